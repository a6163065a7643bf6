//! The engine on a device that works on its own: it queues a step before it has read the one in front of it, and nobody can
//! tell by what they get.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::client::{drawn, greedy, run, submit};
use common::dense::{Fixed, ON, alone, dense, drained, finish, prompt, setup, start};
use common::drive::{name, tiny_folder};
use common::spy::{Hooks, Passes, hooked_runner, poisoned_where};
use lapidary_engine::sampling::{Sampled, SamplingParams};
use lapidary_engine::{
    Allowed, EngineFinish, EngineRequest, FailureKind, Guide, GuideError, StopCause, Verdict,
};
use lapidary_reference::tiny::Variant;

fn works_alone(mut hooks: Hooks) -> (Hooks, Arc<Passes>) {
    let passes = Arc::new(Passes::default());
    hooks.passes = Some(passes.clone());
    (hooks, passes)
}

#[test]
fn one_stream_needs_no_pass_more_and_nearly_all_are_queued_early() {
    let (hooks, passes) = works_alone(Hooks::default());
    let engine = start(hooked_runner(&dense(), ON, setup(), &hooks));
    // Past two borders of pages.
    let request = || greedy(&prompt(4, 11), 70);
    let expected = alone(&dense(), &request()).0;
    assert_eq!(run(&engine, request()).sampled, expected);
    let (all, behind) = passes.count();
    // The prompt in one batch, then a step for each token but the last; the first of them waits for the prompt.
    assert_eq!((all, behind), (70, 68));
    // One that ends by a token is found out a step late, and the step is nobody's.
    let stop = expected[40].token;
    let at = expected.iter().position(|s| s.token == stop).expect("it is there");
    let reply = run(&engine, EngineRequest { stop_ids: vec![stop], ..request() });
    assert_eq!((reply.sampled.len(), &reply.reason), (at, &EngineFinish::Stop(stop)));
    assert_eq!(reply.sampled, expected[..at]);
    let (again, _) = passes.count();
    assert!(again - all <= at + 2, "{} passes for {at} tokens", again - all);
    // What the step wrote is no part of what is kept: the next turn goes on from the answer.
    let mut next: Vec<u32> = prompt(4, 11);
    next.extend(expected.iter().map(|s| s.token));
    next.extend(prompt(5, 7));
    let request = || greedy(&next, 20);
    let reply = run(&engine, request());
    assert_eq!(reply.sampled, alone(&dense(), &request()).0);
    drained(&engine);
}

/// Streams of every kind beside each other: some may go on by themselves and some may not, they come and go.
#[test]
fn requests_in_company_get_what_each_gets_alone() {
    for variant in [Variant::Dense, Variant::Moe, Variant::PerLayerInputs] {
        let folder = tiny_folder(variant);
        let (hooks, passes) = works_alone(Hooks::default());
        let engine = start(hooked_runner(&folder, ON, setup(), &hooks));
        for round in 0..3 {
            let mut requests: Vec<EngineRequest> = Vec::new();
            for i in 0..4usize {
                let mut request = greedy(&prompt(30 + i as u64, 3 + 17 * i), 20 + 23 * (3 - i));
                let expected = alone(&folder, &request).0;
                request.stop_ids = if i == 1 { vec![expected[30].token] } else { Vec::new() };
                requests.push(request);
            }
            if round == 2 {
                requests.push(drawn(&prompt(50, 9), 25, 7));
            }
            let expected: Vec<_> = requests.iter().map(|r| alone(&folder, r)).collect();
            let pending: Vec<_> = requests.into_iter().map(|r| submit(&engine, r)).collect();
            for i in 0..round {
                let other = submit(&engine, greedy(&prompt(90 + i, 20), 50));
                other.token();
                other.hang_up();
            }
            for (i, (pending, (sampled, reason))) in pending.into_iter().zip(&expected).enumerate() {
                let reply = pending.wait();
                let what = format!("{} round {round} request {i}", name(&folder));
                assert_eq!(reply.sampled, *sampled, "{what}");
                assert_eq!(reply.reason, finish(*reason), "{what}");
                assert_eq!(reply.usage.answer_tokens, sampled.len(), "{what}");
            }
        }
        let (all, behind) = passes.count();
        assert!(behind > all / 4, "{behind} of {all}");
        drained(&engine);
    }
}

/// Drawn tokens are the ones that the host would have drawn, and nobody waits for the host either. What the device cannot
/// do is done by the host beside it.
#[test]
fn drawn_streams_need_the_host_as_little_as_greedy_ones() {
    let (hooks, passes) = works_alone(Hooks::default());
    let engine = start(hooked_runner(&dense(), ON, setup(), &hooks));
    let with = |change: fn(&mut SamplingParams)| {
        let mut request = drawn(&prompt(4, 11), 50, 7);
        change(&mut request.sampling);
        request
    };
    let device: [fn(&mut SamplingParams); 6] = [
        |_| {},
        |p| (p.temperature, p.top_k, p.top_p, p.min_p) = (3.5, 17, 1.0, 0.1),
        |p| (p.top_p, p.suppress) = (0.5, vec![3, 5, 8, 13, 21, 34, 55, 89]),
        |p| (p.temperature, p.suppress) = (0.0, vec![40, 41]),
        |p| (p.temperature, p.top_k) = (0.3, 1),
        |p| p.top_p = 0.0,
    ];
    let host: [fn(&mut SamplingParams); 6] = [
        |p| p.top_k = 65,
        |p| p.top_k = 0,
        |p| p.logprobs = Some(2),
        |p| p.repetition_penalty = 1.3,
        |p| p.logit_bias = vec![(7, 2.0)],
        |p| p.suppress = (0..9).collect(),
    ];
    for (i, change) in device.into_iter().enumerate() {
        let before = (passes.count(), passes.drawn());
        let reply = run(&engine, with(change));
        assert_eq!(reply.sampled, alone(&dense(), &with(change)).0, "{i}");
        let after = (passes.count(), passes.drawn());
        // All but the prompt's pass and the one behind it; drawn in each.
        assert_eq!(after.0.1 - before.0.1, 48, "{i}: passes started early");
        assert_eq!(after.1 - before.1, 50, "{i}: tokens drawn by the device");
    }
    for (i, change) in host.into_iter().enumerate() {
        let before = passes.drawn();
        let tokens = |sampled: Vec<Sampled>| sampled.iter().map(|s| s.token).collect::<Vec<_>>();
        let reply = run(&engine, with(change));
        assert_eq!(tokens(reply.sampled), tokens(alone(&dense(), &with(change)).0), "host {i}");
        assert_eq!(passes.drawn(), before, "host {i}");
    }
    // All in company, one with a guide and one that may not end early.
    let guided = || EngineRequest { guide: Some(Box::new(Thirds(0))), ..with(|_| {}) };
    let held = || EngineRequest { min_tokens: 20, stop_ids: (0..120).collect(), ..with(|p| p.top_p = 0.9) };
    let plain = start(hooked_runner(&dense(), ON, setup(), &Hooks::default()));
    let mut all: Vec<Box<dyn Fn() -> EngineRequest>> = vec![Box::new(guided), Box::new(held)];
    for &change in device.iter().chain(&host) {
        all.push(Box::new(move || with(change)));
    }
    let expected: Vec<_> = all.iter().map(|request| run(&plain, request())).collect();
    assert!(expected[1].sampled.len() >= 20 && matches!(expected[1].reason, EngineFinish::Stop(_)));
    let pending: Vec<_> = all.iter().map(|request| submit(&engine, request())).collect();
    for (i, (pending, expected)) in pending.into_iter().zip(expected).enumerate() {
        let reply = pending.wait();
        assert_eq!((reply.sampled, reply.reason), (expected.sampled, expected.reason), "in company {i}");
    }
    drained(&engine);
}

/// Forces every third token.
struct Thirds(usize);

impl Guide for Thirds {
    fn next(&mut self) -> Result<Allowed<'_>, GuideError> {
        Ok(if self.0 % 3 == 2 { Allowed::Force(33) } else { Allowed::Free })
    }
    fn accept(&mut self, token: u32) -> Result<Verdict, GuideError> {
        assert!(self.0 % 3 != 2 || token == 33);
        self.0 += 1;
        Ok(Verdict::Continue)
    }
}

#[test]
fn a_guide_has_the_last_word() {
    let guided = |guide: Box<dyn Guide>| EngineRequest { guide: Some(guide), ..greedy(&prompt(8, 13), 40) };
    let cause = StopCause { keep_token: true, code: 9 };
    let replies = |hooks: &Hooks| {
        let engine = start(hooked_runner(&dense(), ON, setup(), hooks));
        let neighbour = submit(&engine, greedy(&prompt(9, 5), 60));
        let forced = run(&engine, guided(Box::new(Thirds(0))));
        let ended = run(&engine, guided(Box::new(Fixed { left: 11, cause, ..Fixed::free() })));
        let all = [forced, ended, neighbour.wait()].map(|r| (r.sampled, r.reason));
        drained(&engine);
        all
    };
    let (hooks, passes) = works_alone(Hooks::default());
    let found = replies(&hooks);
    assert_eq!(found, replies(&Hooks::default()));
    assert_eq!(found[1].1, EngineFinish::Guide(cause));
    assert!(passes.count().1 > 40, "{:?}", passes.count());
}

#[test]
fn a_row_that_is_not_finite_and_passes_that_fail_end_nobody_else() {
    let requests = || [greedy(&prompt(1, 20), 60), greedy(&prompt(2, 25), 60)];
    let [first, second] = requests().map(|r| alone(&dense(), &r).0);
    // The first's eleventh token makes a row that is not finite; the row is one of a step that was queued early.
    let (token, position) = (first[10].token as i32, 30);
    let mut hooks = poisoned_where(move |t, p| (t, p) == (token, position));
    // And every fifth pass of several rows finds no memory.
    let runs = AtomicUsize::new(0);
    hooks.starved = Hooks::starved(move |what, batch| {
        what == "run" && batch.tokens.len() > 1 && runs.fetch_add(1, Ordering::SeqCst) % 5 == 4
    })
    .starved;
    let (hooks, passes) = works_alone(hooks);
    let engine = start(hooked_runner(&dense(), ON, setup(), &hooks));
    let [one, two] = requests().map(|r| submit(&engine, r));
    let (one, two) = (one.wait(), two.wait());
    assert_eq!(one.reason, EngineFinish::Failed(FailureKind::NonFinite { position: position as usize }));
    assert_eq!(one.sampled, first[..11]);
    assert_eq!((two.sampled, two.reason), (second, EngineFinish::Length));
    assert!(passes.count().1 > 30, "{:?}", passes.count());
    drained(&engine);
}

/// A GPU's float32 mode draws what the host would from the same logits, for streams alone and in company.
#[test]
fn tokens_drawn_in_a_gpus_float32_mode_are_the_hosts() {
    let Some(on) = common::gpu() else { return };
    for variant in [Variant::Dense, Variant::Moe, Variant::PerLayerInputs] {
        let runner = common::runner(&tiny_folder(variant), on, setup());
        assert!(runner.draws(), "{variant:?}: the device draws");
        let engine = start(runner);
        // Asking for probabilities leaves the drawing to the host.
        let request = |i: usize, logprobs| EngineRequest {
            logprobs,
            ..drawn(&prompt(4 + i as u64, 11 + 6 * i), 50, 7 + i as u64)
        };
        let by_host: Vec<_> = (0..3).map(|i| run(&engine, request(i, Some(0))).tokens).collect();
        assert!(by_host[0] != by_host[1] && by_host[1] != by_host[2], "{variant:?}: prompts matter");
        for (i, expected) in by_host.iter().enumerate() {
            assert_eq!(run(&engine, request(i, None)).tokens, *expected, "{variant:?}: {i} alone");
        }
        let pending: Vec<_> = (0..3).map(|i| submit(&engine, request(i, None))).collect();
        let company: Vec<_> = pending.into_iter().map(|p| p.wait().tokens).collect();
        assert_eq!(company, by_host, "{variant:?}: in company");
    }
}

/// On a GPU, at a real model's sizes: the engine's streams are the stepper's, at the stepper's pace.
#[cfg(feature = "cuda")]
#[test]
fn a_gpus_streams_are_those_of_its_stepper() {
    use std::ops::ControlFlow;
    use std::time::Instant;

    use lapidary::LoadOptions;
    use lapidary::synth::Size;
    use lapidary_engine::{Engine, EngineOptions};
    use lapidary_formats::Format;
    if common::gpu().is_none() {
        return;
    }
    for (size, format) in [(Size::E2b, Format::Q4K), (Size::E2b, Format::Bf16), (Size::E4b, Format::Bf16)] {
        let context = 1000;
        let options = LoadOptions {
            context: Some(context),
            chunk: 256,
            head_rows: 16,
            random_weights: Some(format),
            ..LoadOptions::default()
        };
        let mut s = common::random_on_gpu(size, None, options);
        let (ids, steps) = ((0..512).map(|i| i * 7919 % 262_144).collect::<Vec<u32>>(), 256);
        let (mut expected, mut paces) = (Vec::new(), [0.0; 2]);
        for (ahead, pace) in [true, true, false].into_iter().zip([0, 0, 1]) {
            s.reset();
            expected = vec![s.prefill(&ids).expect("the prompt runs")];
            let clock = Instant::now();
            if ahead {
                let first = expected[0];
                let mut take = |t: &[u32]| {
                    expected.push(t[0]);
                    ControlFlow::Continue(())
                };
                s.decode_many(first, steps, &mut take).expect("the steps run");
            } else {
                for step in 0..steps {
                    expected.push(s.decode_step(expected[step], s.cursor()).expect("the step runs"));
                }
            }
            paces[pace] = clock.elapsed().as_secs_f64() / steps as f64;
        }
        let what = format!("{} {format}", size.name());
        let [queued, single] = paces;
        println!("{what}: {:.0} tokens/s queued early, {:.0} step by step", 1.0 / queued, 1.0 / single);
        let runner = s.into_runner();
        let options = EngineOptions::new(&runner, context, 16);
        let engine = Engine::start(runner, options).expect("it starts");
        for streams in [1, 4, 16] {
            let pending: Vec<_> = (0..streams).map(|_| submit(&engine, greedy(&ids, steps + 1))).collect();
            pending.iter().for_each(|p| {
                p.token();
            });
            let clock = Instant::now();
            let replies: Vec<_> = pending.into_iter().map(common::client::Pending::wait).collect();
            let step = clock.elapsed().as_secs_f64() / steps as f64;
            println!("{what}: the engine with {streams} streams {:.0} tokens/s", streams as f64 / step);
            if streams == 1 {
                assert!(replies[0].tokens == expected[1..], "{what}: the engine's are the stepper's");
            }
        }
        // Asking for probabilities leaves the drawing to the host.
        for streams in [1, 4, 16] {
            let mut tokens = Vec::new();
            // The first time passes are recorded.
            for logprobs in [None, Some(0), None] {
                let request = |i| EngineRequest { logprobs, ..drawn(&ids, steps / 2, i) };
                let pending: Vec<_> = (0..streams).map(|i| submit(&engine, request(i))).collect();
                pending.iter().for_each(|p| {
                    p.token();
                });
                let clock = Instant::now();
                let replies: Vec<_> = pending.into_iter().map(common::client::Pending::wait).collect();
                let step = clock.elapsed().as_secs_f64() / (steps / 2 - 1) as f64;
                let by = if logprobs.is_none() { "device" } else { "host" };
                let pace = streams as f64 / step;
                println!("{what}: {streams} streams drawn by the {by}: {pace:.0} tokens/s");
                tokens.push(replies.into_iter().map(|r| r.tokens).collect::<Vec<_>>());
            }
            assert!(
                streams > 1 || tokens[0] == tokens[1] && tokens[0] == tokens[2],
                "{what}: not the host's"
            );
        }
    }
}
