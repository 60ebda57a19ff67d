//! `cargo +nightly fuzz run convert`: see `bodkin_fuzz::convert`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodkin_fuzz::convert::parse(bytes);
});
