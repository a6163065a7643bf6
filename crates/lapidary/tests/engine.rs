//! The engine on real devices: requests in company give the bits of each alone.

mod common;

use common::client::{drawn, greedy, run, submit};
use common::dense::{
    CONTEXT, Fixed, ON, alone, dense, drained, engine, finish, options, prompt, scores, setup,
};
use common::drive::{name, tiny_folder};
use common::spy::POISON;
use common::{runner, stepper};
use lapidary_engine::sampling::{SamplingParams, TokenMask};
use lapidary_engine::{
    Engine, EngineEvent, EngineFinish, EngineRequest, Error, FailureKind, Guide, Prompt, ScoreRequest,
    StopCause,
};
use lapidary_reference::tiny::Variant;
use std::time::{Duration, Instant};

/// Every way to choose tokens, each with a prompt of another length.
fn mixed(seed: u64) -> Vec<EngineRequest> {
    let base = SamplingParams::default();
    let samplings = [
        SamplingParams::greedy(),
        SamplingParams { seed: 7, ..base.clone() },
        SamplingParams { seed: 8, top_k: 0, top_p: 1.0, ..base.clone() },
        SamplingParams { seed: 9, repetition_penalty: 1.3, frequency_penalty: 0.5, ..base.clone() },
        SamplingParams { logit_bias: vec![(5, 3.0), (9, -4.0)], ..SamplingParams::greedy() },
        SamplingParams { seed: 11, min_p: 0.2, temperature: 1.7, presence_penalty: -1.0, ..base },
    ];
    let requests = samplings.into_iter().enumerate().map(|(i, sampling)| {
        let i = i as u64;
        let mut request = greedy(&prompt(seed + i, 3 + 23 * i as usize), 30 + 17 * (5 - i as usize));
        request.sampling = sampling;
        request.priority = (i % 3) as i8 - 1;
        request.logprobs = (i % 2 == 1).then_some(i as usize);
        request.stop_ids = if i == 2 { vec![40, 41, 42, 43] } else { Vec::new() };
        request
    });
    requests.collect()
}

#[test]
fn c02_the_same_request_gives_the_same_bits_in_any_company() {
    for variant in [Variant::Dense, Variant::Moe, Variant::PerLayerInputs] {
        let folder = tiny_folder(variant);
        let engine = engine(&folder);
        let expected: Vec<_> = mixed(30).iter().map(|r| alone(&folder, r)).collect();
        for round in 0..3 {
            let mut pending: Vec<_> = mixed(30).into_iter().map(|r| submit(&engine, r)).collect();
            // Others that come, and go in the middle.
            let others: Vec<_> =
                (0..round * 3).map(|i| submit(&engine, greedy(&prompt(90 + i, 20), 50))).collect();
            for (i, other) in others.into_iter().enumerate() {
                if i % 2 == 0 {
                    other.token();
                    other.hang_up();
                }
            }
            for (i, (pending, (sampled, reason))) in pending.drain(..).zip(&expected).enumerate() {
                let reply = pending.wait();
                let what = format!("{} round {round} request {i}", name(&folder));
                assert_eq!(reply.sampled, *sampled, "{what}");
                assert_eq!(reply.reason, finish(*reason), "{what}");
                assert_eq!(reply.usage.answer_tokens, sampled.len());
                assert_eq!(reply.started, Some((reply.usage.prompt_tokens, reply.usage.cached_tokens)));
                assert_eq!(reply.fed.last(), Some(&reply.usage.prompt_tokens), "{what}");
            }
        }
        drained(&engine);
    }
}

#[test]
fn logprobs_are_those_of_the_model_before_masks_and_bias() {
    let engine = engine(&dense());
    let vocab = engine.config().vocab;
    let all = EngineRequest { logprobs: Some(vocab), ..greedy(&prompt(3, 12), 4) };
    let reply = run(&engine, all);
    for sampled in &reply.sampled {
        assert_eq!(sampled.top.len(), vocab);
        let total: f64 = sampled.top.iter().map(|(_, p)| f64::from(*p).exp()).sum();
        assert!((total - 1.0).abs() <= 1e-4, "{total}");
        assert_eq!(sampled.top[0], (sampled.token, sampled.logprob.unwrap()));
    }
    // A bias or a mask that changes the choice leaves the report as it was.
    let first = &reply.sampled[0];
    let second = first.top[1].0;
    let mut mask = TokenMask::none(vocab);
    mask.allow(second);
    let biased = SamplingParams { logit_bias: vec![(second, 50.0)], ..SamplingParams::greedy() };
    for (sampling, guide) in [(biased, None), (SamplingParams::greedy(), Some(Fixed::mask(mask)))] {
        let request = EngineRequest {
            sampling,
            guide: guide.map(|g| Box::new(g) as Box<dyn Guide>),
            logprobs: Some(vocab),
            ..greedy(&prompt(3, 12), 1)
        };
        let found = run(&engine, request).sampled.remove(0);
        assert_eq!((found.token, &found.top), (second, &first.top));
        assert_eq!(found.logprob, Some(first.top[1].1));
    }
}

#[test]
fn guides_mask_force_and_end_and_neighbours_do_not_notice() {
    let engine = engine(&dense());
    let vocab = engine.config().vocab;
    let ids = [20u32, 33, 64, 91];
    let mut mask = TokenMask::none(vocab);
    ids.iter().for_each(|&t| mask.allow(t));
    let neighbour = submit(&engine, drawn(&prompt(1, 40), 60, 5));
    let guided =
        |guide: Fixed, max| EngineRequest { guide: Some(Box::new(guide)), ..drawn(&prompt(2, 9), max, 3) };

    let reply = run(&engine, guided(Fixed::mask(mask.clone()), 40));
    assert_eq!((reply.tokens.len(), &reply.reason), (40, &EngineFinish::Length));
    assert!(reply.tokens.iter().all(|t| ids.contains(t)), "{:?}", reply.tokens);
    assert!(ids.iter().filter(|t| reply.tokens.contains(t)).count() > 1, "drawn among them");

    let reply = run(&engine, guided(Fixed { force: Some(17), ..Fixed::free() }, 5));
    assert_eq!(reply.tokens, [17; 5]);
    let forced = Fixed { force: Some(17), ..Fixed::free() };
    let reply = run(&engine, EngineRequest { logprobs: Some(1), ..guided(forced, 2) });
    assert!(reply.sampled[0].logprob.is_some_and(|p| p < 0.0) && reply.sampled[0].top.len() == 1);

    for keep_token in [true, false] {
        let cause = StopCause { keep_token, code: 9 };
        let reply = run(&engine, guided(Fixed { left: 4, cause, ..Fixed::free() }, 40));
        assert_eq!(reply.reason, EngineFinish::Guide(cause));
        assert_eq!(reply.tokens.len(), 3 + usize::from(keep_token));
        assert_eq!(reply.usage.answer_tokens, 4);
        // Also on the very last token.
        let reply = run(&engine, guided(Fixed { left: 4, cause, ..Fixed::free() }, 4));
        assert_eq!(reply.reason, EngineFinish::Guide(cause));
    }

    let reply = run(&engine, guided(Fixed { force: Some(POISON), ..Fixed::free() }, 5));
    assert!(matches!(&reply.reason, EngineFinish::Failed(FailureKind::Guide(m)) if m.contains("no 77")));
    assert!(reply.tokens.is_empty());
    let reply = run(&engine, guided(Fixed::mask(TokenMask::none(vocab)), 5));
    assert!(matches!(&reply.reason, EngineFinish::Failed(FailureKind::Guide(m)) if m.contains("no token")));
    let reply = run(&engine, guided(Fixed { force: Some(vocab as u32), ..Fixed::free() }, 5));
    assert!(matches!(&reply.reason, EngineFinish::Failed(FailureKind::Guide(m)) if m.contains("forced")));

    let reply = neighbour.wait();
    assert_eq!(reply.sampled, alone(&dense(), &drawn(&prompt(1, 40), 60, 5)).0);
    drained(&engine);
}

#[test]
fn an_answer_has_at_least_min_tokens_and_ends_by_its_own_ids() {
    let engine = engine(&dense());
    let plain = run(&engine, greedy(&prompt(4, 11), 30)).tokens;
    let (stop, at) = (plain[6], plain.iter().position(|t| *t == plain[6]).unwrap());
    let request = || EngineRequest { stop_ids: vec![stop], ..greedy(&prompt(4, 11), 30) };
    let reply = run(&engine, request());
    assert_eq!((&reply.tokens[..], &reply.reason), (&plain[..at], &EngineFinish::Stop(stop)));
    assert_eq!(reply.usage.answer_tokens, at);

    let reply = run(&engine, EngineRequest { min_tokens: at + 5, ..request() });
    assert!(reply.tokens.len() >= at + 5, "{:?}", reply.tokens);
    assert_eq!(reply.tokens[..at], plain[..at]);
    assert!(!reply.tokens.contains(&stop));

    // A grammar that allows nothing but the end goes before.
    let mut mask = TokenMask::none(engine.config().vocab);
    mask.allow(stop);
    let guide: Box<dyn Guide> = Box::new(Fixed::mask(mask));
    let reply = run(&engine, EngineRequest { min_tokens: 9, guide: Some(guide), ..request() });
    assert_eq!((reply.tokens.len(), reply.reason), (0, EngineFinish::Stop(stop)));

    // The model's own end tokens end an answer unless they are to be ignored.
    let eos = engine.config().eos[0];
    let towards = SamplingParams { logit_bias: vec![(eos, 1e4)], ..SamplingParams::greedy() };
    let request = EngineRequest { sampling: towards.clone(), ignore_eos: false, ..greedy(&prompt(4, 11), 4) };
    assert_eq!(run(&engine, request).reason, EngineFinish::Stop(eos));
    let request = EngineRequest { sampling: towards, ..greedy(&prompt(4, 11), 4) };
    assert_eq!(run(&engine, request).tokens, [eos; 4]);

    let long = prompt(5, CONTEXT - 3);
    let reply = run(&engine, greedy(&long, 30));
    assert_eq!((reply.tokens.len(), reply.reason), (4, EngineFinish::ContextFull));
    drained(&engine);
}

#[test]
fn what_cannot_be_served_is_refused_at_once() {
    let engine = engine(&dense());
    let vocab = engine.config().vocab;
    let refused = |request: EngineRequest| engine.submit(request).unwrap_err();
    let e = refused(greedy(&prompt(1, CONTEXT + 1), 5));
    assert!(matches!(e, Error::PromptTooLong { tokens: 161, context: CONTEXT }), "{e}");
    assert!(matches!(refused(greedy(&[], 5)), Error::EmptyPrompt));
    assert!(matches!(refused(greedy(&[1], 0)), Error::Zero { what: "max_tokens" }));
    assert!(matches!(refused(greedy(&[vocab as u32], 5)), Error::Token { .. }));
    let e = refused(EngineRequest { stop_ids: vec![vocab as u32], ..greedy(&[1], 5) });
    assert!(e.to_string().contains("stop_ids"), "{e}");
    let e = refused(EngineRequest { logprobs: Some(vocab + 1), ..greedy(&[1], 5) });
    assert!(e.to_string().contains("logprobs"), "{e}");
    let sampling = SamplingParams { logit_bias: vec![(u32::MAX, 1.0)], ..SamplingParams::greedy() };
    assert!(matches!(refused(EngineRequest { sampling, ..greedy(&[1], 5) }), Error::Sampling(_)));
    let penalised = SamplingParams { repetition_penalty: 2.0, ..SamplingParams::greedy() };
    let e = refused(EngineRequest { sampling: penalised, ..greedy(&[u32::MAX], 5) });
    assert!(matches!(e, Error::Token { .. }), "{e}");
    assert_eq!(engine.stats().active, 0);
    assert_eq!(run(&engine, greedy(&[5, 6], 3)).tokens.len(), 3);
}

#[test]
fn a_full_queue_refuses_and_takes_again_when_there_is_room() {
    let runner = runner(&dense(), ON, setup());
    let mut options = options(&runner);
    (options.scheduler.waiting, options.scheduler.running) = (3, 1);
    let engine = Engine::start(runner, options).unwrap();
    let first = submit(&engine, greedy(&prompt(1, 9), 100));
    first.token();
    let queued: Vec<_> = (0..3).map(|i| submit(&engine, greedy(&prompt(2 + i, 9), 100))).collect();
    let e = engine.submit(greedy(&[5], 3)).unwrap_err();
    assert!(matches!(e, Error::QueueFull { limit: 3 }), "{e}");
    assert_eq!(engine.stats().scheduler.waiting, 3);
    first.ticket.cancel();
    assert_eq!(first.wait().reason, EngineFinish::Cancelled);
    queued[0].token();
    let last = submit(&engine, greedy(&[5], 3));
    queued.into_iter().for_each(|q| assert_eq!(q.wait().usage.answer_tokens, 100));
    assert_eq!(last.wait().tokens.len(), 3);
    drained(&engine);
}

#[test]
fn k01_a_request_ends_within_two_steps_of_its_listener_leaving() {
    let engine = engine(&dense());
    for i in 0..100 {
        // Nothing is taken ahead, so that the request cannot be done before its listener leaves.
        let (to, events) = std::sync::mpsc::sync_channel(0);
        let mut request = greedy(&prompt(i, 7 + i as usize), 100);
        request.sink = Box::new(move |event| to.send(event).is_ok());
        engine.submit(request).unwrap();
        let tokens = events.iter().filter(|e| matches!(e, EngineEvent::Token(_)));
        assert_eq!(tokens.take(3).count(), 3);
        drop(events);
        let start = Instant::now();
        while engine.stats().active > 0 {
            assert!(start.elapsed() < Duration::from_millis(500), "the slot is not free");
            std::thread::yield_now();
        }
        assert!(engine.stats().pages.iter().all(|p| p.live == 0));
    }
    drained(&engine);
    assert_eq!(engine.stats().ends.cancelled, 100);
}

#[test]
fn k02_a_ticket_cancels_its_own_request_wherever_it_stands() {
    let runner = runner(&dense(), ON, setup());
    let mut options = options(&runner);
    options.scheduler.running = 1;
    let engine = Engine::start(runner, options).unwrap();
    let a = submit(&engine, greedy(&prompt(1, 9), 90));
    a.token();
    let b = submit(&engine, greedy(&prompt(2, 9), 90));
    b.ticket.cancel();
    let reply = b.wait();
    assert_eq!((reply.reason, reply.started), (EngineFinish::Cancelled, None));
    let c = submit(&engine, greedy(&prompt(3, 9), 2));
    assert_eq!(a.wait().tokens.len(), 89, "all but the one that was seen above");
    assert_eq!(c.wait().reason, EngineFinish::Length);
    drained(&engine);
}

#[test]
fn a_request_ends_when_its_time_is_up_queued_or_running() {
    let runner = runner(&dense(), ON, setup());
    let mut options = options(&runner);
    options.scheduler.running = 1;
    // A whole context is a matter of milliseconds, so the first is held up by its sink.
    let engine = Engine::start(runner, options).unwrap();
    let mut slow = greedy(&prompt(1, 9), 100);
    slow.timeout = Some(Duration::from_millis(60));
    let (to, events) = std::sync::mpsc::channel();
    slow.sink = Box::new(move |event| {
        std::thread::sleep(Duration::from_millis(5));
        to.send(event).is_ok()
    });
    engine.submit(slow).unwrap();
    let queued = EngineRequest { timeout: Some(Duration::from_millis(20)), ..greedy(&prompt(2, 9), 5) };
    let queued = submit(&engine, queued).wait();
    assert_eq!((queued.reason, queued.started), (EngineFinish::TimedOut, None));
    let last = events.iter().last().unwrap();
    assert!(matches!(last, EngineEvent::Finished { reason: EngineFinish::TimedOut, .. }), "{last:?}");
    drained(&engine);
    assert_eq!(engine.stats().ends.timed_out, 2);
}

#[test]
fn shutting_down_ends_every_request_once() {
    for drop_handle in [false, true] {
        let engine = engine(&dense());
        let pending: Vec<_> = (0..9).map(|i| submit(&engine, greedy(&prompt(i, 40), 100))).collect();
        pending[0].token();
        if drop_handle {
            drop(engine);
        } else {
            assert!(!engine.drain(Duration::ZERO));
            engine.shutdown();
            engine.shutdown();
            assert!(matches!(engine.submit(greedy(&[5], 1)), Err(Error::ShuttingDown)));
            assert_eq!(engine.stats().active, 0);
        }
        let ends: Vec<_> = pending.into_iter().map(|p| p.wait().reason).collect();
        let shut = EngineFinish::Failed(FailureKind::ShuttingDown);
        assert!(ends.iter().all(|e| *e == shut || *e == EngineFinish::Length), "{ends:?}");
        assert!(ends.contains(&shut));
    }
}

#[test]
fn a_sink_may_drop_the_last_handle() {
    let engine = engine(&dense());
    let (to, ended) = std::sync::mpsc::channel();
    let (dropped, other_is_dropped) = std::sync::mpsc::channel::<()>();
    let mut held = Some(engine.clone());
    let mut request = greedy(&prompt(1, 9), 20);
    request.sink = Box::new(move |event| {
        if let EngineEvent::Token(_) = event
            && let Some(last) = held.take()
        {
            other_is_dropped.recv().unwrap();
            drop(last);
        }
        if let EngineEvent::Finished { reason, .. } = event {
            to.send(reason).unwrap();
        }
        true
    });
    engine.submit(request).unwrap();
    drop(engine);
    dropped.send(()).unwrap();
    let reason = ended.recv_timeout(Duration::from_secs(30)).unwrap();
    assert_eq!(reason, EngineFinish::Failed(FailureKind::ShuttingDown));
}

#[test]
fn prompts_with_soft_rows_are_checked_by_whoever_submits_them() {
    let engine = engine(&dense());
    let hidden = engine.config().hidden;
    let soft = lapidary_engine::SoftSpan {
        start: 2,
        values: vec![0.5; 3 * hidden - 1],
        kind: lapidary_engine::SoftKind::Audio,
    };
    let mut request = greedy(&prompt(1, 9), 3);
    request.prompt = Prompt { tokens: prompt(1, 9), soft: vec![soft] };
    assert!(matches!(engine.submit(request), Err(Error::Length { what: "soft values", .. })));
}

#[test]
fn scores_are_those_of_a_stepper_in_any_company_and_cost_no_row_twice() {
    for variant in [Variant::Dense, Variant::PerLayerInputs] {
        let folder = tiny_folder(variant);
        let tokens = prompt(6, 120);
        let mut expected = Vec::new();
        let mut s = stepper(&folder, ON, setup());
        let vocab = s.model().config.vocab;
        let mut logits = |position: usize, row: &[f32]| {
            if let Some(&next) = tokens.get(position + 1) {
                let logprob = lapidary_engine::sampling::logprobs(row, 0, &[next]).unwrap()[0] as f32;
                expected.push(((position + 1, next), logprob, row.to_vec()));
            }
        };
        s.score(&Prompt::from(&tokens[..]), &mut logits, &mut |_, _| {}).unwrap();
        let engine = engine(&folder);
        let neighbours = [1, 2, 3].map(|i| submit(&engine, drawn(&prompt(i, 40), 70, i)));
        for from in [1, 2, 50, 97, 119] {
            let (found, reason, usage) = scores(&engine, &tokens, from, 3);
            assert_eq!(reason, EngineFinish::Length);
            assert_eq!((found.len(), usage.answer_tokens), (120 - from, 0));
            for (score, (place, logprob, row)) in found.iter().zip(&expected[from - 1..]) {
                assert_eq!((score.position, score.token), *place);
                assert_eq!(score.logprob.to_bits(), logprob.to_bits());
                let top = lapidary_engine::sampling::top_logprobs(row, 0, 3).unwrap();
                assert_eq!(score.top, top.iter().map(|(t, p)| (*t, *p as f32)).collect::<Vec<_>>());
            }
            // What is not scored need not run again.
            assert!(from < 97 || usage.cached_tokens >= 64, "{}", usage.cached_tokens);
            assert!(usage.cached_tokens < from);
        }
        for (i, neighbour) in neighbours.into_iter().enumerate() {
            let i = i as u64 + 1;
            assert_eq!(neighbour.wait().sampled, alone(&folder, &drawn(&prompt(i, 40), 70, i)).0);
        }
        // Nothing to score is an end, and what cannot be is refused.
        assert_eq!(scores(&engine, &tokens, 120, 0).0, []);
        let refused = |prompt: Prompt, from, top| {
            let sink = Box::new(|_| true);
            engine
                .score(ScoreRequest { prompt, from, top, steering: None, priority: 0, timeout: None, sink })
                .unwrap_err()
        };
        assert!(matches!(refused(Prompt::from(&tokens[..]), 0, 0), Error::Zero { what: "score_from" }));
        assert!(matches!(refused(Prompt::from(&tokens[..]), 1, vocab + 1), Error::Sampling(_)));
        assert!(matches!(refused(Prompt::default(), 1, 0), Error::EmptyPrompt));
        drained(&engine);
    }
}
