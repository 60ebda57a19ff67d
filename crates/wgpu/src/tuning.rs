//! Which shape of the GEMV is fastest on an adapter: measured when a model is loaded that has
//! matmuls of a layout for the first time, and kept in a file. The bits of results do not depend on
//! it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use bodkin_backend::tuning::{self, MEASURED_BYTES, RUNS, TIME_LIMIT, fastest};
use bodkin_backend::{Batch, Error, Result, Span};

use crate::batch_data::BatchData;
use crate::dispatch::{self, Ready};
use crate::gpu::Gpu;
use crate::layout::Layout;
use crate::lower::{GEMV_TOKENS, gemv_shape};
use crate::program::{
    BufferId, Depth, Dispatch, Epilogue, GemvShape, Inputs, Kernel, List, Matmul, Program,
};

/// Seconds of a submission: long enough for a clock of the host, and short enough for systems that
/// reset a GPU which does not answer.
const SUBMISSION: f64 = 0.02;
/// The most runs of the matmuls in a submission.
const MOST_PASSES: f64 = 16.0;
/// A shape that takes this, of the built-in one's time, is not measured again.
const SLOW: f64 = 1.5;

/// The rows of the step of a workgroup.
const TOKENS: [usize; 3] = [1, GEMV_TOKENS[0], GEMV_TOKENS[1]];

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
            let layout = Layout::ALL.into_iter().find(|known| format!("{known:?}") == layout)?;
            let tokens = tokens.parse().ok().filter(|tokens| TOKENS.contains(tokens))?;
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
    let sources = Layout::ALL.into_iter().flat_map(|layout| {
        let source = move |tokens| {
            let m = Matmul { layout, inputs: Inputs::Aligned, epilogue: Epilogue::One };
            Kernel::Gemv(m, gemv_shape(layout, tokens)).source(gpu.arithmetic.activations)
        };
        TOKENS.into_iter().map(source)
    });
    let kernels = tuning::checksum(sources.flat_map(String::into_bytes));
    let info = &gpu.info;
    let driver = format!("{} {} {}", info.backend, info.driver, info.driver_info);
    tuning::path(folder, &info.name, &driver, kernels)
}

/// What measurements need of a model that is being loaded, before its first step: they write only
/// values, which each step computes again. Inputs are zeros.
pub(crate) struct Loaded<'a> {
    pub(crate) gpu: &'a Gpu,
    /// The most rows of a step.
    pub(crate) tokens: usize,
    pub(crate) params: &'a wgpu::Buffer,
    pub(crate) batch: &'a (wgpu::Buffer, wgpu::BindGroup),
    /// Finds the buffers of a dispatch.
    pub(crate) find: &'a dyn Fn(&BufferId) -> Result<wgpu::Buffer>,
}

impl Loaded<'_> {
    /// Gives the model's program the fastest shapes. Those that no load has measured yet are
    /// measured.
    ///
    /// # Errors
    /// If the device is lost.
    pub(crate) fn tune(&self, program: &mut Program, folder: &Path) -> Result<()> {
        let path = path(self.gpu, folder);
        let mut shapes = Shapes::parse(&tuning::read(&path));
        let end = Instant::now() + TIME_LIMIT;
        for key in self.missing(program, &shapes) {
            if Instant::now() > end {
                break;
            }
            let shape = self.fastest(program, key, end).map_err(|error| {
                let how = "while its GEMVs were measured, which --no-tune leaves out";
                Error::Config(format!("{error} ({how})"))
            })?;
            shapes.0.insert(key, shape);
            tuning::write(&path, &shapes.text());
        }
        shapes.apply(program);
        Ok(())
    }

    /// The layouts and rows of the program's GEMVs that are not measured, up to the most rows of a
    /// step.
    fn missing(&self, program: &Program, known: &Shapes) -> Vec<(Layout, usize)> {
        let mut all = Vec::new();
        for (_, m, shape) in decode_gemvs(program) {
            let key = (m.layout, shape.tokens);
            if shape.tokens <= self.tokens && !known.0.contains_key(&key) && !all.contains(&key) {
                all.push(key);
            }
        }
        all
    }

    /// The fastest shape for a layout and rows, of those that are compiled until `end`.
    fn fastest(
        &self,
        program: &Program,
        (layout, tokens): (Layout, usize),
        end: Instant,
    ) -> Result<GemvShape> {
        let matmuls = self.measured_matmuls(program, layout, tokens)?;
        let data = decode_step(tokens);
        self.gpu.queue.write_buffer(&self.batch.0, 0, bytemuck::cast_slice(&data.words));
        let (mut shapes, mut runs, mut passes, mut built_in) = (Vec::new(), Vec::new(), 1, 0.0);
        for shape in candidates(layout, tokens) {
            let kernels = matmuls.iter().map(|&(_, m, _)| Kernel::Gemv(m, shape));
            self.gpu.compile_all(kernels);
            let run = matmuls.iter().map(|&(i, m, from)| {
                let dispatch = shaped(&program.dispatches[i], m, from, shape);
                dispatch::ready(self.gpu, &dispatch, (self.params, i), self.find)
            });
            let run = run.collect::<Result<Vec<Ready>>>()?;
            // The first run of a kernel takes longer.
            self.seconds(&run, &data, 1)?;
            let seconds = self.seconds(&run, &data, 1)?;
            if shapes.is_empty() {
                built_in = seconds;
                passes = (SUBMISSION / seconds.max(1e-6)).clamp(1.0, MOST_PASSES) as usize;
            }
            if seconds <= SLOW * built_in {
                shapes.push(shape);
                runs.push(run);
            }
            if Instant::now() > end {
                break;
            }
        }
        let mut least = vec![f64::MAX; runs.len()];
        for _ in 0..RUNS {
            for (run, least) in runs.iter().zip(&mut least) {
                *least = least.min(self.seconds(run, &data, passes)?);
            }
        }
        let found = shapes[fastest(&least)];
        let others = candidates(layout, tokens).into_iter().filter(|&shape| shape != found);
        let kernels = |shape| matmuls.iter().map(move |&(_, m, _)| Kernel::Gemv(m, shape));
        self.gpu.forget(others.flat_map(kernels));
        Ok(found)
    }

    /// The first matmuls of decode with a layout and rows, until their weights are enough.
    fn measured_matmuls(
        &self,
        program: &Program,
        layout: Layout,
        tokens: usize,
    ) -> Result<Vec<(usize, Matmul, GemvShape)>> {
        let (mut matmuls, mut bytes) = (Vec::new(), 0);
        for (i, m, shape) in decode_gemvs(program) {
            if (m.layout, shape.tokens) != (layout, tokens) || bytes >= MEASURED_BYTES as u64 {
                continue;
            }
            for buffer in &program.dispatches[i].buffers {
                if let BufferId::Matrix(..) = buffer {
                    bytes += (self.find)(buffer)?.size();
                }
            }
            matmuls.push((i, m, shape));
        }
        Ok(matmuls)
    }

    /// The seconds of one submission with some passes over the dispatches.
    fn seconds(&self, run: &[Ready], data: &BatchData, passes: usize) -> Result<f64> {
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_bind_group(1, &self.batch.1, &[]);
        (0..passes).for_each(|_| run.iter().for_each(|ready| ready.record(&mut pass, data)));
        drop(pass);
        let commands = encoder.finish();
        let start = Instant::now();
        self.gpu.run(Some(commands))?;
        Ok(start.elapsed().as_secs_f64())
    }
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

/// A step of decode with this many rows.
fn decode_step(rows: usize) -> BatchData {
    let span =
        |_| Span { len: 1, position: 0, tables: Vec::new(), state_slot: 0, is_prefill: false };
    let spans = (0..rows).map(span).collect();
    let mut data = BatchData::default();
    data.set(&Batch { tokens: vec![0; rows], spans, ..Batch::default() });
    data
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bodkin_backend::{Backend, Limits, OutputRequest, PageTable, Step};
    use bodkin_gguf::File;

    use super::*;
    use crate::Wgpu;

    fn open() -> Wgpu {
        Wgpu::open(0).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The bits of the logits of decode steps with one, three and nine rows.
    fn bits(gpu: &Wgpu, model: &str, folder: Option<&Path>) -> Vec<u32> {
        let path = format!("{}/../../tests/parity/models/{model}", env!("CARGO_MANIFEST_DIR"));
        let file = Arc::new(File::open(Path::new(&path)).expect("a file of the kit"));
        let plan = bodkin_model::plan(file.metadata(), file.tensors()).expect("a plan");
        let plan = Arc::new(plan);
        let windows = plan.windows().len();
        let limits = Limits { tokens: 9, outputs: 9, pages: vec![9; windows], state_slots: 9 };
        let gpu = gpu.clone().with_tuning(folder.map(Path::to_path_buf));
        let model = gpu.load(plan, &file, &limits, &|_, _| ());
        let mut model = model.unwrap_or_else(|error| panic!("{error}"));
        let mut bits = Vec::new();
        for rows in [1, 3, 9] {
            let span = |row: u32| Span {
                len: 1,
                position: 0,
                tables: vec![PageTable { skipped: 0, pages: vec![row] }; windows],
                state_slot: row,
                is_prefill: false,
            };
            let spans = (0..rows).map(span).collect();
            let (tokens, outputs) = ((7..7 + rows).collect(), (0..rows).collect());
            let batch = Batch { tokens, spans, outputs, ..Batch::default() };
            let requests = vec![OutputRequest::Logits; rows as usize];
            let step = Step { batch: &batch, requests: &requests, steps: 1, observer: None };
            let result = model.step(step, &mut |output| {
                bits.extend(output.logits.iter().map(|x| x.to_bits()));
                std::ops::ControlFlow::Continue(())
            });
            result.unwrap_or_else(|error| panic!("{error}"));
        }
        bits
    }

    #[test]
    fn shapes_do_not_change_bits() {
        let gpu = open();
        let folder = tempfile::tempdir().expect("a folder");
        // Chunks of 32 columns and of 16.
        for model in ["llama-q4_k_m.gguf", "qwen2-q8_0.gguf"] {
            let built_in = bits(&gpu, model, None);
            for (teams, rows) in [(1, 2), (2, 8)] {
                let keys = Layout::ALL.into_iter().flat_map(|layout| TOKENS.map(|n| (layout, n)));
                let shape = |(layout, tokens)| {
                    let shape = GemvShape { teams, rows, ..gemv_shape(layout, tokens) };
                    ((layout, tokens), shape)
                };
                let shapes = Shapes(keys.map(shape).collect());
                tuning::write(&path(&gpu.gpu, folder.path()), &shapes.text());
                let found = bits(&gpu, model, Some(folder.path()));
                assert!(found == built_in, "{model}: {teams} teams, {rows} rows");
            }
        }
    }

    #[test]
    fn shapes_are_measured_once() {
        let gpu = open();
        let folder = tempfile::tempdir().expect("a folder");
        let file = path(&gpu.gpu, folder.path());
        let model = "llama-f16.gguf";
        assert!(bits(&gpu, model, Some(folder.path())) == bits(&gpu, model, None));
        let text = tuning::read(&file);
        assert!(text.contains("F16 1: teams "), "{text}");
        bits(&gpu, model, Some(folder.path()));
        let again = tuning::read(&file);
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
            "F16 0: teams 1 rows 2",
            "F16 18446744073709551615: teams 1 rows 2",
            "",
        ];
        assert_eq!(Shapes::parse(&wrong.join("\n")), Shapes::default());
    }

    #[test]
    fn a_shape_covers_all_rows_of_the_weight() {
        for layout in Layout::ALL {
            for tokens in TOKENS {
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
