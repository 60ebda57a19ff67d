//! Rows of `bench` as Markdown, JSON or CSV; fields are named as llama-bench names them.

use std::io::Write;

use anyhow::Result;
use bodkin_backend::{ExpertCacheStats, ExpertStats, KvType, StageProfile, WeightLayout};
use serde_json::{Value, json};

use super::session::Test;
use super::timeline::{Split, Timeline};
use bodkin::memory::human_bytes;

/// Output format: a Markdown table, a JSON array of objects, or CSV with a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    Md,
    Json,
    Csv,
}

/// One measured test.
pub(crate) struct Row {
    pub(crate) model_filename: String,
    pub(crate) model_type: String,
    pub(crate) model_size: u64,
    pub(crate) model_n_params: u64,
    pub(crate) backend: String,
    pub(crate) threads: usize,
    pub(crate) batch: usize,
    /// Data type of the KV cache, as selected.
    pub(crate) kv_type: KvType,
    pub(super) test: Test,
    pub(crate) time_unix_s: u64,
    /// Bytes read in one run of the test.
    pub(crate) bytes: u64,
    pub(crate) samples_ns: Vec<u64>,
    /// Memory bandwidth in bytes per second, measured after the runs.
    pub(crate) bandwidths: Vec<f64>,
    /// Steps of one run.
    pub(crate) steps: usize,
    /// Operations of all matmuls of one run, and the operations per second of the fastest; none for
    /// a decoder.
    pub(crate) encoder: Option<(u64, f64)>,
    /// What happened in one run; empty without a profile or trace.
    pub(crate) timeline: Timeline,
    /// Time of each kind of stage in one run; empty without a profile.
    pub(crate) profile: Vec<StageProfile>,
    /// Expert counts and times of that run; empty without experts.
    pub(crate) experts: Vec<ExpertStats>,
    /// Expert counts of one run; empty without a heat map.
    pub(crate) chosen: Vec<ExpertStats>,
    /// Layout of each weight of a sparse format; empty without a profile.
    pub(crate) weight_layouts: Vec<WeightLayout>,
}

impl Row {
    /// The median of the measured bandwidths.
    fn bandwidth(&self) -> f64 {
        let mut sorted = self.bandwidths.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
    }

    /// The test's name. A selected KV type comes last: `tg128 @ d4096 kv q8_0`.
    pub(crate) fn test(&self) -> String {
        let test = self.test.to_string();
        match self.kv_type {
            KvType::Auto => test,
            kv_type => format!("{test} kv {}", kv_type.name()),
        }
    }

    fn rates(&self) -> Vec<f64> {
        let tokens = self.test.tokens() as f64;
        self.samples_ns.iter().map(|&ns| tokens * 1e9 / ns as f64).collect()
    }

    /// Texts per second of an encoder, its operations per second, and their fraction of those of
    /// its fastest matmul, which is what bounds them where memory does not.
    fn encoder_rates(&self) -> Option<[f64; 3]> {
        let (operations, fastest) = self.encoder?;
        let runs = mean(&self.samples_ns.iter().map(|&ns| 1e9 / ns as f64).collect::<Vec<_>>());
        let speed = operations as f64 * runs;
        Some([self.test.sequences as f64 * runs, speed, speed / fastest])
    }

    fn bytes_per_second(&self) -> f64 {
        let times: Vec<f64> = self.samples_ns.iter().map(|&ns| ns as f64).collect();
        self.bytes as f64 * 1e9 / mean(&times)
    }

    /// How the time of a step is split, if it was traced.
    fn split_of_step(&self) -> Option<Split> {
        let Split { compute, transfers, host, waiting } = self.timeline.split()?;
        let [compute, transfers, host, waiting] =
            [compute, transfers, host, waiting].map(|seconds| seconds / self.steps.max(1) as f64);
        Some(Split { compute, transfers, host, waiting })
    }

    /// Milliseconds of a part of the profile in a step.
    fn ms_of_step(&self, part: &StageProfile) -> f64 {
        1e3 * part.seconds / self.steps.max(1) as f64
    }

    fn part_fields(&self, part: &StageProfile) -> Value {
        json!({
            "what": part.name,
            "ms": self.ms_of_step(part),
            "gb_s": part.bytes as f64 / part.seconds / 1e9,
            "gop_s": part.operations as f64 / part.seconds / 1e9,
            "bandwidth_share": part.bytes as f64 / part.seconds / self.bandwidth(),
        })
    }

    fn fields(&self) -> Vec<(&'static str, Value)> {
        let rates = self.rates();
        let times: Vec<f64> = self.samples_ns.iter().map(|&ns| ns as f64).collect();
        let gb_s = self.bytes_per_second() / 1e9;
        let mut fields = vec![
            ("build_version", json!(env!("CARGO_PKG_VERSION"))),
            ("backends", json!(self.backend)),
            ("model_filename", json!(self.model_filename)),
            ("model_type", json!(self.model_type)),
            ("model_size", json!(self.model_size)),
            ("model_n_params", json!(self.model_n_params)),
            ("n_batch", json!(self.batch)),
            ("n_threads", json!(self.threads)),
            ("type_k", json!(self.kv_type.name())),
            ("type_v", json!(self.kv_type.name())),
            ("n_prompt", json!(self.test.prompt)),
            ("n_gen", json!(self.test.generate)),
            ("n_depth", json!(self.test.depth)),
            ("n_sequences", json!(self.test.sequences)),
            ("test", json!(self.test())),
            ("test_time_unix_s", json!(self.time_unix_s)),
            ("avg_ns", json!(mean(&times) as u64)),
            ("stddev_ns", json!(deviation(&times) as u64)),
            ("avg_ts", json!(mean(&rates))),
            ("stddev_ts", json!(deviation(&rates))),
            ("gb_s", json!(gb_s)),
            ("bandwidth_gb_s", json!(self.bandwidth() / 1e9)),
            ("bandwidth_stddev_gb_s", json!(deviation(&self.bandwidths) / 1e9)),
            ("bandwidth_share", json!(self.bytes_per_second() / self.bandwidth())),
            ("samples_ns", json!(self.samples_ns)),
            ("samples_ts", json!(rates)),
        ];
        if let Some([texts, operations, share]) = self.encoder_rates() {
            fields.push(("avg_texts_s", json!(texts)));
            fields.push(("gop_s", json!(operations / 1e9)));
            fields.push(("compute_share", json!(share)));
        }
        if let Some(split) = self.split_of_step() {
            let Split { compute, transfers, host, waiting } = split;
            let [compute, transfers, host, waiting] =
                [compute, transfers, host, waiting].map(|seconds| json!(1e3 * seconds));
            let ms = json!({ "compute": compute, "transfers": transfers, "host": host,
                             "waiting": waiting });
            fields.push(("step_ms", ms));
        }
        if !self.profile.is_empty() {
            let parts = self.profile.iter().map(|part| self.part_fields(part));
            fields.push(("profile", parts.collect()));
        }
        if !self.experts.is_empty() {
            let ms = |e: &ExpertStats| e.seconds.iter().map(|s| s * 1e3).collect::<Vec<_>>();
            let layer = |e: &ExpertStats| {
                let (layer, counts) = (e.layer, &e.counts);
                json!({"layer": layer, "counts": counts, "ms": ms(e), "cache": cache_json(e)})
            };
            fields.push(("experts", self.experts.iter().map(layer).collect()));
        }
        if !self.weight_layouts.is_empty() {
            let choice = |c: &WeightLayout| {
                let (weight, format) = (&c.weight, c.format.name());
                json!({"weight": weight, "format": format, "sparse": c.sparse,
                       "speedup": c.speedup})
            };
            fields.push(("sparse", self.weight_layouts.iter().map(choice).collect()));
        }
        fields
    }
}

fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len() as f64
}

/// The sample standard deviation; 0 for a single sample.
fn deviation(x: &[f64]) -> f64 {
    if x.len() < 2 {
        return 0.0;
    }
    let m = mean(x);
    (x.iter().map(|x| (x - m).powi(2)).sum::<f64>() / (x.len() - 1) as f64).sqrt()
}

/// Prints all rows.
pub(crate) fn print(out: &mut dyn Write, format: Format, rows: &[Row]) -> Result<()> {
    match format {
        Format::Md => print_table(out, rows),
        Format::Json => {
            let rows = rows.iter().map(|row| {
                let fields = row.fields().into_iter().map(|(k, v)| (k.to_owned(), v));
                Value::Object(fields.collect())
            });
            writeln!(out, "{:#}", Value::Array(rows.collect()))?;
            Ok(())
        }
        Format::Csv => print_csv(out, rows),
    }
}

fn print_table(out: &mut dyn Write, rows: &[Row]) -> Result<()> {
    writeln!(
        out,
        "| model | size | params | backend | threads | test | t/s | GB/s | of bandwidth |"
    )?;
    writeln!(out, "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |")?;
    for row in rows {
        let rates = row.rates();
        let speed = row.bytes_per_second();
        writeln!(
            out,
            "| {} | {} | {:.2} M | {} | {} | {} | {:.2} ± {:.2} | {:.1} | {:.0} % of {:.1} ± {:.1} \
             GB/s |",
            row.model_type,
            human_bytes(row.model_size),
            row.model_n_params as f64 / 1e6,
            row.backend,
            row.threads,
            row.test(),
            mean(&rates),
            deviation(&rates),
            speed / 1e9,
            100.0 * speed / row.bandwidth(),
            row.bandwidth() / 1e9,
            deviation(&row.bandwidths) / 1e9,
        )?;
    }
    print_encoders(out, rows)?;
    print_splits(out, rows)?;
    for row in rows {
        if !row.profile.is_empty() {
            print_profile(out, row)?;
        }
        if !row.experts.is_empty() {
            print_experts(out, row)?;
        }
        if !row.weight_layouts.is_empty() {
            print_weight_layouts(out, &row.weight_layouts)?;
        }
    }
    Ok(())
}

/// Texts per second of encoders, and how much of the device's arithmetic they use.
fn print_encoders(out: &mut dyn Write, rows: &[Row]) -> Result<()> {
    let encoders = rows.iter().filter_map(|row| Some((row, row.encoder_rates()?)));
    for (i, (row, [texts, operations, share])) in encoders.enumerate() {
        if i == 0 {
            writeln!(out, "\n| encoder | texts/s | Gop/s | of its fastest matmul |")?;
            writeln!(out, "| --- | ---: | ---: | ---: |")?;
        }
        let (test, gop_s, percent) = (row.test(), operations / 1e9, 100.0 * share);
        writeln!(out, "| {test} | {texts:.1} | {gop_s:.1} | {percent:.0} % |")?;
    }
    Ok(())
}

/// How the time of a step of each test is split.
fn print_splits(out: &mut dyn Write, rows: &[Row]) -> Result<()> {
    let splits = rows.iter().filter_map(|row| Some((row, row.split_of_step()?)));
    for (i, (row, split)) in splits.enumerate() {
        if i == 0 {
            writeln!(out, "\n| a step of | ms | compute | transfers | host | waiting |")?;
            writeln!(out, "| --- | ---: | ---: | ---: | ---: | ---: |")?;
        }
        let parts = [split.compute, split.transfers, split.host, split.waiting];
        let all: f64 = parts.iter().sum();
        write!(out, "| {} | {:.3} |", row.test(), 1e3 * all)?;
        for part in parts {
            write!(out, " {:.3} ({:.1} %) |", 1e3 * part, 100.0 * part / all)?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// Time of each kind of stage in a step, with its bandwidth and operations per second.
fn print_profile(out: &mut dyn Write, row: &Row) -> Result<()> {
    let all: f64 = row.profile.iter().map(|part| part.seconds).sum();
    writeln!(
        out,
        "\n| {}: part of a step | ms | of time | GB/s | of bandwidth | Gop/s |",
        row.test()
    )?;
    writeln!(out, "| --- | ---: | ---: | ---: | ---: | ---: |")?;
    for part in &row.profile {
        let speed = part.bytes as f64 / part.seconds;
        writeln!(
            out,
            "| {} | {:.3} | {:.1} % | {:.1} | {:.0} % | {:.0} |",
            part.name,
            row.ms_of_step(part),
            100.0 * part.seconds / all,
            speed / 1e9,
            100.0 * speed / row.bandwidth(),
            part.operations as f64 / part.seconds / 1e9,
        )?;
    }
    Ok(())
}

/// What the cache of a layer's experts did, null without one.
fn cache_json(experts: &ExpertStats) -> Value {
    match experts.cache {
        Some(ExpertCacheStats { slots, hits, misses, fills, reads, predicted }) => json!({
            "slots": slots, "hits": hits, "misses": misses, "fills": fills, "reads": reads,
            "predicted": predicted,
        }),
        None => Value::Null,
    }
}

/// The load balance of the experts of each layer. Times are sums over all threads; the time per
/// selection is the mean of the layer, and that of its slowest expert. GPUs report no times.
fn print_experts(out: &mut dyn Write, row: &Row) -> Result<()> {
    let test = row.test();
    writeln!(
        out,
        "\n| {test}: layer | experts chosen | least | mean | most | ms | us a choice | slowest |"
    )?;
    writeln!(out, "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")?;
    for ExpertStats { layer, counts, seconds, .. } in &row.experts {
        let (all, chosen) = (counts.len(), counts.iter().filter(|&&count| count > 0).count());
        let (least, most) = (counts.iter().min(), counts.iter().max());
        let mean = counts.iter().sum::<u64>() as f64 / all as f64;
        let [least, most] = [least, most].map(|count| count.copied().unwrap_or(0));
        write!(out, "| {layer} | {chosen} of {all} | {least} | {mean:.1} | {most} |")?;
        if seconds.is_empty() {
            writeln!(out, " - | - | - |")?;
            continue;
        }
        let us = |seconds: f64, count: u64| 1e6 * seconds / count.max(1) as f64;
        let sum: f64 = seconds.iter().sum();
        let each = seconds.iter().zip(counts).map(|(&seconds, &count)| us(seconds, count));
        let (mean, slowest) = (us(sum, counts.iter().sum()), each.fold(0.0, f64::max));
        writeln!(out, " {:.3} | {mean:.1} | {slowest:.1} |", 1e3 * sum)?;
    }
    print_expert_caches(out, row)
}

/// What the cache of each layer's experts did, if a device has no room for all of them.
fn print_expert_caches(out: &mut dyn Write, row: &Row) -> Result<()> {
    let cached = row.experts.iter().filter_map(|e| Some((e.layer, e.cache?, e.counts.len())));
    for (i, (layer, cache, experts)) in cached.enumerate() {
        if i == 0 {
            writeln!(
                out,
                "\n| {}: layer | slots | hits | misses | copies | reads | predicted |",
                row.test()
            )?;
            writeln!(out, "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")?;
        }
        let ExpertCacheStats { slots, hits, misses, fills, reads, predicted } = cache;
        let share = 100.0 * hits as f64 / (hits + misses).max(1) as f64;
        write!(out, "| {layer} | {slots} of {experts} | {hits} ({share:.1} %) ")?;
        writeln!(out, "| {misses} | {fills} | {reads} | {predicted} |")?;
    }
    Ok(())
}

/// The layout of each weight of a sparse format, and the measured speedup of the sparse kernel.
fn print_weight_layouts(out: &mut dyn Write, weight_layouts: &[WeightLayout]) -> Result<()> {
    writeln!(out, "\n| sparse weight | format | kept | without zeros |")?;
    writeln!(out, "| --- | --- | --- | ---: |")?;
    for WeightLayout { weight, format, sparse, speedup } in weight_layouts {
        let kept = if *sparse { "without zeros" } else { "dense" };
        let speedup = speedup.map_or("not timed".to_owned(), |times| format!("{times:.2}x"));
        writeln!(out, "| {weight} | {} | {kept} | {speedup} |", format.name())?;
    }
    Ok(())
}

fn print_csv(out: &mut dyn Write, rows: &[Row]) -> Result<()> {
    let quoted = |value: &Value| {
        let text = match value {
            Value::String(s) => s.clone(),
            Value::Array(items) => {
                items.iter().map(ToString::to_string).collect::<Vec<_>>().join(";")
            }
            other => other.to_string(),
        };
        format!("\"{}\"", text.replace('"', "\"\""))
    };
    for (i, row) in rows.iter().enumerate() {
        let fields = row.fields();
        if i == 0 {
            let names: Vec<&str> = fields.iter().map(|(name, _)| *name).collect();
            writeln!(out, "{}", names.join(","))?;
        }
        let values: Vec<String> = fields.iter().map(|(_, value)| quoted(value)).collect();
        writeln!(out, "{}", values.join(","))?;
    }
    Ok(())
}
