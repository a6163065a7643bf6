//! Damaged and hostile GGUF files: each field that can be wrong gives its own error, and nothing panics.

#[path = "../../../fuzz/exercise/gguf.rs"]
mod exercise;

use std::path::{Path, PathBuf};

use lapidary_formats::Format;
use lapidary_weights::gguf::{Array, File, GgmlType, GgufError, Header, StringArray, Value, Version, Writer};

/// A header put together field by field, so that any of them can lie.
#[derive(Clone)]
struct Raw {
    magic: [u8; 4],
    version: u32,
    /// More tensors and keys claimed than there are.
    extra: (u64, u64),
    keys: Vec<(Vec<u8>, Vec<u8>)>,
    /// Name, dimensions, type, offset.
    tensors: Vec<(&'static str, Vec<u64>, u32, u64)>,
    data: usize,
}

impl Raw {
    /// Sound: two tensors of 4 x 3 and 8 float32, 32-aligned.
    fn sound() -> Raw {
        Raw {
            magic: *b"GGUF",
            version: 3,
            extra: (0, 0),
            keys: vec![(b"name".to_vec(), value("text".into()))],
            tensors: vec![("a", vec![4, 3], 0, 0), ("b", vec![8], 0, 64)],
            data: 96,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::from(self.magic);
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).wrapping_add(self.extra.0).to_le_bytes());
        out.extend((self.keys.len() as u64).wrapping_add(self.extra.1).to_le_bytes());
        for (key, value) in &self.keys {
            out.extend((key.len() as u64).to_le_bytes());
            out.extend(key);
            out.extend(value);
        }
        for (name, dims, kind, offset) in &self.tensors {
            out.extend((name.len() as u64).to_le_bytes());
            out.extend(name.as_bytes());
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(32) + self.data, 0);
        out
    }

    fn error(&self) -> GgufError {
        let bytes = self.bytes();
        exercise::gguf(&bytes);
        Header::parse(&bytes, bytes.len() as u64).unwrap_err()
    }
}

/// A value with its type, as a file holds it.
fn value(value: Value) -> Vec<u8> {
    let mut writer = Writer::new(Version::V3);
    writer.set("k", value).unwrap();
    // Without this the file would be padded.
    writer.set("general.alignment", 1u32).unwrap();
    let mut out = Vec::new();
    writer.begin(&mut out).unwrap();
    // Before the value come magic, version, two counts and the key; behind it the second key.
    out[24 + 9..out.len() - (8 + 17 + 4 + 4)].to_vec()
}

#[test]
fn every_field_that_lies_is_named() {
    let check = |change: &dyn Fn(&mut Raw), expected: &str| {
        let mut raw = Raw::sound();
        change(&mut raw);
        let message = raw.error().to_string();
        assert!(message.contains(expected), "got: {message}\nexpected: {expected}");
    };
    Header::parse(&Raw::sound().bytes(), Raw::sound().bytes().len() as u64).unwrap();

    check(&|r| r.magic = *b"vers", r#"not a GGUF file: it starts with "vers""#);
    check(&|r| r.magic = *b"FUGG", "big-endian");
    check(&|r| r.version = 3u32.swap_bytes(), "big-endian");
    check(&|r| r.version = 1, "GGUF version 1; versions 2 and 3 can be read");
    check(&|r| r.version = 4, "GGUF version 4");

    check(&|r| r.extra.0 = 1 << 60, "1152921504606846978 tensors; at most");
    check(&|r| r.extra.1 = 1 << 60, "1152921504606846977 metadata keys; at most");
    check(&|r| r.keys[0].0.clear(), "metadata key 0 has an empty name");
    check(&|r| r.keys.push(r.keys[0].clone()), r#"key "name" occurs twice"#);
    check(&|r| r.keys[0].0[1] = 0xFF, "metadata key 0 at byte 32 isn't UTF-8");
    check(&|r| r.keys[0].1[12] = 0xFF, r#"key "name" at byte 48 isn't UTF-8"#);
    check(&|r| r.keys[0].1[..4].fill(0xEE), r#"key "name" has type 4008636142; GGUF defines 0 to 12"#);
    check(
        &|r| r.keys[0].1[4..12].fill(0xFF),
        r#"truncated: key "name" at byte 48 needs 18446744073709551615"#,
    );
    check(&|r| r.keys[0].1 = vec![7, 0, 0, 0, 2], r#"key "name" holds the bool 2; expected 0 or 1"#);
    check(
        &|r| r.keys[0].1 = value(vec![true, false].into()).into_iter().take(17).chain([9]).collect(),
        "the bool 9",
    );

    let array = |element: u32, count: u64| {
        [9u32.to_le_bytes(), element.to_le_bytes()].concat().into_iter().chain(count.to_le_bytes()).collect()
    };
    for element in (0..=6).chain(8..=12) {
        for count in [u64::MAX, u64::MAX / 8 + 1, 1 << 40] {
            check(
                &|r| r.keys[0].1 = array(element, count),
                &format!(r#"{count} elements in key "name"; at most"#),
            );
        }
    }
    check(&|r| r.keys[0].1 = array(7, u64::MAX), r#"truncated: key "name""#);
    check(&|r| r.keys[0].1 = array(13, 1), r#"key "name" has type 13"#);
    let nest = |array: Array| Array::Array(vec![array]);
    let deep = nest(nest(nest(Array::U8(vec![1]))));
    check(&|r| r.keys[0].1 = value(nest(deep.clone()).into()), "nests arrays more than 4 deep");
    let mut raw = Raw::sound();
    raw.keys[0].1 = value(deep.clone().into());
    let header = Header::parse(&raw.bytes(), raw.bytes().len() as u64).unwrap();
    assert_eq!(header.metadata.value("name"), Some(&deep.into()));

    let alignment = |v: Value| (b"general.alignment".to_vec(), value(v));
    // The writer refuses these two, so their number is put into the bytes.
    let number = |n: u32| (b"general.alignment".to_vec(), [4u32.to_le_bytes(), n.to_le_bytes()].concat());
    check(&|r| r.keys[0] = number(0), "general.alignment is 0; expected a power of two");
    check(&|r| r.keys[0] = number(24), "general.alignment is 24");
    check(
        &|r| r.keys[0] = alignment("32".into()),
        r#"key "general.alignment" holds a string; expected an unsigned"#,
    );
    check(&|r| r.keys[0] = number(1 << 31), r#"tensor "b" has offset 64; expected a multiple of 2147483648"#);

    check(&|r| r.tensors[1].0 = "", "tensor description 1 has an empty name");
    check(&|r| r.tensors[1].0 = "a", r#"tensor "a" occurs twice"#);
    check(&|r| r.tensors[0].1 = vec![1; 5], r#"tensor "a" has 5 dimensions; at most 4"#);
    check(&|r| r.tensors[0].1 = vec![4, 0], r#"tensor "a" has dimensions [4, 0]; none may be zero"#);
    check(
        &|r| r.tensors[0].1 = vec![1 << 40, 1 << 40],
        r#"tensor "a" with dimensions [1099511627776, 1099511627776] is too large"#,
    );
    check(&|r| r.tensors[0].1 = vec![1 << 62, 2], "too large to address");
    check(&|r| r.tensors[0].1 = vec![1 << 40], r#"tensor "a" takes 4398046511104 bytes from byte"#);
    check(&|r| r.tensors[0].2 = 8, r#"tensor "a": rows of 4 in Q8_0, which needs a multiple of 32"#);
    check(&|r| r.tensors[1].3 = 33, r#"tensor "b" has offset 33; expected a multiple of 32"#);
    check(&|r| r.tensors[1].3 = 32, r#"tensors "a" and "b" overlap at byte"#);
    check(&|r| r.tensors[1].3 = 96, r#"tensor "b" takes 32 bytes from byte"#);
    check(&|r| r.tensors[1].3 = u64::MAX - 31, r#"tensor "b" takes 32 bytes from byte"#);
    let of_another_type = |kind: u32| {
        let mut raw = Raw::sound();
        raw.tensors[0] = ("a", vec![256, 3], kind, 0);
        raw.tensors[1].3 = 2048;
        raw.data = 2048 + 32;
        raw
    };
    for (kind, name) in [
        (4, "Q4_2"),
        (9, "Q8_1"),
        (16, "IQ2_XXS"),
        (19, "IQ1_S"),
        (21, "IQ3_S"),
        (31, "Q4_0_4_4"),
        (34, "TQ1_0"),
        (41, "Q1_0"),
        (99, "number 99"),
    ] {
        let bytes = of_another_type(kind).bytes();
        exercise::gguf(&bytes);
        let header = Header::parse(&bytes, bytes.len() as u64).unwrap();
        header.tensors[1].view(&bytes).unwrap();
        let error = header.tensors[0].view(&bytes).unwrap_err().to_string();
        assert!(error.starts_with(&format!(r#"tensor "a" has type {name}, which can't"#)), "{error}");
    }
    // The extent of a removed type isn't known, but where it starts nobody else may be.
    check(&|r| (r.tensors[0].2, r.tensors[0].3) = (4, 64), "overlap");
    check(&|r| (r.tensors[0].2, r.tensors[0].3) = (4, 1 << 40), r#"tensor "a" takes 0 bytes from byte"#);
}

#[test]
fn a_scalar_without_dimensions_is_one_number() {
    let mut raw = Raw::sound();
    raw.tensors[0].1.clear();
    let bytes = raw.bytes();
    let header = Header::parse(&bytes, bytes.len() as u64).unwrap();
    let view = header.tensors[0].view(&bytes).unwrap();
    assert_eq!((view.rows, view.cols, view.bytes.len()), (1, 1, 4));
}

#[test]
fn a_long_header_is_refused_before_it_is_copied() {
    // A string of 50 GB, as a sparse file can have; only its beginning is at hand.
    let mut raw = Raw::sound();
    raw.keys[0].1 = [8u32.to_le_bytes().to_vec(), (50u64 << 30).to_le_bytes().to_vec()].concat();
    let bytes = raw.bytes();
    let error = Header::parse(&bytes, 60 << 30).unwrap_err();
    assert!(matches!(error, GgufError::HeaderTooLong { .. }), "{error}");
}

#[test]
fn what_the_writer_is_asked_for_must_be_possible() {
    let mut writer = Writer::new(Version::V3);
    let f32 = GgmlType::of(Format::F32).unwrap();
    writer.set("a", 1u32).unwrap();
    writer.tensor("t", &[3, 5], f32).unwrap();
    writer.tensor("u", &[2], f32).unwrap();
    for (error, expected) in [
        (writer.set("a", 2u32), r#"key "a" occurs twice"#),
        (writer.set("", 2u32), "metadata key 1 has an empty name"),
        (writer.set("general.alignment", 24u32), "general.alignment is 24"),
        (writer.set("general.alignment", 32u64), r#"key "general.alignment" holds u64 32; expected u32"#),
        (writer.tensor("t", &[3], f32), r#"tensor "t" occurs twice"#),
        (writer.tensor("", &[3], f32), "has an empty name"),
        (writer.tensor("v", &[0], f32), "none may be zero"),
        (writer.tensor("v", &[1; 5], f32), "5 dimensions"),
        (writer.tensor("v", &[33], GgmlType(8)), "a multiple of 32"),
        (writer.tensor("v", &[u64::MAX], f32), "too large to address"),
        (writer.tensor("v", &[32], GgmlType(31)), r#"tensor "v" has type Q4_0_4_4, which can't be written"#),
    ] {
        let error = error.unwrap_err().to_string();
        assert!(error.contains(expected), "got: {error}\nexpected: {expected}");
    }
    let mut body = writer.begin(Vec::new()).unwrap();
    let message = |result: Result<(), GgufError>| result.unwrap_err().to_string();
    assert_eq!(message(body.write("u", &[0; 8])), r#"data for tensor "u"; expected "t""#);
    body.write("t", &[0; 59]).unwrap();
    assert_eq!(message(body.write("t", &[0; 2])), r#"tensor "t" takes 60 bytes; 61 were written"#);
    body.write("t", &[0; 1]).unwrap();
    assert_eq!(message(body.write("t", &[0; 1])), r#"data for tensor "t"; expected "u""#);
    assert_eq!(message(body.finish().map(drop)), r#"tensor "u" takes 8 bytes; 0 were written"#);
}

/// The seeds of the fuzz target: small files that between them have every kind of value and layout.
fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let mut values = Writer::new(Version::V3);
    let strings = || StringArray::from_iter(["", "<bos>", "▁the"]);
    let nested = Array::Array(vec![Array::U16(vec![1, 2]), Array::String(strings()), Array::Array(vec![])]);
    for (key, value) in [
        ("u8", 1u8.into()),
        ("i8", Value::I8(-1)),
        ("u16", 2u16.into()),
        ("i16", Value::I16(-2)),
        ("u32", 3u32.into()),
        ("i32", Value::I32(-3)),
        ("f32", 0.5f32.into()),
        ("bool", true.into()),
        ("string", "gemma4".into()),
        ("u64", 4u64.into()),
        ("i64", Value::I64(-4)),
        ("f64", 0.25f64.into()),
        ("strings", strings().into()),
        ("bools", vec![true, false].into()),
        ("floats", vec![1.0f32].into()),
        ("integers", vec![7i32, -7].into()),
        ("nested", nested.into()),
    ] {
        values.set(key, value).unwrap();
    }

    let mut blocks = Writer::new(Version::V2);
    blocks.set("general.alignment", 8u32).unwrap();
    for number in 0..=41 {
        // Removed types have no size to write.
        let shape = [256, 1];
        let _ = blocks.tensor(&format!("t{number}"), &shape, GgmlType(number));
    }

    let mut stack = Writer::new(Version::V3);
    stack.set("split.no", 0u16).unwrap();
    stack.set("split.count", 2u16).unwrap();
    stack.set("split.tensors.count", 3i32).unwrap();
    stack.tensor("experts", &[32, 3, 5], GgmlType(8)).unwrap();
    stack.tensor("scalar", &[], GgmlType(0)).unwrap();

    let empty = Writer::new(Version::V3);
    let files = [("values", values), ("blocks", blocks), ("stack", stack), ("empty", empty)];
    files.into_iter().map(|(name, writer)| (name, filled(writer))).collect()
}

#[test]
fn quantised_types_without_a_codec_are_listed_by_name() {
    let (_, bytes) = seeds().into_iter().find(|(name, _)| *name == "blocks").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("blocks.gguf");
    std::fs::write(&path, bytes).unwrap();
    let file = File::open(&path).unwrap();
    let listed: Vec<String> = file.unsupported_tensors().map(|info| info.kind.to_string()).collect();
    let expected = "Q8_1 Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ3_S IQ2_S IQ1_M TQ1_0 TQ2_0 Q1_0";
    assert_eq!(listed.join(" "), expected);
    for info in file.tensors() {
        let usable = file.view(&info.name).is_ok();
        assert_eq!(usable, info.kind.format().is_some(), "{}", info.kind);
    }
}

/// A file whose tensors hold a pattern.
fn filled(writer: Writer) -> Vec<u8> {
    let mut header = Vec::new();
    writer.clone().begin(&mut header).unwrap();
    // Parsed as a file that is long enough for anything.
    let tensors = Header::parse(&header, u64::MAX).unwrap().tensors;
    let mut body = writer.begin(Vec::new()).unwrap();
    for info in tensors {
        let bytes = info.bytes.unwrap() as usize;
        body.write(&info.name, &(0..bytes).map(|i| (i * 7 % 61) as u8).collect::<Vec<_>>()).unwrap();
    }
    body.finish().unwrap()
}

fn seed_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/gguf")
}

#[test]
#[ignore = "rewrites fuzz/seeds/gguf; run it after changing the seeds on purpose"]
fn write_seeds() {
    for (name, bytes) in seeds() {
        std::fs::write(seed_folder().join(name), bytes).unwrap();
    }
}

#[test]
fn the_stored_seeds_are_what_the_writer_makes() {
    for (name, bytes) in seeds() {
        Header::parse(&bytes, bytes.len() as u64).unwrap();
        assert!(std::fs::read(seed_folder().join(name)).unwrap() == bytes, "{name}");
    }
}

#[test]
fn stored_seeds_and_their_damaged_forms_never_panic() {
    let mut replayed = 0;
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/python.gguf");
    let stored = std::fs::read_dir(seed_folder()).unwrap().map(|entry| entry.unwrap().path());
    for path in stored.chain([python]) {
        let seed = std::fs::read(&path).unwrap();
        exercise::gguf(&seed);
        for part in 0..64 {
            let cut = &seed[..seed.len() * part / 64];
            exercise::gguf(cut);
            if let Ok(header) = Header::parse(&seed, seed.len() as u64)
                && header.tensors.iter().any(|t| t.range().is_some_and(|r| r.end > cut.len() as u64))
            {
                Header::parse(cut, cut.len() as u64).unwrap_err();
            }
        }
        // Every byte and every aligned or unaligned field of eight bytes of the header, and some of the data, set to
        // what breaks arithmetic.
        let header_len = Header::parse(&seed, seed.len() as u64).map_or(0, |h| h.data_start as usize);
        for at in (0..seed.len()).filter(|at| *at < header_len || at % 97 == 0) {
            for value in [0, 1, 0x7F, 0x80, 0xFF] {
                let mut damaged = seed.clone();
                damaged[at] = value;
                exercise::gguf(&damaged);
            }
            for value in [0, 1 << 32, 1 << 63, u64::MAX, u64::MAX - 31] {
                let mut damaged = seed.clone();
                let end = seed.len().min(at + 8);
                damaged[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
                exercise::gguf(&damaged);
            }
        }
        replayed += 1;
    }
    assert!(replayed >= 5, "only {replayed} seeds found");
}
