//! The measured launch shapes of matmuls, and the text file that keeps them. A shape is one that
//! the host could choose itself: the file decides how fast a matmul is, but never its bits.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use crate::packed::MmaLayout;
use crate::parameters as p;

/// Matmuls of more rows have the built-in launch shape.
const MAX_ROWS: usize = 512;
/// Rows that are measured, each for those from the one before it on.
const ROWS: [usize; 16] = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, MAX_ROWS];
/// Larger files are not read.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// What decides how long a matmul without experts takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MatmulShape {
    layout: MmaLayout,
    is_gated: bool,
    /// Of the weights.
    tiles: usize,
    chunks: usize,
    slices: usize,
    /// One of [`ROWS`].
    rows: usize,
}

/// How `gemm_wgmma` is launched: input rows and split-K slices of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GemmShape {
    pub(crate) width: usize,
    pub(crate) slices: usize,
}

/// How a matmul is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaunchShape {
    Gemm(GemmShape),
    /// By `gemv_mma`, with this number of blocks for each multiprocessor.
    Gemv(usize),
}

/// Measured launch shapes. A shape may run as a GEMV where another model runs it as a GEMM.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Tuning {
    gemms: HashMap<MatmulShape, GemmShape>,
    gemvs: HashMap<MatmulShape, usize>,
}

/// The rows that are measured, of steps of at most `most`.
pub(crate) fn measured_rows(most: usize) -> impl Iterator<Item = usize> {
    ROWS.into_iter().take_while(move |&rows| rows <= most)
}

impl MatmulShape {
    /// None of matmuls that have the built-in launch shape.
    pub(crate) fn of(layout: MmaLayout, is_gated: bool, matmul: &p::Matmul) -> Option<MatmulShape> {
        let (tiles, chunks) = (matmul.tiles as usize, matmul.chunks as usize);
        let rows = ROWS.into_iter().find(|&rows| matmul.rows as usize <= rows)?;
        let slices = matmul.slices as usize;
        let has_experts = matmul.experts_used > 0;
        (!has_experts).then_some(MatmulShape { layout, is_gated, tiles, chunks, slices, rows })
    }
}

impl Tuning {
    /// Only this launch shape.
    pub(crate) fn of(shape: MatmulShape, launch: LaunchShape) -> Tuning {
        let mut tuning = Tuning::default();
        tuning.insert(shape, launch);
        tuning
    }

    pub(crate) fn insert(&mut self, shape: MatmulShape, launch: LaunchShape) {
        match launch {
            LaunchShape::Gemm(gemm) => drop(self.gemms.insert(shape, gemm)),
            LaunchShape::Gemv(blocks) => drop(self.gemvs.insert(shape, blocks)),
        }
    }

    pub(crate) fn gemm(&self, shape: &MatmulShape) -> Option<GemmShape> {
        self.gemms.get(shape).copied()
    }

    pub(crate) fn gemv(&self, shape: &MatmulShape) -> Option<usize> {
        self.gemvs.get(shape).copied()
    }

    /// Whether there is a launch shape for the kernel of this one.
    pub(crate) fn has(&self, shape: &MatmulShape, launch: LaunchShape) -> bool {
        match launch {
            LaunchShape::Gemm(_) => self.gemms.contains_key(shape),
            LaunchShape::Gemv(_) => self.gemvs.contains_key(shape),
        }
    }

    /// Reads a file. One that cannot be read, or is too large, has no launch shapes.
    pub(crate) fn read(path: &Path) -> Tuning {
        let mut text = String::new();
        let file = File::open(path).map(|file| file.take(MAX_FILE_BYTES + 1));
        match file.and_then(|mut file| file.read_to_string(&mut text)) {
            Ok(bytes) if bytes as u64 <= MAX_FILE_BYTES => Tuning::parse(&text),
            _ => Tuning::default(),
        }
    }

    /// Writes a file in one rename. Without it the next load measures again, so it may fail.
    pub(crate) fn write(&self, path: &Path) {
        let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
        let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
        let written = folder.and_then(|()| fs::write(&temporary, self.text()));
        if written.and_then(|()| fs::rename(&temporary, path)).is_err() {
            let _ = fs::remove_file(&temporary);
        }
    }

    fn text(&self) -> String {
        let gemm = |(shape, gemm): (&MatmulShape, &GemmShape)| (*shape, LaunchShape::Gemm(*gemm));
        let gemv = |(shape, blocks): (&MatmulShape, &usize)| (*shape, LaunchShape::Gemv(*blocks));
        let all = self.gemms.iter().map(gemm).chain(self.gemvs.iter().map(gemv));
        let mut lines: Vec<String> = all.map(|(shape, launch)| line(&shape, launch)).collect();
        lines.sort();
        lines.concat()
    }

    /// Lines that are not a launch shape are left out.
    fn parse(text: &str) -> Tuning {
        let mut tuning = Tuning::default();
        for (shape, launch) in text.lines().filter_map(parse_line) {
            tuning.insert(shape, launch);
        }
        tuning
    }
}

/// A launch shape as text, such as `u4 gated tiles 1792 chunks 64 slices 4 rows 32: gemm 64 2`.
fn line(shape: &MatmulShape, launch: LaunchShape) -> String {
    let MatmulShape { layout, is_gated, tiles, chunks, slices, rows } = shape;
    let (layout, gated) = (layout.name(), if *is_gated { "gated" } else { "plain" });
    let launch = match launch {
        LaunchShape::Gemm(GemmShape { width, slices }) => format!("gemm {width} {slices}"),
        LaunchShape::Gemv(blocks) => format!("gemv {blocks}"),
    };
    format!(
        "{layout} {gated} tiles {tiles} chunks {chunks} slices {slices} rows {rows}: {launch}\n"
    )
}

fn parse_line(line: &str) -> Option<(MatmulShape, LaunchShape)> {
    let (shape, launch) = line.split_once(": ")?;
    let shape: Vec<&str> = shape.split(' ').collect();
    let &[layout, gated, "tiles", tiles, "chunks", chunks, "slices", slices, "rows", rows] =
        shape.as_slice()
    else {
        return None;
    };
    let layout = MmaLayout::ALL.into_iter().find(|known| known.name() == layout)?;
    let is_gated = match gated {
        "gated" => true,
        "plain" => false,
        _ => return None,
    };
    let number = |text: &str| text.parse::<usize>().ok();
    let (tiles, chunks, slices) = (number(tiles)?, number(chunks)?, number(slices)?);
    let rows = number(rows).filter(|rows| ROWS.contains(rows))?;
    let launch = match *launch.split(' ').collect::<Vec<_>>().as_slice() {
        ["gemm", width, slices] => {
            LaunchShape::Gemm(GemmShape { width: number(width)?, slices: number(slices)? })
        }
        ["gemv", blocks] => LaunchShape::Gemv(number(blocks)?),
        _ => return None,
    };
    Some((MatmulShape { layout, is_gated, tiles, chunks, slices, rows }, launch))
}

/// The name of the file of a device, a driver and compiled kernels.
pub(crate) fn file_name(device: &str, driver: &str, kernels: u64) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let device: String = device.chars().map(plain).collect();
    format!("{device}-cuda{driver}-{kernels:016x}.txt")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matmul(rows: u32) -> p::Matmul {
        p::Matmul { tiles: 1792, chunks: 64, slices: 4, rows, ..p::Matmul::default() }
    }

    fn shape(rows: u32) -> MatmulShape {
        MatmulShape::of(MmaLayout::U4, true, &matmul(rows)).expect("few rows")
    }

    #[test]
    fn rows_share_the_launch_shape_of_the_next_measured_ones() {
        let measured = [
            (1, 1),
            (2, 2),
            (3, 4),
            (4, 4),
            (5, 8),
            (8, 8),
            (9, 16),
            (16, 16),
            (17, 32),
            (33, 48),
            (48, 48),
            (64, 64),
            (65, 96),
            (97, 128),
            (128, 128),
            (129, 192),
            (449, 512),
            (512, 512),
        ];
        for (rows, expected) in measured {
            assert_eq!(shape(rows).rows, expected, "{rows} rows");
        }
        assert_eq!(MatmulShape::of(MmaLayout::U4, true, &matmul(513)), None);
        let experts = p::Matmul { experts_used: 2, ..matmul(8) };
        assert_eq!(MatmulShape::of(MmaLayout::U4, true, &experts), None);
        assert_eq!(measured_rows(5).collect::<Vec<_>>(), [1, 2, 4]);
        assert_eq!(measured_rows(4096).last(), Some(MAX_ROWS));
    }

    #[test]
    fn files_hold_every_launch_shape() {
        let folder = std::env::temp_dir().join(format!("bodkin-tuning-{}", std::process::id()));
        let path = folder.join("tuning").join(file_name("NVIDIA H200", "12.4", 7));
        let gemm = GemmShape { width: 64, slices: 2 };
        let mut tuning = Tuning::of(shape(32), LaunchShape::Gemm(gemm));
        tuning.insert(shape(8), LaunchShape::Gemv(3));
        tuning.insert(shape(32), LaunchShape::Gemv(1));
        tuning.write(&path);
        assert_eq!(Tuning::read(&path), tuning);
        assert_eq!((tuning.gemm(&shape(20)), tuning.gemv(&shape(20))), (Some(gemm), Some(1)));
        assert!(!tuning.has(&shape(8), LaunchShape::Gemm(gemm)));
        let text = fs::read_to_string(&path).expect("written just now");
        let line = "u4 gated tiles 1792 chunks 64 slices 4 rows 32: gemm 64 2\n";
        assert!(text.starts_with(line), "{text}");
        let names: Vec<_> = fs::read_dir(path.parent().expect("a folder")).expect("it").collect();
        assert_eq!(names.len(), 1, "{names:?}");
        fs::write(&path, line.repeat(20_000)).expect("a file");
        assert_eq!(Tuning::read(&path), Tuning::default(), "too large");
        fs::remove_dir_all(&folder).expect("a folder");
        assert_eq!(Tuning::read(&path), Tuning::default());
    }

    #[test]
    fn malformed_lines_are_left_out() {
        let good = "u4 gated tiles 1792 chunks 64 slices 4 rows 8: gemv 3";
        let wrong = [
            "",
            "u4",
            "# a comment",
            "u5 gated tiles 1792 chunks 64 slices 4 rows 8: gemv 3",
            "u4 open tiles 1792 chunks 64 slices 4 rows 8: gemv 3",
            "u4 gated tiles 1792 chunks 64 slices 4 rows 9: gemv 3",
            "u4 gated tiles -1 chunks 64 slices 4 rows 8: gemv 3",
            "u4 gated tiles 99999999999999999999 chunks 64 slices 4 rows 8: gemv 3",
            "u4 gated tiles 1792 chunks 64 slices 4 rows 8: gemv",
            "u4 gated tiles 1792 chunks 64 slices 4 rows 8: gemv 3 4",
            "u4 gated tiles 1792 chunks 64 slices 4 rows 8: gemm 64",
            "u4 gated tiles 1792 chunks 64 slices 4 rows 8 gemm 64 2",
        ];
        for line in wrong {
            assert_eq!(parse_line(line), None, "{line}");
        }
        let text = format!("{}\n{good}", wrong.join("\n"));
        assert_eq!(Tuning::parse(&text), Tuning::of(shape(8), LaunchShape::Gemv(3)));
    }

    #[test]
    fn names_of_files_are_plain() {
        let name = file_name("NVIDIA A100/80GB ..\\x", "12.4", 0xab);
        assert_eq!(name, "NVIDIA-A100-80GB----x-cuda12.4-00000000000000ab.txt");
    }
}
