//! Reading and writing whole GGUF files: another tool's file, our own in both versions, split ones, huge ones.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use lapidary_formats::{Format, TensorView, decode_row, encode_rows, validate};
use lapidary_weights::gguf::{Array, File, GgmlType, GgufError, StringArray, Value, Version, Writer};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn decode(view: &TensorView) -> Vec<f32> {
    validate(view).unwrap();
    let mut out = vec![0.0; view.rows * view.cols];
    out.chunks_mut(view.cols).enumerate().for_each(|(row, out)| decode_row(view, row, out));
    out
}

#[test]
fn a_file_of_the_python_package_reads_as_it_was_written() {
    let file = File::open(fixture("python.gguf")).unwrap();
    let m = file.metadata();
    assert_eq!(m.require::<&str>("general.architecture").unwrap(), "gemma4");
    for (key, value) in [
        ("a.u8", Value::U8(200)),
        ("a.i8", Value::I8(-100)),
        ("a.u16", Value::U16(60000)),
        ("a.i16", Value::I16(-30000)),
        ("a.u32", Value::U32(4000000000)),
        ("a.i32", Value::I32(-2000000000)),
        ("a.u64", Value::U64(1 << 63)),
        ("a.i64", Value::I64(-(1 << 62))),
        ("a.f32", Value::F32(1.5e-6)),
        ("a.f64", Value::F64(0.1)),
        ("a.bool", Value::Bool(true)),
        ("a.string", "Zwölf \u{2581} ▁".into()),
        ("b.integers", vec![1i32, -2, 3].into()),
        ("b.floats", vec![0.5f32, -0.25].into()),
        ("b.bools", vec![true, false, true].into()),
        ("b.strings", StringArray::from_iter(["", "<bos>", "▁the", "\n"]).into()),
        ("b.nested", Array::Array(vec![Array::I32(vec![1, 2]), Array::I32(vec![3])]).into()),
    ] {
        assert_eq!(m.value(key), Some(&value), "{key}");
    }

    let bytes = std::fs::read(fixture("python.f32")).unwrap();
    let mut expected = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
    let mut check = |view: TensorView, rows: usize, cols: usize, format: Format| {
        assert_eq!((view.rows, view.cols, view.format), (rows, cols, format), "{}", view.name);
        for (i, value) in decode(&view).into_iter().enumerate() {
            assert_eq!(Some(value), expected.next(), "{} element {i}", view.name);
        }
    };
    check(file.view("norm.weight").unwrap(), 1, 7, Format::F32);
    check(file.view("half.weight").unwrap(), 3, 5, Format::F16);
    check(file.view("brain.weight").unwrap(), 5, 3, Format::Bf16);
    check(file.view("eight.weight").unwrap(), 3, 96, Format::Q8_0);
    for expert in 0..3 {
        check(file.view3("experts.weight", expert).unwrap(), 5, 32, Format::Q4_0);
    }
    check(file.view("six.weight").unwrap(), 2, 256, Format::Q6K);
    assert_eq!(expected.next(), None);

    assert_eq!(file.bytes("order").unwrap(), [3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]);
    assert_eq!(file.unsupported_tensors().count(), 0);
    let message = |error: GgufError| error.to_string().rsplit_once("python.gguf: ").unwrap().1.to_owned();
    assert!(message(file.view("order").unwrap_err()).starts_with("tensor \"order\" has type I32"));
    assert_eq!(message(file.view("gone").unwrap_err()), "tensor \"gone\" is missing");
    assert_eq!(
        message(file.view("experts.weight").unwrap_err()),
        "tensor \"experts.weight\" has dimensions [32, 5, 3]; expected one matrix, {columns, rows}"
    );
    assert_eq!(
        message(file.view3("experts.weight", 3).unwrap_err()),
        "tensor \"experts.weight\" has 3 matrices; number 3 was asked for"
    );
}

#[test]
fn keys_are_given_in_the_type_asked_for_or_refused_by_name() {
    let file = File::open(fixture("python.gguf")).unwrap();
    let m = file.metadata();
    assert_eq!(m.get::<u32>("a.u8").unwrap(), Some(200));
    assert_eq!(m.get::<usize>("a.u32").unwrap(), Some(4000000000));
    assert_eq!(m.get::<i32>("a.i16").unwrap(), Some(-30000));
    assert_eq!(m.get::<f32>("a.f64").unwrap(), Some(0.1));
    assert_eq!(m.get::<u32>("gone").unwrap(), None);
    assert_eq!(m.get::<Vec<i32>>("b.integers").unwrap(), Some(vec![1, -2, 3]));
    assert_eq!(m.get::<Vec<i32>>("a.i8").unwrap(), Some(vec![-100]));
    assert_eq!(m.get_each::<u32>("a.u16", 2).unwrap(), Some(vec![60000, 60000]));
    assert_eq!(m.get_each::<i32>("b.integers", 3).unwrap(), Some(vec![1, -2, 3]));
    assert_eq!(m.get_each::<bool>("b.bools", 3).unwrap(), Some(vec![true, false, true]));
    let message = |error: GgufError| error.to_string().rsplit_once("python.gguf: ").unwrap().1.to_owned();
    for (error, expected) in [
        (
            m.require::<u32>("gone").unwrap_err(),
            r#"key "gone" is missing; expected an unsigned 32-bit integer"#,
        ),
        (
            m.get::<u32>("a.i8").unwrap_err(),
            r#"key "a.i8" holds i8 -100; expected an unsigned 32-bit integer"#,
        ),
        (
            m.get::<i32>("a.u32").unwrap_err(),
            r#"key "a.u32" holds u32 4000000000; expected a 32-bit integer"#,
        ),
        (
            m.get::<&str>("b.bools").unwrap_err(),
            r#"key "b.bools" holds an array of 3 bool; expected a string"#,
        ),
        (m.get::<f32>("a.bool").unwrap_err(), r#"key "a.bool" holds bool true; expected a float"#),
        (
            m.get::<Vec<u32>>("b.integers").unwrap_err(),
            r#"key "b.integers" holds an array of 3 i32; expected an array of unsigned 32-bit integers"#,
        ),
        (
            m.get_each::<i32>("b.integers", 2).unwrap_err(),
            r#"key "b.integers" holds an array of 3 i32; expected a 32-bit integer or 2 of them"#,
        ),
    ] {
        assert_eq!(message(error), expected);
    }
}

/// Name, bytes and decoded values of a tensor.
type Written = (String, Vec<u8>, Vec<f32>);

/// A file with one tensor of every format, odd sizes, and what was encoded.
fn plan(version: Version) -> (Writer, Vec<Written>) {
    let mut writer = Writer::new(version);
    writer.set("general.architecture", "gemma4").unwrap();
    writer.set("general.alignment", 8u32).unwrap();
    writer.set("layers", vec![3u64, 5]).unwrap();
    let mut data = Vec::new();
    for format in Format::ALL {
        let Some(kind) = GgmlType::of(format) else { continue };
        let (rows, cols) = (5, 3 * format.block_len());
        let values: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.37).sin()).collect();
        let encoded = encode_rows(format, &values, rows, cols).unwrap();
        let name = format!("{format}.weight");
        writer.tensor(&name, &[cols as u64, rows as u64], kind).unwrap();
        let decoded = decode(&encoded.view("m"));
        data.push((name, encoded.bytes, decoded));
    }
    (writer, data)
}

fn check_plan(file: &File, data: &[Written]) {
    assert_eq!(file.metadata().get::<Vec<u32>>("layers").unwrap(), Some(vec![3, 5]));
    assert_eq!(file.tensors().count(), data.len());
    for ((name, bytes, decoded), info) in data.iter().zip(file.tensors()) {
        assert_eq!(&info.name, name);
        let view = file.view(name).unwrap();
        assert_eq!(view.bytes, bytes, "{name}");
        assert_eq!(&decode(&view), decoded, "{name}");
    }
}

#[test]
fn what_is_written_is_read_in_both_versions_and_always_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    for (version, number) in [(Version::V2, 2), (Version::V3, 3)] {
        let (writer, data) = plan(version);
        let path = folder.path().join("model.gguf");
        let mut body = writer.clone().create(&path).unwrap();
        let mut again = writer.begin(Vec::new()).unwrap();
        for (name, bytes, _) in &data {
            body.write(name, bytes).unwrap();
            // In pieces of odd size, to the same file.
            bytes.chunks(7).for_each(|piece| again.write(name, piece).unwrap());
        }
        body.finish().unwrap();
        assert!(again.finish().unwrap() == std::fs::read(&path).unwrap());
        let file = File::open(&path).unwrap();
        assert_eq!(file.version(), number);
        check_plan(&file, &data);
    }
}

#[test]
fn a_split_model_opens_from_any_of_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let (writer, data) = plan(Version::V3);
    let mut body = writer.create_split(folder.path().join("model"), NonZeroUsize::new(5).unwrap()).unwrap();
    data.iter().for_each(|(name, bytes, _)| body.write(name, bytes).unwrap());
    let paths = body.finish().unwrap();
    assert_eq!(paths.len(), 4);
    assert_eq!(paths[3], folder.path().join("model-00004-of-00004.gguf"));
    for path in &paths {
        let file = File::open(path).unwrap();
        check_plan(&file, &data);
        assert!(file.paths().eq(&paths));
    }

    let (writer, _) = plan(Version::V3);
    let mut short = writer.create_split(folder.path().join("short"), NonZeroUsize::new(1).unwrap()).unwrap();
    short.write(&data[0].0, &data[0].1).unwrap();
    assert!(matches!(short.finish(), Err(GgufError::WriteLength { found: 0, .. })));

    let first = &paths[0];
    let error = |path: &Path| File::open(path).unwrap_err();
    let third = std::fs::read(&paths[2]).unwrap();
    std::fs::remove_file(&paths[2]).unwrap();
    assert!(matches!(error(first), GgufError::MissingShard { number: 3, count: 4, .. }));
    std::fs::copy(&paths[1], &paths[2]).unwrap();
    let message = error(first).to_string();
    assert!(
        message.ends_with(
            r#"00003-of-00004.gguf: key "split.no" is 1; expected 2 from the file's name and its siblings"#
        ),
        "{message}"
    );
    std::fs::write(&paths[2], third).unwrap();
    File::open(first).unwrap();

    let alone = folder.path().join("renamed.gguf");
    std::fs::copy(&paths[1], &alone).unwrap();
    assert!(error(&alone).to_string().contains("one of 4 files of a split model, but not named"));
    let other_count = folder.path().join("model-00002-of-00005.gguf");
    std::fs::copy(&paths[1], &other_count).unwrap();
    assert!(error(&other_count).to_string().contains(r#"key "split.count" is 4; expected 5"#));
}

#[test]
fn files_of_a_split_model_must_add_up() {
    let folder = tempfile::tempdir().unwrap();
    let write = |number: u16, tensor: &str, total: Option<i32>| {
        let mut writer = Writer::new(Version::V3);
        writer.set("split.no", number - 1).unwrap();
        writer.set("split.count", 2u16).unwrap();
        if let Some(total) = total {
            writer.set("split.tensors.count", total).unwrap();
        }
        writer.tensor(tensor, &[3], GgmlType(0)).unwrap();
        let path = folder.path().join(format!("m-{number:05}-of-00002.gguf"));
        let mut body = writer.create(&path).unwrap();
        body.write(tensor, &[0; 12]).unwrap();
        body.finish().unwrap();
        path
    };
    let error = |second: &Path| File::open(second).unwrap_err().to_string();
    write(1, "a", Some(2));
    File::open(write(2, "b", Some(2))).unwrap();
    assert!(
        error(&write(2, "b", Some(3))).contains(r#"00002.gguf: key "split.tensors.count" is 3; expected 2"#)
    );
    assert!(error(&write(2, "b", None)).contains(r#"key "split.tensors.count" is missing; expected 2"#));
    assert!(error(&write(2, "a", Some(2))).contains(r#"tensor "a" occurs twice"#));
}

#[test]
#[cfg(unix)]
fn opening_a_huge_file_reads_its_header_only() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("huge.gguf");
    let mut writer = Writer::new(Version::V3);
    writer
        .set("tokenizer.ggml.tokens", StringArray::from_iter((0..262_144).map(|i| format!("token {i}"))))
        .unwrap();
    // 60 matrices of 1 GB.
    for i in 0..60 {
        writer
            .tensor(&format!("blk.{i}.weight"), &[32768, 16384], GgmlType::of(Format::Bf16).unwrap())
            .unwrap();
    }
    // Only the header is written; the file system supplies the zeros.
    let mut head = Vec::new();
    writer.begin(&mut head).unwrap();
    std::fs::write(&path, &head).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(head.len() as u64 + 60 * (1 << 30)).unwrap();

    let start = std::time::Instant::now();
    let file = File::open(&path).unwrap();
    assert_eq!(
        file.metadata().require::<&StringArray>("tokenizer.ggml.tokens").unwrap().get(262_143),
        Some("token 262143")
    );
    assert_eq!(file.view("blk.59.weight").unwrap().bytes.len(), 1 << 30);
    assert!(start.elapsed().as_secs_f64() < 1.0, "{:?}", start.elapsed());
}
