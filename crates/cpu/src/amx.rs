//! The tile unit of Intel's AMX, and the same operations in plain Rust for processors without it.
//!
//! There are eight tile registers of 16 rows with 64 bytes each. One instruction multiplies 16 rows
//! of 32 bfloat16 with 32 columns of 16, and adds 256 f32 sums to a third tile, in 16 cycles: 512
//! multiplications a cycle, against 128 of the int8 dot product. A second operand has pairs of
//! columns in each 32 bits: its row `k` holds columns `2k` and `2k + 1` of 16 rows of weights.
#![cfg(target_arch = "x86_64")]

/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;
/// Columns of bfloat16 in a tile.
pub(crate) const TILE_COLS: usize = 32;
/// Bytes of a row of a tile.
pub(crate) const TILE_ROW_BYTES: usize = 64;
/// Bytes of a tile.
pub(crate) const TILE_BYTES: usize = TILE_ROWS * TILE_ROW_BYTES;

/// Eight tile registers, numbered by type parameters. In memory, the rows of a tile follow each
/// other.
pub(crate) trait TileUnit {
    /// Configures the registers of this thread, until the value is dropped.
    ///
    /// # Safety
    /// The processor has the instructions, and this thread has no other value of this type.
    unsafe fn configure() -> Self;

    /// Sets a register to zero.
    fn zero<const T: usize>(&mut self);

    /// Loads a register.
    ///
    /// # Safety
    /// `at` has a tile.
    unsafe fn load<const T: usize>(&mut self, at: *const u8);

    /// Stores a register.
    ///
    /// # Safety
    /// `at` has space for a tile.
    unsafe fn store<const T: usize>(&mut self, at: *mut u8);

    /// Adds to register `SUM`, for each of its rows and columns: the sum of the products of the
    /// even columns in order, plus that of the odd columns. Denormals count as zero.
    fn add_products<const SUM: usize, const A: usize, const B: usize>(&mut self);
}

/// Whether the processor has the instructions and the system lets this process use them.
pub(crate) fn is_available() -> bool {
    use std::sync::OnceLock;
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_instructions() && system_permits())
}

fn has_instructions() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const BF16: u32 = 1 << 22;
    const TILES: u32 = 1 << 24;
    /// The system may save registers with `xsave`.
    const OSXSAVE: u32 = 1 << 27;
    /// The configuration and the data of tiles, which the system saves.
    const STATE: u32 = 3 << 17;
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    let saved: u32;
    // SAFETY: the system has enabled the instruction.
    unsafe {
        std::arch::asm!("xgetbv", in("ecx") 0, out("eax") saved, out("edx") _,
            options(nomem, nostack, preserves_flags));
    }
    __cpuid_count(7, 0).edx & (BF16 | TILES) == BF16 | TILES && saved & STATE == STATE
}

/// Asks for the permission to use tile data. Linux gives it to all threads of a process, unless a
/// thread's signal stack is too small for the registers.
#[cfg(target_os = "linux")]
fn system_permits() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const TILE_DATA: i64 = 18;
    let result: i64;
    // SAFETY: the system call changes the permission alone; it clobbers rcx and r11.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") TILE_DATA,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn system_permits() -> bool {
    false
}

/// The processor's tile unit.
pub(crate) struct Amx(());

impl Drop for Amx {
    fn drop(&mut self) {
        // SAFETY: `configure` found the instructions. Without live tiles the system has less to
        // save.
        unsafe { std::arch::asm!("tilerelease", options(nomem, nostack, preserves_flags)) }
    }
}

#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileUnit for Amx {
    #[inline(always)]
    unsafe fn configure() -> Amx {
        const EIGHT_WHOLE_TILES: Configuration = {
            let (mut row_bytes, mut rows, mut tile) = ([0; 16], [0; 16], 0);
            while tile < 8 {
                (row_bytes[tile], rows[tile]) = (TILE_ROW_BYTES as u16, TILE_ROWS as u8);
                tile += 1;
            }
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
        };
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            std::arch::asm!("ldtilecfg [{}]", in(reg) &EIGHT_WHOLE_TILES,
                options(readonly, nostack, preserves_flags));
        }
        Amx(())
    }

    #[inline(always)]
    fn zero<const T: usize>(&mut self) {
        // SAFETY: the registers are configured.
        unsafe {
            std::arch::asm!("tilezero tmm{tile}", tile = const T,
                options(nomem, nostack, preserves_flags));
        }
    }

    #[inline(always)]
    unsafe fn load<const T: usize>(&mut self, at: *const u8) {
        // SAFETY: the registers are configured, and the caller vouches for the tile.
        unsafe {
            std::arch::asm!("tileloadd tmm{tile}, [{at} + {stride}]", tile = const T,
                at = in(reg) at, stride = in(reg) TILE_ROW_BYTES,
                options(readonly, nostack, preserves_flags));
        }
    }

    #[inline(always)]
    unsafe fn store<const T: usize>(&mut self, at: *mut u8) {
        // SAFETY: the registers are configured, and the caller vouches for the tile.
        unsafe {
            std::arch::asm!("tilestored [{at} + {stride}], tmm{tile}", tile = const T,
                at = in(reg) at, stride = in(reg) TILE_ROW_BYTES,
                options(nostack, preserves_flags));
        }
    }

    #[inline(always)]
    fn add_products<const SUM: usize, const A: usize, const B: usize>(&mut self) {
        // SAFETY: the registers are configured.
        unsafe {
            std::arch::asm!("tdpbf16ps tmm{sum}, tmm{a}, tmm{b}",
                sum = const SUM, a = const A, b = const B,
                options(nomem, nostack, preserves_flags));
        }
    }
}

/// The tile unit in plain Rust. Products of bfloat16 are exact in f32 unless they are denormal, so
/// it has the bits of the processor's.
pub(crate) struct EmulatedAmx {
    tiles: [Tile; 8],
}

/// Zero instead of a denormal.
#[inline(always)]
fn flushed(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0.0 * x } else { x }
}

/// The first and the second bfloat16 of each pair of a row.
#[inline(always)]
fn halves(row: &[u32; TILE_ROWS]) -> [[f32; TILE_ROWS]; 2] {
    [
        row.map(|pair| flushed(f32::from_bits(pair << 16))),
        row.map(|pair| flushed(f32::from_bits(pair & 0xffff_0000))),
    ]
}

impl TileUnit for EmulatedAmx {
    unsafe fn configure() -> EmulatedAmx {
        EmulatedAmx { tiles: [[[0; TILE_ROWS]; TILE_ROWS]; 8] }
    }

    fn zero<const T: usize>(&mut self) {
        self.tiles[T] = [[0; TILE_ROWS]; TILE_ROWS];
    }

    unsafe fn load<const T: usize>(&mut self, at: *const u8) {
        // SAFETY: the caller vouches for the tile.
        self.tiles[T] = unsafe { at.cast::<[[u32; TILE_ROWS]; TILE_ROWS]>().read_unaligned() };
    }

    unsafe fn store<const T: usize>(&mut self, at: *mut u8) {
        // SAFETY: the caller vouches for the tile.
        unsafe { at.cast::<[[u32; TILE_ROWS]; TILE_ROWS]>().write_unaligned(self.tiles[T]) }
    }

    fn add_products<const SUM: usize, const A: usize, const B: usize>(&mut self) {
        let (a, b) = (self.tiles[A], self.tiles[B]);
        // SAFETY: `configure` found the instructions.
        unsafe { add_products(&mut self.tiles[SUM], &a, &b) }
    }
}

type Tile = [[u32; TILE_ROWS]; TILE_ROWS];

/// # Safety
/// The processor has AVX-512, which the rest of the level needs too.
#[target_feature(enable = "avx512f")]
unsafe fn add_products(sums: &mut Tile, a: &Tile, b: &Tile) {
    let weights = b.map(|row| halves(&row));
    for (a, sums) in a.iter().zip(sums) {
        let mut dots = [[0.0; TILE_ROWS]; 2];
        let x = halves(a);
        for (k, weights) in weights.iter().enumerate() {
            for half in 0..2 {
                for (dot, w) in dots[half].iter_mut().zip(weights[half]) {
                    *dot = flushed(*dot + x[half][k] * w);
                }
            }
        }
        for (i, sum) in sums.iter_mut().enumerate() {
            let dot = flushed(dots[0][i] + dots[1][i]);
            *sum = flushed(flushed(f32::from_bits(*sum)) + dot).to_bits();
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    /// Two tiles times each other, added to a third, by a unit.
    fn sums<U: TileUnit>(sums: &[f32; 256], a: &[bf16; 512], b: &[bf16; 512]) -> [f32; 256] {
        let mut out = [0.0; 256];
        // SAFETY: each array is a tile, and the caller checked the instructions.
        unsafe {
            let mut unit = U::configure();
            unit.load::<0>(sums.as_ptr().cast());
            unit.load::<4>(a.as_ptr().cast());
            unit.load::<7>(b.as_ptr().cast());
            unit.add_products::<0, 4, 7>();
            unit.store::<0>(out.as_mut_ptr().cast());
        }
        out
    }

    fn operands() -> ([f32; 256], [bf16; 512], [bf16; 512]) {
        let value = |i: usize| ((i * 7919) % 1013) as f32 / 506.5 - 1.0;
        let mut a: [bf16; 512] = std::array::from_fn(|i| bf16::from_f32(value(i)));
        let b = std::array::from_fn(|i| bf16::from_f32(value(i + 300) * 3.0));
        // A row of denormals, and one with a NaN.
        a[32..64].fill(bf16::from_bits(3));
        a[70] = bf16::NAN;
        (std::array::from_fn(|i| value(i + 77)), a, b)
    }

    #[test]
    fn the_emulated_unit_multiplies_tiles() {
        if !is_x86_feature_detected!("avx512f") {
            return;
        }
        let (start, a, b) = operands();
        let found = sums::<EmulatedAmx>(&start, &a, &b);
        for row in 0..16 {
            for col in 0..16 {
                let exact = (0..32).fold(f64::from(start[16 * row + col]), |sum, k| {
                    let w = b[32 * (k / 2) + 2 * col + k % 2].to_f64();
                    sum + if row == 1 { 0.0 } else { a[32 * row + k].to_f64() * w }
                });
                let found = found[16 * row + col];
                let is_near = (f64::from(found) - exact).abs() < 1e-5;
                assert!(if row == 2 { found.is_nan() } else { is_near }, "{row}, {col}: {found}");
            }
        }
    }

    #[test]
    fn the_processor_has_the_bits_of_the_emulated_unit() {
        if !is_available() {
            return;
        }
        let (start, a, b) = operands();
        let [found, wanted] = [sums::<Amx>(&start, &a, &b), sums::<EmulatedAmx>(&start, &a, &b)];
        for (found, wanted) in found.iter().zip(&wanted) {
            let same = found.to_bits() == wanted.to_bits();
            assert!(same || found.is_nan() && wanted.is_nan(), "{found} {wanted}");
        }
    }
}
