"""Many streams at once, some of which leave, and some requests that are nonsense.

For SECONDS_OF_LOAD (60) there are STREAMS (200) clients that ask again as soon as they are answered. One in ten leaves in the
middle, three in a hundred send something malformed. Afterwards: every request had exactly one outcome, equal questions
had equal answers however busy the server was, nothing runs or waits, no page is held, and memory is what it was.
"""

import asyncio
import json
import os
import random
import signal
import time
import urllib.parse

from common import Server, report, until

SECONDS = float(os.environ.get("SECONDS_OF_LOAD", 60))
STREAMS = int(os.environ.get("STREAMS", 200))
ANIMALS = ["dog", "cat", "fox", "lion", "duck", "snail", "bear", "wolf", "frog", "goat"]
MALFORMED = [
    b"{",
    b"null",
    b'{"messages": "x"}',
    b'{"messages": [], "stream": true}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}',
    b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"99999999": 1}}',
    b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "a b"}}]}',
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
]


def body(number):
    """One of forty questions; each has one answer."""
    animal, length = ANIMALS[number % 10], 16 + 16 * (number // 10)
    messages = [{"role": "user", "content": f"Tell me a story about a {animal}."}]
    return json.dumps(
        {"messages": messages, "temperature": 0.8, "seed": number, "max_tokens": length, "ignore_eos": True, "stream": True,
         "stream_options": {"include_usage": True}}
    ).encode()


async def post(host, port, payload):
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    await writer.drain()
    status = int((await reader.readline()).split()[1])
    return reader, writer, status


class Tally:
    def __init__(self):
        self.sent = self.answered = self.left = self.refused = 0
        self.wrong = []
        self.gaps = []
        self.first = []
        self.ids = set()
        self.answers = {}


async def ask(host, port, number, leaves_after, tally):
    """One request. Returns what became of it: answered, left, refused, or what went wrong."""
    start = time.perf_counter()
    reader, writer, status = await post(host, port, body(number))
    if status == 429:
        writer.close()
        return "refused"
    if status != 200:
        return f"status {status}"
    data = bytearray()
    last = None
    read = 0
    try:
        while chunk := await reader.read(65536):
            now = time.perf_counter()
            # The chunk that opens a message has an empty content.
            if chunk.count(b'"content":"') > chunk.count(b'"content":""'):
                if last is None:
                    tally.first.append(now - start)
                else:
                    tally.gaps.append(now - last)
                last = now
            data += chunk
            read += 1
            if leaves_after is not None and read > leaves_after:
                writer.transport.abort()
                return "left"
    finally:
        writer.close()
    frames = [line[6:] for line in bytes(data).split(b"\n") if line.startswith(b"data: ")]
    if not frames or frames[-1].strip() != b"[DONE]" or frames.count(b"[DONE]") != 1:
        return "no end"
    chunks = [json.loads(f) for f in frames[:-1]]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    if len({c["id"] for c in chunks}) != 1 or chunks[0]["id"] in tally.ids:
        return "an id twice"
    tally.ids.add(chunks[0]["id"])
    if chunks[-1]["usage"]["completion_tokens"] != 16 + 16 * (number // 10):
        return "tokens missing"
    if tally.answers.setdefault(number, text) != text:
        return f"another answer to {number}"
    return "answered"


async def nonsense(host, port, random_):
    reader, writer, status = await post(host, port, random_.choice(MALFORMED))
    text = await reader.read()
    writer.close()
    return "refused" if status == 400 and b'"error"' in text else f"nonsense got {status}"


async def client(host, port, number, until_, tally):
    random_ = random.Random(number)
    while time.time() < until_:
        tally.sent += 1
        draw = random_.random()
        try:
            if draw < 0.03:
                outcome = await nonsense(host, port, random_)
            else:
                leaves = random_.randint(0, 12) if draw < 0.13 else None
                outcome = await asyncio.wait_for(ask(host, port, random_.randrange(40), leaves, tally), 120)
        except Exception as error:
            outcome = repr(error)
        if outcome in ("answered", "left", "refused"):
            setattr(tally, outcome, getattr(tally, outcome) + 1)
        else:
            tally.wrong.append(outcome)


def percentile(values, share):
    return round(sorted(values)[int(share * (len(values) - 1))] * 1e3, 2) if values else None


def engine_gap(metrics, share):
    """The least bound of the engine's own histogram that holds this share of the times between tokens, in ms."""
    name = 'vllm:inter_token_latency_seconds_bucket{le="'
    buckets = sorted((float(k[len(name):].split('"')[0].replace("+Inf", "inf")), v) for k, v in metrics.items() if k.startswith(name))
    return next(bound * 1e3 for bound, count in buckets if count >= share * buckets[-1][1])


def main():
    server = Server("--parallel", str(STREAMS), "--sequences", "16", "--log-level", "warn")
    url = urllib.parse.urlparse(server.url)

    async def run(streams, seconds, tally):
        end = time.time() + seconds
        await asyncio.gather(*(client(url.hostname, url.port, n, end, tally) for n in range(streams)))

    idle = lambda: all(server.metrics()[f"lapidary_requests_{what}{{}}"] == 0 for what in ("running", "waiting"))
    try:
        # Alone first: these are the answers that company must not change. It also fills every buffer that stays.
        alone = Tally()

        async def one_by_one():
            for number in range(40):
                assert await ask(url.hostname, url.port, number, None, alone) == "answered"

        asyncio.run(one_by_one())
        warm = Tally()
        warm.answers = alone.answers
        asyncio.run(run(STREAMS, min(5, SECONDS), warm))
        until("it is idle", idle, 20)
        memory = server.resident_bytes()

        tally = Tally()
        tally.answers = alone.answers
        start = time.time()
        asyncio.run(run(STREAMS, SECONDS, tally))
        took = time.time() - start
        until("it is idle", idle, 20)
        after = server.resident_bytes()
        metrics = server.metrics()
        live = sum(v for k, v in metrics.items() if k.startswith("lapidary_pages") and 'state="live"' in k)
        report(
            "load", streams=STREAMS, seconds=round(took, 1), sent=tally.sent, answered=tally.answered, left=tally.left,
            refused=tally.refused, wrong=tally.wrong[:5], first_token_ms={"p50": percentile(tally.first, 0.5), "p99": percentile(tally.first, 0.99)},
            inter_token_ms={"p50": percentile(tally.gaps, 0.5), "p99": percentile(tally.gaps, 0.99)},
            engine_inter_token_ms={"p50": engine_gap(metrics, 0.5), "p99": engine_gap(metrics, 0.99)},
            tokens_per_s=round(sum(16 + 16 * (n // 10) for n in range(40)) / 40 * tally.answered / took),
            memory_mib={"before": memory >> 20, "after": after >> 20}, live_pages=live,
            host_us_per_row=round(1e6 * metrics["lapidary_host_seconds_total{}"] / metrics["lapidary_rows_total{}"], 1),
        )
        assert not tally.wrong and not warm.wrong, (tally.wrong + warm.wrong)[:10]
        assert tally.sent == tally.answered + tally.left + tally.refused, "every request has one outcome"
        assert live == 0, "no page is held"
        assert after < memory * 1.1 + (32 << 20), "memory is what it was"

        # Killed without warning, it starts again and answers the same.
        server.stop(signal.SIGKILL)
        server = Server("--log-level", "warn")
        url = urllib.parse.urlparse(server.url)
        again = Tally()
        again.answers = alone.answers
        outcome = asyncio.run(ask(url.hostname, url.port, 7, None, again))
        assert outcome == "answered", outcome
        assert server.stop() == 0
    finally:
        if server.process.poll() is None:
            server.stop(signal.SIGKILL)
    print("load: passed")


if __name__ == "__main__":
    main()
