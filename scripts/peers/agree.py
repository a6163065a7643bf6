#!/usr/bin/env python3
"""Whether llama.cpp reads lapidary's GGUF files as lapidary does: greedy replies and logits of both, token by token.

    scripts/peers/agree.py [MODEL.gguf ...] [--formats q8_0,q4_0,q4_k_m,bf16] [--pebbles FOLDER] [--generate 24]

Without files, the bf16 checkpoints in --pebbles (`moe` and `e`) are converted with `lapidary convert` to every format
first. The prompts are the 20 of `tests/pebble/moe/samples.json` or `e`'s, by the file's name.

llama.cpp replies greedily; lapidary is then fed the same tokens, in float32 and with quantised activations, and every
token must be its own best one too. Where it is not, both logits have to be so near that rounding explains it: llama.cpp
rounds activations, keys and values as lapidary's `fast` mode does, so the noise floor of a file is how far lapidary's
`fast` is from its float32 over the same weights. It fails if llama.cpp is further from float32 than three times that
floor (RMS over all logits), or if a token differs whose gap exceeds twice the largest difference in that row. Over plain
weights lapidary rounds no activation and llama.cpp rounds them to bf16, 1/512 at most in each of the matrices; there the
bound is a hundredth of the logits' own size.
"""

PLAIN = 0.01

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import environment

sys.path.insert(0, str(environment.PROJECT / "scripts" / "accuracy"))
import measure as accuracy  # noqa: E402

SAMPLES = environment.PROJECT / "tests" / "pebble"


def prompts(name: str) -> list[list[int]]:
    which = "moe" if "moe" in name else "e"
    return [sample["prompt_ids"] for sample in json.loads((SAMPLES / which / "samples.json").read_text())]


def llama_greedy(o, model: Path, ids, scratch: Path):
    import numpy

    (scratch / "ids.json").write_text(json.dumps(ids))
    script = Path(environment.__file__).with_name("llama.py")
    command = [sys.executable, script, "greedy", model, "--threads", o.threads, "--ids", scratch / "ids.json"]
    command += ["--generate", o.generate, "--output", scratch / "llama.npz"]
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
    found = numpy.load(scratch / "llama.npz")
    return found["tokens"], found["logits"]


def lapidary_rows(o, model: Path, ids, reply, scratch: Path, dtype: str):
    """The logits from which each of the reply's tokens would be taken."""
    import numpy

    out = scratch / "dump.safetensors"
    tokens = ",".join(map(str, [*ids, *reply[:-1]]))
    command = [o.lapidary, "dump", "-m", str(model), "--tokens", tokens, "--dtype", dtype, "-t", str(o.threads)]
    subprocess.run([*command, "-o", str(out)], check=True, capture_output=True)
    rows = numpy.array(accuracy.read_logits(out)[len(ids) - 1 :])
    out.unlink()
    return rows


def compare(o, model: Path) -> dict:
    import numpy

    given = prompts(model.name)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        tokens, theirs = llama_greedy(o, model, given, scratch)
        f32, fast = (
            numpy.stack([lapidary_rows(o, model, i, t.tolist(), scratch, d) for i, t in zip(given, tokens)])
            for d in ("f32", "fast")
        )
    # Finite first: whatever is compared with NaN passes.
    for rows in (theirs, f32, fast):
        assert numpy.isfinite(rows).all() and rows.shape == theirs.shape
    rms = lambda a, b: float(numpy.sqrt(numpy.mean((a.astype(numpy.float64) - b) ** 2)))  # noqa: E731
    best = f32.argmax(axis=-1)
    gaps = []
    for p, step in zip(*numpy.nonzero(best != tokens)):
        row, token = f32[p, step], tokens[p, step]
        allowed = 2 * float(numpy.abs(row - theirs[p, step]).max())
        gaps.append({"prompt": int(p), "step": int(step), "gap": float(row.max() - row[token]), "allowed": allowed})
    first = {g["prompt"] for g in gaps}
    distance, floor = rms(theirs, f32), rms(fast, f32)
    size = float(numpy.sqrt(numpy.mean(f32.astype(numpy.float64) ** 2)))
    bound = PLAIN * size if model.stem.split("-")[-1] in ("f32", "f16", "bf16") else 3 * floor
    good = distance <= bound and all(g["gap"] <= g["allowed"] for g in gaps)
    return {
        "prompts": len(given),
        "equal_replies": len(given) - len(first),
        "tokens": int(tokens.size),
        "equal_tokens": int((best == tokens).sum()),
        "widest_gap": max((g["gap"] for g in gaps), default=0.0),
        "llama_rms": distance,
        "floor_rms": floor,
        "logit_rms": size,
        "good": good,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, help="GGUF files; conversions of the pebbles without any")
    parser.add_argument("--formats", default="bf16,q8_0,q4_0,q4_k_m", help="what to convert to")
    parser.add_argument("--pebbles", type=Path, help="folder of the bf16 checkpoints `moe` and `e`")
    parser.add_argument("--generate", type=int, default=24, help="tokens of each reply (24)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures there")
    environment.add_options(parser)
    o = parser.parse_args()
    python = environment.interpreter(o)
    if Path(python).absolute() != Path(sys.executable).absolute():
        # Everything that follows needs numpy, which that interpreter has.
        sys.exit(subprocess.run([python, *sys.argv, "--python", python]).returncode)
    if not o.models and not o.pebbles:
        sys.exit("name GGUF files, or the folder of the checkpoints with --pebbles")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        models = o.models
        for name in [] if models else ("moe", "e"):
            for target in o.formats.split(","):
                out = Path(folder) / f"pebble-{name}-{target}.gguf"
                command = [o.lapidary, "convert", "-m", str(o.pebbles / name), target, "-o", str(out)]
                subprocess.run(command, check=True, capture_output=True)
                models = [*models, out]
        print("| file | replies equal | tokens equal | widest gap | llama.cpp to f32, RMS | floor (fast to f32) | logits, RMS | |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for model in models:
            r = results[model.name] = compare(o, model)
            print(
                f"| {model.stem} | {r['equal_replies']} of {r['prompts']} | {r['equal_tokens']} of {r['tokens']} "
                f"| {r['widest_gap']:.4f} | {r['llama_rms']:.4f} | {r['floor_rms']:.4f} | {r['logit_rms']:.2f} "
                f"| {'ok' if r['good'] else 'FAIL'} |",
                flush=True,
            )
    if o.json:
        o.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(0 if all(r["good"] for r in results.values()) else 1)


if __name__ == "__main__":
    main()
