//! `cargo +nightly fuzz run kld`: see `bodkin_fuzz::kld`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodkin_fuzz::kld(bytes);
});
