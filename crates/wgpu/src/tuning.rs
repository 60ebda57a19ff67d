//! Which shape of the GEMV is fastest on an adapter: measured when a model is loaded that has
//! matmuls of a layout for the first time, and kept in a file. The bits of results do not depend on
//! it.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bodkin_backend::{Batch, Limits, Result, Span, tuning_file};

use crate::batch_data::BatchData;
use crate::dispatch::{self, Ready};
use crate::gpu::Gpu;
use crate::layout::Layout;
use crate::lower::gemv_shape;
use crate::program::{
    BufferId, Depth, Dispatch, Epilogue, GemvShape, Inputs, Kernel, List, Matmul, Program,
};

/// The time for all measurements of a load; the next load makes those that are missing.
const TIME_LIMIT: Duration = Duration::from_secs(2);
/// Matmuls of a measurement, at most, and how often they run in one submission.
const MATMULS: usize = 16;
const PASSES: usize = 4;
/// Interleaved runs of each shape, of which the fastest counts.
const RUNS: usize = 3;
/// What a shape may take, of the built-in one's time, to take its place.
const FASTER: f64 = 0.97;

/// The layouts that have GEMVs.
const LAYOUTS: [Layout; 7] = [
    Layout::F32,
    Layout::F16,
    Layout::Bf16,
    Layout::Signed,
    Layout::Unsigned,
    Layout::Nibbles,
    Layout::Indices,
];

/// Measured shapes, by layout and rows of the step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Shapes(HashMap<(Layout, usize), GemvShape>);

/// The shapes to measure, the built-in one first.
pub(crate) fn candidates(layout: Layout, tokens: usize) -> Vec<GemvShape> {
    let built_in = gemv_shape(layout, tokens);
    let all = [1, 2, 4].into_iter().flat_map(|teams| [2, 4, 8].map(|rows| (teams, rows)));
    let others = all.map(|(teams, rows)| GemvShape { teams, rows, ..built_in });
    let others = others.filter(|shape| *shape != built_in && shape.is_possible());
    std::iter::once(built_in).chain(others).collect()
}

impl Shapes {
    fn text(&self) -> String {
        let line = |((layout, tokens), shape): (&(Layout, usize), &GemvShape)| {
            let GemvShape { teams, rows, .. } = shape;
            format!("{layout:?} {tokens}: teams {teams} rows {rows}\n")
        };
        let mut lines: Vec<String> = self.0.iter().map(line).collect();
        lines.sort();
        lines.concat()
    }

    /// Lines that are no possible shape are left out.
    fn parse(text: &str) -> Shapes {
        let parse = |line: &str| {
            let (of, shape) = line.split_once(": ")?;
            let (layout, tokens) = of.split_once(' ')?;
            let layout = LAYOUTS.into_iter().find(|known| format!("{known:?}") == layout)?;
            let tokens = tokens.parse().ok()?;
            let found = candidates(layout, tokens).into_iter().find(|candidate| {
                format!("teams {} rows {}", candidate.teams, candidate.rows) == shape
            })?;
            Some(((layout, tokens), found))
        };
        Shapes(text.lines().filter_map(parse).collect())
    }

    /// Gives a program these shapes.
    fn apply(&self, program: &mut Program) {
        for dispatch in &mut program.dispatches {
            if let Kernel::Gemv(m, shape) = dispatch.kernel
                && let Some(&measured) = self.0.get(&(m.layout, shape.tokens))
            {
                *dispatch = shaped(dispatch, m, shape, measured);
            }
        }
    }
}

/// The same matmul with another shape.
fn shaped(dispatch: &Dispatch, m: Matmul, from: GemvShape, to: GemvShape) -> Dispatch {
    let mut dispatch = dispatch.clone();
    dispatch.kernel = Kernel::Gemv(m, to);
    // At most the rows of a workgroup are too many: they do nothing.
    let rows = dispatch.grid.groups * from.teams * from.rows;
    dispatch.grid.groups = to.groups(rows);
    dispatch
}

/// The file of an adapter, its driver and these kernels.
fn path(gpu: &Gpu, folder: &Path) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    for layout in LAYOUTS {
        let m = Matmul { layout, inputs: Inputs::Aligned, epilogue: Epilogue::One };
        let kernel = Kernel::Gemv(m, gemv_shape(layout, 1));
        kernel.source(gpu.arithmetic.activations).hash(&mut hasher);
    }
    let info = &gpu.info;
    let driver = format!("{} {} {}", info.backend, info.driver, info.driver_info);
    tuning_file::path(folder, &info.name, &driver, hasher.finish())
}

/// Gives a program whose matmuls are loaded the fastest shapes; those that no load has measured yet
/// are measured. `find` finds the buffers of a dispatch.
pub(crate) fn tune(
    gpu: &Gpu,
    folder: &Path,
    (program, limits): (&mut Program, &Limits),
    params: &wgpu::Buffer,
    batch: &(wgpu::Buffer, wgpu::BindGroup),
    find: &dyn Fn(&BufferId) -> Result<wgpu::Buffer>,
) -> Result<()> {
    let path = path(gpu, folder);
    let known = Shapes::parse(&tuning_file::read(&path));
    let mut shapes = known.clone();
    let end = Instant::now() + TIME_LIMIT;
    for (layout, tokens) in missing(program, limits, &known) {
        if Instant::now() > end {
            break;
        }
        let matmuls = measured_matmuls(program, layout, tokens);
        let candidates = candidates(layout, tokens);
        let kernels = candidates.iter().map(|&shape| Kernel::Gemv(matmuls[0].1, shape));
        gpu.compile_all(kernels);
        let runs = candidates.iter().map(|&shape| {
            let ready = matmuls.iter().map(|&(i, m, from)| {
                let dispatch = shaped(&program.dispatches[i], m, from, shape);
                dispatch::ready(gpu, &dispatch, (params, i), find)
            });
            ready.collect::<Result<Vec<Ready>>>()
        });
        let runs = runs.collect::<Result<Vec<_>>>()?;
        let data = decode_rows(tokens);
        gpu.queue.write_buffer(&batch.0, 0, bytemuck::cast_slice(&data.words));
        let seconds = least_seconds(gpu, &runs, &data, &batch.1)?;
        let limit = FASTER * seconds[0];
        let faster = candidates.iter().zip(&seconds).skip(1).filter(|(_, s)| **s < limit);
        let fastest = faster.min_by(|a, b| a.1.total_cmp(b.1));
        let fastest = fastest.map_or(candidates[0], |(shape, _)| *shape);
        shapes.0.insert((layout, tokens), fastest);
    }
    if shapes != known {
        tuning_file::write(&path, &shapes.text());
    }
    shapes.apply(program);
    Ok(())
}

/// The GEMVs of all rows of decode, with their numbers. Outputs may be fewer.
fn decode_gemvs(program: &Program) -> impl Iterator<Item = (usize, Matmul, GemvShape)> {
    program.dispatches.iter().enumerate().filter_map(|(i, dispatch)| {
        let is_decode = matches!(dispatch.grid.depth, Depth::List(List::Decode, _));
        match dispatch.kernel {
            Kernel::Gemv(m, shape) if is_decode => Some((i, m, shape)),
            _ => None,
        }
    })
}

/// Their layouts and numbers of rows that are not measured, up to the most rows of a step.
fn missing(program: &Program, limits: &Limits, known: &Shapes) -> Vec<(Layout, usize)> {
    let mut all = Vec::new();
    for (_, m, shape) in decode_gemvs(program) {
        let key = (m.layout, shape.tokens);
        if shape.tokens <= limits.tokens && !known.0.contains_key(&key) && !all.contains(&key) {
            all.push(key);
        }
    }
    all
}

/// The numbers of some dispatches with a layout and rows: those of the kernel with the most rows of
/// weights, so that few kernels are compiled.
fn measured_matmuls(
    program: &Program,
    layout: Layout,
    tokens: usize,
) -> Vec<(usize, Matmul, GemvShape)> {
    let is_one =
        |(_, m, shape): &(usize, Matmul, GemvShape)| m.layout == layout && shape.tokens == tokens;
    let all: Vec<_> = decode_gemvs(program).filter(is_one).collect();
    let mut groups: HashMap<Matmul, usize> = HashMap::new();
    for (i, m, _) in &all {
        *groups.entry(*m).or_default() += program.dispatches[*i].grid.groups;
    }
    let most = all.iter().map(|(_, m, _)| *m).max_by_key(|m| groups[m]);
    all.into_iter().filter(|(_, m, _)| Some(*m) == most).take(MATMULS).collect()
}

/// A step of decode with this many rows.
fn decode_rows(rows: usize) -> BatchData {
    let span =
        |_| Span { len: 1, position: 0, tables: Vec::new(), state_slot: 0, is_prefill: false };
    let spans = (0..rows).map(span).collect();
    let mut data = BatchData::default();
    data.set(&Batch { tokens: vec![0; rows], spans, ..Batch::default() });
    data
}

/// The least seconds of some runs of each list of dispatches.
fn least_seconds(
    gpu: &Gpu,
    runs: &[Vec<Ready>],
    data: &BatchData,
    batch: &wgpu::BindGroup,
) -> Result<Vec<f64>> {
    let seconds = |run: &[Ready]| -> Result<f64> {
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_bind_group(1, batch, &[]);
        (0..PASSES).for_each(|_| run.iter().for_each(|ready| ready.record(&mut pass, data)));
        drop(pass);
        let start = Instant::now();
        gpu.run(Some(encoder.finish()))?;
        Ok(start.elapsed().as_secs_f64())
    };
    runs.iter().try_for_each(|run| seconds(run).map(drop))?;
    let mut least = vec![f64::MAX; runs.len()];
    for _ in 0..RUNS {
        for (run, least) in runs.iter().zip(&mut least) {
            *least = least.min(seconds(run)?);
        }
    }
    Ok(least)
}

#[cfg(test)]
mod tests {
    use bodkin_backend::Backend;
    use bodkin_conformance as conformance;

    use super::*;
    use crate::Wgpu;

    fn is_case(name: &str) -> bool {
        name.contains("decoder F16")
    }

    /// The logits of generated rows, which GEMVs compute.
    fn bits(gpu: &Wgpu, folder: Option<&Path>) -> Vec<(String, Vec<u32>)> {
        let gpu = gpu.clone().with_tuning(folder.map(Path::to_path_buf));
        let logits = conformance::generated_logits_named(&gpu, is_case);
        let logits = logits.unwrap_or_else(|error| panic!("{}: {error}", gpu.name()));
        let bits = |logits: Vec<f32>| logits.into_iter().map(f32::to_bits).collect();
        logits.into_iter().map(|(name, logits)| (name, bits(logits))).collect()
    }

    #[test]
    fn shapes_do_not_change_bits() {
        let gpu = Wgpu::open(0).unwrap_or_else(|error| panic!("{error}"));
        let folder = tempfile::tempdir().expect("a folder");
        let built_in = bits(&gpu, None);
        assert!(!built_in.is_empty());
        for (teams, rows) in [(4, 2), (1, 8)] {
            let keys = LAYOUTS.into_iter().flat_map(|layout| [1, 4, 8].map(|n| (layout, n)));
            let shape = |(layout, tokens)| {
                let shape = GemvShape { teams, rows, ..gemv_shape(layout, tokens) };
                ((layout, tokens), shape)
            };
            let shapes = Shapes(keys.map(shape).collect());
            tuning_file::write(&path(&gpu.gpu, folder.path()), &shapes.text());
            assert!(bits(&gpu, Some(folder.path())) == built_in, "{teams} teams, {rows} rows");
        }
    }

    #[test]
    fn shapes_are_measured_once() {
        let gpu = Wgpu::open(0).unwrap_or_else(|error| panic!("{error}"));
        let folder = tempfile::tempdir().expect("a folder");
        let file = path(&gpu.gpu, folder.path());
        assert!(bits(&gpu, Some(folder.path())) == bits(&gpu, None));
        let text = tuning_file::read(&file);
        assert!(text.contains("F16 1: teams "), "{text}");
        bits(&gpu, Some(folder.path()));
        let again = tuning_file::read(&file);
        assert!(text.lines().all(|line| again.contains(line)), "{text} {again}");
    }

    #[test]
    fn text_holds_every_shape() {
        let mut shapes = Shapes::default();
        for (layout, tokens) in [(Layout::Nibbles, 8), (Layout::Signed, 1)] {
            shapes.0.insert((layout, tokens), candidates(layout, tokens)[1]);
        }
        let text = shapes.text();
        assert!(text.starts_with("Nibbles 8: teams "), "{text}");
        assert_eq!(Shapes::parse(&text), shapes);
        let wrong = [
            "Nibbles 8: teams 2 rows 3",
            "Nibbles 8: teams 64 rows 4",
            "Nibbles 8: teams 2 rows 4 5",
            "Nibbles 8 teams 2 rows 4",
            "Nibbles x: teams 2 rows 4",
            "Bits 8: teams 2 rows 4",
            "",
        ];
        assert_eq!(Shapes::parse(&wrong.join("\n")), Shapes::default());
    }

    #[test]
    fn a_shape_covers_all_rows_of_the_weight() {
        for layout in LAYOUTS {
            for tokens in [1, 4, 8] {
                let all = candidates(layout, tokens);
                assert!(all.len() > 1 && all.iter().all(GemvShape::is_possible), "{all:?}");
                for rows in [1, 2, 31, 4096] {
                    for shape in &all {
                        let groups = shape.groups(all[0].groups(rows) * all[0].teams * all[0].rows);
                        assert!(groups * shape.teams * shape.rows >= rows);
                    }
                }
            }
        }
    }
}
