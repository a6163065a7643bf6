"""Copies goldens without the values that no test reads.

usage: python trim.py SOURCE DESTINATION      (needs the packages safetensors and numpy)

Left out: the side values of all-bf16 runs (`*logits_bf16`, `*hidden_bf16`, `*greedy_bf16`, `*tokens_bf16`),
which only sized the tolerances in README.md.
"""

import shutil
import sys
from pathlib import Path

from safetensors import safe_open
from safetensors.numpy import save_file

VARIANTS = ["dense31b", "moe26b", "e2b", "unified12b", "gemma3"]
# Only the refusal of a drafter is tested with this one.
MODEL_ONLY = ["assistant_e2b"]


def trim(source: Path, destination: Path) -> None:
    with safe_open(source, "numpy") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if not name.endswith("_bf16")}
    save_file(kept, destination)


def main() -> None:
    source, destination = Path(sys.argv[1]), Path(sys.argv[2])
    for variant in VARIANTS + MODEL_ONLY:
        out = destination / variant
        out.mkdir(parents=True, exist_ok=True)
        for name in ["config.json", "model.safetensors"]:
            shutil.copyfile(source / variant / name, out / name)
        if variant not in MODEL_ONLY:
            shutil.copyfile(source / variant / "meta.json", out / "meta.json")
            trim(source / variant / "golden.safetensors", out / "golden.safetensors")
        print(variant, sum(f.stat().st_size for f in out.iterdir()))


if __name__ == "__main__":
    main()
