//! `cargo +nightly fuzz run tokenizer`: see `bodkin_fuzz::tokenizer`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodkin_fuzz::tokenizer(bytes);
});
