//! Reuse of earlier requests' keys and values on real devices: every reply equals that of a cold run, bit by bit,
//! and costs what is new, a window and a batch.

mod common;

use std::path::{Path, PathBuf};
use std::time::Duration;

use common::client::{Reply, drawn, greedy, run, submit};
use common::drive::{Random, name, tiny_folder, values};
use common::spy::{Hooks, hooked, hooked_runner};
use common::{On, Setup};
use lapidary_engine::generate::{Event, Generation, Request};
use lapidary_engine::sampling::Sampled;
use lapidary_engine::{
    Engine, EngineFinish, EngineOptions, EngineRequest, PrefixDir, PrefixOptions, SoftKind, SoftSpan,
};
use lapidary_ops::{Group, KvFormat, PAGE_TOKENS};
use lapidary_reference::Golden;
use lapidary_reference::tiny::Variant;

const ON: On = On::Cpu { threads: 1 };
/// The tiny models' own window is shorter than a page, which would hide what this is about.
const WINDOW: usize = 45;
const ROWS: usize = 37;
const CONTEXT: usize = 700;

fn wide() -> Hooks {
    Hooks::config(|config| config.window = WINDOW)
}

fn setup(kv: KvFormat) -> Setup {
    Setup { rows: ROWS, head_rows: 5, context: CONTEXT, kv, ..Setup::default() }
}

/// Where the tests run: folder and format of keys and values.
#[derive(Clone)]
struct Place {
    folder: PathBuf,
    kv: KvFormat,
}

impl Place {
    fn tiny(variant: Variant, kv: KvFormat) -> Place {
        Place { folder: tiny_folder(variant), kv }
    }

    /// Every variant and every format, though not each with each. Blocks of 32 values need heads of such a width,
    /// which the tiny models lack.
    fn all() -> Vec<Place> {
        let f32s = [Variant::Moe, Variant::PerLayerInputs, Variant::Unified, Variant::Gemma3];
        let mut places: Vec<Place> = f32s.map(|v| Place::tiny(v, KvFormat::F32)).into();
        places
            .extend([KvFormat::F32, KvFormat::F16, KvFormat::Bf16].map(|kv| Place::tiny(Variant::Dense, kv)));
        places.extend(
            ["dense31b", "e2b"].map(|v| Place { folder: Golden::root().join(v), kv: KvFormat::Q8_0 }),
        );
        places
    }

    fn what(&self) -> String {
        format!("{} {:?}", name(&self.folder), self.kv)
    }

    fn engine(&self, change: impl FnOnce(&mut EngineOptions)) -> Engine {
        let runner = hooked_runner(&self.folder, ON, setup(self.kv), &wide());
        let mut options = EngineOptions::new(&runner, CONTEXT, 3);
        change(&mut options);
        Engine::start(runner, options).unwrap()
    }

    /// What a fresh stepper gives.
    fn cold(&self, request: &EngineRequest) -> Vec<Sampled> {
        let mut s = hooked(&self.folder, ON, setup(self.kv), &wide());
        let mut sampling = request.sampling.clone();
        sampling.logprobs = request.logprobs.map(|n| n as u32);
        let (prompt, max_tokens) = (request.prompt.clone(), request.max_tokens);
        let mut g =
            Generation::new(&mut s, Request { prompt, sampling, max_tokens, stop_ids: Vec::new() }).unwrap();
        let mut sampled = Vec::new();
        while let Event::Token(token) = g.step(&mut |_| {}).unwrap().unwrap() {
            sampled.push(token);
        }
        sampled
    }

    /// Runs a request; its reply equals that of a cold run.
    #[track_caller]
    fn checked(&self, engine: &Engine, request: impl Fn() -> EngineRequest) -> Reply {
        let reply = run(engine, request());
        assert_eq!(reply.sampled, self.cold(&request()), "{}", self.what());
        reply
    }
}

fn ids(seed: u64, len: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| 3 + (random.next() % 170) as u32).collect()
}

/// With logprobs, so that replies are compared by more than their tokens.
fn asked(prompt: &[u32], max_tokens: usize) -> EngineRequest {
    EngineRequest { logprobs: Some(2), ..greedy(prompt, max_tokens) }
}

fn computed(reply: &Reply) -> usize {
    reply.usage.prompt_tokens - reply.usage.cached_tokens
}

#[test]
fn b02_a_next_turn_an_edit_and_a_regeneration_run_what_is_new_a_window_and_a_batch() {
    for place in Place::all() {
        let what = place.what();
        let engine = place.engine(|_| {});
        let first = ids(1, 411);
        let reply = place.checked(&engine, || asked(&first, 70));
        assert_eq!(reply.usage.cached_tokens, 0);

        let next = [&first[..], &reply.tokens, &ids(2, 40)].concat();
        let turn = place.checked(&engine, || asked(&next, 20));
        assert!(computed(&turn) <= 40 + 2 * PAGE_TOKENS, "{what}: {} rows", computed(&turn));

        let again = place.checked(&engine, || asked(&first, 70));
        assert!(computed(&again) <= PAGE_TOKENS, "{what}: {} rows", computed(&again));

        // Anywhere, not only where turns begin.
        for (seed, kept) in [(3, 390), (4, 300), (5, 215), (6, 101), (7, 40)] {
            let edited = [&first[..kept], &ids(seed, 30)].concat();
            let reply = place.checked(&engine, || asked(&edited, 9));
            let most = 30 + WINDOW + ROWS;
            assert!(computed(&reply) <= most, "{what}: {} rows after {kept}", computed(&reply));
        }
        // The place where others parted is known from then on.
        let edited = [&first[..300], &ids(8, 30)].concat();
        let reply = place.checked(&engine, || asked(&edited, 9));
        assert!(computed(&reply) <= 30 + PAGE_TOKENS, "{what}: {} rows", computed(&reply));
        drained(&engine);
    }
}

#[track_caller]
fn drained(engine: &Engine) {
    assert!(engine.drain(Duration::from_secs(120)), "everybody gets done");
    let stats = engine.stats();
    assert!(stats.pages.iter().all(|p| p.live == 0), "{:?}", stats.pages);
}

#[test]
fn a_turn_that_is_marked_costs_no_window() {
    let place = Place::tiny(Variant::Dense, KvFormat::F32);
    let engine = place.engine(|o| o.prefix.turn_tokens = vec![2]);
    let mut prompt = ids(1, 500);
    prompt[350] = 2;
    prompt[460] = 2;
    place.checked(&engine, || asked(&prompt, 9));
    for marked in [460, 350] {
        let edited = [&prompt[..marked + 3], &ids(9, 30)].concat();
        let reply = place.checked(&engine, || asked(&edited, 9));
        assert!(computed(&reply) <= 33 + PAGE_TOKENS, "{} rows", computed(&reply));
    }
}

#[test]
fn b03_a_full_pool_with_and_without_reuse_mixes_no_data_in_any_kv_format() {
    let mut places: Vec<Place> = [KvFormat::F32, KvFormat::F16, KvFormat::Bf16]
        .map(|kv| Place::tiny(Variant::PerLayerInputs, kv))
        .into();
    places.push(Place { folder: Golden::root().join("moe26b"), kv: KvFormat::Q8_0 });
    for place in places {
        for reuse in [true, false] {
            let engine = place.engine(|o| {
                o.scheduler.context = 140;
                o.sequences = 4;
                o.scheduler.running = 48;
                if !reuse {
                    o.prefix = PrefixOptions::off();
                }
                // No room for snapshots but what requests leave.
                let need = |window: usize| window.div_ceil(PAGE_TOKENS) + 1;
                o.pages = Some([1 + 4 * need(WINDOW + ROWS + 31), 1 + 4 * 5]);
            });
            let requests = || (0..48).map(|i| asked(&ids(i / 2, 20 + 2 * i as usize), 70 + i as usize % 7));
            let pending: Vec<_> = requests().map(|r| submit(&engine, r)).collect();
            for (i, (pending, request)) in pending.into_iter().zip(requests()).enumerate() {
                let reply = pending.wait();
                let expected = place.cold(&request);
                assert_eq!(reply.sampled, expected[..reply.sampled.len()], "{} {reuse} {i}", place.what());
                assert_eq!(reply.sampled.len(), expected.len().min(140 + 1 - (20 + 2 * i)), "{i}");
            }
            let stats = engine.stats();
            assert!(stats.scheduler.preemptions > 0, "{}: the pool was meant to be full", place.what());
            drained(&engine);
        }
    }
}

#[test]
fn b04_a_request_does_not_depend_on_earlier_ones_on_one_engine() {
    for place in Place::all() {
        let engine = place.engine(|_| {});
        let (a, b) = (ids(1, 3 * WINDOW + 20), ids(2, 5));
        for _ in 0..2 {
            place.checked(&engine, || asked(&a, 30));
            place.checked(&engine, || EngineRequest { logprobs: Some(2), ..drawn(&b, 60, 3) });
        }
        drained(&engine);
    }
}

#[test]
fn k07_choices_of_one_prompt_share_its_prefill_and_differ_by_seed() {
    let place = Place::tiny(Variant::Dense, KvFormat::F32);
    let engine = place.engine(|_| {});
    let prompt = ids(5, 300);
    let pending: Vec<_> = [7, 8, 9, 7].map(|seed| submit(&engine, drawn(&prompt, 40, seed))).into();
    let replies: Vec<Reply> = pending.into_iter().map(|p| p.wait()).collect();
    for (reply, seed) in replies.iter().zip([7, 8, 9, 7]) {
        assert_eq!(reply.sampled, place.cold(&drawn(&prompt, 40, seed)), "seed {seed}");
    }
    assert_eq!(replies[0].tokens, replies[3].tokens);
    assert!(replies[0].tokens != replies[1].tokens && replies[1].tokens != replies[2].tokens);
    let rows: usize = replies.iter().map(computed).sum();
    assert!(rows <= 300 + 3 * PAGE_TOKENS, "one prefill, not {rows} rows");
    drained(&engine);
}

#[test]
fn soft_rows_are_told_apart_by_what_they_hold() {
    for (variant, kind) in [
        (Variant::Unified, SoftKind::Vision),
        (Variant::Moe, SoftKind::Vision),
        (Variant::PerLayerInputs, SoftKind::Audio),
    ] {
        let place = Place::tiny(variant, KvFormat::F32);
        let engine = place.engine(|_| {});
        let hidden = engine.config().hidden;
        let asked = |picture: u64, changed_row: Option<usize>, tail: u64| {
            let mut request = asked(&[ids(1, 280), ids(tail, 20)].concat(), 12);
            // A block of 30 rows over a page's end.
            let mut soft = values(picture, 30 * hidden);
            if let Some(row) = changed_row {
                soft[row * hidden] += 0.25;
            }
            request.prompt.soft.push(SoftSpan { start: 110, values: soft, kind });
            request
        };
        let cold = place.checked(&engine, || asked(1, None, 2));
        assert_eq!(cold.usage.cached_tokens, 0);
        let same = place.checked(&engine, || asked(1, None, 3));
        assert!(computed(&same) <= 20 + WINDOW + ROWS, "{} rows", computed(&same));
        // Another picture, or one that differs in its last row: nothing behind its beginning is reused, and of a
        // vision block nothing at all, as each of its rows may see the last.
        for (picture, row) in [(2, None), (1, Some(29)), (1, Some(0))] {
            let other = place.checked(&engine, || asked(picture, row, 2));
            let most = if kind == SoftKind::Audio { 110 + row.unwrap_or(0) } else { 110 };
            assert!(other.usage.cached_tokens <= most, "{}", other.usage.cached_tokens);
        }
        drained(&engine);
    }
}

/// Conversations that branch, are cut, cancelled and gone on with, on pools that keep only some of them.
#[test]
fn random_conversations_on_small_pools_give_what_cold_runs_give() {
    for place in [
        Place::tiny(Variant::Dense, KvFormat::Bf16),
        Place::tiny(Variant::PerLayerInputs, KvFormat::F32),
        Place { folder: Golden::root().join("dense31b"), kv: KvFormat::Q8_0 },
    ] {
        let engine = place.engine(|o| {
            o.scheduler.context = 330;
            o.scheduler.running = 6;
            o.scheduler.max_stall = Duration::from_millis(4);
            o.scheduler.min_prompt_rows = 3;
            o.pages = Some([14, 14]);
            let plan_page = 1 << 20;
            o.prefix.snapshot_bytes = Some(plan_page);
        });
        let mut random = Random::new(11);
        let mut texts: Vec<Vec<u32>> = (0..3).map(|i| ids(i, 60 + 50 * i as usize)).collect();
        for round in 0..14 {
            let mut requests: Vec<(Vec<u32>, usize)> = Vec::new();
            for _ in 0..4 {
                let text = &texts[random.next() as usize % texts.len()];
                let kept = match random.next() % 3 {
                    0 => text.len(),
                    _ => 1 + random.next() as usize % text.len(),
                };
                let tail = random.next() as usize % 30;
                let mut prompt = [&text[..kept], &ids(random.next(), tail)].concat();
                prompt.truncate(230);
                requests.push((prompt, 1 + random.next() as usize % 100));
            }
            let pending: Vec<_> = requests
                .iter()
                .enumerate()
                .map(|(i, (prompt, most))| {
                    let request =
                        if i % 2 == 0 { asked(prompt, *most) } else { drawn(prompt, *most, i as u64) };
                    submit(&engine, request)
                })
                .collect();
            for (i, (pending, (prompt, most))) in pending.into_iter().zip(requests).enumerate() {
                if random.next() % 5 == 0 {
                    pending.ticket.cancel();
                }
                let reply = pending.wait();
                let request = if i % 2 == 0 { asked(&prompt, most) } else { drawn(&prompt, most, i as u64) };
                let expected = place.cold(&request);
                let what = format!("{} round {round} request {i}", place.what());
                assert_eq!(reply.sampled, expected[..reply.sampled.len()], "{what}");
                if reply.reason != EngineFinish::Cancelled {
                    assert_eq!(reply.sampled.len(), expected.len(), "{what}");
                }
                texts.push([prompt, reply.tokens].concat());
            }
            if texts.len() > 12 {
                texts.drain(..4);
            }
        }
        drained(&engine);
        let stats = engine.stats().scheduler;
        println!("{}: {stats:?}", place.what());
        assert!(
            stats.prefix.hits > 10 && stats.prefix.evicted > 3 && stats.preemptions > 0,
            "{:?}",
            stats.prefix
        );
    }
}

#[test]
fn a_budget_that_holds_no_window_is_refused() {
    let place = Place::tiny(Variant::Dense, KvFormat::F32);
    let runner = hooked_runner(&place.folder, ON, setup(place.kv), &wide());
    let group = &runner.plan().groups[Group::Sliding.index()];
    let page: usize = (0..group.layers.len()).map(|l| group.page_bytes(l)).sum();
    // 44 keys before a row at a border lie on two pages.
    for (bytes, fits) in [(2 * page - 1, false), (2 * page, true)] {
        let prefix = PrefixOptions { snapshot_bytes: Some(bytes), ..PrefixOptions::default() };
        assert_eq!(prefix.snapshot_pages(runner.plan()).is_ok(), fits, "{bytes}");
    }
    let prefix = PrefixOptions { snapshot_bytes: Some(2 * page - 1), ..PrefixOptions::default() };
    let options = EngineOptions { prefix, ..EngineOptions::new(&runner, CONTEXT, 2) };
    let error = Engine::start(runner, options).unwrap_err().to_string();
    assert!(error.contains(&(2 * page).to_string()), "{error}");
}

/// Options that store pages in `folder`.
fn stored(options: &mut EngineOptions, folder: &Path, model: &str) {
    let (path, model) = (folder.to_owned(), model.to_owned());
    options.prefix.dir = Some(PrefixDir { path, bytes: 1 << 30, model });
}

/// The files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let folders = std::fs::read_dir(folder).unwrap().map(|f| f.unwrap().path());
    let mut files: Vec<PathBuf> =
        folders.flat_map(|f| std::fs::read_dir(f).unwrap().map(|f| f.unwrap().path())).collect();
    files.sort();
    files
}

#[test]
fn b02_what_was_stored_is_gone_on_with_after_a_restart() {
    for place in Place::all() {
        let folder = tempfile::tempdir().unwrap();
        let what = place.what();
        let first = ids(1, 411);
        let engine = place.engine(|o| stored(o, folder.path(), "a"));
        let reply = place.checked(&engine, || asked(&first, 25));
        drained(&engine);
        engine.shutdown();
        let next = [&first[..], &reply.tokens, &ids(2, 40)].concat();
        for turn in 0..2 {
            let engine = place.engine(|o| stored(o, folder.path(), "a"));
            let reply = place.checked(&engine, || asked(&next, 20));
            let most = if turn == 0 { 40 + 2 * PAGE_TOKENS } else { PAGE_TOKENS };
            assert!(computed(&reply) <= most, "{what}: {} rows", computed(&reply));
            let again = place.checked(&engine, || asked(&first, 25));
            assert!(computed(&again) <= PAGE_TOKENS, "{what}: {} rows", computed(&again));
            drained(&engine);
            let stats = engine.stats().store.unwrap();
            assert!(stats.loaded > 10 && stats.damaged == 0 && stats.failed == 0, "{stats:?}");
        }
        // Another model's pages are not for this one.
        let engine = place.engine(|o| stored(o, folder.path(), "b"));
        let reply = place.checked(&engine, || asked(&next, 20));
        assert_eq!(reply.usage.cached_tokens, 0);
    }
}

#[test]
fn stored_pages_that_are_damaged_are_dropped_and_the_rest_serves() {
    let place = Place::tiny(Variant::PerLayerInputs, KvFormat::F16);
    let first = ids(1, 411);
    let mut cached = Vec::new();
    for case in 0..6 {
        let folder = tempfile::tempdir().unwrap();
        let engine = place.engine(|o| stored(o, folder.path(), "a"));
        place.checked(&engine, || asked(&first, 25));
        engine.shutdown();
        let all = files(folder.path());
        let fulls: Vec<_> = all.iter().filter(|f| f.extension().is_some_and(|e| e == "full")).collect();
        for (i, file) in all.iter().enumerate() {
            let bytes = std::fs::read(file).unwrap();
            let full = file.extension().is_some_and(|e| e == "full");
            match case {
                // As a process that was killed, or a disk that lies, may leave them.
                1 if !full => std::fs::write(file, &bytes[..bytes.len() / 2]).unwrap(),
                2 if full && fulls.iter().position(|f| *f == file).is_some_and(|n| n % 2 == 0) => {
                    std::fs::write(file, b"").unwrap();
                }
                3 => std::fs::write(file, [&bytes[..99], &[bytes[99] ^ 4], &bytes[100..]].concat()).unwrap(),
                4 if i % 3 == 0 => std::fs::remove_file(file).unwrap(),
                5 => std::fs::rename(file, file.with_extension("1.unfinished")).unwrap(),
                _ => {}
            }
        }
        let engine = place.engine(|o| stored(o, folder.path(), "a"));
        let reply = place.checked(&engine, || asked(&first, 25));
        cached.push(reply.usage.cached_tokens);
        drained(&engine);
        let damaged = engine.stats().store.unwrap().damaged;
        assert_eq!(damaged > 0, (1..=3).contains(&case), "case {case}: {damaged}");
    }
    println!("cached rows by kind of damage: {cached:?}");
    assert!(cached[0] >= 384 && cached[3] == 0 && cached[5] == 0, "{cached:?}");
}

#[test]
fn requests_that_wait_for_stored_pages_can_be_cancelled_and_time_out() {
    let place = Place::tiny(Variant::Dense, KvFormat::F32);
    let folder = tempfile::tempdir().unwrap();
    let engine = place.engine(|o| stored(o, folder.path(), "a"));
    let prompts: Vec<Vec<u32>> = (0..8).map(|i| ids(i, 400)).collect();
    prompts.iter().for_each(|p| drop(run(&engine, asked(p, 3))));
    engine.shutdown();
    let engine = place.engine(|o| stored(o, folder.path(), "a"));
    let pending: Vec<_> = prompts
        .iter()
        .enumerate()
        .map(|(i, p)| {
            let timeout = (i % 4 == 1).then_some(Duration::from_micros(1));
            let pending = submit(&engine, EngineRequest { timeout, ..asked(p, 5) });
            if i % 4 == 2 {
                pending.ticket.cancel();
            }
            pending
        })
        .collect();
    for (i, (pending, prompt)) in pending.into_iter().zip(&prompts).enumerate() {
        let reply = pending.wait();
        match i % 4 {
            1 => assert_eq!(reply.reason, EngineFinish::TimedOut),
            2 => assert_eq!(reply.reason, EngineFinish::Cancelled),
            _ => {
                assert_eq!(reply.sampled, place.cold(&asked(prompt, 5)));
                assert!(computed(&reply) <= PAGE_TOKENS);
            }
        }
    }
    drained(&engine);
}

#[test]
fn a_device_that_hands_out_no_pages_and_a_folder_that_is_none_are_told_at_the_start() {
    let place = Place::tiny(Variant::Dense, KvFormat::F32);
    let folder = tempfile::tempdir().unwrap();
    let start = |on, path: &Path| {
        let runner = hooked_runner(&place.folder, on, setup(place.kv), &wide());
        let mut options = EngineOptions::new(&runner, CONTEXT, 1);
        stored(&mut options, path, "a");
        Engine::start(runner, options).unwrap_err().to_string()
    };
    assert!(start(On::Reference, folder.path()).contains("pages of keys and values"));
    let file = folder.path().join("a file");
    std::fs::write(&file, b"x").unwrap();
    assert!(start(ON, &file).contains("a file"));
}
