"""Two servers behind a router from the package index: the same prefix goes to the same server, one server is killed in
the middle of streams and comes back.

The router is sglang-router, with its cache-aware policy; it is told of two lapidary processes on loopback and reads
their /health and /v1/models like those of its own engine.
"""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai

from common import CAPITAL, STORY, Server, report, until


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_router(workers, log):
    port = free_port()
    command = [
        sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", *workers, "--policy", "cache_aware",
        "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
        "--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1",
        "--cb-failure-threshold", "3", "--cb-timeout-duration-secs", "2", "--worker-startup-timeout-secs", "30",
        "--worker-startup-check-interval", "1", "--disable-retries",
        # How unequal the servers' loads may be before the prefix counts for less.
        "--balance-abs-threshold", "2", "--balance-rel-threshold", "1.1", "--cache-threshold", "0.3",
    ]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"

    def answers():
        assert process.poll() is None, "the router ended"
        try:
            return urllib.request.urlopen(url + "/health", timeout=2).status == 200
        except OSError:
            return False

    until("the router answers", answers, 60)
    return process, url


def prompt(family, turn):
    """A long beginning that a family of requests shares."""
    words = f"The {family} sat by the {family}. " * 40
    return [{"role": "user", "content": f"{words} Turn {turn}. What is the capital of Kenya?"}]


def main():
    log = open(os.environ.get("ROUTER_LOG", "/dev/null"), "wb")
    a, b = Server(), Server()
    router, url = start_router([a.url, b.url], log)
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)
    try:
        ask = lambda messages, **more: client.chat.completions.create(model="lapidary", messages=messages, temperature=0, **more)
        assert ask(CAPITAL).choices[0].message.content == "The capital of Kenya is Nairobi."

        # Cache-aware: families that arrive together are spread over both servers, and each finds its beginning where
        # it was when its later requests come one by one.
        families = ["garden", "engine", "silver", "copper", "river", "window"]
        with concurrent.futures.ThreadPoolExecutor(len(families)) as pool:
            first = lambda family: ask(prompt(family, 0), max_tokens=60, extra_body={"ignore_eos": True})
            list(pool.map(first, families))
        served = [s.metrics().get("vllm:e2e_request_latency_seconds_count{}", 0) for s in (a, b)]
        found = looked_up = 0
        for turn in range(1, 5):
            for family in families:
                usage = ask(prompt(family, turn), max_tokens=4).usage
                found += usage.prompt_tokens_details.cached_tokens
                looked_up += usage.prompt_tokens
        share = found / looked_up
        report("router: cache-aware", first_requests_by_server=served, prompt_tokens=looked_up, cached=found, share=round(share, 3))
        assert min(served) > 0, "both servers got families"
        assert share > 0.4, "requests with a common beginning meet the server that has it"

        # One server dies in the middle of streams.
        def stream(number):
            text, error = "", None
            try:
                more = {"max_tokens": 400, "extra_body": {"ignore_eos": True}, "stream": True}
                for chunk in ask([{"role": "user", "content": f"Tell me a story about Zoe number {number}."}], **more):
                    text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            except Exception as e:
                error = type(e).__name__
            return text, error

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            streams = [pool.submit(stream, n) for n in range(12)]
            until("both have streams", lambda: all(s.metrics()["lapidary_requests_running{}"] > 0 for s in (a, b)), 20)
            b.stop(signal.SIGKILL)
            killed = time.time()
            results = [s.result(timeout=60) for s in streams]
        broken = [error for _, error in results if error]
        whole = [text for text, error in results if not error]
        report("router: one killed", streams=len(results), broken=broken, whole=len(whole))
        assert broken and whole, "the streams of the killed server break, the others go on"

        # New requests succeed, at the latest when the router has noticed.
        failures = 0
        while time.time() < killed + 15:
            try:
                assert ask(CAPITAL).choices[0].message.content
                break
            except openai.OpenAIError:
                failures += 1
                time.sleep(0.2)
        recovered = time.time() - killed
        for _ in range(10):
            assert ask(CAPITAL).choices[0].message.content
        report("router: after the kill", first_success_s=round(recovered, 2), failures_before=failures)

        # It comes back on its port and gets work again.
        port = int(b.url.rsplit(":", 1)[1])
        b = Server(port=port)

        def works():
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda n: ask(prompt(f"place{n}", time.time()), max_tokens=30, extra_body={"ignore_eos": True}), range(8)))
            return b.metrics().get("lapidary_generation_tokens_total{}", 0) > 0

        back = time.time()
        until("the server that came back gets work", works, 30)
        report("router: rejoined", seconds=round(time.time() - back, 2))
    finally:
        router.terminate()
        router.wait(20)
        for server in (a, b):
            if server.process.poll() is None:
                server.stop(signal.SIGKILL)
    print("router: passed")


if __name__ == "__main__":
    main()
