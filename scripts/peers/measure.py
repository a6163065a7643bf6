#!/usr/bin/env python3
"""Measures lapidary and other engines on the same GGUF file with the same threads, in turn, round after round.

    scripts/peers/measure.py MODEL.gguf [MODEL.gguf ...] [--threads 1,2] [--rounds 5] [--output peers]

Each round runs every engine once in a process of its own; figures are medians over the rounds with the least and the
greatest beside them. Before and after each round a fixed piece of work tells whether the machine was quiet. Writes
OUTPUT.md, a table, and OUTPUT.json, everything. With --add the rounds join those that OUTPUT.json has already, so that
they can be spread over a day; flags and engines must be the same. docs/performance.md says what each figure means.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from pathlib import Path

import environment
import quiet

HERE = Path(__file__).resolve().parent
TEXT = "The capital of France is"

# One engine's part of a round may take this long, else the engine is left out.
LONGEST_SECONDS = 900


def output_of(command) -> dict:
    """The JSON that a command prints, lapidary's whole output or another's last line."""
    command = [str(part) for part in command]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_SECONDS)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"{' '.join(command)}\ntook longer than {LONGEST_SECONDS} s") from late
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr.strip()}")
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError:
        return json.loads(done.stdout.strip().splitlines()[-1])


class Lapidary:
    name = "lapidary"

    def __init__(self, o):
        self.o = o
        self.version = subprocess.run([o.lapidary, "--version"], capture_output=True, text=True).stdout.strip()

    def bench(self, model, threads, *flags):
        command = [self.o.lapidary, "bench", "-m", model, "-t", threads, "-r", 1, "--json", *flags]
        return output_of(command)

    def measure(self, model, threads) -> dict:
        o, found = self.o, {}
        report = self.bench(model, threads, "-p", o.prompt, "-n", o.generate)
        prompt, generate = report["tests"]
        found["prompt"] = prompt["tokens_per_second"]
        found["decode"] = generate["tokens_per_second"]
        found["decode share of read bandwidth"] = generate["share_of_limit"]
        found["read bandwidth, GB/s"] = generate["limit_tokens_per_second"] * generate["bytes_per_token"] / 1e9
        (whole,) = self.bench(model, threads, "-p", o.prompt, "-n", 0, "--no-tail-skip")["tests"]
        found["prompt, every layer for every token"] = whole["tokens_per_second"]
        if o.depth:
            (deep,) = self.bench(model, threads, "-p", 0, "-n", o.generate, "-d", o.depth)["tests"]
            found[f"decode at depth {o.depth}"] = deep["tokens_per_second"]
            found[f"decode at depth {o.depth} share of read bandwidth"] = deep["share_of_limit"]
        found["first token, s"], found["peak memory, MiB"] = self.start(model, threads)
        return found

    def start(self, model, threads):
        """Seconds from the start of the process to its first output, and the most memory that it had."""
        command = [self.o.lapidary, "run", "-m", model, "-t", str(threads), "--ctx", "1024", "--raw", "--greedy"]
        command += ["-n", "1", TEXT]
        start = HERE / "start.py"
        found = subprocess.run([sys.executable, start, *command], check=True, capture_output=True, text=True)
        found = json.loads(found.stdout)
        return found["seconds"], found["peak_mib"]


class LlamaCpp:
    name = "llama.cpp"

    def __init__(self, o, python):
        self.o, self.python = o, python
        code = "import llama_cpp; print('llama-cpp-python', llama_cpp.__version__)"
        self.version = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()

    def run(self, *arguments):
        return output_of([self.python, HERE / "llama.py", *arguments])

    def measure(self, model, threads) -> dict:
        o = self.o
        rates = self.run("speed", model, "--threads", threads, "--prompt", o.prompt, "--generate", o.generate)
        (prompt,), (decode,) = rates["prompt"], rates["generate"]
        # It has no way to leave the tail out, so both of our figures stand beside this one.
        found = {"prompt": prompt, "prompt, every layer for every token": prompt, "decode": decode}
        if o.depth:
            flags = ["--prompt", 0, "--generate", o.generate, "--depth", o.depth]
            rates = self.run("speed", model, "--threads", threads, *flags)
            (found[f"decode at depth {o.depth}"],) = rates["generate"]
        started = self.run("start", model, "--threads", threads, "--text", TEXT)
        found["first token, s"] = started["seconds"]
        found["peak memory, MiB"] = started["peak_bytes"] / 2**20
        return found


class MistralRs:
    name = "mistral.rs"

    def __init__(self, o, python):
        self.o, self.python = o, python
        code = "import importlib.metadata as m; print('mistralrs', m.version('mistralrs'))"
        self.version = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()

    def measure(self, model, threads) -> dict:
        o = self.o
        command = [self.python, HERE / "mistral.py", model, "--threads", threads]
        return output_of([*command, "--prompt", o.prompt, "--generate", o.generate])


def engines(o) -> list:
    """The engines that were asked for and are there."""
    wanted = o.engines.split(",")
    list_ = [Lapidary(o)] if "lapidary" in wanted else []
    if "llama.cpp" in wanted or "mistral.rs" in wanted:
        python = environment.interpreter(o)
        if "llama.cpp" in wanted:
            list_.append(LlamaCpp(o, python))
        if "mistral.rs" in wanted:
            if environment.try_mistral_rs(python):
                list_.append(MistralRs(o, python))
            else:
                print("mistral.rs: no build for this machine, left out", file=sys.stderr)
    return list_


def rounds(o, engines_, model, threads):
    """Every engine once a round; samples of the machine around each round. Engines that fail are left out."""
    found = {engine.name: [] for engine in engines_}
    samples = [quiet.sample()]
    for number in range(o.rounds):
        for engine in [e for e in engines_ if found[e.name] is not None]:
            print(f"{model.name}, {threads} threads, round {number + 1}: {engine.name}", file=sys.stderr)
            try:
                found[engine.name].append(engine.measure(model, threads))
            except RuntimeError as error:
                print(f"{engine.name} left out: {error}", file=sys.stderr)
                found[engine.name] = None
        samples.append(quiet.sample())
    return {name: runs for name, runs in found.items() if runs}, samples


def joined(results, model, threads, found, samples) -> dict:
    """The run of this model and number of threads among the results, with these rounds added, or a run of these alone."""
    for run in results["runs"]:
        if (run["model"], run["threads"]) == (model.name, threads):
            if set(run["rounds"]) != set(found):
                sys.exit(f"{model.name}: rounds with other engines are there: {', '.join(run['rounds'])}")
            break
    else:
        run = {"model": model.name, "bytes": model.stat().st_size, "threads": threads, "sessions": []}
        run["rounds"] = {name: [] for name in found}
        results["runs"].append(run)
    for name, more in found.items():
        run["rounds"][name] += more
    run["sessions"].append(samples)
    run["figures"] = {
        name: {test: summary([r[test] for r in all_]) for test in all_[0]} for name, all_ in run["rounds"].items()
    }
    # A round counts when it was quiet before and after it.
    calm = iter(quiet.judge([sample for session in run["sessions"] for sample in session]))
    run["quiet_rounds"] = []
    for session in run["sessions"]:
        looks = [next(calm) for _ in session]
        run["quiet_rounds"] += [a and b for a, b in zip(looks, looks[1:])]
    return run


def summary(values: list[float]) -> dict:
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values), "all": values}


def cell(entry) -> str:
    if entry is None:
        return ""
    places = 3 if entry["median"] < 10 else 1
    median, least, greatest = (f"{entry[key]:.{places}f}" for key in ("median", "least", "greatest"))
    return f"{median} ({least} to {greatest})"


def markdown(results, o) -> str:
    """The tables."""
    m = results["machine"]
    lines = [
        f"{results['date']}, {m['processor']}, {m['cores']} cores; " + "; ".join(results["engines"].values()),
        "",
        f"Medians (least to greatest), tokens/s unless said; prompt {o.prompt}, decode {o.generate}.",
    ]
    for run in results["runs"]:
        quiet_rounds, all_rounds = sum(run["quiet_rounds"]), len(run["quiet_rounds"])
        names = list(run["figures"])
        lines += ["", f"{run['model']}, {run['threads']} threads; the machine was quiet in {quiet_rounds} of {all_rounds} rounds", ""]
        lines.append("| | " + " | ".join(names) + " | lapidary / llama.cpp |")
        lines.append("| --- " * (len(names) + 2) + "|")
        tests = list(dict.fromkeys(test for figures in run["figures"].values() for test in figures))
        for test in tests:
            entries = [run["figures"][name].get(test) for name in names]
            ours, theirs = (run["figures"].get(name, {}).get(test) for name in ("lapidary", "llama.cpp"))
            ratio = f"{ours['median'] / theirs['median']:.2f}" if ours and theirs else ""
            lines.append(f"| {test} | " + " | ".join(map(cell, entries)) + f" | {ratio} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--threads", default="1,2", help="thread counts, separated by commas (1,2)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, at least 5 for figures that are quoted (5)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt (512)")
    parser.add_argument("--generate", type=int, default=128, help="tokens that are decoded (128)")
    parser.add_argument("--depth", type=int, default=4096, help="tokens before the second decode test, 0 for none (4096)")
    parser.add_argument("--engines", default="lapidary,llama.cpp", help="also mistral.rs (lapidary,llama.cpp)")
    parser.add_argument("--add", action="store_true", help="add rounds to those that OUTPUT.json has")
    parser.add_argument("--output", default="peers", help="name of the files without .md and .json (peers)")
    environment.add_options(parser)
    o = parser.parse_args()
    engines_ = engines(o)
    results = {
        "date": datetime.date.today().isoformat(),
        "machine": environment.machine(),
        "engines": {engine.name: engine.version for engine in engines_},
        "flags": {name: getattr(o, name) for name in ("prompt", "generate", "depth")},
        "commands": [],
        "runs": [],
    }
    output = Path(f"{o.output}.json")
    if o.add and output.exists():
        before = json.loads(output.read_text())
        for key in ("machine", "engines", "flags"):
            if before[key] != results[key]:
                sys.exit(f"{output} has rounds with other {key}: {before[key]}, not {results[key]}")
        results = before
    results["commands"].append(" ".join(sys.argv))
    for model in o.models:
        for threads in map(int, o.threads.split(",")):
            found, samples = rounds(o, engines_, model, threads)
            joined(results, model, threads, found, samples)
            output.write_text(json.dumps(results, indent=1) + "\n")
            Path(f"{o.output}.md").write_text(markdown(results, o))
    print(markdown(results, o), end="")


if __name__ == "__main__":
    main()
