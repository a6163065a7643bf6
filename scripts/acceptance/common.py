"""What the suites share: starting and stopping a server, and the questions that the built-in model was trained on."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.request

BINARY = os.environ.get("LAPIDARY", "target/release/lapidary")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "The name of the city."}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "number", "description": "The first number."},
                    "b": {"type": "number", "description": "The second number."},
                },
                "required": ["a", "b"],
            },
        },
    },
]
WEATHER = [{"role": "user", "content": "What is the weather in Oslo?"}]
CAPITAL = [{"role": "user", "content": "What is the capital of Kenya?"}]
STORY = [{"role": "user", "content": "Tell me a story about Zoe."}]
PERSON = [{"role": "user", "content": "Give JSON for a person called Ada, aged 36, living in Lima."}]
PERSON_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


class Server:
    """A running server."""

    def __init__(self, *flags, env=None, log=None, port=0):
        command = [BINARY, "serve", "--port", str(port), *flags]
        self.log = open(log, "ab") if log else subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **(env or {})}
        )
        self.url = None
        for line in self.process.stderr:
            if log:
                self.log.write(line)
            found = re.search(rb"serving .* on (https?://\S+)", line)
            if found:
                self.url = found[1].decode()
                break
        if self.url is None:
            raise RuntimeError(f"the server ended with {self.process.wait()}")
        # Its log has to go somewhere, or it blocks on a full pipe.
        self.drain = subprocess.Popen(["cat"], stdin=self.process.stderr, stdout=self.log)
        self.process.stderr.close()

    def stop(self, how=signal.SIGTERM, wait=40):
        self.process.send_signal(how)
        code = self.process.wait(wait)
        self.drain.wait(5)
        return code

    def metrics(self):
        """All samples by name and labels."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {re.sub(r'model_name="[^"]*",?', "", name): float(value) for name, value in pairs}

    def resident_bytes(self):
        with open(f"/proc/{self.process.pid}/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def serving(*flags, **more):
    server = Server(*flags, **more)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop(signal.SIGKILL)


def until(what, holds, seconds=10):
    end = time.time() + seconds
    while not holds():
        if time.time() > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.02)


def report(name, **figures):
    """A line of figures for whoever reads the run."""
    print(f"{name}: {json.dumps(figures)}", flush=True)
