//! The name of a model as a user writes it: `owner/name[@revision][:quant-or-file]`.
//!
//! Parsing is strict because the parts become paths in the store and in addresses.

use std::{fmt, str::FromStr};

use super::HubError;

/// A repository on the hub.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Repo {
    /// User or organisation.
    pub owner: String,
    /// Name within the owner's.
    pub name: String,
}

impl fmt::Display for Repo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)
    }
}

/// A model on the hub, with the revision and the file or quantisation that is wanted.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Spec {
    /// The repository.
    pub repo: Repo,
    /// Branch, tag or commit; `None` is the branch `main`.
    pub revision: Option<String>,
    /// A file of the repository or a quantisation such as `Q4_K_M`; `None` leaves the choice to the store.
    pub selector: Option<String>,
}

/// The branch that stands for no revision.
pub const MAIN: &str = "main";

impl Spec {
    /// Parses `owner/name[@revision][:quant-or-file]`.
    ///
    /// # Errors
    /// [`HubError::Spec`] with what is wrong.
    pub fn parse(text: &str) -> Result<Self, HubError> {
        parse(text).map_err(|reason| HubError::Spec { text: text.to_owned(), reason })
    }

    /// The revision by name.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(MAIN)
    }
}

impl FromStr for Spec {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        Self::parse(text)
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.repo)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        if let Some(selector) = &self.selector {
            write!(f, ":{selector}")?;
        }
        Ok(())
    }
}

fn parse(text: &str) -> Result<Spec, String> {
    let (rest, selector) = match text.split_once(':') {
        Some((rest, selector)) => (rest, Some(selector)),
        None => (text, None),
    };
    let (path, revision) = match rest.split_once('@') {
        Some((path, revision)) => (path, Some(revision)),
        None => (rest, None),
    };
    let Some((owner, name)) = path.split_once('/') else {
        return Err("there is no slash between owner and name".to_owned());
    };
    check_part("owner", owner)?;
    check_part("name", name)?;
    for (what, value) in [("revision", revision), ("quant or file", selector)] {
        if let Some(value) = value {
            check_path(value).map_err(|reason| format!("the {what} \"{value}\" {reason}"))?;
        }
    }
    Ok(Spec {
        repo: Repo { owner: owner.to_owned(), name: name.to_owned() },
        revision: revision.map(str::to_owned),
        selector: selector.map(str::to_owned),
    })
}

/// The hub's own rules for names. `--` is excluded because the store joins owner and name with it.
fn check_part(what: &str, part: &str) -> Result<(), String> {
    const LONGEST: usize = 96;
    let bad = |c: &char| !(c.is_ascii_alphanumeric() || "-_.".contains(*c));
    if part.is_empty() {
        return Err(format!("the {what} is empty"));
    }
    if let Some(c) = part.chars().find(bad) {
        return Err(format!(
            "the {what} \"{part}\" has {c:?}, only letters, digits, '-', '_' and '.' may be in it"
        ));
    }
    let edge = |c: char| c == '-' || c == '.';
    if part.starts_with(edge) || part.ends_with(edge) || part.contains("--") || part.contains("..") {
        return Err(format!("the {what} \"{part}\" may not start or end with '-' or '.', nor double them"));
    }
    if part.len() > LONGEST {
        return Err(format!("the {what} is longer than {LONGEST} characters"));
    }
    Ok(())
}

/// Whether a relative path stays in its folder on every platform; the reason if it doesn't.
pub(super) fn check_path(path: &str) -> Result<(), &'static str> {
    if path.is_empty() {
        return Err("is empty");
    }
    if path.contains(|c: char| c.is_control() || "\\:*?\"<>|".contains(c)) {
        return Err("has a character that isn't allowed in file names");
    }
    match path.split('/').any(|part| part.is_empty() || part.ends_with('.')) {
        true => Err("has an empty part or one that ends with a dot"),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_parsed_and_printed_back() {
        for (text, revision, selector) in [
            ("google/gemma-4-E2B-it", None, None),
            ("g/n_1.5:Q4_K_M", None, Some("Q4_K_M")),
            ("g/n@v1.0", Some("v1.0"), None),
            (
                "g/n@refs/pr/3:sub dir/m-00001-of-00002.gguf",
                Some("refs/pr/3"),
                Some("sub dir/m-00001-of-00002.gguf"),
            ),
        ] {
            let spec: Spec = text.parse().unwrap();
            assert_eq!((spec.revision.as_deref(), spec.selector.as_deref()), (revision, selector), "{text}");
            assert_eq!(spec.to_string(), text);
        }
        assert_eq!(Spec::parse("g/n").unwrap().revision(), "main");
    }

    #[test]
    fn bad_names_are_refused_with_a_reason() {
        for (text, reason) in [
            ("gemma", "slash"),
            ("", "slash"),
            ("/n", "owner is empty"),
            ("o/", "name is empty"),
            ("o/n/m", "'/'"),
            ("o/..", "'.'"),
            ("o/a--b", "double"),
            ("o/näme", "'ä'"),
            ("o/n:", "quant or file \"\" is empty"),
            ("o/n@", "revision \"\" is empty"),
            ("o/n:../../secret", "ends with a dot"),
            ("o/n@/etc", "empty part"),
            ("o/n:a\\b", "character"),
            ("o/n:a:b", "character"),
        ] {
            let message = Spec::parse(text).unwrap_err().to_string();
            assert!(message.contains(reason) && message.contains("owner/name"), "{text}: {message}");
        }
        assert!(Spec::parse(&format!("o/{}", "n".repeat(97))).is_err());
    }
}
