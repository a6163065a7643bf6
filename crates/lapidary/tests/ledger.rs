//! `docs/hard-cases.md` names tests; a name that has gone from the code must go from the document too.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The identifiers of the list, by section.
const CASES: [(char, u32); 13] = [
    ('A', 12),
    ('B', 8),
    ('C', 4),
    ('D', 8),
    ('E', 7),
    ('F', 8),
    ('G', 3),
    ('H', 8),
    ('I', 7),
    ('J', 4),
    ('K', 8),
    ('L', 4),
    ('M', 5),
];

/// Names of the functions of a file that are tests.
fn tests_of(source: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    let mut is_test = false;
    for line in source.lines().map(str::trim) {
        match line.strip_prefix("fn ") {
            Some(rest) if is_test => {
                found.extend(rest.split(['(', '<']).next());
                is_test = false;
            }
            Some(_) => {}
            None => is_test |= line == "#[test]",
        }
    }
    found
}

/// The rows of the document's tables: identifier and last cell.
fn rows(document: &str) -> BTreeMap<&str, &str> {
    let mut rows = BTreeMap::new();
    for line in document.lines().filter(|l| l.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [id, _, held] = cells[..] else { panic!("a row has three cells: {line}") };
        if id.len() == 3 && id[1..].bytes().all(|b| b.is_ascii_digit()) {
            assert!(rows.insert(id, held).is_none(), "{id} is listed twice");
        }
    }
    rows
}

#[test]
fn every_case_is_listed_and_every_test_it_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let document = std::fs::read_to_string(root.join("docs/hard-cases.md")).expect("the document");
    let rows = rows(&document);
    let ids = CASES.iter().flat_map(|&(section, last)| (1..=last).map(move |n| format!("{section}{n:02}")));
    let expected: BTreeSet<String> = ids.collect();
    let listed: BTreeSet<String> = rows.keys().map(|id| (*id).to_owned()).collect();
    assert_eq!(listed, expected);

    let mut sources = BTreeMap::new();
    let (mut missing, mut named) = (Vec::new(), 0);
    for (id, held) in &rows {
        let tests: Vec<(&str, &str)> = held.split('`').filter_map(|part| part.split_once("::")).collect();
        let explained = ["open: ", "later: ", "n/a: "].iter().any(|word| held.contains(word));
        assert!(!tests.is_empty() || explained, "{id} has neither a test nor a reason");
        for (file, test) in tests {
            named += 1;
            let source = sources.entry(file).or_insert_with(|| {
                std::fs::read_to_string(root.join("crates").join(file)).unwrap_or_default()
            });
            if !tests_of(source).contains(test) {
                missing.push(format!("{id}: {file}::{test}"));
            }
        }
    }
    assert!(missing.is_empty(), "no such tests: {missing:#?}");
    assert!(named > 100, "only {named} names were read from the document");
}

/// A test that bears a case's identifier belongs to that case's row.
#[test]
fn every_test_that_is_named_after_a_case_is_listed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let document = std::fs::read_to_string(root.join("docs/hard-cases.md")).expect("the document");
    let rows = rows(&document);
    let mut folders = vec![root.join("crates")];
    let mut found = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder of the project") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            if path.extension().is_none_or(|e| e != "rs") {
                continue;
            }
            let source = std::fs::read_to_string(&path).expect("source");
            for test in tests_of(&source) {
                for id in test.split('_').take_while(|word| is_id(word)) {
                    found += 1;
                    let row = rows.get(id.to_uppercase().as_str());
                    let listed = row.is_some_and(|held| held.contains(&format!("::{test}`")));
                    assert!(listed, "{}: {test} is not in the row of {id}", path.display());
                }
            }
        }
    }
    assert!(found > 50, "only {found} tests bear an identifier");
}

/// A lower-case identifier of a case; traps, which count from t01, are another list.
fn is_id(word: &str) -> bool {
    let mut chars = word.chars();
    chars.next().is_some_and(|c| ('a'..='m').contains(&c))
        && word.len() == 3
        && chars.all(|c| c.is_ascii_digit())
}
