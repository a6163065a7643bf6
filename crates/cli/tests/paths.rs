//! Paths are opaque to the program: names in any script, spaces, long ones, and on Unix ones that are no text (M03).

mod common;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use common::{command, copy_golden, finish, golden, lapidary, pebble};

fn in_folder(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    copy_golden("gemma3", folder);
    let out = folder.join("aus gabe.safetensors");
    let args: [&OsStr; 8] = [
        "dump".as_ref(),
        "-m".as_ref(),
        folder.as_os_str(),
        "--tokens".as_ref(),
        "2,7,5".as_ref(),
        "-o".as_ref(),
        out.as_os_str(),
        "--layers=0".as_ref(),
    ];
    lapidary(args).ok();
    assert!(std::fs::metadata(&out).unwrap().len() > 3 * 512 * 4);
    std::fs::remove_file(&out).unwrap();
    lapidary(["inspect".as_ref(), folder.as_os_str()]).ok();
    let checked =
        lapidary(["check".as_ref(), "-m".as_ref(), folder.as_os_str(), "--compute=f32".as_ref()]).ok();
    assert!(checked.ends_with("READY\n"));
    let file = folder.join("modell.gguf");
    std::fs::copy(pebble(), &file).unwrap();
    let args: [&OsStr; 7] = [
        "run".as_ref(),
        "-m".as_ref(),
        file.as_os_str(),
        "--compute=f32".as_ref(),
        "-n=3".as_ref(),
        "--greedy".as_ref(),
        "Hi".as_ref(),
    ];
    lapidary(args).ok();
}

#[test]
fn names_in_any_script_with_spaces() {
    let scratch = tempfile::tempdir().unwrap();
    for name in ["Модели моей собаки", "日本語　模型", "größe é e\u{301}", "emoji 🦊 -m --help", "a'b\"c"]
    {
        in_folder(&scratch.path().join(name));
    }
}

#[test]
fn paths_longer_than_260_characters() {
    let scratch = tempfile::tempdir().unwrap();
    let mut folder = scratch.path().to_path_buf();
    while folder.as_os_str().len() < 400 {
        folder.push("ein recht langer Name eines Ordners");
    }
    in_folder(&folder);
}

#[cfg(unix)]
#[test]
fn names_that_are_no_text() {
    use std::os::unix::ffi::OsStrExt;
    let scratch = tempfile::tempdir().unwrap();
    let folder: PathBuf = scratch.path().join(OsStr::from_bytes(b"not \xFF\xFE text"));
    in_folder(&folder);
    // A model that is not there is named as well as it can be.
    let missing = scratch.path().join(OsStr::from_bytes(b"gone \xFF"));
    let message = lapidary(["inspect".as_ref(), missing.as_os_str()]).failure();
    assert!(message.contains("gone"), "{message}");
}

#[test]
fn the_store_may_have_any_name() {
    let scratch = tempfile::tempdir().unwrap();
    let home = scratch.path().join("Мой кэш 模型");
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let repo = home.join("hub").join("models--o--n");
    let snapshot = repo.join("snapshots").join(commit);
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(repo.join("refs")).unwrap();
    std::fs::write(repo.join("refs").join("main"), commit).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden("gemma3").join(file), snapshot.join(file)).unwrap();
    }
    let run = |args: &[&str]| finish(command().env("HF_HOME", &home).args(args).output().unwrap());
    assert!(run(&["list"]).ok().contains("o/n"));
    let listed = common::json(&run(&["list", "--json"]).ok());
    assert_eq!(listed[0]["files"].as_array().unwrap().len(), 2);
    assert!(run(&["inspect", "o/n", "--offline"]).ok().contains("Gemma 3"));
    assert!(run(&["pull", "o/n", "--offline"]).ok().contains(commit));
    run(&["rm", "o/n"]).ok();
    assert!(!run(&["list"]).ok().contains("o/n"));
    let message = run(&["rm", "o/n"]).failure();
    assert!(message.contains("o/n") && message.contains("isn't in the store"), "{message}");
}
