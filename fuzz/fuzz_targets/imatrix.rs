//! `cargo +nightly fuzz run imatrix`: see `bodkin_fuzz::imatrix`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodkin_fuzz::imatrix(bytes);
});
