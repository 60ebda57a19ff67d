//! Commands of Ollama that are not this command line's, and what to do instead.

use clap::error::{ContextKind, ContextValue};

const COMMANDS: [(&str, &str); 5] = [
    (
        "ps",
        "`bodkin serve` lists its loaded models at /api/ps, `bodkin list` those on this machine",
    ),
    (
        "stop",
        "Ctrl-C ends `bodkin serve`; its --keep-alive, or keep_alive: 0 in a request, unloads a \
         model",
    ),
    (
        "create",
        "`bodkin run` takes a GGUF file, and as flags what a Modelfile sets, such as --system; \
         `bodkin convert` and `bodkin quantize` make GGUF files",
    ),
    ("cp", "`bodkin serve NAME=MODEL` serves a model under another name"),
    ("push", "bodkin uploads nothing; tools of a hub, such as `hf upload`, do"),
];

/// The error of an unknown command, with what to do instead if Ollama has a command of this name.
pub(crate) fn with_tip(mut error: clap::Error) -> clap::Error {
    let Some(ContextValue::String(name)) = error.get(ContextKind::InvalidSubcommand) else {
        return error;
    };
    let Some((_, tip)) = COMMANDS.iter().find(|(known, _)| known == name) else { return error };
    error.remove(ContextKind::SuggestedSubcommand);
    let tips = ContextValue::StyledStrs(vec![(*tip).into()]);
    error.insert(ContextKind::Suggested, tips);
    error
}
