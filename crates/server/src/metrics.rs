//! Counters for Prometheus.
//!
//! What routers, autoscalers and the endpoint picker of the Gateway API Inference Extension read has to have the names
//! that they know, which are vLLM's; so each of those figures appears under that name and under our own.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use lapidary::PAGE_TOKENS;
use lapidary::service::{EngineStats, PageUse, ServiceStats, ServiceUsage};

/// Bounds for the time to a first token, in seconds.
const FIRST_TOKEN: &[f64] =
    &[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1., 2.5, 5., 7.5, 10., 20., 40., 80.];
/// Bounds for whole requests, in seconds.
const WHOLE: &[f64] =
    &[0.1, 0.3, 0.5, 0.8, 1., 1.5, 2., 2.5, 5., 10., 15., 20., 30., 40., 50., 60., 120., 240., 480.];
/// Bounds for counts of tokens.
const TOKENS: &[f64] = &[1., 2., 5., 10., 20., 50., 100., 200., 500., 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5];

/// All of the server's own counters.
#[derive(Debug)]
pub struct Metrics {
    /// Time from a request to its first token.
    pub first_token: Histogram,
    whole: Histogram,
    prompt: Histogram,
    generation: Histogram,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    generation_tokens: AtomicU64,
    reasoning_tokens: AtomicU64,
    finished: Labelled,
    http: Labelled,
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics {
            first_token: Histogram::new(FIRST_TOKEN),
            whole: Histogram::new(WHOLE),
            prompt: Histogram::new(TOKENS),
            generation: Histogram::new(TOKENS),
            prompt_tokens: AtomicU64::new(0),
            cached_tokens: AtomicU64::new(0),
            generation_tokens: AtomicU64::new(0),
            reasoning_tokens: AtomicU64::new(0),
            finished: Labelled::default(),
            http: Labelled::default(),
        }
    }
}

impl Metrics {
    /// Counts a reply by the reason of its end.
    pub fn finished(&self, reason: &'static str) {
        self.finished.add(format!("finished_reason=\"{reason}\""));
    }

    /// Counts a response. Routes are those of the router, so there are few of them.
    pub fn http(&self, method: &str, route: &str, status: u16) {
        self.http.add(format!("method=\"{method}\",route=\"{route}\",status=\"{status}\""));
    }

    /// Counts a request that has ended.
    pub fn request(&self, usage: &ServiceUsage, seconds: f64) {
        if usage.prompt_tokens == 0 {
            return;
        }
        let add = |counter: &AtomicU64, n: usize| counter.fetch_add(n as u64, Ordering::Relaxed);
        add(&self.prompt_tokens, usage.prompt_tokens);
        add(&self.cached_tokens, usage.cached_tokens);
        add(&self.generation_tokens, usage.completion_tokens);
        add(&self.reasoning_tokens, usage.reasoning_tokens);
        self.prompt.record(usage.prompt_tokens as f64);
        self.generation.record(usage.completion_tokens as f64);
        self.whole.record(seconds);
    }

    /// The text that Prometheus scrapes.
    pub fn render(&self, model: &str, ready: bool, stats: Option<&ServiceStats>) -> String {
        let mut page = Page { text: String::new(), model: format!("model_name=\"{}\"", escape(model)) };
        page.family("lapidary_ready", "gauge", "1 when requests are taken");
        page.sample("lapidary_ready", "", u64::from(ready) as f64);
        if let Some(stats) = stats {
            page.stats(stats);
        }
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        page.counter("prompt_tokens_total", "Tokens of prompts", load(&self.prompt_tokens));
        page.counter("generation_tokens_total", "Tokens that were generated", load(&self.generation_tokens));
        page.own_counter("reasoning_tokens_total", "Tokens inside thoughts", load(&self.reasoning_tokens));
        page.own_counter(
            "cached_tokens_total",
            "Tokens of prompts that were not computed",
            load(&self.cached_tokens),
        );
        for name in ["lapidary_request_success_total", "vllm:request_success_total"] {
            page.family(name, "counter", "Replies by the reason of their end");
            page.labelled(name, &self.finished);
        }
        page.family("lapidary_http_requests_total", "counter", "Responses by route and status");
        page.labelled("lapidary_http_requests_total", &self.http);
        page.histogram("time_to_first_token_seconds", "From a request to its first token", &self.first_token);
        page.histogram("e2e_request_latency_seconds", "From a request to its end", &self.whole);
        page.histogram("request_prompt_tokens", "Tokens of a prompt", &self.prompt);
        page.histogram("request_generation_tokens", "Tokens generated for a request", &self.generation);
        page.text
    }
}

/// A counter a set of labels.
#[derive(Debug, Default)]
struct Labelled(Mutex<BTreeMap<String, u64>>);

impl Labelled {
    fn add(&self, labels: String) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(labels).or_default() += 1;
    }
}

/// Counts of values up to each bound.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    /// One a bound and one for the rest.
    counts: Vec<AtomicU64>,
    /// In millionths.
    sum: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram { bounds, counts, sum: AtomicU64::new(0) }
    }

    /// Counts a value.
    pub fn record(&self, value: f64) {
        let place = self.bounds.partition_point(|bound| *bound < value);
        self.counts[place].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add((value * 1e6) as u64, Ordering::Relaxed);
    }
}

/// The page in the making. Every sample carries the model's name.
struct Page {
    text: String,
    model: String,
}

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn sample(&mut self, name: &str, labels: &str, value: f64) {
        let comma = if labels.is_empty() { "" } else { "," };
        let _ = writeln!(self.text, "{name}{{{}{comma}{labels}}} {value}", self.model);
    }

    /// A figure under our name and under vLLM's.
    fn both(&mut self, kind: &str, name: &str, theirs: &str, help: &str, value: f64) {
        for name in [format!("lapidary_{name}"), format!("vllm:{theirs}")] {
            self.family(&name, kind, help);
            self.sample(&name, "", value);
        }
    }

    fn counter(&mut self, name: &str, help: &str, value: f64) {
        self.both("counter", name, name, help, value);
    }

    fn own_counter(&mut self, name: &str, help: &str, value: f64) {
        let name = format!("lapidary_{name}");
        self.family(&name, "counter", help);
        self.sample(&name, "", value);
    }

    fn labelled(&mut self, name: &str, counts: &Labelled) {
        for (labels, count) in counts.0.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            self.sample(name, labels, *count as f64);
        }
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        let counts: Vec<u64> = histogram.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let sum = histogram.sum.load(Ordering::Relaxed) as f64 / 1e6;
        self.buckets(name, help, histogram.bounds, &counts, sum);
    }

    fn buckets(&mut self, name: &str, help: &str, bounds: &[f64], counts: &[u64], sum: f64) {
        for name in [format!("lapidary_{name}"), format!("vllm:{name}")] {
            self.family(&name, "histogram", help);
            let mut below = 0;
            for (place, count) in counts.iter().enumerate() {
                below += count;
                let bound = bounds.get(place).map_or("+Inf".to_owned(), f64::to_string);
                self.sample(&format!("{name}_bucket"), &format!("le=\"{bound}\""), below as f64);
            }
            self.sample(&format!("{name}_sum"), "", sum);
            self.sample(&format!("{name}_count"), "", below as f64);
        }
    }

    fn stats(&mut self, stats: &ServiceStats) {
        let engine = &stats.engine;
        // The group that is nearer its end decides; pages kept for later requests are given up when one needs them.
        let share = |pages: &PageUse| pages.live as f64 / pages.total.max(1) as f64;
        let usage = engine.pages.iter().map(share).fold(0.0, f64::max);
        for (name, theirs, help, value) in [
            ("requests_running", "num_requests_running", "Replies in the making", stats.running as f64),
            ("requests_waiting", "num_requests_waiting", "Replies that wait", stats.waiting as f64),
            ("kv_usage", "kv_cache_usage_perc", "Share of the pages that requests hold, 0 to 1", usage),
        ] {
            self.both("gauge", name, theirs, help, value);
        }
        self.family("vllm:gpu_cache_usage_perc", "gauge", "The older name of kv_cache_usage_perc");
        self.sample("vllm:gpu_cache_usage_perc", "", usage);
        let pages = engine.pages.iter().map(|pages| pages.total).max().unwrap_or(0);
        self.family("vllm:cache_config_info", "gauge", "Positions of a page, and pages of the larger group");
        let info = format!("block_size=\"{PAGE_TOKENS}\",num_gpu_blocks=\"{pages}\"");
        self.sample("vllm:cache_config_info", &info, 1.0);
        self.family(
            "lapidary_pages",
            "gauge",
            "Pages of keys and values: all, held, kept for later requests",
        );
        for (group, pages) in ["sliding", "full"].iter().zip(&engine.pages) {
            for (state, count) in [("total", pages.total), ("live", pages.live), ("kept", pages.kept)] {
                let labels = format!("group=\"{group}\",state=\"{state}\"");
                self.sample("lapidary_pages", &labels, count as f64);
            }
        }
        self.engine_counters(engine);
        let (queue, gap) = (&engine.queue, &engine.inter_token);
        let help = "From a request to its first rows";
        self.buckets("request_queue_time_seconds", help, queue.bounds, &queue.counts, queue.sum);
        // Older dashboards and autoscalers ask for the second name.
        for name in ["inter_token_latency_seconds", "time_per_output_token_seconds"] {
            self.buckets(name, "Between two tokens of a reply", gap.bounds, &gap.counts, gap.sum);
        }
    }

    fn engine_counters(&mut self, engine: &EngineStats) {
        for (name, theirs, help, value) in [
            (
                "prefix_queries_total",
                "prefix_cache_queries_total",
                "Prompt tokens looked up",
                engine.prompt_tokens,
            ),
            ("prefix_hits_total", "prefix_cache_hits_total", "Prompt tokens found", engine.cached_tokens),
            ("preemptions_total", "num_preemptions_total", "Replies put off", engine.scheduler.preemptions),
        ] {
            self.both("counter", name, theirs, help, value as f64);
        }
        for (name, help, value) in [
            ("steps_total", "Batches", engine.scheduler.steps as f64),
            ("rows_total", "Rows of batches", engine.scheduler.rows as f64),
            ("recomputed_rows_total", "Rows that were fed again", engine.scheduler.recomputed_rows as f64),
            (
                "non_finite_total",
                "Replies that ended because logits were not finite",
                engine.non_finite as f64,
            ),
            ("panics_total", "Replies that ended because something panicked", engine.panics as f64),
            ("failed_passes_total", "Passes that the device could not finish", engine.failed_passes as f64),
            ("device_seconds_total", "Time in which the device ran passes", engine.device_time.as_secs_f64()),
            ("host_seconds_total", "Time of the engine's thread beside it", engine.host_time.as_secs_f64()),
        ] {
            self.own_counter(name, help, value);
        }
        let Some(store) = &engine.store else { return };
        self.family("lapidary_prefix_store_bytes", "gauge", "Bytes of the folder of stored prefixes");
        self.sample("lapidary_prefix_store_bytes", "", store.bytes as f64);
        for (name, help, value) in [
            ("prefix_store_saved_total", "Pages that were written", store.saved),
            ("prefix_store_loaded_total", "Pages that were read back and used", store.loaded),
            ("prefix_store_damaged_total", "Files that were damaged and removed", store.damaged),
            ("prefix_store_evicted_total", "Files that were removed for the size cap", store.evicted),
            ("prefix_store_failed_total", "Writes that failed or were given up", store.failed),
        ] {
            self.own_counter(name, help, value as f64);
        }
    }
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_add_up_and_bounds_are_inclusive() {
        let histogram = Histogram::new(&[1., 2.]);
        for value in [0.5, 1.0, 1.5, 2.0, 2.5] {
            histogram.record(value);
        }
        let mut page = Page { text: String::new(), model: "model_name=\"m\"".to_owned() };
        page.histogram("t", "h", &histogram);
        let bucket = |le: &str| format!("vllm:t_bucket{{model_name=\"m\",le=\"{le}\"}}");
        for line in [
            format!("{} 2\n", bucket("1")),
            format!("{} 4\n", bucket("2")),
            format!("{} 5\n", bucket("+Inf")),
            "lapidary_t_sum{model_name=\"m\"} 7.5\n".to_owned(),
            "lapidary_t_count{model_name=\"m\"} 5\n".to_owned(),
        ] {
            assert!(page.text.contains(&line), "{line} is not in\n{}", page.text);
        }
    }
}
