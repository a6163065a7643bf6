//! A store over folders of its own: restarts, damage, the size cap.

use std::sync::mpsc::channel;
use std::time::Duration;

use super::*;

const BYTES: [usize; GROUPS] = [700, 500];

fn key(n: u8) -> BlockKey {
    BlockKey([n; 32])
}

fn dir(path: &Path, bytes: u64) -> PrefixDir {
    PrefixDir { path: path.to_owned(), bytes, model: String::new() }
}

fn page(group: Group, n: u8) -> Vec<u8> {
    (0..BYTES[group.index()]).map(|i| (i as u8).wrapping_mul(n)).collect()
}

fn loaded(store: &Store, group: Group, n: u8) -> Option<Vec<u8>> {
    let mut wanted = [Vec::new(), Vec::new()];
    wanted[group.index()].push((5, key(n)));
    let (to, done) = channel();
    store.load(wanted, move |pages| to.send(pages).expect("somebody waits"));
    let pages = done.recv_timeout(Duration::from_secs(20)).expect("an answer")?;
    let (block, page) = [pages.sliding, pages.full].concat().remove(0);
    assert_eq!(block, 5);
    Some(page)
}

fn saved(path: &Path, identity: u8, pages: u8) {
    let store = Store::open(&dir(path, 1 << 20), [identity; 32], BYTES).unwrap();
    for n in 0..pages {
        Group::ALL.iter().for_each(|&group| store.save((group, key(n)), page(group, n)));
    }
}

fn files(path: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(path).unwrap().map(|f| f.unwrap().path());
    let mut files: Vec<PathBuf> =
        folders.flat_map(|f| fs::read_dir(f).unwrap().map(|f| f.unwrap().path())).collect();
    files.sort();
    files
}

#[test]
fn what_was_saved_is_there_after_a_restart_and_only_for_the_same_origin() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path(), 1, 3);
    assert_eq!(files(folder.path()).len(), 6);
    let store = Store::open(&dir(folder.path(), 1 << 20), [1; 32], BYTES).unwrap();
    for n in 0..3 {
        for group in Group::ALL {
            assert!(store.has((group, key(n))));
            assert_eq!(loaded(&store, group, n), Some(page(group, n)));
        }
    }
    assert_eq!(loaded(&store, Group::Full, 9), None);
    let stats = store.stats();
    assert_eq!(
        (stats.files, stats.loaded, stats.damaged),
        (6, 6, 0),
        "a file that is not there is not damaged"
    );
    let other = Store::open(&dir(folder.path(), 1 << 20), [2; 32], BYTES).unwrap();
    assert!(!other.has((Group::Full, key(0))) && other.stats().bytes == stats.bytes);
}

#[test]
fn a_file_with_any_bit_changed_or_cut_anywhere_is_removed_and_never_used() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path(), 1, 1);
    let path = files(folder.path()).into_iter().find(|p| p.extension().unwrap() == "full").unwrap();
    let good = fs::read(&path).unwrap();
    assert_eq!(good.len(), HEAD + 500 + TAIL);
    let mut bad: Vec<Vec<u8>> = Vec::new();
    for at in (0..good.len()).step_by(23).chain([0, 7, 8, 39, 40, 41, 72, 73, 80, 81, good.len() - 1]) {
        let mut bytes = good.clone();
        bytes[at] ^= 1 << (at % 8);
        bad.push(bytes);
    }
    bad.extend([0, 1, HEAD, HEAD + 1, good.len() - TAIL, good.len() - 1].map(|len| good[..len].to_vec()));
    bad.push([&good[..], &[0]].concat());
    // Another page's file under this name: sound in itself.
    bad.push(seal(&[1; 32], (Group::Full, key(3)), &page(Group::Full, 3)));
    bad.push(seal(&[2; 32], (Group::Full, key(0)), &page(Group::Full, 0)));
    bad.push(seal(&[1; 32], (Group::Sliding, key(0)), &page(Group::Full, 0)));
    for (i, bytes) in bad.iter().enumerate() {
        fs::write(&path, bytes).unwrap();
        let store = Store::open(&dir(folder.path(), 1 << 20), [1; 32], BYTES).unwrap();
        assert_eq!(loaded(&store, Group::Full, 0), None, "case {i}");
        assert!(!path.exists() && !store.has((Group::Full, key(0))), "case {i}");
        assert_eq!(store.stats().damaged, 1, "case {i}");
        assert_eq!(loaded(&store, Group::Sliding, 0), Some(page(Group::Sliding, 0)));
    }
    fs::write(&path, &good).unwrap();
    let store = Store::open(&dir(folder.path(), 1 << 20), [1; 32], BYTES).unwrap();
    assert_eq!(loaded(&store, Group::Full, 0), Some(page(Group::Full, 0)));
}

#[test]
fn the_size_cap_holds_and_what_was_used_last_stays() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path(), 1, 20);
    let all = files(folder.path());
    let total: u64 = all.iter().map(|p| p.metadata().unwrap().len()).sum();
    // Ages that leave no doubt.
    for (i, path) in all.iter().enumerate() {
        let at = SystemTime::now() - Duration::from_secs(1000 - i as u64);
        fs::File::options().append(true).open(path).unwrap().set_modified(at).unwrap();
    }
    fs::write(folder.path().join("notes"), b"somebody else's").unwrap();
    let store = Store::open(&dir(folder.path(), total), [1; 32], BYTES).unwrap();
    let oldest = named(&all[0]).unwrap();
    assert!(loaded(&store, oldest.0, oldest.1.0[0]).is_some(), "used just now");
    drop(store);
    let store = Store::open(&dir(folder.path(), total / 2), [2; 32], BYTES).unwrap();
    let left = files_left(folder.path());
    assert!(left.contains(&all[0]) && !left.contains(&all[1]) && left.contains(&all[39]));
    assert!(store.stats().bytes <= total / 2 && store.stats().evicted > 15);
    for n in 100..140 {
        store.save((Group::Full, key(n)), page(Group::Full, n));
    }
    drop(store);
    let bytes: u64 = files_left(folder.path()).iter().map(|p| p.metadata().unwrap().len()).sum();
    assert!(bytes <= total / 2, "{bytes}");
    assert!(folder.path().join("notes").exists());
}

fn files_left(path: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(path).unwrap().map(|f| f.unwrap().path()).filter(|f| f.is_dir());
    folders.flat_map(|f| fs::read_dir(f).unwrap().map(|f| f.unwrap().path())).collect()
}

#[test]
fn a_folder_that_cannot_be_used_is_told_at_once_and_strangers_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, b"x").unwrap();
    let error = Store::open(&dir(&file, 1), [1; 32], BYTES).unwrap_err().to_string();
    assert!(error.contains("file"), "{error}");
    saved(folder.path(), 1, 1);
    let own = folder.path().join(hex(&[1; 8]));
    for name in
        ["readme.txt", "ABCD.full", &format!("{}.full", "G".repeat(64)), &format!("{}.full", "A".repeat(64))]
    {
        fs::write(own.join(name), b"mine").unwrap();
    }
    let store = Store::open(&dir(folder.path(), 0), [1; 32], BYTES).unwrap();
    assert_eq!(store.stats().files, 0, "a cap of nothing");
    assert_eq!(files_left(folder.path()).len(), 4);
}

#[test]
fn depth_is_how_far_pages_of_both_kinds_reach() {
    let folder = tempfile::tempdir().unwrap();
    {
        let store = Store::open(&dir(folder.path(), 1 << 20), [1; 32], BYTES).unwrap();
        (2..9).for_each(|n| store.save((Group::Full, key(n)), page(Group::Full, n)));
        [3, 4, 6, 7].iter().for_each(|&n| store.save((Group::Sliding, key(n)), page(Group::Sliding, n)));
    }
    let store = Store::open(&dir(folder.path(), 1 << 20), [1; 32], BYTES).unwrap();
    let keys: Vec<BlockKey> = (0..12).map(key).collect();
    let two = |blocks: usize| Some(blocks.saturating_sub(2));
    let depth = |known, least, most| store.depth(&keys, known, least, most, two);
    assert_eq!(depth(2, 0, 12), Some(8), "6 and 7 are a window");
    assert_eq!(depth(2, 0, 7), Some(5), "3 and 4 are");
    assert_eq!(depth(2, 5, 7), None);
    assert_eq!(depth(1, 0, 12), None, "full page 1 is nowhere");
    assert_eq!(store.depth(&keys, 2, 0, 12, |_| None), Some(9), "without sliding layers");
}
