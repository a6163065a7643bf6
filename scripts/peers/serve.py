"""Compares lapidary's server with llama.cpp's on one GGUF file, with one client: `lapidary bench serve`.

    serve.py GGUF --llama-server PATH [--threads T] [--streams 1,4,16] [--prompt-words N] [--output-tokens N] [--requests N]

Both servers get the same threads, context and number of slots, run one after the other, and are asked a first time without being
measured. Prints a table, and JSON with --json.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait(url: str, process) -> None:
    for _ in range(600):
        if process.poll() is not None:
            sys.exit(f"the server ended with {process.returncode}")
        try:
            if urllib.request.urlopen(url + "/health", timeout=1).status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit(f"{url} does not become ready")


def bench(options, url: str, streams: int, requests: int, seed: int) -> dict:
    command = [
        options.lapidary, "bench", "serve", "--url", url, "--streams", str(streams), "--requests", str(requests),
        "--prompt-words", options.prompt_words, "--output-tokens", options.output_tokens, "--seed", str(seed),
    ]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def servers(options, streams: int):
    port = free_port()
    slots = max(streams, 1)
    context = options.context
    lapidary = [
        options.lapidary, "serve", "-m", options.gguf, "--port", str(port), "-t", str(options.threads), "--ctx", str(context),
        "--sequences", str(slots), "--log-level", "warn", "--ignore-memory",
        "--max-stall-ms", str(options.max_stall_ms),
    ]
    yield "lapidary", f"http://127.0.0.1:{port}", lapidary
    port = free_port()
    llama = [
        options.llama_server, "-m", options.gguf, "--port", str(port), "--host", "127.0.0.1", "-t", str(options.threads),
        "-tb", str(options.threads), "-c", str(context * slots), "-np", str(slots), "-ctk", "f16", "-ctv", "f16", "-fa", "on",
        "--no-webui", "-ngl", "0",
    ]
    yield "llama.cpp", f"http://127.0.0.1:{port}", llama


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("gguf")
    parser.add_argument("--llama-server", required=True)
    parser.add_argument("--lapidary", default=os.environ.get("LAPIDARY", "target/release/lapidary"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--prompt-words", default="100-300")
    parser.add_argument("--output-tokens", default="64")
    parser.add_argument("--requests", type=int, default=3, help="for each stream")
    parser.add_argument("--max-stall-ms", type=int, default=200, help="of lapidary")
    parser.add_argument("--only", help="this server only")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = []
    if not options.json:
        print("| server | streams | output tokens/s | first token p50 / p99, ms | between tokens p50 / p99, ms | completed |")
        print("| --- | --- | --- | --- | --- | --- |")
    for streams in map(int, options.streams.split(",")):
        for name, url, command in servers(options, streams):
            if options.only not in (None, name):
                continue
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                wait(url, process)
                bench(options, url, streams, streams, 99)
                figures = bench(options, url, streams, streams * options.requests, 1)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(60)
            results.append({"server": name, "streams": streams, **figures})
            if not options.json:
                # As they come: a long run that is cut has told something.
                print(row(results[-1]), flush=True)
    if options.json:
        print(json.dumps(results, indent=1))


def row(r: dict) -> str:
    first, gap = r["first_token_ms"], r["inter_token_ms"]
    return (
        f"| {r['server']} | {r['streams']} | {r['output_tokens_per_s']:.1f} | {first['p50']:.0f} / {first['p99']:.0f} | "
        f"{gap['p50']:.1f} / {gap['p99']:.1f} | {r['completed']} of {r['requests']} |"
    )


if __name__ == "__main__":
    main()
