//! `cargo +nightly fuzz run surgery`: see `bodkin_fuzz::surgery`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodkin_fuzz::surgery(bytes);
});
