"""Whether the machine was quiet: fixed work that takes equally long each time, unless something else runs."""

import hashlib
import os
import time

# Work of a few tenths of a second each.
HASHED_BYTES = 1 << 20
HASHES = 300
READ_BYTES = 512 << 20
READS = 6

# A round counts as quiet below these: share of processor time that others took while this program slept, and how much
# longer the fixed work took than in the best round.
BUSY_SHARE = 0.03
SLOWER = 0.06


def busy_share(seconds: float = 1.0) -> float:
    """Share of all cores' time that was used while this program slept, the time that a host took away included."""

    def times():
        with open("/proc/stat") as stat:
            fields = [int(f) for f in stat.readline().split()[1:9]]
        idle = fields[3] + fields[4]
        return sum(fields), idle

    total, idle = times()
    time.sleep(seconds)
    total_after, idle_after = times()
    return 1 - (idle_after - idle) / max(1, total_after - total)


def sample() -> dict:
    """One look: others' share of the cores, seconds of fixed arithmetic, bytes a second of reading memory."""
    busy = busy_share()
    data = os.urandom(HASHED_BYTES)
    begin = time.perf_counter()
    for _ in range(HASHES):
        hashlib.sha256(data)
    work = time.perf_counter() - begin
    # Written, since untouched memory is one page of zeros; and without a match every byte is read.
    twos = b"\2" * READ_BYTES
    begin = time.perf_counter()
    for _ in range(READS):
        twos.find(b"\1")
    read = READS * READ_BYTES / (time.perf_counter() - begin)
    return {"busy_share": busy, "work_seconds": work, "read_bytes_per_second": read}


def judge(samples: list[dict]) -> list[bool]:
    """Whether each of a session's samples was quiet."""
    work = min(s["work_seconds"] for s in samples)
    read = max(s["read_bytes_per_second"] for s in samples)
    return [
        s["busy_share"] < BUSY_SHARE
        and s["work_seconds"] < work * (1 + SLOWER)
        and s["read_bytes_per_second"] > read / (1 + SLOWER)
        for s in samples
    ]
