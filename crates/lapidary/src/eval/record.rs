//! What an evaluation has found so far, kept in a file so that it can be broken off and gone on with.
//!
//! ```text
//! {"evaluation": {"what": "ppl", "model": "..", ..}}     what it is of; anything else is refused by the field's name
//! {"tokens": 511, "nats": 1893.2, ..}                    one line a unit, in order
//! ```
//!
//! Lines are appended and flushed one by one; a last line without its end is what a break-off left, and is written again.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::error::{EvalError, Result};

/// The results of units, in a file or not.
#[derive(Debug, Default)]
pub struct Record {
    file: Option<(PathBuf, File)>,
    /// What the file held when it was opened.
    before: Vec<Value>,
    next: usize,
}

impl Record {
    /// Keeps nothing.
    pub fn none() -> Record {
        Record::default()
    }

    /// Opens the record at `path` of the evaluation that `of` describes, or begins one.
    ///
    /// # Errors
    /// [`EvalError::OtherRecord`], [`EvalError::BadRecord`], [`EvalError::Io`].
    pub fn open(path: &Path, of: &Map<String, Value>) -> Result<Record> {
        let io = |source| EvalError::Io { path: path.to_owned(), source };
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(io(e)),
        };
        let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
        let mut before = Vec::new();
        for (n, line) in whole.lines().enumerate() {
            let bad = |problem: String| EvalError::BadRecord { path: path.to_owned(), line: n + 1, problem };
            let value: Value = serde_json::from_str(line).map_err(|e| bad(e.to_string()))?;
            if n > 0 {
                before.push(value);
                continue;
            }
            let Some(found) = value["evaluation"].as_object() else {
                return Err(bad("expected {\"evaluation\": ..}".to_owned()));
            };
            same(path, found, of)?;
        }
        // Cut off what a break-off left of a line.
        let mut file = OpenOptions::new().create(true).truncate(false).write(true).open(path).map_err(io)?;
        file.set_len(whole.len() as u64).map_err(io)?;
        std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0)).map_err(io)?;
        if whole.is_empty() {
            writeln!(file, "{}", json!({"evaluation": of})).map_err(io)?;
        }
        Ok(Record { file: Some((path.to_owned(), file)), before, next: 0 })
    }

    /// How many units it held when it was opened.
    pub fn found(&self) -> usize {
        self.before.len()
    }

    /// The next unit's result: as recorded, or from `run`, and then recorded.
    ///
    /// # Errors
    /// What `run` fails with, [`EvalError::BadRecord`], [`EvalError::Io`].
    pub fn next<T: Serialize + DeserializeOwned>(&mut self, run: impl FnOnce() -> Result<T>) -> Result<T> {
        let n = self.next;
        if let Some(value) = self.before.get(n) {
            let (path, _) = self.file.as_ref().expect("only files hold results");
            let bad = |e: serde_json::Error| EvalError::BadRecord {
                path: path.clone(),
                line: n + 2,
                problem: e.to_string(),
            };
            let result = T::deserialize(value).map_err(bad)?;
            self.next += 1;
            return Ok(result);
        }
        let result = run()?;
        if let Some((path, file)) = &mut self.file {
            let mut line = serde_json::to_string(&result).expect("results are plain data");
            line.push('\n');
            file.write_all(line.as_bytes()).map_err(|source| EvalError::Io { path: path.clone(), source })?;
        }
        self.next += 1;
        Ok(result)
    }
}

fn same(path: &Path, found: &Map<String, Value>, expected: &Map<String, Value>) -> Result<()> {
    for field in expected.keys().chain(found.keys()) {
        let (was, is) = (found.get(field), expected.get(field));
        if was != is {
            let text = |v: Option<&Value>| v.map_or("absent".to_owned(), Value::to_string);
            let (found, expected) = (text(was), text(is));
            return Err(EvalError::OtherRecord {
                path: path.to_owned(),
                field: field.clone(),
                found,
                expected,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(model: &str) -> Map<String, Value> {
        json!({"what": "ppl", "model": model}).as_object().unwrap().clone()
    }

    #[test]
    fn what_was_found_is_not_run_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record");
        let mut record = Record::open(&path, &of("a")).unwrap();
        for n in 0..3 {
            assert_eq!(record.next(|| Ok(n)).unwrap(), n);
        }
        drop(record);
        // A break-off in the middle of a line.
        std::fs::write(&path, std::fs::read_to_string(&path).unwrap() + "17").unwrap();
        let mut record = Record::open(&path, &of("a")).unwrap();
        assert_eq!(record.found(), 3);
        for n in 0..3 {
            assert_eq!(record.next::<i32>(|| panic!("it is there")).unwrap(), n);
        }
        assert_eq!(record.next(|| Ok(40)).unwrap(), 40);
        drop(record);
        assert_eq!(
            std::fs::read_to_string(&path).unwrap().lines().skip(1).collect::<Vec<_>>(),
            ["0", "1", "2", "40"]
        );
    }

    #[test]
    fn other_records_are_refused_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record");
        drop(Record::open(&path, &of("a")).unwrap());
        let before = std::fs::read(&path).unwrap();
        let error = Record::open(&path, &of("b")).unwrap_err().to_string();
        assert!(error.contains("model was \"a\" and is \"b\""), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), before);
        std::fs::write(&path, "a novel\n").unwrap();
        let error = Record::open(&path, &of("a")).unwrap_err().to_string();
        assert!(error.contains("line 1"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"a novel\n");
    }
}
