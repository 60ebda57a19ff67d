#!/usr/bin/env python3
"""Starts `bodkin serve` with the flags of llama-server, for llama.cpp's server tests.

BODKIN is the binary and MODELS the folder with the tiny models that stand in for those of the tests' presets,
which are on a hub. Flags without a counterpart are left out: the tests that need one fail.
"""

import os
import sys
import tempfile

# The first whose word is in the name of the model that a test asks for.
STAND_INS = [("bge", "bert.gguf"), ("reranker", "bert.gguf"), ("gemma3", "gemma3.gguf"),
             ("MOE", "mixtral.gguf"), ("", "llama-spm.gguf")]

# Flags that `bodkin serve` has, too.
VALUES = {"--host", "--port", "--threads", "--api-key", "--chat-template-file", "--batch-size"}

# Flags about fields of requests, and the names of the fields.
DEFAULTS = {"--temp": "temperature", "--seed": "seed", "--n-predict": "max_tokens"}

# Flags that llama-server has and that take a value.
OTHER_VALUES = {
    "--model", "--model-url", "--model-draft", "--hf-repo", "--hf-file", "--models-dir", "--models-max",
    "--models-preset", "--cors-origins", "--ubatch-size", "--n-gpu-layers", "--pooling",
    "--alias", "--tags", "--ctx-size", "--parallel", "-ctk", "-ctv", "-fa", "--slot-save-path",
    "--grp-attn-n", "--grp-attn-w", "--lora", "--spec-type", "--spec-draft-n-max", "--spec-draft-n-min",
    "--spec-synth-len", "--spec-synth-rates", "--reasoning-format", "--reasoning", "--chat-template",
    "--mmproj-url", "--media-path", "--sleep-idle-seconds", "--cache-ram", "--tools", "--tools-runtime",
    "--mcp-servers-config", "--mcp-servers-json",
}

# Templates that llama-server knows by name.
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
              "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama3": "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
              "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant"
              "<|end_header_id|>\n\n{% endif %}",
    "command-r": "{% for m in messages %}<|START_OF_TURN_TOKEN|><|{{ 'CHATBOT' if m.role == 'assistant' else "
                 "m.role | upper }}_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>{% endfor %}"
                 "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
}


def parse(arguments):
    """The flags that are there, with their values."""
    flags = {}
    while arguments:
        flag = arguments.pop(0)
        flags[flag] = arguments.pop(0) if flag in VALUES | DEFAULTS.keys() | OTHER_VALUES else ""
    return flags


def template_file(template):
    """A file with a template that is given by its name or its text."""
    file = tempfile.NamedTemporaryFile("w", suffix=".jinja", delete=False)
    file.write(TEMPLATES.get(template, template))
    file.close()
    return file.name


def translate(flags):
    """The arguments of `bodkin serve`."""
    asked = flags.get("--model") or flags.get("--hf-repo", "") + flags.get("--hf-file", "")
    file = next(file for word, file in STAND_INS if word in asked)
    path = os.path.join(os.environ["MODELS"], file)
    arguments = [f"{flags['--alias']}={path}" if "--alias" in flags else path, "--device", "cpu"]
    for flag in VALUES & flags.keys():
        arguments += [flag, flags[flag]]
    # llama-server writes -1 for no limit of tokens.
    for flag in [flag for flag in DEFAULTS if flags.get(flag, "-1") != "-1"]:
        arguments += ["--default", f"{DEFAULTS[flag]}={flags[flag]}"]
    slots = int(flags.get("--parallel", 4))
    arguments += ["--parallel", str(slots)]
    if "--ctx-size" in flags:
        # llama-server divides its context among the slots unless they share it.
        share = 1 if "--kv-unified" in flags else slots
        arguments += ["--ctx-size", str(int(flags["--ctx-size"]) // share)]
    if "--reasoning" in flags:
        thinks = "false" if flags["--reasoning"] == "off" else "true"
        arguments += ["--default", f'chat_template_kwargs={{"enable_thinking":{thinks}}}']
    if "--chat-template" in flags:
        arguments += ["--chat-template-file", template_file(flags["--chat-template"])]
    arguments += ["--cors-origin", flags.get("--cors-origins", "*")]
    return arguments


if __name__ == "__main__":
    binary = os.environ["BODKIN"]
    os.execv(binary, [binary, "serve", *translate(parse(sys.argv[1:]))])
