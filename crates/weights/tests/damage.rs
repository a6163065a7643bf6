//! A safetensors file damaged in each way gives the error of that damage, never a panic.

mod support;

use std::path::Path;

use lapidary_weights::safetensors::{Dtype, File, Header, NewTensor, write};
use lapidary_weights::{Checkpoint, Error};
use support::{Tensor, folder, message, raw_file, write_file};

/// Opens a file with this header and this many bytes of data.
fn open(header: &str, data: usize) -> Result<File, Error> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    raw_file(&path, header, data);
    File::open(&path)
}

macro_rules! refused {
    ($result:expr, $variant:ident, $($part:expr),*) => {{
        let result = $result;
        assert!(matches!(result, Err(Error::$variant { .. })), "{result:?}");
        message(result, &["model.safetensors", $($part),*])
    }};
}

#[test]
fn a_sound_header_is_read() {
    let header = r#"{"b":{"dtype":"F32","shape":[2,3],"data_offsets":[2,26]},"__metadata__":{"k":"v"},
                     "a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]},"z":{"dtype":"I8","shape":[0],"data_offsets":[26,26]}}   "#;
    let file = open(header, 26).unwrap();
    let names: Vec<&str> = file.entries().iter().map(|e| e.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "z"], "the order of the data");
    assert_eq!(file.metadata()["k"], "v");
    assert_eq!(file.bytes(file.find("b").unwrap()).len(), 24);
}

#[test]
fn the_length_of_the_header_is_checked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    for (bytes, needed) in [(&b""[..], "8"), (b"1234567", "8"), (b"\x09\0\0\0\0\0\0\0{}", "17")] {
        std::fs::write(&path, bytes).unwrap();
        refused!(File::open(&path), Truncated, "header", needed, &bytes.len().to_string());
    }
    // What a page of HTML begins with, read as a length.
    std::fs::write(&path, b"<!doctype html><html>").unwrap();
    refused!(File::open(&path), BadHeader, "100000000");
    refused!(open("[1, 2]", 0), BadHeader, "JSON object");
    refused!(open("", 0), BadHeader, "JSON object");
    refused!(open("{\"a\"", 0), BadHeader, "line 1");
    refused!(open("{}{", 0), BadHeader, "trailing");
    refused!(open(r#"{"__metadata__":{"k":1}}"#, 0), BadHeader, "string");
}

#[test]
fn each_entry_is_checked() {
    let entry = |e: &str| open(&format!("{{\"t\":{e}}}"), 8);
    refused!(entry(r#"{"dtype":"F33","shape":[2],"data_offsets":[0,8]}"#), BadTensor, "tensor t", "F33");
    refused!(
        entry(r#"{"dtype":"F32","shape":[3],"data_offsets":[0,8]}"#),
        BadTensor,
        "tensor t",
        "12 bytes",
        "0..8"
    );
    refused!(entry(r#"{"dtype":"F32","shape":[2],"data_offsets":[8,0]}"#), BadTensor, "tensor t", "8..0");
    refused!(entry(r#"{"dtype":"F4","shape":[15],"data_offsets":[0,8]}"#), BadTensor, "tensor t", "whole");
    let wrap = r#"{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0]}"#;
    refused!(entry(wrap), BadTensor, "tensor t", "4294967296");
    let wrap = r#"{"dtype":"U8","shape":[8],"data_offsets":[18446744073709551612,4]}"#;
    refused!(entry(wrap), BadTensor, "tensor t", "18446744073709551612");
    refused!(entry(r#"{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}"#), BadHeader, "tensor t", "-2");
    refused!(entry(r#"{"dtype":"F32","shape":[2]}"#), BadHeader, "tensor t", "data_offsets");
    refused!(
        entry(r#"{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}"#),
        BadHeader,
        "tensor t",
        "shape"
    );
    refused!(entry("7"), BadHeader, "tensor t");
    let deep = format!("{{\"t\":{}", "[".repeat(100_000));
    refused!(open(&deep, 0), BadHeader, "tensor t");
}

#[test]
fn tensors_fill_the_data_once() {
    let two = |a: [u64; 2], b: [u64; 2], data| {
        let entry = |n: &str, [begin, end]: [u64; 2]| {
            format!(r#""{n}":{{"dtype":"U8","shape":[{}],"data_offsets":[{begin},{end}]}}"#, end - begin)
        };
        open(&format!("{{{},{}}}", entry("a", a), entry("b", b)), data)
    };
    two([0, 5], [5, 8], 8).unwrap();
    refused!(two([0, 5], [4, 8], 8), Overlap, "b and a", "5", "4");
    refused!(two([0, 5], [0, 8], 8), Overlap, "b", "a");
    refused!(two([0, 4], [5, 8], 8), Hole, "4..5");
    refused!(two([1, 5], [5, 8], 8), Hole, "0..1");
    refused!(two([0, 5], [5, 8], 11), Hole, "8..11");
    let text = refused!(two([0, 5], [5, 8], 7), Truncated, "tensor b");
    assert!(text.contains("fetch it again"));
    let same = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
    refused!(open(same, 2), Duplicate, "tensor a");
}

#[test]
fn a_checkpoint_cut_anywhere_is_refused() {
    let dir = folder(&[
        Tensor::bf16("model.embed_tokens.weight", &[7, 5]),
        Tensor::bf16("model.norm.weight", &[5]),
        Tensor::bf16("model.layers.0.self_attn.q_proj.weight", &[3, 5]),
    ]);
    let path = dir.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    Checkpoint::open(dir.path()).unwrap();
    for part in 0..64 {
        std::fs::write(&path, &whole[..whole.len() * part / 64]).unwrap();
        message(Checkpoint::open(dir.path()), &["model.safetensors"]);
    }
}

#[test]
fn the_writer_refuses_what_the_reader_would() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.safetensors");
    let tensor =
        |name: &str, bytes| NewTensor { name: name.to_owned(), dtype: Dtype::F16, shape: vec![1, 3], bytes };
    let none = Default::default();
    message(write(&path, &[tensor("a", &[0; 5])], &none), &["a", "5 bytes", "[1, 3]"]);
    message(write(&path, &[tensor("a", &[0; 6]), tensor("a", &[0; 6])], &none), &["taken"]);
    message(write(&path, &[tensor("__metadata__", &[0; 6])], &none), &["taken"]);
    message(write(Path::new("/nonexistent/x"), &[], &none), &["/nonexistent/x"]);
    assert!(!path.exists(), "a refused file is not begun");

    write(&path, &[tensor("b\"\u{e9}", &[1, 2, 3, 4, 5, 6]), tensor("a", &[9; 6])], &none).unwrap();
    let file = File::open(&path).unwrap();
    assert_eq!(file.bytes(file.find("b\"\u{e9}").unwrap()), [1, 2, 3, 4, 5, 6]);
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(Header::parse(&bytes, &path).unwrap().data_start % 8, 0);
}

/// The seeds of the fuzz target, each cut at every 64th and with each byte of its header damaged, are either read or
/// refused with a message.
#[test]
fn seeds_and_their_damage_never_panic() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/safetensors_header");
    let mut count = 0;
    for seed in std::fs::read_dir(seeds).unwrap() {
        let path = seed.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        let try_it = |bytes: &[u8]| {
            if let Err(e) = Header::parse(bytes, &path) {
                assert!(!e.to_string().is_empty());
            }
        };
        try_it(&bytes);
        (0..64).for_each(|part| try_it(&bytes[..bytes.len() * part / 64]));
        let mut damaged = bytes.clone();
        for i in 0..bytes.len().min(400) {
            for flip in [0x01, 0x10, 0x80, 0xff] {
                damaged[i] = bytes[i] ^ flip;
                try_it(&damaged);
            }
            damaged[i] = bytes[i];
        }
        count += 1;
    }
    assert!(count >= 4, "{count} seeds");
}

#[test]
fn what_is_written_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.safetensors");
    let tensors = [Tensor::f32s("x", &[2], &[1.5, -2.0]), Tensor::codes("y", Dtype::F8E4M3, &[3, 7])];
    write_file(&path, &tensors);
    let file = File::open(&path).unwrap();
    for t in &tensors {
        let entry = file.find(&t.name).unwrap();
        assert_eq!((entry.dtype, &entry.shape, file.bytes(entry)), (t.dtype, &t.shape, &t.bytes[..]));
    }
}
