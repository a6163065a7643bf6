"""The Python environment that other engines are installed in, and where lapidary's own program is."""

import os
import platform
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]

# Built from source, so that it uses all that this processor can do, as ours does.
LLAMA_CPP = "llama-cpp-python==0.3.36"
MISTRAL_RS = "mistralrs"


def interpreter(options) -> str:
    """The interpreter that has the other engines: the given one, or that of an environment which is made if need be."""
    if options.python:
        return options.python
    folder = Path(options.venv)
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    wanted = {"numpy": ["numpy"], "llama_cpp": ["--no-binary", "llama-cpp-python", LLAMA_CPP]}
    for module, packages in wanted.items():
        if not has(python, module):
            print(f"installing {packages[-1]} into {folder}", file=sys.stderr)
            flags = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"}
            subprocess.run([str(python), "-m", "pip", "install", *packages], check=True, env=os.environ | flags)
    return str(python)


def try_mistral_rs(python: str) -> bool:
    """Installs mistral.rs where there is a build of it for this machine; building it takes longer than measuring."""
    if has(python, "mistralrs"):
        return True
    command = [python, "-m", "pip", "install", "--only-binary", ":all:", MISTRAL_RS]
    return subprocess.run(command).returncode == 0


def has(python, module: str) -> bool:
    """Whether a module can be imported."""
    found = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", found]).returncode == 0


def add_options(parser):
    """The options that say where things are."""
    parser.add_argument("--python", help="interpreter that has llama_cpp and numpy; one is set up in --venv without it")
    parser.add_argument("--venv", default=str(PROJECT / "target" / "peers-venv"), help="folder of the environment")
    parser.add_argument("--lapidary", default=str(PROJECT / "target" / "release" / "lapidary"), help="lapidary's program")


def machine() -> dict:
    """What figures belong to."""
    name = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {"processor": name, "cores": len(os.sched_getaffinity(0)), "system": platform.platform()}
