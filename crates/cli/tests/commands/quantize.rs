//! `quantize`: the names of its outputs, and words that are no type.

use crate::place::{Place, model, stderr};

const MODEL: &str = "llama";

#[test]
fn an_output_without_a_name_has_that_of_the_input() {
    let place = Place::new();
    place.text(&["quantize", &model(MODEL), "named.gguf", "Q8_0"]);
    let named = std::fs::read(place.path("named.gguf")).unwrap();
    for (args, output) in [
        (["tiny.gguf", "Q8_0"], "tiny-Q8_0.gguf"),
        (["tiny.F16.gguf", "--type=q8_0"], "tiny-Q8_0.gguf"),
        (["tiny-1b-f32.gguf", "q8_0"], "tiny-1b-Q8_0.gguf"),
    ] {
        std::fs::copy(model(MODEL), place.path(args[0])).unwrap();
        let said = place.run(&[&["quantize"], &args[..]].concat());
        let text = stderr(&said);
        assert!(said.status.success() && text.contains(&format!("wrote {output}\n")), "{text}");
        assert_eq!(std::fs::read(place.path(output)).unwrap(), named, "{output}");
        std::fs::remove_file(place.path(output)).unwrap();
    }
    place.text(&["quantize", "tiny.gguf", "Q8_0"]);
    let error = stderr(&place.run(&["quantize", "tiny.gguf", "Q8_0"]));
    assert!(error.contains("tiny-Q8_0.gguf exists; name an output file to replace it"), "{error}");
    // A dry run writes nothing.
    place.text(&["quantize", "tiny.gguf", "Q8_0", "--dry-run"]);
    let output = place.run(&["quantize", "tiny.gguf", "Q8_0", "--dry-run", "-t", "1000"]);
    assert!(stderr(&output).starts_with("1000 threads on "), "{}", stderr(&output));
    // Nothing is fetched for an output that exists: there is no registry here.
    std::fs::write(place.path("none-1b-Q8_0.gguf"), "as it was").unwrap();
    let error = stderr(&place.run(&["quantize", "none:1b", "Q8_0"]));
    assert!(error.starts_with("error: none-1b-Q8_0.gguf exists"), "{error}");
}

#[test]
fn a_type_with_a_wrong_letter_is_no_output_file() {
    let place = Place::new();
    let (input, expected) = (model(MODEL), "expected TYPE, such as Q4_K_M, after INPUT or OUTPUT");
    for (args, start) in [
        (&[][..], format!("{expected}; ")),
        (&["out.gguf"], format!("{expected}, found only the output `out.gguf`; ")),
        (&["Q4_K_X"], "expected one of ".to_owned()),
        (&["Q4_K_X", "--dense"], "expected one of ".to_owned()),
    ] {
        let output = place.run(&[&["quantize", &input], args].concat());
        let error = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.starts_with(&format!("error: {start}")), "{error}");
        assert_eq!(error.contains(", found `Q4_K_X`"), args.contains(&"Q4_K_X"), "{error}");
        assert!(!place.path("Q4_K_X").exists());
    }
    place.text(&["quantize", &input, "out.gguf", "--dense"]);
}
