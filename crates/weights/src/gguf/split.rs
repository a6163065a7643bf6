//! Models split over several files, `NAME-00001-of-00005.gguf` and so on.
//!
//! The first file carries all metadata; each carries `split.no` (from 0), `split.count` and `split.tensors.count`,
//! the number of tensors in all files together.

use std::path::{Path, PathBuf};

use super::{GgufError, Header, Result};

/// A file name that says which part of a split model the file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardName {
    /// The path before `-00001-of-00005.gguf`.
    pub prefix: PathBuf,
    /// From 1.
    pub number: u32,
    /// Files of the model.
    pub count: u32,
}

impl ShardName {
    /// Reads a path's file name; `None` if it doesn't follow the pattern.
    pub fn parse(path: &Path) -> Option<ShardName> {
        let name = path.file_name()?.to_str()?;
        let rest = name.strip_suffix(".gguf")?;
        let (rest, count) = rest.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let five_digits = |s: &str| (s.len() == 5).then(|| s.parse::<u32>().ok()).flatten();
        let (number, count) = (five_digits(number)?, five_digits(count)?);
        (1..=count).contains(&number).then(|| ShardName {
            prefix: path.with_file_name(prefix),
            number,
            count,
        })
    }

    /// The path of file `number`, from 1.
    pub fn path(&self, number: u32) -> PathBuf {
        let mut name = self.prefix.clone().into_os_string();
        name.push(format!("-{number:05}-of-{:05}.gguf", self.count));
        name.into()
    }
}

/// Whether `header`, found at `path`, is one file of several, and which: name and keys must agree.
pub(super) fn shard_of(path: &Path, header: &Header) -> Result<Option<ShardName>> {
    let name = ShardName::parse(path).filter(|name| name.count > 1);
    let count = header.metadata.get::<u32>("split.count")?.filter(|&count| count > 1);
    match (name, count) {
        (None, None) => Ok(None),
        (None, Some(count)) => Err(GgufError::SplitName { count }),
        (Some(name), _) => {
            check_key(header, "split.count", name.count.into())?;
            check_key(header, "split.no", (name.number - 1).into())?;
            Ok(Some(name))
        }
    }
}

/// Holds all files of a model against the number of tensors that each claims for the whole.
pub(super) fn check_total<'a>(headers: impl Iterator<Item = (&'a Path, &'a Header)> + Clone) -> Result<()> {
    let total = headers.clone().map(|(_, header)| header.tensors.len() as u64).sum();
    for (path, header) in headers {
        check_key(header, "split.tensors.count", total).map_err(|e| e.in_file(path))?;
    }
    Ok(())
}

fn check_key(header: &Header, key: &'static str, expected: u64) -> Result<()> {
    match header.metadata.get::<u64>(key)? {
        Some(found) if found == expected => Ok(()),
        Some(found) => Err(GgufError::SplitKey { key, found: found.to_string(), expected }),
        None => Err(GgufError::SplitKey { key, found: "missing".into(), expected }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_names_round_trip_and_others_are_no_shards() {
        let path = Path::new("dir-00001-of-00002/gemma-of-4-00002-of-00010.gguf");
        let name = ShardName::parse(path).unwrap();
        assert_eq!((name.number, name.count), (2, 10));
        assert_eq!(name.path(2), path);
        assert_eq!(name.path(10), Path::new("dir-00001-of-00002/gemma-of-4-00010-of-00010.gguf"));
        for other in
            ["a.gguf", "a-1-of-2.gguf", "a-00003-of-00002.gguf", "a-00000-of-00002.gguf", "-of-00002.gguf"]
        {
            assert_eq!(ShardName::parse(Path::new(other)), None, "{other}");
        }
    }
}
