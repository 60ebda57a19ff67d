//! The measured launch shapes of matmuls, and their text in a file. A shape is one that the host
//! could choose itself: the file decides how fast a matmul is, but never its bits.

use std::collections::HashMap;

use crate::packed::MmaLayout;
use crate::parameters as p;

/// Matmuls of more rows have the built-in launch shape.
const MAX_ROWS: usize = 512;
/// Rows that are measured, each for those from the one before it on.
const ROWS: [usize; 16] = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, MAX_ROWS];

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

    pub(crate) fn text(&self) -> String {
        let gemm = |(shape, gemm): (&MatmulShape, &GemmShape)| (*shape, LaunchShape::Gemm(*gemm));
        let gemv = |(shape, blocks): (&MatmulShape, &usize)| (*shape, LaunchShape::Gemv(*blocks));
        let all = self.gemms.iter().map(gemm).chain(self.gemvs.iter().map(gemv));
        let mut lines: Vec<String> = all.map(|(shape, launch)| line(&shape, launch)).collect();
        lines.sort();
        lines.concat()
    }

    /// Lines that are not a launch shape are left out.
    pub(crate) fn parse(text: &str) -> Tuning {
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
    fn text_holds_every_launch_shape() {
        let gemm = GemmShape { width: 64, slices: 2 };
        let mut tuning = Tuning::of(shape(32), LaunchShape::Gemm(gemm));
        tuning.insert(shape(8), LaunchShape::Gemv(3));
        tuning.insert(shape(32), LaunchShape::Gemv(1));
        let text = tuning.text();
        assert!(text.starts_with("u4 gated tiles 1792 chunks 64 slices 4 rows 32: gemm 64 2\n"));
        assert_eq!(Tuning::parse(&text), tuning);
        assert_eq!((tuning.gemm(&shape(20)), tuning.gemv(&shape(20))), (Some(gemm), Some(1)));
        assert!(!tuning.has(&shape(8), LaunchShape::Gemm(gemm)));
    }

    #[test]
    fn malformed_lines_are_left_out() {
        let good = "u4 gated tiles 1792 chunks 64 slices 4 rows 8: gemv 3";
        let wrong = [
            "",
            "u4",
            "# a comment",
            "u3 gated tiles 1792 chunks 64 slices 4 rows 8: gemv 3",
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
}
