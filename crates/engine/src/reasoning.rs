//! The texts with which chat templates mark a model's reasoning.

/// The texts around a model's reasoning.
#[derive(Debug, PartialEq, Eq)]
pub struct ReasoningMarkers {
    /// The text before it.
    pub open: &'static str,
    /// The text behind it.
    pub close: &'static str,
    /// The text before an answer without reasoning, if there is such a marker.
    pub answer: Option<&'static str>,
}

/// The markers of families of templates.
const MARKERS: [ReasoningMarkers; 8] = [
    ReasoningMarkers { open: "<think>", close: "</think>", answer: None },
    ReasoningMarkers { open: "<seed:think>", close: "</seed:think>", answer: None },
    ReasoningMarkers { open: "<thinking>", close: "</thinking>", answer: None },
    ReasoningMarkers { open: "[THINK]", close: "[/THINK]", answer: None },
    // Cohere.
    ReasoningMarkers { open: "<|START_THINKING|>", close: "<|END_THINKING|>", answer: None },
    // Gemma 4.
    ReasoningMarkers { open: "<|channel>thought", close: "<channel|>", answer: None },
    // GPT-OSS.
    ReasoningMarkers {
        open: "<|channel|>analysis<|message|>",
        close: "<|end|><|start|>assistant<|channel|>final<|message|>",
        answer: Some("<|channel|>final<|message|>"),
    },
    // Solar Open.
    ReasoningMarkers {
        open: "<|think|>",
        close: "<|end|><|begin|>assistant<|content|>",
        answer: Some("<|content|>"),
    },
];

/// How an answer may begin with reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reasoning {
    /// What is around it.
    pub markers: &'static ReasoningMarkers,
    /// Whether the prompt ends with the first marker, as some templates write it.
    pub is_open: bool,
}

impl Reasoning {
    /// That of an answer to `prompt`, if the template's `source` marks reasoning.
    pub fn of(source: &str, prompt: &str) -> Option<Reasoning> {
        let is_marked = |markers: &&ReasoningMarkers| {
            [markers.close, markers.open].iter().any(|marker| source.contains(marker))
        };
        Some(Reasoning::marked(MARKERS.iter().find(is_marked)?, prompt))
    }

    /// That of an answer to `prompt` with these markers.
    pub fn marked(markers: &'static ReasoningMarkers, prompt: &str) -> Reasoning {
        Reasoning { markers, is_open: prompt.trim_end().ends_with(markers.open) }
    }
}
