"""mistral.rs through its Python package. Runs in the environment that has it, a process a measurement.

    mistral.py GGUF --threads T --prompt N --generate N [--text TEXT]

It takes text, not ids, and times both phases itself: the prompt is so many words that are about a token each, and
speeds are those of the tokens that it counted.
"""

import argparse
import json
import os
import resource
import time
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=128)
    parser.add_argument("--text", default="The capital of France is")
    o = parser.parse_args()
    # Its thread pools take these at their start.
    os.environ["RAYON_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(o.threads)
    import mistralrs

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    which = mistralrs.Which.GGUF(quantized_model_id=str(o.model.parent), quantized_filename=o.model.name)
    runner = mistralrs.Runner(which=which, token_source="none", prefix_cache_n=0)

    def complete(prompt, tokens):
        request = mistralrs.CompletionRequest(
            prompt=prompt, model="default", max_tokens=tokens, temperature=0.0, ignore_eos=True
        )
        return runner.send_completion_request(request).usage

    complete(o.text, 1)
    found = {"first token, s": time.perf_counter() - begin}
    # What the longer prompt takes comes later, so that this is comparable.
    found["peak memory, MiB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    words = " ".join((["one", "two", "three", "four", "five"] * o.prompt)[: o.prompt - 1])
    for run in range(2):
        usage = complete(words, o.generate)
    found["prompt, every layer for every token"] = usage.avg_prompt_tok_per_sec
    found["decode"] = usage.avg_compl_tok_per_sec
    print(json.dumps(found))


if __name__ == "__main__":
    main()
