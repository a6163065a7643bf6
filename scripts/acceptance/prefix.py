"""What the next turn of a long conversation costs, and that it is answered as without anything kept.

Prints for each model how many of a second turn's tokens were computed: at most what is new, a window and a batch. The answer
is compared with that of a server that keeps nothing, and with that of a server that was started again over the same folder.

The built-in model is asked after 6,000 tokens. A file in LAPIDARY_GEMMA3_GGUF (Gemma 3 270M) is asked after 20,000.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import urllib.request

from common import report, serving

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand part "
    "place case week company system program question work number night point home"
).split()
# Rows of a batch by default.
BATCH = 512


def post(server, path, body, timeout=600):
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return json.load(reply)


def ids(server, text):
    return post(server, "/tokenize", {"prompt": text})["tokens"]


def complete(server, prompt, tokens):
    start = time.time()
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    reply = post(server, "/v1/completions", body)
    usage = reply["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    choice = reply["choices"][0]
    return {
        "text": choice["text"], "logprobs": choice["logprobs"], "prompt": usage["prompt_tokens"], "cached": cached,
        "computed": usage["prompt_tokens"] - cached, "seconds": round(time.time() - start, 2),
    }


def same(a, b, what):
    if (a["text"], a["logprobs"]) != (b["text"], b["logprobs"]):
        sys.exit(f"{what}: another answer\n{a['text']!r}\n{b['text']!r}")


def run(name, flags, history, window, answer=40):
    words = random.Random(5)
    draw = lambda count: "".join(words.choice(WORDS) + " " for _ in range(count))
    folder = tempfile.mkdtemp()
    flags = [*flags, "--log-level", "warn", "--ignore-memory"]
    stored = ["--prefix-dir", folder]
    try:
        with serving(*flags, *stored) as server:
            first = ids(server, draw(history))[:history]
            one = complete(server, first, answer)
            added = ids(server, draw(30))[1:31]
            second = [*first, *ids(server, one["text"])[1:], *added]
            two = complete(server, second, answer)
            edited = [*first[: history - 300], *ids(server, draw(60))[1:]]
            changed = complete(server, edited, answer)
            files = lambda: sum(len(f) for _, _, f in os.walk(folder))
            before = -1
            while files() != before:
                before = files()
                time.sleep(2)
            server.stop(signal.SIGKILL)
        with serving(*flags, *stored) as server:
            again = complete(server, second, answer)
        with serving(*flags, "--no-prefix-cache") as server:
            cold = complete(server, second, answer)
            cold_changed = complete(server, edited, answer)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    same(two, cold, f"{name}, second turn")
    same(again, cold, f"{name}, second turn after a restart")
    same(changed, cold_changed, f"{name}, edited")
    new = len(second) - len(first)
    most = new + window + BATCH
    report(
        name, history=one["prompt"], second_turn=two["prompt"], new=new, window=window, batch=BATCH, most=most,
        computed=two["computed"], after_restart=again["computed"], edited=changed["computed"],
        seconds={"cold": cold["seconds"], "kept": two["seconds"], "after_restart": again["seconds"]},
    )
    for what, found in (("second turn", two), ("after a restart", again)):
        if not 0 < found["computed"] <= most:
            sys.exit(f"{name}, {what}: {found['computed']} tokens were computed, at most {most} were allowed")
    if changed["computed"] > len(edited) - (history - 300) + window + BATCH:
        sys.exit(f"{name}, edited: {changed['computed']} tokens were computed")


run("built-in model, 6,000 tokens", ["--ctx", "8192"], 6000, 128)
gguf = os.environ.get("LAPIDARY_GEMMA3_GGUF")
if gguf:
    run("270M, 20,000 tokens", ["-m", gguf, "--ctx", "32768"], 20_000, 512)
else:
    print("LAPIDARY_GEMMA3_GGUF names no file: the 270M model was not asked")
