#!/usr/bin/env python3
"""How far quantised arithmetic leads from exact float32 arithmetic over the same weights: lapidary's and llama.cpp's.

    scripts/accuracy/measure.py MODEL.gguf [--text FILE --skip BYTES --take BYTES] [--positions 500] [--output accuracy]

The text is cut into chunks of 512 tokens, the first of each replaced by BOS. At positions 256 to 510 of each chunk,
until there are enough, every engine's distribution of the next token is held against that of lapidary's float32 path:
the mean of the Kullback-Leibler divergence KL(float32 || engine) in nats, and how often the most likely token is the
same. All engines see the same ids. Writes OUTPUT.md and OUTPUT.json.
"""

import argparse
import datetime
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
import environment  # noqa: E402

CHUNK = 512
FIRST = 256
BOS = 2


def default_text() -> Path:
    """The text of the stored perplexity, which comes with a crate that the project builds."""
    found = sorted(Path.home().glob(".cargo/registry/src/*/esaxx-rs-0.1.10/data/eighty.txt"))
    if not found:
        sys.exit("esaxx-rs 0.1.10 is not in ~/.cargo/registry: run `cargo fetch`, or give --text")
    return found[0]


def token_ids(o) -> list[list[int]]:
    """Chunks of ids, each with BOS first, the last one as long as it must be."""
    text = o.text.read_bytes()[o.skip :].decode(errors="replace").replace("\r\n", "\n")
    text = text.encode()[: o.take].decode(errors="ignore")
    command = [o.lapidary, "tokenize", "-m", o.model, "--json"]
    ids = json.loads(subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout)["ids"]
    chunks, left = [], o.positions
    while left > 0:
        start = len(chunks) * CHUNK
        chunk = [BOS] + ids[start + 1 : start + CHUNK]
        if len(chunk) < CHUNK:
            sys.exit(f"the text has {len(ids)} tokens, too few for {o.positions} positions")
        # The last token of a chunk has nothing to predict.
        scored = min(left, CHUNK - 1 - FIRST)
        chunks.append(chunk[: FIRST + scored])
        left -= scored
    return chunks


def read_logits(path: Path):
    """The tensor `logits` of a safetensors file, mapped."""
    import numpy

    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(length))["logits"]
    assert entry["dtype"] == "F32", entry
    offset = 8 + length + entry["data_offsets"][0]
    return numpy.memmap(path, numpy.float32, "r", offset, tuple(entry["shape"]))


def lapidary_rows(o, chunks, scratch: Path, *flags):
    """Logits of the scored positions of every chunk."""
    import numpy

    rows, out = [], scratch / "dump.safetensors"
    for ids in chunks:
        command = [o.lapidary, "dump", "-m", o.model, "--tokens", ",".join(map(str, ids)), "-o", str(out)]
        subprocess.run([*command, "-t", str(o.threads), *flags], check=True)
        rows.append(numpy.array(read_logits(out)[FIRST:]))
        out.unlink()
    return numpy.concatenate(rows)


def llama_rows(o, chunks, scratch: Path):
    import numpy

    ids, out = scratch / "ids.json", scratch / "llama.npy"
    ids.write_text(json.dumps(chunks))
    script = Path(environment.__file__).with_name("llama.py")
    command = [sys.executable, script, "logits", o.model, "--threads", o.threads, "--ids", ids, "--from", FIRST]
    subprocess.run([str(part) for part in [*command, "--output", out]], check=True, stdout=subprocess.DEVNULL)
    return numpy.load(out)


def compare(reference, rows) -> dict:
    """Mean divergence from the reference, its standard error, and agreement on the most likely token."""
    import numpy

    assert reference.shape == rows.shape, (reference.shape, rows.shape)
    divergences, agree, furthest = [], 0, 0.0
    for p, q in zip(reference, rows):
        # Finite first: whatever is compared with NaN passes.
        assert numpy.isfinite(p).all() and numpy.isfinite(q).all()
        furthest = max(furthest, float(numpy.abs(p - q).max()))
        p, q = (v.astype(numpy.float64) - v.max() for v in (p, q))
        log_p, log_q = (v - numpy.log(numpy.exp(v).sum()) for v in (p, q))
        divergences.append(float((numpy.exp(log_p) * (log_p - log_q)).sum()))
        agree += int(p.argmax() == q.argmax())
    n = len(divergences)
    return {
        "positions": n,
        "mean_kl": float(numpy.mean(divergences)),
        "standard_error": float(numpy.std(divergences) / n**0.5),
        "greatest_kl": max(divergences),
        "top1": agree / n,
        "furthest_logit": furthest,
    }


def measure(o) -> dict:
    chunks = token_ids(o)
    engines = {
        "lapidary, fast, bf16 KV": ["--dtype", "fast", "--kv", "bf16"],
        "lapidary, fast, f16 KV": ["--dtype", "fast", "--kv", "f16"],
        "lapidary, fast, q8_0 KV": ["--dtype", "fast", "--kv", "q8_0"],
    }
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        reference = lapidary_rows(o, chunks, scratch, "--dtype", "f32", "--kv", "f32")
        found = {name: compare(reference, lapidary_rows(o, chunks, scratch, *flags)) for name, flags in engines.items()}
        if not o.without_llama:
            found["llama.cpp, f16 KV"] = compare(reference, llama_rows(o, chunks, scratch))
    return found


def markdown(results) -> str:
    m = results["machine"]
    lines = [f"{results['date']}, {m['processor']}, {results['model']}, {results['positions']} positions", ""]
    lines += ["| against float32 | mean KL, nats | standard error | greatest KL | same best token | furthest logit |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for name, f in results["figures"].items():
        lines.append(
            f"| {name} | {f['mean_kl']:.6f} | {f['standard_error']:.6f} | {f['greatest_kl']:.4f} "
            f"| {100 * f['top1']:.1f} % | {f['furthest_logit']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--text", type=Path, help="the text; that of the stored perplexity without it")
    parser.add_argument("--skip", type=int, default=4163, help="bytes of it to leave out first (4163)")
    parser.add_argument("--take", type=int, default=88000, help="bytes of it to take (88000)")
    parser.add_argument("--positions", type=int, default=500, help="positions to compare (500)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without-llama", action="store_true", help="lapidary alone")
    parser.add_argument("--output", default="accuracy", help="name of the files without .md and .json (accuracy)")
    environment.add_options(parser)
    o = parser.parse_args()
    python = sys.executable if o.without_llama and environment.has(sys.executable, "numpy") else environment.interpreter(o)
    if Path(python).absolute() != Path(sys.executable).absolute():
        # Everything that follows needs numpy, which that interpreter has.
        sys.exit(subprocess.run([python, *sys.argv, "--python", python]).returncode)
    o.text = o.text or default_text()
    results = {
        "date": datetime.date.today().isoformat(),
        "machine": environment.machine(),
        "model": Path(o.model).name,
        "command": " ".join(sys.argv),
        "positions": o.positions,
        "figures": measure(o),
    }
    Path(f"{o.output}.json").write_text(json.dumps(results, indent=1) + "\n")
    Path(f"{o.output}.md").write_text(markdown(results))
    print(markdown(results), end="")


if __name__ == "__main__":
    main()
