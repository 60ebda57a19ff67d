//! Metrics of the engines, read when metrics are: by our own names for each model, by vLLM's names
//! for each model, and by llama-server's names for all models together.

use std::fmt::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bodkin_backend::{ExpertCacheStats, ExpertStats};
use bodkin_engine::Stats;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::models::{Measured, ModelPool};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ModelLabels {
    pub(super) model: String,
}

/// vLLM's label of a model.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VllmLabels {
    model_name: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LayerLabels {
    model: String,
    layer: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ExpertLabels {
    model: String,
    layer: usize,
    expert: usize,
}

/// What the requests of all models that have ended sum up to.
#[derive(Debug, Default)]
pub(super) struct RequestTotals {
    /// Time until first tokens, without time in the queue.
    pub(super) prompt_us: AtomicU64,
    /// Time from first tokens to last.
    pub(super) generate_us: AtomicU64,
    /// Tokens of the longest sequence.
    pub(super) longest: AtomicU64,
}

/// A number: its name, what it is, and whether it only grows.
type Metric<T> = (&'static str, &'static str, bool, fn(&T) -> f64);

const ENGINE_METRICS: &[Metric<Stats>] = &[
    ("bodkin_requests_running", "Requests that have pages", false, |s| s.running as f64),
    ("bodkin_requests_waiting", "Requests that wait", false, |s| s.waiting as f64),
    ("bodkin_requests", "Requests that were admitted", true, |s| s.requests as f64),
    ("bodkin_prompt_tokens", "Tokens of prompts", true, |s| s.prompt_tokens as f64),
    ("bodkin_cached_tokens", "Prompt tokens found in the KV cache", true, |s| {
        s.cached_tokens as f64
    }),
    ("bodkin_generated_tokens", "Tokens that were generated", true, |s| s.generated_tokens as f64),
    ("bodkin_preemptions", "Requests that gave up their pages", true, |s| s.preemptions as f64),
    ("bodkin_steps", "Steps of the model", true, |s| s.steps as f64),
    ("bodkin_rows", "Tokens that were computed", true, |s| s.rows as f64),
    ("bodkin_step_seconds", "Time in steps", true, |s| s.step_seconds),
    ("bodkin_kv_pages", "Pages of the KV cache", false, |s| pages(&s.total_pages)),
    ("bodkin_kv_pages_free", "Pages that hold nothing", false, |s| pages(&s.free_pages)),
    ("bodkin_kv_pages_cached", "Unused pages that hold a prefix", false, |s| {
        pages(&s.cached_pages)
    }),
    ("bodkin_kv_cache_usage_ratio", "Share of the pages in use", false, usage),
];

const VLLM_METRICS: &[Metric<Stats>] = &[
    ("vllm:num_requests_running", "As bodkin_requests_running", false, |s| s.running as f64),
    ("vllm:num_requests_waiting", "As bodkin_requests_waiting", false, |s| s.waiting as f64),
    ("vllm:kv_cache_usage_perc", "As bodkin_kv_cache_usage_ratio", false, usage),
];

/// The sums over all models that llama-server's names stand for.
struct Sums {
    stats: Stats,
    prompt_seconds: f64,
    generate_seconds: f64,
    longest: f64,
}

const LLAMA_METRICS: &[Metric<Sums>] = &[
    ("llamacpp:prompt_tokens", "Prompt tokens that were computed", true, Sums::prompt_tokens),
    ("llamacpp:prompt_tokens_cached", "As bodkin_cached_tokens", true, |s| {
        s.stats.cached_tokens as f64
    }),
    ("llamacpp:prompt_seconds", "Time in which they were", true, |s| s.prompt_seconds),
    ("llamacpp:tokens_predicted", "As bodkin_generated_tokens", true, |s| {
        s.stats.generated_tokens as f64
    }),
    ("llamacpp:tokens_predicted_seconds", "Time in which they were", true, |s| s.generate_seconds),
    ("llamacpp:n_decode", "Steps of all models", true, |s| s.stats.steps as f64),
    ("llamacpp:n_tokens_max", "Tokens of the longest sequence", false, |s| s.longest),
    ("llamacpp:prompt_tokens_seconds", "Prompt tokens a second", false, |s| {
        rate(s.prompt_tokens(), s.prompt_seconds)
    }),
    ("llamacpp:predicted_tokens_seconds", "Generated tokens a second of a request", false, |s| {
        rate(s.stats.generated_tokens as f64, s.generate_seconds)
    }),
    ("llamacpp:requests_processing", "As bodkin_requests_running", false, |s| {
        s.stats.running as f64
    }),
    ("llamacpp:requests_deferred", "As bodkin_requests_waiting", false, |s| s.stats.waiting as f64),
    ("llamacpp:n_busy_slots_per_decode", "Requests in a step", false, |s| {
        rate(s.stats.sequences as f64, s.stats.steps as f64)
    }),
];

impl Sums {
    fn of<'a>(stats: impl Iterator<Item = &'a Stats>, totals: &RequestTotals) -> Sums {
        let mut sum = Stats::default();
        for stats in stats {
            sum.running += stats.running;
            sum.waiting += stats.waiting;
            sum.add_totals(stats);
        }
        let seconds = |us: &AtomicU64| us.load(Relaxed) as f64 / 1e6;
        Sums {
            stats: sum,
            prompt_seconds: seconds(&totals.prompt_us),
            generate_seconds: seconds(&totals.generate_us),
            longest: totals.longest.load(Relaxed) as f64,
        }
    }

    fn prompt_tokens(&self) -> f64 {
        let Stats { prompt_tokens, cached_tokens, .. } = self.stats;
        prompt_tokens.saturating_sub(cached_tokens) as f64
    }
}

fn rate(count: f64, of: f64) -> f64 {
    if of > 0.0 { count / of } else { 0.0 }
}

fn pages(windows: &[usize]) -> f64 {
    windows.iter().sum::<usize>() as f64
}

/// The share of the pages that running requests hold.
fn usage(stats: &Stats) -> f64 {
    let (all, free) = (pages(&stats.total_pages), pages(&stats.free_pages));
    rate(all - free - pages(&stats.cached_pages), all)
}

/// Reads the engines' statistics.
pub(super) struct EngineCollector {
    pub(super) pool: Arc<ModelPool>,
    pub(super) totals: Arc<RequestTotals>,
}

impl std::fmt::Debug for EngineCollector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EngineCollector")
    }
}

impl Collector for EngineCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let measured: Vec<(&str, Measured)> = self
            .pool
            .entries()
            .iter()
            .filter_map(|entry| Some((entry.spec.id.as_str(), entry.measured()?)))
            .collect();
        let labels = |id: &str| ModelLabels { model: id.to_owned() };
        let loaded = || measured.iter().filter(|(_, m)| m.bytes.is_some());
        for metric in ENGINE_METRICS {
            let is_counter = metric.2;
            let shown = measured.iter().filter(|(_, m)| is_counter || m.bytes.is_some());
            let values = shown.map(|(id, m)| (labels(id), metric.3(&m.stats)));
            write(&mut encoder, metric, values)?;
        }
        for metric in VLLM_METRICS {
            let labels = |id: &str| VllmLabels { model_name: id.to_owned() };
            let values = loaded().map(|(id, m)| (labels(id), metric.3(&m.stats)));
            write(&mut encoder, metric, values)?;
        }
        let read = measured.iter().map(|(id, m)| (labels(id), m.read_bytes as f64));
        let help = "Bytes that steps had to read, of weights and of the state of sequences";
        let metric: Metric<()> = ("bodkin_read_bytes", help, true, |()| 0.0);
        write(&mut encoder, &metric, read)?;
        let sums = Sums::of(measured.iter().map(|(_, m)| &m.stats), &self.totals);
        for metric in LLAMA_METRICS {
            let (name, help, is_counter, value) = *metric;
            let descriptor = encoder.encode_descriptor(name, help, None, kind(is_counter))?;
            encode(is_counter, value(&sums), descriptor)?;
        }
        let bytes = measured.iter().filter_map(|(id, m)| Some((labels(id), m.bytes? as f64)));
        let metric: Metric<()> = (
            "bodkin_model_bytes",
            "Memory of a loaded model and its KV cache, which a CPU takes as it fills",
            false,
            |()| 0.0,
        );
        write(&mut encoder, &metric, bytes)?;
        let experts =
            measured.iter().flat_map(|(id, m)| m.experts.iter().map(move |layer| (*id, layer)));
        encode_experts(&mut encoder, &experts.collect::<Vec<_>>())
    }
}

/// Writes a metric with its values, which have labels.
fn write<T, L: EncodeLabelSet>(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, is_counter, _): &Metric<T>,
    values: impl IntoIterator<Item = (L, f64)>,
) -> Result<(), Error> {
    let mut values = values.into_iter().peekable();
    if values.peek().is_none() {
        return Ok(());
    }
    let mut descriptor = encoder.encode_descriptor(name, help, None, kind(*is_counter))?;
    for (labels, value) in values {
        encode(*is_counter, value, descriptor.encode_family(&labels)?)?;
    }
    Ok(())
}

fn kind(is_counter: bool) -> MetricType {
    match is_counter {
        true => ConstCounter::new(0.0).metric_type(),
        false => ConstGauge::new(0.0).metric_type(),
    }
}

fn encode(is_counter: bool, value: f64, encoder: MetricEncoder<'_>) -> Result<(), Error> {
    match is_counter {
        true => ConstCounter::new(value).encode(encoder),
        false => ConstGauge::new(value).encode(encoder),
    }
}

/// What is known of the experts of each layer of each model.
fn encode_experts(
    encoder: &mut DescriptorEncoder<'_>,
    layers: &[(&str, &ExpertStats)],
) -> Result<(), Error> {
    let metric = |name, help, is_counter| -> Metric<()> { (name, help, is_counter, |()| 0.0) };
    let each = |value: fn(u64, u64) -> f64| {
        layers.iter().flat_map(move |(model, stats)| {
            let all = stats.counts.iter().sum::<u64>().max(1);
            stats.counts.iter().enumerate().map(move |(expert, &count)| {
                let labels =
                    ExpertLabels { model: (*model).to_owned(), layer: stats.layer, expert };
                (labels, value(count, all))
            })
        })
    };
    let selections = ("bodkin_expert_selections", "How often a token was sent to an expert");
    write(encoder, &metric(selections.0, selections.1, true), each(|count, _| count as f64))?;
    let share = ("bodkin_expert_utilization_ratio", "Share of the selections of its layer");
    let shares = each(|count, all| count as f64 / all as f64);
    write(encoder, &metric(share.0, share.1, false), shares)?;
    let seconds = ("bodkin_expert_thread_seconds", "Thread time in the experts of a layer");
    let measured = layers.iter().filter(|(_, stats)| !stats.seconds.is_empty());
    let times = measured.map(|(model, stats)| {
        let labels = LayerLabels { model: (*model).to_owned(), layer: stats.layer };
        (labels, stats.seconds.iter().sum())
    });
    write(encoder, &metric(seconds.0, seconds.1, true), times)?;
    CACHE_METRICS.iter().try_for_each(|metric| {
        let cached = layers.iter().filter_map(|(model, stats)| {
            let labels = LayerLabels { model: (*model).to_owned(), layer: stats.layer };
            Some((labels, metric.3(stats.cache.as_ref()?)))
        });
        write(encoder, metric, cached)
    })
}

/// What the caches of experts count, where not all experts are on the device.
const CACHE_METRICS: [Metric<ExpertCacheStats>; 6] = [
    ("bodkin_expert_cache_slots", "Experts of a layer that the device has room for", false, |c| {
        c.slots as f64
    }),
    ("bodkin_expert_cache_hits", "Chosen experts that were on the device", true, |c| c.hits as f64),
    (
        "bodkin_expert_cache_misses",
        "Chosen experts that were read from the host or the file",
        true,
        |c| c.misses as f64,
    ),
    ("bodkin_expert_cache_copies", "Experts that were copied to the device", true, |c| {
        c.fills as f64
    }),
    ("bodkin_expert_cache_reads", "Experts that were read from the file", true, |c| c.reads as f64),
    ("bodkin_expert_cache_predicted", "Misses that the layer before had predicted", true, |c| {
        c.predicted as f64
    }),
];

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;
    use prometheus_client::registry::Registry;

    use super::*;

    /// Two layers, of which the second has a cache.
    #[derive(Debug)]
    struct Layers;

    impl Collector for Layers {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
            let cache = ExpertCacheStats {
                slots: 4,
                hits: 30,
                misses: 5,
                fills: 2,
                reads: 1,
                predicted: 3,
            };
            let layer = |layer, cache| {
                let (counts, seconds) = (vec![1, 3], Vec::new());
                ExpertStats { layer, counts, seconds, cache }
            };
            let (first, second) = (layer(0, None), layer(1, Some(cache)));
            encode_experts(&mut encoder, &[("m", &first), ("m", &second)])
        }
    }

    #[test]
    fn caches_of_experts_are_counted_by_layer() {
        let (mut registry, mut text) = (Registry::default(), String::new());
        registry.register_collector(Box::new(Layers));
        text::encode(&mut text, &registry).unwrap();
        for line in [
            "bodkin_expert_cache_slots{model=\"m\",layer=\"1\"} 4.0",
            "bodkin_expert_cache_hits_total{model=\"m\",layer=\"1\"} 30.0",
            "bodkin_expert_cache_misses_total{model=\"m\",layer=\"1\"} 5.0",
            "bodkin_expert_cache_copies_total{model=\"m\",layer=\"1\"} 2.0",
            "bodkin_expert_cache_reads_total{model=\"m\",layer=\"1\"} 1.0",
            "bodkin_expert_cache_predicted_total{model=\"m\",layer=\"1\"} 3.0",
            "bodkin_expert_utilization_ratio{model=\"m\",layer=\"0\",expert=\"1\"} 0.75",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        assert_eq!(text.matches("\nbodkin_expert_cache_hits_total").count(), 1, "{text}");
    }
}
