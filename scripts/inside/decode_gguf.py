#!/usr/bin/env python3
"""Writes a Gemma 3 GGUF file's weights, decoded and rounded to bfloat16, as a safetensors checkpoint.

Where only a quantised file of a real model is at hand, its decoded weights can stand for an unquantised checkpoint: what a
conversion of them costs is measured against these very weights. Needs numpy, safetensors, ml_dtypes and gguf.

    scripts/inside/decode_gguf.py MODEL.gguf --tokenizer tokenizer.json -o FOLDER
"""

import argparse
import json
import pathlib
import shutil

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

# By the file's name of a layer's tensor; norms are stored with 1 added, in checkpoints without.
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def name_of(stored):
    if stored in WHOLE:
        return WHOLE[stored]
    block, layer, rest = stored.split(".", 2)
    kind = rest.removesuffix(".weight")
    if block != "blk" or kind not in LAYER:
        raise SystemExit(f"{stored} is no tensor of a Gemma 3 model")
    return f"model.layers.{layer}.{LAYER[kind]}.weight"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True)
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True)
    args = parser.parse_args()
    reader = gguf.GGUFReader(args.model)
    value = lambda key, default=None: reader.fields[key].contents() if key in reader.fields else default
    if value("general.architecture") != "gemma3":
        raise SystemExit(f"{args.model} is of {value('general.architecture')}, not gemma3")
    tensors = {}
    for tensor in reader.tensors:
        decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name.endswith("norm.weight"):
            decoded = decoded - 1
        # Norms stay float32: 1 was added before they were stored, and bfloat16 would round them a second time.
        keep = np.float32 if decoded.ndim == 1 else ml_dtypes.bfloat16
        tensors[name_of(tensor.name)] = np.ascontiguousarray(decoded.astype(keep))
    of = lambda key, default=None: value(f"gemma3.{key}", default)
    layers = of("block_count")
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "head_dim": of("attention.key_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "layer_types": ["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(layers)],
        "max_position_embeddings": of("context_length"),
        "num_attention_heads": of("attention.head_count"),
        "num_hidden_layers": layers,
        "num_key_value_heads": of("attention.head_count_kv"),
        "query_pre_attn_scalar": of("attention.key_length"),
        "rms_norm_eps": float(of("attention.layer_norm_rms_epsilon")),
        "rope_local_base_freq": 10000.0,
        "rope_theta": float(of("rope.freq_base")),
        "sliding_window": of("attention.sliding_window"),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
    }
    args.output.mkdir(parents=True)
    save_file(tensors, args.output / "model.safetensors", {"format": "pt"})
    (args.output / "config.json").write_text(json.dumps(config, indent=2))
    shutil.copy(args.tokenizer, args.output / "tokenizer.json")


if __name__ == "__main__":
    main()
