//! `cargo +nightly fuzz run manifest`: see `bodkin_fuzz::manifest`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodkin_fuzz::manifest(bytes);
});
