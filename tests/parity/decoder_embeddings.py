"""Records embeddings of the tiny Qwen3 in float32 with Hugging Face's transformers.

    pip install torch transformers gguf
    python decoder_embeddings.py > embeddings/qwen3.json

For each case of models/qwen3.json: the mean of the last hidden states behind the output norm, and
the last of them, both of length 1.
"""

import json
import sys

import torch
from gguf import GGUFReader
from transformers import Qwen3Config, Qwen3Model

NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def name_of(tensor):
    parts = tensor.removesuffix(".weight").split(".")
    layer = f"layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{layer}{NAMES[parts[-1]]}.weight"


def unit(vector):
    return [float(f"{x:.9g}") for x in vector / vector.norm()]


kit = json.load(open("models/qwen3.json"))
model = Qwen3Model(Qwen3Config(**kit["hf"]["config"])).float().eval()
tensors = [t for t in GGUFReader("models/qwen3.gguf").tensors if t.name != "output.weight"]
model.load_state_dict({name_of(t.name): torch.from_numpy(t.data.copy()).float() for t in tensors})
cases = []
for case in kit["cases"]:
    with torch.no_grad():
        states = model(torch.tensor([case["tokens"]])).last_hidden_state[0]
    pooled = {"mean": unit(states.mean(0)), "last": unit(states[-1])}
    cases.append({"id": case["id"], "tokens": case["tokens"], **pooled})
json.dump({"model": "qwen3", "cases": cases}, sys.stdout)
print()
