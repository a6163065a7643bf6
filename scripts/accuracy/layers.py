#!/usr/bin/env python3
"""What a layer's arithmetic in bf16 costs: lapidary's fast mode on a GPU beside torch's bfloat16, both against torch's float32.

    scripts/accuracy/layers.py [--sizes 31b,26b-a4b,e2b] [--tokens 96] [--lapidary PATH] [--work FOLDER] [--device cuda]

Writes a checkpoint of each size with its published widths, a few layers, a vocabulary of 4,096 and random bf16 weights, runs
the published implementation (transformers) over it in float32 and in bfloat16 and `lapidary dump --device cuda --dtype fast`,
and prints for every layer the relative root mean square of what each leaves behind, over all tokens:

    rms(hidden - hidden_float32) / rms(hidden_float32)

The last column may be at most 1.5. Routed experts whose places in the ranking are nearly equal may be exchanged by either
rounding, so that of a size with experts the median over tokens is held. Needs torch, transformers and safetensors, and room for
float32 weights of a few layers (31b: 8 GB).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

S, F = "sliding_attention", "full_attention"
VOCAB = 4096
# Layers of both kinds, and for E2B layers that read the keys and values of others.
SIZES = {
    "31b": dict(
        hidden_size=5376, intermediate_size=21504, num_attention_heads=32, num_key_value_heads=16,
        num_global_key_value_heads=4, attention_k_eq_v=True, sliding_window=1024, layer_types=[S, S, F],
    ),
    "26b-a4b": dict(
        hidden_size=2816, intermediate_size=2112, num_attention_heads=16, num_key_value_heads=8,
        num_global_key_value_heads=2, attention_k_eq_v=True, sliding_window=1024, layer_types=[S, F],
        enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
    ),
    "e2b": dict(
        hidden_size=1536, intermediate_size=6144, num_attention_heads=8, num_key_value_heads=1,
        sliding_window=512, layer_types=[S, S, F, S, F], hidden_size_per_layer_input=256, num_kv_shared_layers=2,
        use_double_wide_mlp=True,
    ),
}  # fmt: skip


def config(size):
    text = dict(
        architectures=["Gemma4ForCausalLM"], model_type="gemma4_text", dtype="bfloat16", vocab_size=VOCAB,
        vocab_size_per_layer_input=VOCAB, head_dim=256, global_head_dim=512, rms_norm_eps=1e-6,
        final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True,
        max_position_embeddings=4096, bos_token_id=2, eos_token_id=1, pad_token_id=0, attention_bias=False,
        num_global_key_value_heads=None, attention_k_eq_v=False, enable_moe_block=False, num_experts=None,
        top_k_experts=None, moe_intermediate_size=None, hidden_size_per_layer_input=0, num_kv_shared_layers=0,
        use_double_wide_mlp=False,
        rope_parameters={
            F: {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            S: {"rope_theta": 1e4, "rope_type": "default"},
        },
    )  # fmt: skip
    text.update(SIZES[size])
    text["num_hidden_layers"] = len(text["layer_types"])
    return text


def weights(torch, model, per_layer, device):
    """Every branch of a layer adds about as much as its input has."""
    made = {}
    generator = torch.Generator(device=device).manual_seed(7)
    for name, old in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        leaf = name.split(".")[-2] if name.endswith(".weight") else name.split(".")[-1]
        normal = lambda std, mean=0.0: torch.randn(old.shape, generator=generator, device=device) * std + mean  # noqa: B023, E731
        if leaf == "layer_scalar":
            value = torch.full(old.shape, 0.75)
        elif leaf in ("q_norm", "k_norm"):
            value = normal(0.2 * old.shape[0] ** -0.5, 1.4 * old.shape[0] ** -0.5 if leaf == "q_norm" else 1.0)
        elif leaf == "per_expert_scale" or "norm" in leaf or leaf == "scale":
            value = normal(0.2, 1.0)
        elif name.endswith("router.proj.weight"):
            value = normal(1.5)
        elif leaf == "embed_tokens_per_layer":
            value = normal(per_layer**-0.5)
        else:
            value = normal(old.shape[-1] ** -0.5)
        made[name] = value.to(torch.bfloat16).contiguous().cpu()
    return made


def run(torch, path, dtype, device, ids):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").to(device).eval()
    body = next(m for m in model.modules() if hasattr(m, "layers") and hasattr(m, "embed_tokens"))
    seen = []

    def see(_module, _inputs, output):
        seen.append((output[0] if isinstance(output, tuple) else output).detach().double().reshape(len(ids), -1).cpu())

    # Both runs and lapidary scale the embeddings alike.
    body.embed_tokens.embed_scale = body.embed_tokens.embed_scale.to(torch.bfloat16).to(torch.float32)
    for layer in body.layers:
        layer.register_forward_hook(see)
    with torch.no_grad():
        model(torch.tensor([ids], device=device), use_cache=False)
    return seen


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="31b,26b-a4b,e2b")
    parser.add_argument("--tokens", type=int, default=96, help="length of the prompt (96)")
    parser.add_argument("--lapidary", default="target/release/lapidary", help="a program with CUDA")
    parser.add_argument("--work", help="folder for checkpoints; a temporary one when not given")
    parser.add_argument("--device", default="cuda", help="of torch and lapidary")
    o = parser.parse_args()

    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    ids = [2] + [5 + 7919 * i % (VOCAB - 5) for i in range(1, o.tokens)]
    worst = 0.0
    for size in o.sizes.split(","):
        with tempfile.TemporaryDirectory(dir=o.work) as folder:
            folder = Path(folder)
            text = config(size)
            (folder / "config.json").write_text(json.dumps(text))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
            made = weights(torch, model, text["hidden_size_per_layer_input"] or 1, o.device)
            save_file(made, str(folder / "model.safetensors"), metadata={"format": "pt"})
            del made, model
            exact = run(torch, folder, torch.float32, o.device, ids)
            half = run(torch, folder, torch.bfloat16, o.device, ids)
            for compute in ["f32", "fast"]:
                dump = folder / f"{compute}.safetensors"
                command = [o.lapidary, "dump", "-m", folder, "--device", o.device, "--dtype", compute, "-o", dump]
                command += ["--tokens", ",".join(map(str, ids)), "--layers", "all"]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                ours = load_file(str(dump))
                for n, expected in enumerate(exact):
                    rms = expected.pow(2).mean(1).sqrt()
                    of = lambda x: ((x - expected).pow(2).mean(1).sqrt() / rms)  # noqa: B023, E731
                    theirs, own = of(half[n]), of(ours[f"hidden.{n}"].double().reshape(expected.shape))
                    if not bool(torch.isfinite(own).all()):
                        sys.exit(f"{size} layer {n}: not finite")
                    pool = torch.median if text["enable_moe_block"] else lambda x: x.pow(2).mean().sqrt()
                    a, b = float(pool(own)), float(pool(theirs))
                    if compute == "fast":
                        worst = max(worst, a / b)
                    print(f"{size:8} layer {n} {text['layer_types'][n]:18} {compute:4} {a:.3e}  torch bf16 {b:.3e}  {a / b:.3f}", flush=True)
    print(f"worst ratio of the fast mode {worst:.3f}: {'ok' if worst <= 1.5 else 'MORE THAN 1.5'}")
    sys.exit(worst > 1.5)


if __name__ == "__main__":
    main()
