//! Run-time dispatch to the instruction set.

/// Calls a function that is generic over `Vector`, compiled for the instructions of an `Isa`.
///
/// `dispatch!(isa, name::<T>(a: A, b: B) -> R)` selects one of the copies of `name::<V, T>(a, b)`.
macro_rules! dispatch {
    ($isa:expr, $name:ident $(::<$t:ty>)?($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c,fma,avx2")]
        unsafe fn avx512($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: this function is compiled for the instructions.
            unsafe { $name::<$crate::vector::avx512::Avx512 $(, $t)?>($($arg),*) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: this function is compiled for the instructions.
            unsafe { $name::<$crate::vector::avx2::Avx2 $(, $t)?>($($arg),*) }
        }
        match $isa {
            #[cfg(target_arch = "x86_64")]
            $crate::isa::Isa::Avx512
            | $crate::isa::Isa::Avx512Bf16
            | $crate::isa::Isa::Amx
            | $crate::isa::Isa::AmxEmulated => {
                // SAFETY: an `Isa` proves its instructions.
                unsafe { avx512($($arg),*) }
            }
            // SAFETY: an `Isa` proves its instructions.
            #[cfg(target_arch = "x86_64")]
            $crate::isa::Isa::Avx2 | $crate::isa::Isa::AvxVnni => unsafe { avx2($($arg),*) },
            // SAFETY: every 64-bit Arm processor has NEON.
            #[cfg(target_arch = "aarch64")]
            $crate::isa::Isa::Neon | $crate::isa::Isa::DotProd => unsafe {
                $name::<$crate::vector::neon::Neon $(, $t)?>($($arg),*)
            },
            // SAFETY: arrays need no instructions.
            _ => unsafe { $name::<$crate::vector::portable::Portable $(, $t)?>($($arg),*) },
        }
    }};
}
pub(crate) use dispatch;
