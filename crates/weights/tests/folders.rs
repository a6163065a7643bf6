//! What a path may mean, and what is said when it means nothing.

mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use lapidary_weights::LayerRole::*;
use lapidary_weights::safetensors::INDEX_FILE;
use lapidary_weights::{Checkpoint, Error, Kind, Role};
use support::{CONFIG, Tensor, folder, folder_with, message, raw_file, write_file};

/// Two layers' worth of names; sizes odd and unequal.
fn tensors() -> Vec<Tensor> {
    vec![
        Tensor::bf16("model.embed_tokens.weight", &[11, 5]),
        Tensor::bf16("model.norm.weight", &[5]),
        Tensor::bf16("model.layers.0.self_attn.q_proj.weight", &[3, 5]),
        Tensor::bf16("model.layers.1.self_attn.q_proj.weight", &[7, 5]),
    ]
}

/// The tensors in two shards, and the index that places them.
fn sharded(folder: &Path, index: &str) {
    std::fs::write(folder.join("config.json"), CONFIG).unwrap();
    let tensors = tensors();
    write_file(&folder.join("model-00001-of-00002.safetensors"), &tensors[..2]);
    write_file(&folder.join("model-00002-of-00002.safetensors"), &tensors[2..]);
    std::fs::write(folder.join(INDEX_FILE), index).unwrap();
}

const INDEX: &str = r#"{"metadata": {"total_size": 1}, "weight_map": {
    "model.embed_tokens.weight": "model-00001-of-00002.safetensors",
    "model.norm.weight": "model-00001-of-00002.safetensors",
    "model.layers.0.self_attn.q_proj.weight": "model-00002-of-00002.safetensors",
    "model.layers.1.self_attn.q_proj.weight": "model-00002-of-00002.safetensors"}}"#;

fn same(c: &Checkpoint) {
    let expected = tensors();
    assert_eq!(c.roles().count(), expected.len());
    for t in expected {
        let role = c.roles().find(|r| c.stored(*r).unwrap().name == t.name).unwrap();
        assert_eq!(c.tensor(role).unwrap().unwrap().bytes, &t.bytes[..]);
    }
}

#[test]
fn folder_file_and_shard_mean_the_same() {
    let dir = folder(&tensors());
    for path in [dir.path().to_owned(), dir.path().join("model.safetensors")] {
        let c = Checkpoint::open(&path).unwrap();
        assert_eq!((c.kind(), c.path(), c.files().len()), (Kind::Safetensors, &*path, 1));
        same(&c);
    }
    let dir = tempfile::tempdir().unwrap();
    sharded(dir.path(), INDEX);
    for path in [dir.path().to_owned(), dir.path().join("model-00002-of-00002.safetensors")] {
        let c = Checkpoint::open(&path).unwrap();
        assert_eq!(c.files().len(), 2);
        same(&c);
        assert!(c.notes().is_empty());
    }
    // A file under another name is the model when it is the only one.
    let dir = folder(&tensors());
    std::fs::rename(dir.path().join("model.safetensors"), dir.path().join("gemma.safetensors")).unwrap();
    same(&Checkpoint::open(dir.path()).unwrap());
}

#[test]
fn a_wrong_index_is_named() {
    let try_index = |index: &str| {
        let dir = tempfile::tempdir().unwrap();
        sharded(dir.path(), index);
        Checkpoint::open(dir.path())
    };
    for (index, part) in [
        ("", "EOF"),
        ("{}", "weight_map"),
        (r#"{"weight_map": {}}"#, "empty"),
        (r#"{"weight_map": {"a": "../secret.safetensors"}}"#, "same folder"),
        (r#"{"weight_map": {"a": "/etc/passwd"}}"#, "same folder"),
        (r#"{"weight_map": {"a": ""}}"#, "same folder"),
        (r#"{"weight_map": {"a": "model-00001-of-00002.safetensors"}}"#, "tensor a"),
    ] {
        let result = try_index(index);
        assert!(matches!(result, Err(Error::BadIndex { .. })), "{result:?}");
        message(result, &[INDEX_FILE, part]);
    }
    let absent = try_index(r#"{"weight_map": {"a": "model-00009-of-00009.safetensors"}}"#);
    assert!(matches!(absent, Err(Error::Io { .. })));
    message(absent, &["model-00009-of-00009.safetensors"]);

    // A tensor that the index forgets is used and told of; one in two shards is refused.
    let dir = tempfile::tempdir().unwrap();
    sharded(dir.path(), &INDEX.replace(r#""model.norm.weight": "model-00001-of-00002.safetensors","#, ""));
    let c = Checkpoint::open(dir.path()).unwrap();
    same(&c);
    assert!(c.notes()[0].contains("1 tensors"), "{:?}", c.notes());
    write_file(&dir.path().join("model-00002-of-00002.safetensors"), &tensors()[1..]);
    let twice = Checkpoint::open(dir.path());
    assert!(matches!(twice, Err(Error::Duplicate { .. })));
    message(twice, &["model.norm.weight", "model-00001", "model-00002"]);
}

#[test]
fn a_path_without_a_checkpoint_says_what_was_looked_for() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    message(Checkpoint::open(at("absent")), &["absent", "cannot read"]);
    message(Checkpoint::open(dir.path()), &["config.json", ".gguf"]);
    std::fs::write(at("config.json"), CONFIG).unwrap();
    message(Checkpoint::open(dir.path()), &["no tensors"]);
    message(Checkpoint::open(at("config.json")), &["a folder, a .gguf file"]);
    write_file(&at("a.safetensors"), &tensors());
    write_file(&at("b.safetensors"), &tensors());
    message(Checkpoint::open(dir.path()), &["2 .safetensors files", INDEX_FILE]);
    std::fs::remove_file(at("config.json")).unwrap();
    std::fs::remove_file(at("b.safetensors")).unwrap();
    message(Checkpoint::open(dir.path()), &["no config.json"]);
    message(Checkpoint::open(at("a.safetensors")), &["config.json", "cannot read"]);
    std::fs::remove_file(at("a.safetensors")).unwrap();
    for name in ["q4.gguf", "q8.gguf"] {
        std::fs::write(at(name), b"GGUF").unwrap();
    }
    message(Checkpoint::open(dir.path()), &["2 .gguf files", "q4.gguf"]);
}

#[test]
fn a_config_that_is_none_is_named() {
    for (config, part) in
        [("", "EOF"), ("[]", "object"), ("{\"a\": }", "line 1"), ("\u{0}", "expected value")]
    {
        let dir = folder_with(config, &tensors());
        let result = Checkpoint::open(dir.path());
        assert!(matches!(result, Err(Error::BadConfig { .. })), "{result:?}");
        message(result, &["config.json", part]);
    }
    let deep = "[".repeat(1_000_000);
    message(Checkpoint::open(folder_with(&deep, &tensors()).path()), &["config.json"]);
    let dir = folder(&tensors());
    std::fs::write(dir.path().join("generation_config.json"), "[").unwrap();
    message(Checkpoint::open(dir.path()), &["generation_config.json"]);
}

#[test]
fn paths_are_opaque() {
    let root = tempfile::tempdir().unwrap();
    let long = "x".repeat(120);
    for name in ["Модель 模型\u{3000}e\u{301}", "with space & 'quote' ", &format!("{long}/{long}/{long}")]
    {
        let dir = root.path().join(name);
        std::fs::create_dir_all(&dir).unwrap();
        sharded(&dir, INDEX);
        same(&Checkpoint::open(&dir).unwrap());
    }
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        let dir = root.path().join(std::ffi::OsStr::from_bytes(b"not \xff\xfe utf-8"));
        if std::fs::create_dir(&dir).is_ok() {
            sharded(&dir, INDEX);
            same(&Checkpoint::open(&dir).unwrap());
        }
    }
}

#[test]
fn what_is_recognised_and_not_run_is_named() {
    let drafter = folder_with(r#"{"model_type": "gemma4_assistant"}"#, &tensors());
    message(
        Checkpoint::open(drafter.path()),
        &["gemma4_assistant drafter checkpoints are not yet supported", "config.json"],
    );
    let mut with = tensors();
    with.push(Tensor::bf16("pre_projection.weight", &[3, 10]));
    with.push(Tensor::bf16("nonsense", &[1]));
    let drafter = folder(&with);
    message(
        Checkpoint::open(drafter.path()),
        &["drafter checkpoints are not yet supported", "pre_projection.weight"],
    );

    let mut with = tensors();
    with.push(Tensor::bf16("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", &[3, 10]));
    message(Checkpoint::open(folder(&with).path()), &["LoRA adapters are not yet supported", "lora_A"]);
    let adapter = folder(&tensors());
    std::fs::write(adapter.path().join("adapter_config.json"), "{}").unwrap();
    message(
        Checkpoint::open(adapter.path()),
        &["LoRA adapters are not yet supported", "adapter_config.json", "merge"],
    );

    for (config, part) in [
        (r#"{"quantization_config": {"quant_method": "gptq"}}"#, "gptq"),
        (r#"{"text_config": {"quantization_config": {"quant_method": "bitsandbytes"}}}"#, "bitsandbytes"),
    ] {
        message(
            Checkpoint::open(folder_with(config, &tensors()).path()),
            &["config.json", part, "not yet supported"],
        );
    }
}

#[test]
fn every_tensor_is_accounted_for() {
    let mut with = tensors();
    for name in [
        "model.vision_tower.a.weight",
        "model.vision_embedder.b",
        "model.audio_tower.c",
        "model.embed_audio.d",
    ] {
        with.push(Tensor::bf16(name, &[13]));
    }
    let c = Checkpoint::open(folder(&with).path()).unwrap();
    let ignored = c.ignored();
    assert_eq!((ignored.vision, ignored.audio, ignored.projector, ignored.bytes), (2, 1, 1, 4 * 26));
    assert_eq!(c.roles().count(), 4);

    for name in ["model.layers.1.self_attn.q_proj.bias", "model.layers.1.altup.weight", "something.weight"] {
        let mut with = tensors();
        with.push(Tensor::bf16(name, &[3]));
        let result = Checkpoint::open(folder(&with).path());
        assert!(matches!(result, Err(Error::UnknownTensor { .. })), "{result:?}");
        message(result, &[name, "model.safetensors"]);
    }
    // Two prefixes in one file would leave it open which embedding is meant.
    let mut with = tensors();
    with.push(Tensor::bf16("model.language_model.embed_tokens.weight", &[11, 5]));
    message(
        Checkpoint::open(folder(&with).path()),
        &["model.embed_tokens.weight", "model.language_model.embed_tokens.weight"],
    );
}

#[test]
fn an_explicit_head_is_reported_as_it_is() {
    let embed = tensors().remove(0);
    let head = |bytes: &[u8]| {
        let mut with = tensors();
        with.push(Tensor::new("lm_head.weight", embed.dtype, &embed.shape, bytes.to_vec()));
        folder(&with)
    };
    let equal = head(&embed.bytes);
    let c = Checkpoint::open(equal.path()).unwrap();
    assert_eq!(c.head_differs().unwrap(), Some(false));
    assert!(c.notes()[0].contains("lm_head.weight"), "{:?}", c.notes());
    let mut other = embed.bytes.clone();
    other[17] ^= 1;
    assert_eq!(Checkpoint::open(head(&other).path()).unwrap().head_differs().unwrap(), Some(true));
    c.expect(Role::Head, 11, 5).unwrap();
}

#[test]
fn text_files_are_found_and_the_template_read() {
    let dir = folder(&tensors());
    let put = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let template = || Checkpoint::open(dir.path()).unwrap().text_files().read_chat_template();
    assert_eq!(template().unwrap(), None);
    put(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}"#,
    );
    assert_eq!(template().unwrap().as_deref(), Some("d"));
    put("tokenizer_config.json", r#"{"chat_template": 5}"#);
    message(template(), &["tokenizer_config.json", "chat_template"]);
    put("tokenizer_config.json", r#"{"chat_template": "t"}"#);
    assert_eq!(template().unwrap().as_deref(), Some("t"));
    put("chat_template.json", r#"{"chat_template": "j"}"#);
    assert_eq!(template().unwrap().as_deref(), Some("j"));
    put("chat_template.jinja", "{{ x }}\n");
    assert_eq!(template().unwrap().as_deref(), Some("{{ x }}\n"));
    put("tokenizer.json", "{}");
    let c = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(c.text_files().tokenizer, Some(dir.path().join("tokenizer.json")));
    assert_eq!(c.text_files().generation_config, None);
}

/// 60 GB of one tensor, none of it on disk: opening reads the header and no more.
#[cfg(unix)]
#[test]
fn a_huge_file_opens_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    std::fs::write(dir.path().join("config.json"), CONFIG).unwrap();
    let (rows, cols) = (262_144u64, 114_441u64);
    let bytes = rows * cols * 2;
    let header = format!(
        r#"{{"model.embed_tokens.weight":{{"dtype":"BF16","shape":[{rows},{cols}],"data_offsets":[0,{bytes}]}}}}"#
    );
    raw_file(&path, &header, 0);
    let length = 8 + header.len() as u64 + bytes;
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length).unwrap();
    let start = Instant::now();
    let c = Checkpoint::open(dir.path()).unwrap();
    assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
    assert_eq!(c.total_bytes(), length);
    assert_eq!(c.parameters(), rows * cols);
    let view = c.expect(Role::Embed, rows as usize, cols as usize).unwrap();
    assert_eq!(view.slice_rows(200_000, 1).bytes.len(), 2 * cols as usize);
    assert!(c.stored(Role::Layer(0, QProj)).is_none());
}
