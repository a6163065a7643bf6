"""Opens a trace's page in a headless browser and checks what it drew.

Usage: trace_page.py [LAPIDARY] [BROWSER]

Needs Chromium (Debian: `apt install chromium`); not part of the continuous checks for that reason.
"""
import html
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

lapidary = sys.argv[1] if len(sys.argv) > 1 else "lapidary"
browser = sys.argv[2] if len(sys.argv) > 2 else "chromium"


def check(folder: Path, prompt: str, tokens: int) -> None:
    page, log = folder / "trace.html", folder / "log"
    subprocess.run([lapidary, "run", "--raw", prompt, "-n", str(tokens), "--seed", "1", "--trace-html", page],
                   check=True, capture_output=True)
    with open(log, "w") as err:
        dom = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
                              f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000", "--dump-dom",
                              page.as_uri()], check=True, stdout=subprocess.PIPE, stderr=err, text=True).stdout
    said = [line for line in log.read_text().splitlines() if "CONSOLE" in line]
    assert not said, said
    assert 'data-ready="yes"' in dom, "the script did not come to its end"
    data = json.loads(re.search(r'id="data">(.*?)</script>', dom, re.S).group(1))
    count, layers = len(data["tokens"]), len(data["tokens"][0]["norms"])
    table = lambda name: re.search(rf'<table class="heat" id="{name}">(.*?)</table>', dom, re.S).group(1)
    rows = lambda name: table(name).count("<tr>")
    cells = lambda name: len(re.findall(r"<td[ >]", table(name)))
    assert rows("norms") == rows("lens") == rows("experts") == layers, (rows("norms"), layers)
    assert cells("norms") == cells("lens") == layers * (count + 1)
    assert cells("experts") == layers * (data["experts"] + 1)
    answer = re.search(r'<div id="answer">(.*?)</div>', dom, re.S).group(1)
    spans = re.findall(r"<span[^>]*>(.*?)</span>", answer, re.S)
    assert [html.unescape(s) for s in spans] == [data["texts"][str(t["token"])] for t in data["tokens"]]
    assert html.unescape(re.search(r'<code id="prompt">(.*?)</code>', dom, re.S).group(1)) == prompt
    # The last layer's lens names the token of each column where the answer was the likeliest.
    print(f"{prompt!r}: {count} tokens, {layers} layers, {data['experts']} experts, all drawn")


with tempfile.TemporaryDirectory() as folder:
    check(Path(folder), "Once upon a time", 24)
    check(Path(folder), "</script><b>&amp; \"quoted\"</b><!--", 7)
print("ok")
