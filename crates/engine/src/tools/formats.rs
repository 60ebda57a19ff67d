//! The forms of tool calls, a row for each family of chat templates. A row has what the model
//! writes, which grammars force, and what the parser goes by.

use super::bodies::{Arguments, Body, Tags};
use crate::reasoning::ReasoningMarkers;

/// How the calls of an answer are written: blocks of one or several calls.
///
/// Texts that are written may have placeholders: `{n}` is a number, `{id}` an id of nine
/// characters, `{call_id}` one behind Mistral's marker, `{json}` the content type of Harmony,
/// `{type}` the JSON type of a value, and `{any}` nothing. Whatever stands in their place is
/// skipped when calls are parsed.
#[derive(Debug, PartialEq)]
pub struct ToolFormat {
    /// Texts that the sources of such templates have, all of them.
    pub(crate) template_marks: &'static [&'static str],
    /// The text with which a block begins.
    pub(crate) start: &'static str,
    /// The text with which it ends; empty if nothing but the end of the answer does.
    pub(crate) end: &'static str,
    /// Texts with which an answer may begin a block that has no `start`.
    pub(crate) bare: &'static [&'static str],
    /// Whether the prompt ends with `start`.
    pub(crate) is_open: bool,
    /// What is written before the first call of a block and behind the last.
    pub(crate) block: [&'static str; 2],
    /// What is written before a tool's name, between it and the arguments, and behind them.
    pub(crate) call: [&'static str; 3],
    /// What is written between the calls of a block; a block has one call without it.
    pub(crate) between_calls: Option<&'static str>,
    /// What is written between blocks; an answer has one block without it.
    pub(crate) between_blocks: Option<&'static str>,
    /// What is written before an answer that is no call.
    pub(crate) answer: &'static str,
    /// How calls are parsed.
    pub(crate) body: Body,
    /// Texts around the content of an answer, which are no part of it.
    pub(crate) hidden: &'static [&'static str],
    /// The markers of reasoning where an answer may go on behind it with a call; those of the
    /// template without it.
    pub reasoning: Option<&'static ReasoningMarkers>,
}

const PLAIN: ToolFormat = ToolFormat {
    template_marks: &[],
    start: "",
    end: "",
    bare: &[],
    is_open: false,
    block: ["", ""],
    call: ["{\"name\": \"", "\", \"arguments\": ", "}"],
    between_calls: None,
    between_blocks: None,
    answer: "",
    body: Body::Objects,
    hidden: &[],
    reasoning: None,
};

type Text = &'static str;

const fn tagged(open: Text, key_end: Text, value: [Text; 2], close: Text) -> Body {
    Body::Named(Arguments::Tagged(Tags { open, key_end, value, close }))
}

const JSON: Body = Body::Named(Arguments::Json);

/// GPT-OSS, whose answer behind the reasoning begins with its channel.
const HARMONY_REASONING: ReasoningMarkers = ReasoningMarkers {
    open: "<|channel|>analysis<|message|>",
    close: "<|end|><|start|>assistant",
    answer: None,
};

/// Solar Open, likewise.
const SOLAR_REASONING: ReasoningMarkers =
    ReasoningMarkers { open: "<|think|>", close: "<|end|><|begin|>assistant", answer: None };

/// The most specific ones come first.
pub(crate) static FORMATS: &[ToolFormat] = &[
    // Hunyuan 3.
    ToolFormat {
        template_marks: &["<tool_sep", ":opensource"],
        start: "<tool_calls:opensource>",
        end: "</tool_calls:opensource>",
        block: ["<tool_calls:opensource>\n", "\n</tool_calls:opensource>"],
        call: ["<tool_call:opensource>", "<tool_sep:opensource>\n", "</tool_call:opensource>"],
        between_calls: Some("\n"),
        body: tagged(
            "<arg_key:opensource>",
            "</arg_key:opensource>\n<arg_value:opensource>",
            ["", ""],
            "</arg_value:opensource>\n",
        ),
        ..PLAIN
    },
    // GLM 4.5 and later, and models with its form.
    ToolFormat {
        template_marks: &["<arg_key>", "<tool_call>"],
        start: "<tool_call>",
        end: "</tool_call>",
        block: ["<tool_call>", "</tool_call>"],
        call: ["", "\n", ""],
        between_blocks: Some("\n"),
        body: tagged("<arg_key>", "</arg_key>\n<arg_value>", ["", ""], "</arg_value>\n"),
        ..PLAIN
    },
    // ByteDance's Seed.
    ToolFormat {
        template_marks: &["<seed:tool_call>", "<function="],
        start: "<seed:tool_call>",
        end: "</seed:tool_call>",
        block: ["<seed:tool_call>\n", "</seed:tool_call>"],
        call: ["<function=", ">\n", "</function>\n"],
        between_calls: Some(""),
        body: tagged("<parameter=", ">", ["", ""], "</parameter>\n"),
        ..PLAIN
    },
    // Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5.
    ToolFormat {
        template_marks: &["<function=", "<parameter=", "<tool_call>"],
        start: "<tool_call>",
        end: "</tool_call>",
        bare: &["<function="],
        block: ["<tool_call>\n", "</tool_call>"],
        call: ["<function=", ">\n", "</function>\n"],
        between_blocks: Some("\n"),
        body: tagged("<parameter=", ">", ["\n", "\n"], "\n</parameter>\n"),
        ..PLAIN
    },
    // Functionary 3.1.
    ToolFormat {
        template_marks: &["<function=", "</function>"],
        start: "<function=",
        end: "</function>",
        block: ["<function=", "</function>"],
        call: ["", ">", ""],
        between_blocks: Some(""),
        body: JSON,
        ..PLAIN
    },
    // Functionary 3.2.
    ToolFormat {
        template_marks: &[">>>${recipient}", "'>>>all\\n'"],
        start: ">>>",
        is_open: true,
        block: [">>>", ""],
        call: ["", "\n", ""],
        between_blocks: Some(""),
        body: JSON,
        answer: "all\n",
        hidden: &[">>>all\n"],
        ..PLAIN
    },
    // MiniCPM 5.
    ToolFormat {
        template_marks: &["<function name=", "<param name="],
        start: "<function name=\"",
        end: "</function>",
        block: ["<function name=\"", "</function>"],
        call: ["", "\">", ""],
        between_blocks: Some(""),
        body: tagged("<param name=\"", "\">", ["", ""], "</param>"),
        ..PLAIN
    },
    // MiniMax M3, whose tags have the names of arguments.
    ToolFormat {
        template_marks: &["]<]minimax[>[", "<invoke name="],
        start: "]<]minimax[>[<tool_call>",
        end: "]<]minimax[>[</tool_call>",
        block: ["]<]minimax[>[<tool_call>\n", "]<]minimax[>[</tool_call>"],
        call: ["]<]minimax[>[<invoke name=\"", "\">", "]<]minimax[>[</invoke>\n"],
        between_calls: Some(""),
        body: tagged("]<]minimax[>[<", ">", ["", ""], "]<]minimax[>[</{key}>"),
        ..PLAIN
    },
    // MiniMax M2.
    ToolFormat {
        template_marks: &["<minimax:tool_call>", "<invoke name="],
        start: "<minimax:tool_call>",
        end: "</minimax:tool_call>",
        block: ["<minimax:tool_call>\n", "</minimax:tool_call>"],
        call: ["<invoke name=\"", "\">\n", "</invoke>\n"],
        between_calls: Some(""),
        body: tagged("<parameter name=\"", "\">", ["", ""], "</parameter>\n"),
        ..PLAIN
    },
    // DeepSeek V3.2.
    ToolFormat {
        template_marks: &["｜DSML｜", "function_calls>"],
        start: "<｜DSML｜function_calls>",
        end: "</｜DSML｜function_calls>",
        block: ["<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"],
        ..DSML
    },
    // DeepSeek V4.
    ToolFormat { template_marks: &["｜DSML｜", "tool_calls>"], ..DSML },
    // Glimmer.
    ToolFormat {
        template_marks: &["<atem:function_calls>"],
        start: "<atem:function_calls>",
        end: "</atem:function_calls>",
        block: ["<atem:function_calls>\n", "</atem:function_calls>"],
        call: ["<atem:invoke name=\"", "\">\n", "</atem:invoke>\n"],
        between_calls: Some(""),
        body: tagged("<atem:parameter name=\"", "\">", ["", ""], "</atem:parameter>\n"),
        ..PLAIN
    },
    // DeepSeek R1 and V3.
    ToolFormat {
        template_marks: &["<｜tool▁sep｜>", "```json"],
        call: [
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
        ],
        between_calls: Some("\n"),
        ..DEEPSEEK
    },
    // DeepSeek V3.1.
    ToolFormat { template_marks: &["<｜tool▁sep｜>"], ..DEEPSEEK },
    // Kimi K2.
    ToolFormat {
        template_marks: &["<|tool_calls_section_begin|>"],
        start: "<|tool_calls_section_begin|>",
        end: "<|tool_calls_section_end|>",
        block: ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"],
        call: [
            "<|tool_call_begin|>functions.",
            ":{n}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ],
        between_calls: Some(""),
        body: JSON,
        ..PLAIN
    },
    // GPT-OSS. The recipient stands in the channel or before it.
    ToolFormat { template_marks: &["<|channel|>commentary", "functions."], ..HARMONY },
    // Solar Open.
    ToolFormat {
        template_marks: &["<|tool_call:begin|>"],
        start: "<|tool_calls|>",
        block: ["<|tool_calls|>", ""],
        call: [
            "<|tool_call:begin|>{id}<|tool_call:name|>",
            "<|tool_call:args|>",
            "<|tool_call:end|>",
        ],
        between_calls: Some(""),
        body: JSON,
        answer: "<|content|>",
        hidden: &["<|content|>", "<|end|>", "<|begin|>assistant"],
        reasoning: Some(&SOLAR_REASONING),
        ..PLAIN
    },
    // Kimi K3.
    ToolFormat {
        template_marks: &["<|open|>", "<|sep|>", "'call'"],
        start: "<|open|>tools<|sep|>",
        end: "<|close|>tools<|sep|>",
        block: ["<|open|>tools<|sep|>", "<|close|>tools<|sep|>"],
        call: ["<|open|>call tool=\"", "\" index=\"{n}\"<|sep|>", "<|close|>call<|sep|>"],
        between_calls: Some(""),
        body: tagged(
            "<|open|>argument key=\"",
            "\"",
            [" type=\"string\"<|sep|>", " type=\"{type}\"<|sep|>"],
            "<|close|>argument<|sep|>",
        ),
        answer: "<|open|>response<|sep|>",
        hidden: &["<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"],
        ..PLAIN
    },
    // Gemma 4.
    ToolFormat {
        template_marks: &["<|tool_call>call:"],
        start: "<|tool_call>call:",
        end: "<tool_call|>",
        block: ["<|tool_call>call:", "<tool_call|>"],
        call: ["", "", ""],
        between_blocks: Some(""),
        body: Body::Named(Arguments::Gemma),
        ..PLAIN
    },
    // Mistral, Devstral and Magistral: the newer form, with ids and without.
    ToolFormat {
        template_marks: &["[TOOL_CALLS]", "[CALL_ID]"],
        call: ["", "{call_id}[ARGS]", ""],
        ..MISTRAL
    },
    ToolFormat { template_marks: &["[TOOL_CALLS]", "[ARGS]"], ..MISTRAL },
    // Mistral's older form.
    ToolFormat {
        template_marks: &["[TOOL_CALLS]"],
        start: "[TOOL_CALLS]",
        block: ["[TOOL_CALLS][", "]"],
        call: ["{\"name\": \"", "\", \"arguments\": ", ", \"id\": \"{id}\"}"],
        between_calls: Some(", "),
        ..PLAIN
    },
    // Command R7B and Command A.
    ToolFormat {
        template_marks: &["<|START_ACTION|>"],
        start: "<|START_ACTION|>",
        end: "<|END_ACTION|>",
        block: ["<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"],
        call: ["{\"tool_call_id\": \"{n}\", \"tool_name\": \"", "\", \"parameters\": ", "}"],
        between_calls: Some(",\n    "),
        ..PLAIN
    },
    // Command R and R+.
    ToolFormat {
        template_marks: &["Action:\\n```json", "\"tool_name\""],
        start: "Action:\n```json",
        end: "```",
        block: ["Action:\n```json\n[\n", "\n]```"],
        call: ["    {\n        \"tool_name\": \"", "\",\n        \"parameters\": ", "\n    }"],
        between_calls: Some(",\n"),
        ..PLAIN
    },
    // Apertus.
    ToolFormat {
        template_marks: &["<|tools_prefix|>"],
        start: "<|tools_prefix|>",
        end: "<|tools_suffix|>",
        block: ["<|tools_prefix|>[", "]<|tools_suffix|>"],
        call: ["{\"", "\": ", "}"],
        between_calls: Some(", "),
        ..PLAIN
    },
    // Nemotron Nano 2.
    ToolFormat {
        template_marks: &["<TOOLCALL>"],
        start: "<TOOLCALL>",
        end: "</TOOLCALL>",
        block: ["<TOOLCALL>[", "]</TOOLCALL>"],
        between_calls: Some(", "),
        ..PLAIN
    },
    // LFM 2.
    ToolFormat { template_marks: &["<|tool_call_start|>"], ..PYTHONIC },
    ToolFormat { template_marks: &["List of tools: "], ..PYTHONIC },
    // GigaChat.
    ToolFormat {
        template_marks: &["<|function_call|>"],
        start: "<|function_call|>",
        block: ["<|function_call|>", ""],
        ..PLAIN
    },
    ToolFormat {
        template_marks: &["function call", "role_sep"],
        start: "function call<|role_sep|>",
        block: ["function call<|role_sep|>\n", ""],
        ..PLAIN
    },
    // FireFunction.
    ToolFormat {
        template_marks: &["functools["],
        start: "functools",
        block: ["functools[", "]"],
        between_calls: Some(", "),
        ..PLAIN
    },
    // MiniMax M1: an object on each line.
    ToolFormat {
        template_marks: &["<tool_calls>\\n{", "</tool_calls>"],
        start: "<tool_calls>",
        end: "</tool_calls>",
        block: ["<tool_calls>\n", "\n</tool_calls>"],
        between_calls: Some("\n"),
        ..PLAIN
    },
    // Apriel.
    ToolFormat {
        template_marks: &["<tool_calls>[", "</tool_calls>"],
        start: "<tool_calls>",
        end: "</tool_calls>",
        block: ["<tool_calls>[", "]</tool_calls>"],
        between_calls: Some(", "),
        ..PLAIN
    },
    // Granite 3, and Phi-4-mini, which may write an end.
    ToolFormat {
        template_marks: &["<|tool_call|>"],
        start: "<|tool_call|>",
        block: ["<|tool_call|>[", "]"],
        between_calls: Some(", "),
        hidden: &["<|/tool_call|>"],
        ..PLAIN
    },
    HERMES,
    // Llama 3.1 to 4, which may write an object without any marker.
    ToolFormat {
        template_marks: &["header", "\"parameters\": "],
        start: "<|python_tag|>",
        bare: &["{\"name\"", "{\"type\"", "{\"function\"", "{ \"name\"", "{\n"],
        call: ["{\"name\": \"", "\", \"parameters\": ", "}"],
        ..PLAIN
    },
];

const DSML: ToolFormat = ToolFormat {
    start: "<｜DSML｜tool_calls>",
    end: "</｜DSML｜tool_calls>",
    block: ["<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"],
    call: ["<｜DSML｜invoke name=\"", "\">\n", "</｜DSML｜invoke>\n"],
    between_calls: Some(""),
    body: tagged(
        "<｜DSML｜parameter name=\"",
        "\"",
        [" string=\"true\">", " string=\"false\">"],
        "</｜DSML｜parameter>\n",
    ),
    ..PLAIN
};

/// Hermes, and all who took its form: Qwen 2.5 and 3, EXAONE, ERNIE, Granite 4.
pub(crate) const HERMES: ToolFormat = ToolFormat {
    template_marks: &["<tool_call>"],
    start: "<tool_call>",
    end: "</tool_call>",
    block: ["<tool_call>\n", "\n</tool_call>"],
    between_blocks: Some("\n"),
    ..PLAIN
};

const DEEPSEEK: ToolFormat = ToolFormat {
    start: "<｜tool▁calls▁begin｜>",
    end: "<｜tool▁calls▁end｜>",
    block: ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
    call: ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"],
    between_calls: Some(""),
    body: JSON,
    ..PLAIN
};

const HARMONY: ToolFormat = ToolFormat {
    start: "to=functions.",
    block: ["<|channel|>commentary to=functions.", ""],
    call: ["", "{json}<|message|>", ""],
    answer: "<|channel|>final<|message|>",
    body: JSON,
    hidden: &[
        "<|start|>assistant",
        "<|channel|>commentary",
        "<|channel|>analysis",
        "<|channel|>final",
        "<|message|>",
        "<|end|>",
    ],
    reasoning: Some(&HARMONY_REASONING),
    ..PLAIN
};

const MISTRAL: ToolFormat = ToolFormat {
    start: "[TOOL_CALLS]",
    block: ["[TOOL_CALLS]", ""],
    call: ["", "{any}[ARGS]", ""],
    between_blocks: Some(""),
    body: JSON,
    ..PLAIN
};

const PYTHONIC: ToolFormat = ToolFormat {
    start: "<|tool_call_start|>",
    end: "<|tool_call_end|>",
    block: ["<|tool_call_start|>[", "]<|tool_call_end|>"],
    call: ["", "(", ")"],
    between_calls: Some(", "),
    body: Body::Named(Arguments::Python),
    ..PLAIN
};
