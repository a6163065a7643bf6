//! The hub against a server in the test, from an empty folder to a model on disk.

mod server;

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::*;
use server::{COMMIT, HubFile, Reply, Request, Server, Site, large, site, small};

/// More than two buffers and a multiple of nothing.
const LARGE: usize = 700_001;
const CUT: usize = 300_007;

fn builder(cache: &Path, site: &Site) -> HubBuilder {
    Hub::builder(cache)
        .endpoint(&site.hub.url)
        .attempts(3, Duration::from_millis(5))
        .timeout(Duration::from_secs(5))
        .lock_wait(Duration::from_millis(100))
}

fn get(hub: &Hub, spec: &str) -> Result<Snapshot, HubError> {
    hub.get(&Spec::parse(spec).unwrap(), &mut Watch::default())
}

fn right(_: &Request, _: usize, reply: Reply) -> Reply {
    reply
}

fn gguf() -> Vec<HubFile> {
    vec![small("README.md", "# n"), large("m-Q4_0.gguf", LARGE)]
}

/// A change that applies to the storage host's answers alone.
fn at_storage(
    change: impl Fn(&Request, usize, Reply) -> Reply + Send + Sync,
) -> impl Fn(&Request, usize, Reply) -> Reply + Send + Sync {
    move |request, before, reply| match request.path.starts_with("/blob/") {
        true => change(request, before, reply),
        false => reply,
    }
}

fn ranges(site: &Site) -> Vec<Option<String>> {
    site.storage.requests().iter().map(|r| r.header("range").map(str::to_owned)).collect()
}

/// Every file under a folder that ends so.
fn files_ending(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files_ending(&path, ending));
        } else if path.to_str().unwrap().ends_with(ending) {
            found.push(path);
        }
    }
    found
}

#[test]
fn a_model_arrives_in_the_shared_layout_under_a_path_that_is_not_ascii() {
    let files = vec![
        small("config.json", "{\"a\": 1}"),
        small("tokenizer.json", ""),
        large("model-00001-of-00002.safetensors", LARGE),
        large("model-00002-of-00002.safetensors", 1013),
        small("model.safetensors.index.json", "{}"),
        small("pytorch_model.bin", "evil"),
    ];
    let site = site(files.clone(), right);
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("Модели 模型　cache");
    let hub = builder(&cache, &site).build().unwrap();

    let mut reports: Vec<(String, u64, u64)> = Vec::new();
    let mut progress = |p: &Progress<'_>| reports.push((p.file.to_owned(), p.done, p.total));
    let mut watch = Watch { progress: Some(&mut progress), cancel: None };
    let model = hub.get(&Spec::parse("o/n").unwrap(), &mut watch).unwrap();

    let root = cache.join("models--o--n");
    assert_eq!(model.folder, root.join("snapshots").join(COMMIT));
    assert_eq!(model.path(), model.folder);
    assert_eq!(model.unreachable, None);
    assert_eq!(fs::read_to_string(root.join("refs/main")).unwrap(), COMMIT);
    for file in &files {
        let path = model.folder.join(file.name);
        if file.name.ends_with(".bin") {
            assert!(!path.exists());
            continue;
        }
        assert!(model.files.contains(&path), "{}", file.name);
        assert_eq!(fs::read(&path).unwrap(), file.contents, "{}", file.name);
        #[cfg(unix)]
        assert_eq!(fs::read_link(&path).unwrap(), Path::new("../../blobs").join(file.etag()));
        let reports: Vec<_> = reports.iter().filter(|r| r.0 == file.name).collect();
        assert!(reports.windows(2).all(|w| w[0].1 <= w[1].1));
        let size = file.contents.len() as u64;
        assert_eq!((reports[0].1, reports.last().unwrap().1, reports[0].2), (0, size, size));
    }
    assert!(files_ending(&cache, ".incomplete").is_empty());

    let before = site.hub.requests().len();
    assert_eq!(get(&hub, "o/n").unwrap(), model);
    assert_eq!(site.hub.requests().len(), before + 1, "a stored model costs one listing");
    assert_eq!(hub.list().unwrap()[0].revisions, ["main"]);
    assert_eq!(hub.remove(&Spec::parse("o/n").unwrap()).unwrap().files, 5);
    assert!(hub.list().unwrap().is_empty() && !root.exists());
}

#[test]
fn a_connection_that_breaks_again_and_again_is_resumed_where_it_broke() {
    const STEP: usize = 100_003;
    let cut = |_: &Request, _, reply| Reply { cut_at: Some(STEP), ..reply };
    let site = site(gguf(), at_storage(cut));
    let folder = tempfile::tempdir().unwrap();
    let hub = builder(folder.path(), &site).build().unwrap();
    let model = get(&hub, "o/n").unwrap();
    assert_eq!(fs::read(model.path()).unwrap(), gguf()[1].contents);
    // More answers than the three attempts that are made without progress.
    let expected = (0..7).map(|i| (i > 0).then(|| format!("bytes={}-", i * STEP))).collect::<Vec<_>>();
    assert_eq!(ranges(&site), expected);
}

#[test]
fn a_cancelled_download_is_resumed_by_the_next_process() {
    let site = site(gguf(), right);
    let folder = tempfile::tempdir().unwrap();
    let cancel = AtomicBool::new(false);
    let mut kept = 0;
    let mut progress = |p: &Progress<'_>| {
        kept = p.done;
        cancel.store(p.done > 0, Ordering::Relaxed);
    };
    let mut watch = Watch { progress: Some(&mut progress), cancel: Some(&cancel) };
    let hub = builder(folder.path(), &site).build().unwrap();
    let stopped = hub.get(&Spec::parse("o/n").unwrap(), &mut watch).unwrap_err();
    assert!(matches!(&stopped, HubError::Cancelled { file } if file == "m-Q4_0.gguf"), "{stopped}");
    assert!(kept > 0 && kept < LARGE as u64);
    drop(hub);

    let hub = builder(folder.path(), &site).build().unwrap();
    let model = get(&hub, "o/n:q4_0").unwrap();
    assert_eq!(fs::read(model.path()).unwrap(), gguf()[1].contents);
    assert_eq!(ranges(&site), [None, Some(format!("bytes={kept}-"))]);
}

#[test]
fn a_server_without_ranges_is_asked_for_everything_again() {
    // Ignored, refused, and answered with other bytes than asked for.
    let contents = gguf()[1].contents.clone();
    let ignored = Reply::new(200).body(contents.clone());
    let refused = Reply::new(416);
    let other = Reply::new(206).with("Content-Range", "bytes 5-700000/700001").body(&contents[5..]);
    for wrong in [ignored, refused, other] {
        let status = wrong.status;
        let change = move |r: &Request, before, reply| match (before, r.header("range")) {
            (0, _) => Reply { cut_at: Some(CUT), ..reply },
            (_, Some(_)) => wrong.clone(),
            _ => reply,
        };
        let site = site(gguf(), at_storage(change));
        let folder = tempfile::tempdir().unwrap();
        let hub = builder(folder.path(), &site).build().unwrap();
        let model = get(&hub, "o/n").unwrap();
        assert!(fs::read(model.path()).unwrap() == contents, "after {status}");
    }
}

#[test]
fn the_token_goes_to_the_endpoint_only() {
    // A relative redirect stays at the endpoint and keeps the token.
    let change = |r: &Request, _, reply: Reply| match r.path.as_str() {
        p if p.ends_with("/config.json") && !p.contains("moved") => {
            Reply::new(307).with("Location", format!("/o/n/resolve/{COMMIT}/config.json?moved"))
        }
        p if p.ends_with("?moved") => Reply::new(200).with("ETag", "\"abc\"").body("{}"),
        _ => reply,
    };
    let files = vec![small("config.json", "?"), large("model.safetensors", 1013)];
    let site = site(files, change);
    let folder = tempfile::tempdir().unwrap();
    let hub = builder(folder.path(), &site).token(Some("hf_secret".to_owned())).build().unwrap();
    let model = get(&hub, "o/n").unwrap();
    assert_eq!(fs::read_to_string(model.folder.join("config.json")).unwrap(), "{}");
    for request in site.hub.requests() {
        assert_eq!(request.header("authorization"), Some("Bearer hf_secret"), "{}", request.path);
    }
    let stored = site.storage.requests();
    assert_eq!(stored.len(), 1, "HEAD isn't sent on to the storage host");
    assert_eq!(stored[0].header("authorization"), None);
    assert!(!format!("{hub:?}").contains("hf_secret"));
}

#[test]
fn contents_with_another_hash_are_discarded() {
    let change = |_: &Request, before, mut reply: Reply| {
        if before == 0 {
            reply.body[CUT] ^= 1;
        }
        reply
    };
    let site = site(gguf(), at_storage(change));
    let folder = tempfile::tempdir().unwrap();
    let hub = builder(folder.path(), &site).build().unwrap();
    match get(&hub, "o/n").unwrap_err() {
        HubError::HashMismatch { file, expected, got } => {
            assert_eq!((file.as_str(), expected), ("m-Q4_0.gguf", gguf()[1].etag()));
            assert_eq!(got.len(), 64);
        }
        other => panic!("{other}"),
    }
    assert!(files_ending(&folder.path().join("models--o--n"), "").is_empty(), "something of it stayed");
    get(&hub, "o/n").unwrap();
}

#[test]
fn a_body_of_another_length_is_refused() {
    // Longer: the announced size is one too small.
    let shrink = |r: &Request, _, reply: Reply| match r.path.ends_with(".gguf") {
        true => reply.with("X-Linked-Size", (LARGE - 1).to_string()),
        false => reply,
    };
    let longer = site(gguf(), shrink);
    let folder = tempfile::tempdir().unwrap();
    let hub = builder(folder.path(), &longer).build().unwrap();
    match get(&hub, "o/n").unwrap_err() {
        HubError::SizeMismatch { expected, got, .. } => assert!(expected == 700_000 && got > expected),
        other => panic!("{other}"),
    }

    // Shorter, always at the same place: given up after three attempts, the beginning kept.
    let cut = |_: &Request, _, reply: Reply| match reply.status {
        200 => Reply { cut_at: Some(CUT), ..reply },
        _ => Reply { cut_at: Some(0), ..reply },
    };
    let shorter = site(gguf(), at_storage(cut));
    let folder = tempfile::tempdir().unwrap();
    let hub = builder(folder.path(), &shorter).build().unwrap();
    let error = get(&hub, "o/n").unwrap_err();
    assert!(matches!(error, HubError::Unreachable { attempts: 3, .. }), "{error}");
    assert!(error.to_string().contains("m-Q4_0.gguf"), "{error}");
    assert_eq!(shorter.storage.requests().len(), 3);
    let partial = files_ending(folder.path(), ".incomplete");
    assert_eq!(fs::metadata(&partial[0]).unwrap().len(), CUT as u64);
    assert!(hub.store.commit(&Spec::parse("o/n").unwrap().repo, "main").unwrap().is_none());
}

#[test]
fn refusals_say_what_to_do_and_are_not_repeated() {
    let cases = [
        (401, "GatedRepo", None, vec!["accept the licence at http://", "/o/n and set HF_TOKEN"]),
        (401, "RepoNotFound", None, vec!["check the name", "accept the licence"]),
        (403, "GatedRepo", Some("hf_x"), vec!["account that the token belongs to"]),
        (401, "", Some("hf_x"), vec!["HF_TOKEN is valid"]),
        (404, "RepoNotFound", None, vec!["check the spelling"]),
        (404, "RevisionNotFound", None, vec!["no such revision"]),
        (410, "", None, vec!["answered 410"]),
    ];
    for (status, code, token, words) in cases {
        let change = move |_: &Request, _, _| Reply::new(status).with("X-Error-Code", code);
        let site = site(gguf(), change);
        let folder = tempfile::tempdir().unwrap();
        let hub = builder(folder.path(), &site).token(token.map(str::to_owned)).build().unwrap();
        let error = get(&hub, "o/n@v2").unwrap_err();
        let message = error.to_string();
        for word in words {
            assert!(message.contains(word), "{message}");
        }
        assert!(message.contains("/api/models/o/n/revision/v2") && message.contains(&status.to_string()));
        assert_eq!(site.hub.requests().len(), 1);
        match (status, error) {
            (401 | 403, HubError::AccessDenied { .. }) | (404, HubError::NotFound { .. }) => {}
            (410, HubError::Status { .. }) => {}
            (_, other) => panic!("{status}: {other:?}"),
        }
    }
    // The storage host's refusal isn't about the licence, and its address is shown without the signature.
    let site = site(gguf(), at_storage(|_, _, _| Reply::new(403)));
    let folder = tempfile::tempdir().unwrap();
    let hub = builder(folder.path(), &site).build().unwrap();
    let message = get(&hub, "o/n").unwrap_err().to_string();
    assert!(message.contains("answered 403") && !message.contains("licence"), "{message}");
    assert!(!message.contains("signature"), "{message}");
}

#[test]
fn an_overloaded_server_is_tried_again_as_often_as_set() {
    let busy = |times: usize| {
        move |r: &Request, before: usize, reply| match before < times && !r.path.starts_with("/blob/") {
            true => Reply::new(503).with("Retry-After", "0"),
            false => reply,
        }
    };
    let twice = site(gguf(), busy(2));
    let folder = tempfile::tempdir().unwrap();
    get(&builder(folder.path(), &twice).build().unwrap(), "o/n").unwrap();

    let thrice = site(gguf(), busy(3));
    let folder = tempfile::tempdir().unwrap();
    let error = get(&builder(folder.path(), &thrice).build().unwrap(), "o/n").unwrap_err();
    assert!(matches!(error, HubError::Status { status: 503, .. }), "{error}");
    assert_eq!(thrice.hub.requests().len(), 3);
}

#[test]
fn a_silent_server_times_out_and_is_tried_again() {
    let slow = |_: &Request, before, reply: Reply| match before {
        0 => Reply { delay: Duration::from_millis(900), ..reply },
        _ => reply,
    };
    let site = site(gguf(), at_storage(slow));
    let folder = tempfile::tempdir().unwrap();
    let hub = builder(folder.path(), &site).timeout(Duration::from_millis(300)).build().unwrap();
    get(&hub, "o/n").unwrap();
    assert_eq!(site.storage.requests().len(), 2);
}

#[test]
fn offline_uses_the_store_alone() {
    let site = site(gguf(), right);
    let folder = tempfile::tempdir().unwrap();
    let online = builder(folder.path(), &site).build().unwrap();
    let offline = builder(folder.path(), &site).offline(true).build().unwrap();
    let message = get(&offline, "o/n").unwrap_err().to_string();
    assert!(message.contains("o/n isn't in the store") && message.contains("offline mode"), "{message}");

    let model = get(&online, "o/n").unwrap();
    let requests = site.hub.requests().len();
    assert_eq!(get(&offline, "o/n").unwrap(), model);
    assert_eq!(get(&offline, "o/n:Q4_0").unwrap(), model);
    assert_eq!(get(&offline, &format!("o/n@{COMMIT}")).unwrap(), model);
    assert_eq!(offline.files(&Spec::parse("o/n").unwrap()).unwrap(), ["m-Q4_0.gguf"]);
    for absent in ["o/n:Q8_0", "o/n@v3", "o/other"] {
        let error = get(&offline, absent).unwrap_err();
        assert!(matches!(&error, HubError::Offline { model, .. } if model == absent), "{error}");
    }
    assert_eq!(site.hub.requests().len(), requests, "offline, yet the server was asked");

    // The server is gone: what is stored is used and that is said; what isn't gives the network's error.
    drop(site);
    let fallen_back = get(&online, "o/n").unwrap();
    assert!(fallen_back.unreachable.as_ref().unwrap().contains("/api/models/o/n"));
    assert_eq!(fallen_back.files, model.files);
    assert!(matches!(get(&online, "o/other").unwrap_err(), HubError::Unreachable { attempts: 3, .. }));
}

#[test]
fn a_split_gguf_comes_whole() {
    let files = vec![
        large("q8/m-Q8_0-00002-of-00003.gguf", 2003),
        large("q8/m-Q8_0-00001-of-00003.gguf", 1009),
        large("q8/m-Q8_0-00003-of-00003.gguf", 501),
        large("m q4-Q4_0.gguf", 307),
        large("mmproj-F16.gguf", 101),
    ];
    let site = site(files.clone(), right);
    let folder = tempfile::tempdir().unwrap();
    let hub = builder(folder.path(), &site).build().unwrap();
    let model = get(&hub, "o/n:q8_0").unwrap();
    assert_eq!(model.path(), model.folder.join("q8/m-Q8_0-00001-of-00003.gguf"));
    assert_eq!(model.files.len(), 3);
    for (path, file) in model.files.iter().zip([1, 0, 2]) {
        assert_eq!(fs::read(path).unwrap(), files[file].contents);
    }
    assert_eq!(site.storage.requests().len(), 3, "only what was chosen");
    assert!(matches!(get(&hub, "o/n").unwrap_err(), HubError::Ambiguous { .. }));
    // A name with a space, and a removal of one quantisation.
    assert_eq!(fs::read(get(&hub, "o/n:Q4_0").unwrap().path()).unwrap(), files[3].contents);
    let removed = hub.remove(&Spec::parse("o/n:Q8_0").unwrap()).unwrap();
    assert_eq!(removed, Removed { files: 3, bytes: 2003 + 1009 + 501 });
    assert_eq!(hub.list().unwrap()[0].files, [("m q4-Q4_0.gguf".to_owned(), 307)]);
    assert!(matches!(hub.remove(&Spec::parse("o/n:Q8_0").unwrap()).unwrap_err(), HubError::NoMatch { .. }));
}

#[test]
fn one_process_at_a_time_downloads_a_file() {
    let site = site(gguf(), right);
    let folder = tempfile::tempdir().unwrap();
    let hub = builder(folder.path(), &site).build().unwrap();
    let path = hub.store.lock(&Spec::parse("o/n").unwrap().repo, &gguf()[1].etag());
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let other = fs::File::create(&path).unwrap();
    other.lock().unwrap();
    let error = get(&hub, "o/n").unwrap_err();
    assert!(matches!(&error, HubError::Busy { path: p, .. } if *p == path), "{error}");
    assert!(site.storage.requests().is_empty());
    other.unlock().unwrap();
    get(&hub, "o/n").unwrap();
}

#[test]
fn two_downloads_at_once_fetch_the_contents_once() {
    let slow = |_: &Request, _, reply| Reply { delay: Duration::from_millis(200), ..reply };
    let site = site(gguf(), at_storage(slow));
    let folder = tempfile::tempdir().unwrap();
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                let hub = builder(folder.path(), &site).lock_wait(Duration::from_secs(20)).build().unwrap();
                let model = get(&hub, "o/n").unwrap();
                assert_eq!(fs::read(model.path()).unwrap().len(), LARGE);
            });
        }
    });
    assert_eq!(site.storage.requests().len(), 1);
}

#[test]
fn a_file_larger_than_the_disk_is_refused_before_it_comes() {
    let huge = 1u64 << 60;
    let change = move |r: &Request, _, reply: Reply| match r.path.ends_with(".gguf") {
        true => reply.with("X-Linked-Size", huge.to_string()),
        false => reply,
    };
    let site = site(gguf(), change);
    let folder = tempfile::tempdir().unwrap();
    let hub = builder(folder.path(), &site).build().unwrap();
    match get(&hub, "o/n").unwrap_err() {
        HubError::NoSpace { needed, available, .. } => assert!(needed == huge && available < huge),
        other => panic!("{other}"),
    }
    assert!(site.storage.requests().is_empty());
}

#[test]
fn a_hostile_server_cannot_leave_the_store() {
    let listing = |text: String| move |_: &Request, _, _| Reply::new(200).body(text.clone());
    let with_file =
        |name: &str| format!("{{\"sha\": \"{COMMIT}\", \"siblings\": [{{\"rfilename\": {name:?}}}]}}");
    let cases = [
        (with_file("../../../evil.gguf"), "leads out"),
        (with_file("/etc/evil.gguf"), "leads out"),
        ("{\"sha\": \"../..\", \"siblings\": []}".to_owned(), "holds no commit"),
        ("{\"siblings\": []}".to_owned(), "holds no commit"),
        (format!("{{\"sha\": \"{COMMIT}\"}}"), "isn't a list"),
        ("<html>".to_owned(), "not JSON"),
    ];
    for (text, reason) in cases {
        let site = site(gguf(), listing(text));
        let folder = tempfile::tempdir().unwrap();
        let hub = builder(folder.path(), &site).build().unwrap();
        let error = get(&hub, "o/n").unwrap_err();
        assert!(matches!(&error, HubError::BadAnswer { reason: r, .. } if r.contains(reason)), "{error}");
    }
    type Change = fn(&Request, usize, Reply) -> Reply;
    let at_file: [(Change, &str); 4] = [
        (|_, _, r| if r.status == 302 { r.with("X-Linked-ETag", "\"../../x\"") } else { r }, "can't name"),
        (|_, _, r| if r.status == 302 { Reply::new(200).body("x") } else { r }, "no ETag"),
        (
            |q, _, r| if r.status == 302 { Reply::new(302).with("Location", q.path.clone()) } else { r },
            "redirects",
        ),
        (|_, _, r| if r.status == 302 { Reply::new(302) } else { r }, "nowhere"),
    ];
    for (change, reason) in at_file {
        let site = site(gguf(), change);
        let folder = tempfile::tempdir().unwrap();
        let hub = builder(folder.path(), &site).build().unwrap();
        let error = get(&hub, "o/n").unwrap_err();
        assert!(matches!(&error, HubError::BadAnswer { reason: r, .. } if r.contains(reason)), "{error}");
    }
}

#[test]
fn contents_that_another_commit_has_are_not_fetched_again() {
    let site = site(gguf(), right);
    let folder = tempfile::tempdir().unwrap();
    let hub = builder(folder.path(), &site).build().unwrap();
    let (repo, old) = (Spec::parse("o/n").unwrap().repo, "f".repeat(40));
    let blob = hub.store.blob(&repo, &gguf()[1].etag());
    fs::create_dir_all(blob.parent().unwrap()).unwrap();
    fs::write(&blob, &gguf()[1].contents).unwrap();
    hub.store.link(&repo, &old, "m-Q4_0.gguf", &gguf()[1].etag()).unwrap();
    get(&hub, "o/n").unwrap();
    assert!(site.storage.requests().is_empty());
    // A blob that some crash left too short is none.
    hub.remove(&Spec::parse("o/n").unwrap()).unwrap();
    fs::create_dir_all(blob.parent().unwrap()).unwrap();
    fs::write(&blob, &gguf()[1].contents[..CUT]).unwrap();
    let model = get(&hub, "o/n").unwrap();
    assert_eq!(fs::read(model.path()).unwrap(), gguf()[1].contents);
}

#[test]
fn the_environment_is_read_as_other_tools_read_it() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().to_str().unwrap().to_owned();
    let from = |vars: &[(&str, &str)]| {
        let vars: Vec<(String, String)> = vars.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect();
        HubBuilder::from_vars(move |name| {
            vars.iter().find(|(n, _)| n == name).map(|(_, v)| OsString::from(v))
        })
    };
    let b = from(&[("HOME", &home)]).unwrap();
    assert_eq!(b.cache, folder.path().join(".cache/huggingface/hub"));
    assert_eq!((b.endpoint.as_str(), b.token, b.offline), ("https://huggingface.co", None, false));
    let b = from(&[("HOME", &home), ("XDG_CACHE_HOME", "/x")]).unwrap();
    assert_eq!(b.cache, Path::new("/x/huggingface/hub"));
    let b = from(&[("HOME", &home), ("HF_HOME", "~/hf")]).unwrap();
    assert_eq!(b.cache, folder.path().join("hf/hub"));
    let b = from(&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c"), ("HF_HUB_OFFLINE", "True")]).unwrap();
    assert!(b.cache == Path::new("/c") && b.offline);

    fs::write(folder.path().join("token"), "hf_file\n").unwrap();
    let b = from(&[("HF_HOME", &home), ("HF_TOKEN", "")]).unwrap();
    assert_eq!(b.token.as_deref(), Some("hf_file"));
    let b = from(&[("HF_HOME", &home), ("HF_TOKEN", " hf_var "), ("HF_ENDPOINT", "http://mirror/")]).unwrap();
    assert_eq!(b.token.as_deref(), Some("hf_var"));
    assert!(!format!("{b:?}").contains("hf_var"));
    b.build().unwrap();

    assert!(from(&[]).unwrap_err().to_string().contains("HF_HOME"));
    for (endpoint, token) in [("ftp://x", ""), ("no address", ""), ("", "a b"), ("", "a\nb")] {
        let b = from(&[("HF_HOME", &home), ("HF_ENDPOINT", endpoint), ("HF_TOKEN", token)]).unwrap();
        assert!(matches!(b.build().unwrap_err(), HubError::Setting { .. }), "{endpoint}{token}");
    }
}

#[test]
fn nothing_listens_there() {
    let url = Server::start(|_| Reply::new(200)).url.clone();
    let folder = tempfile::tempdir().unwrap();
    let hub = Hub::builder(folder.path()).endpoint(&url).attempts(2, Duration::ZERO).build().unwrap();
    let message = get(&hub, "o/n").unwrap_err().to_string();
    assert!(message.contains("after 2 attempts") && message.contains("check the network"), "{message}");
}
