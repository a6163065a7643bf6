#!/usr/bin/env python3
"""Runs a command and prints, as JSON, the seconds until its first output and its peak memory in MiB.

A process of its own: a child's peak counts what its parent held when it was forked, so the parent must be small.
"""
import json, os, subprocess, sys, tempfile, time

# A file takes what the command says meanwhile, so that it never waits for a reader.
with tempfile.TemporaryFile() as said:
    begin = time.perf_counter()
    child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=said)
    child.stdout.read(1)
    seconds = time.perf_counter() - begin
    child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        said.seek(0)
        sys.exit(f"{' '.join(sys.argv[1:])}\n{said.read().decode().strip()}")
print(json.dumps({"seconds": seconds, "peak_mib": used.ru_maxrss / 1024}))
