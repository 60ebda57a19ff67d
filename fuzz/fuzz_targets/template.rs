//! `cargo +nightly fuzz run template`: see `bodkin_fuzz::template`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodkin_fuzz::template(bytes);
});
