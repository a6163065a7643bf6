#!/usr/bin/env python3
"""Logits and hidden states of a prompt by the published implementation (transformers), in the form of `lapidary dump`.

    scripts/reference/dump.py MODEL -o OUT.safetensors (--tokens 2,9259,1902 | --text FILE [--limit N])
        [--dtype float32] [--bf16] [--layers all|0,3] [--embed-scale f32|bf16] [--no-activations]

MODEL is a folder with config.json and safetensors, plain or in a scheme that transformers reads with compressed-tensors.
Needs torch, transformers and safetensors: `pip install torch transformers safetensors compressed-tensors`.

The file, T tokens, H the hidden size, V the vocabulary:

    input_ids   [T] I64     the prompt, with BOS
    logits      [T, V] F32  after the softcap, every position
    logits_bf16 [T, V] BF16 the same of a run all in bfloat16 (--bf16): the reference's own noise
    embed       [T, H] F32  scaled embeddings
    hidden.N    [T, H] F32  output of layer N, its scalar included, before any final norm
    final_norm  [T, H] F32  after the final norm

and in its header `model`, `dtype`, `transformers`, `torch`. `lapidary eval kl --against OUT` and `lapidary verify
--against OUT` read it. The published implementation rounds the embedding scale to bfloat16 with bfloat16 weights alone;
with --dtype float32 lapidary must be told so: `--embed-scale f32`, or here --embed-scale bf16 rounds it too.
"""

import argparse
import sys
from pathlib import Path


def prompt(o) -> list[int]:
    if o.tokens:
        return [int(t) for t in o.tokens.split(",")]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(o.model) / "tokenizer.json"))
    ids = tokenizer.encode(o.text.read_text(), add_special_tokens=False).ids
    return [o.bos, *ids][: o.limit]


def load(o, dtype):
    import torch
    from transformers import AutoModelForCausalLM

    # Eager attention is the definition; the others are its approximations.
    model = AutoModelForCausalLM.from_pretrained(o.model, dtype=dtype, attn_implementation="eager").eval()
    if getattr(model.config, "quantization_config", None) is not None:
        # Some schemes are only decoded in the first pass, to the file's own type.
        with torch.no_grad():
            try:
                model(torch.tensor([[o.bos]]))
            except RuntimeError:
                pass
        torch.nn.Module.to(model, dtype)
    return model


def text_model(model):
    """The module with the layers, whatever it is wrapped in."""
    found = [m for m in model.modules() if hasattr(m, "layers") and hasattr(m, "embed_tokens")]
    if not found:
        sys.exit(f"{type(model).__name__} has no module with layers and embed_tokens")
    return found[0]


def run(model, ids, keep):
    """Logits, and what the hooks of `keep` saw, by name."""
    import torch

    body, seen, hooks = text_model(model), {}, []

    def hook(name):
        def see(_module, _inputs, output):
            value = output[0] if isinstance(output, tuple) else output
            seen[name] = value.detach().float().reshape(len(ids), -1).clone()

        return see

    if keep is not None:
        hooks.append(body.embed_tokens.register_forward_hook(hook("embed")))
        hooks.append(body.norm.register_forward_hook(hook("final_norm")))
        hooks += [body.layers[n].register_forward_hook(hook(f"hidden.{n}")) for n in keep]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].detach()
    for h in hooks:
        h.remove()
    return logits, seen


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the checkpoint")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the file to write")
    parser.add_argument("--tokens", help="token ids, separated by commas")
    parser.add_argument("--text", type=Path, help="a text, which gets one BOS")
    parser.add_argument("--limit", type=int, default=128, help="most tokens of a text (128)")
    parser.add_argument("--bos", type=int, default=2, help="id of BOS (2)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="arithmetic (float32)")
    parser.add_argument("--bf16", action="store_true", help="run it in bfloat16 too and add logits_bf16")
    parser.add_argument("--layers", default="all", help="layers whose output is written: all, or numbers")
    parser.add_argument("--embed-scale", choices=["f32", "bf16"], default="f32", help="rounding of the embedding scale (f32)")
    parser.add_argument("--no-activations", action="store_true", help="logits alone")
    o = parser.parse_args()
    if bool(o.tokens) == bool(o.text):
        parser.error("give --tokens or --text")

    import torch
    import transformers
    from safetensors.torch import save_file

    ids = prompt(o)
    model = load(o, getattr(torch, o.dtype))
    body = text_model(model)
    if o.embed_scale == "bf16" and hasattr(body.embed_tokens, "embed_scale"):
        scale = body.embed_tokens.embed_scale
        body.embed_tokens.embed_scale = scale.to(torch.bfloat16).to(scale.dtype)
    count = len(body.layers)
    layers = list(range(count)) if o.layers == "all" else [int(n) for n in o.layers.split(",")]
    logits, seen = run(model, ids, None if o.no_activations else layers)
    out = {"input_ids": torch.tensor(ids, dtype=torch.int64), "logits": logits.float().contiguous(), **seen}
    if o.bf16:
        del model
        rough, _ = run(load(o, torch.bfloat16), ids, None)
        out["logits_bf16"] = rough.to(torch.bfloat16).contiguous()
    for name, value in out.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            sys.exit(f"{name} holds values that are not finite; nothing was written")
    header = {"model": str(o.model), "dtype": o.dtype, "embed_scale": o.embed_scale}
    header |= {"transformers": transformers.__version__, "torch": torch.__version__}
    save_file(out, str(o.output), metadata=header)
    print(f"{o.output}: {len(ids)} tokens, {', '.join(sorted(out))}")


if __name__ == "__main__":
    main()
