"""`make engines`: both engines on the embedded model, each in processes of its own, into docs/guide/llamacpp.md.

One process a round and engine, in turns: load, a cold prompt, the same document with another question, a long reply;
then another process that finds the document on disk.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guide" / "llamacpp.md"
TITLES = {"hf": "transformers, float32", "llamacpp": "llama.cpp, Q4_1"}
TOKENS, REPLY = 1000, 64


def main() -> None:
    """Measure, print, and write the table with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into the guide")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=3, metavar=("ENGINE", "FOLDER", "PART"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        print(json.dumps(measure(*chosen.measure)))
        return
    found: dict[str, list[dict[str, Any]]] = {engine: [] for engine in TITLES}
    for _ in range(chosen.rounds):
        for engine, rows in found.items():
            with tempfile.TemporaryDirectory() as folder:
                rows.append(run(engine, folder, "cold") | run(engine, folder, "restarted"))
    text = table(found)
    print(text)
    if chosen.write:
        page = PAGE.read_text("utf-8")
        PAGE.write_text(
            re.sub(r"(<!-- engines -->\n).*?(<!-- /engines -->)", rf"\1{text}\n\2", page, flags=re.DOTALL), "utf-8"
        )


def run(engine: str, folder: str, part: str) -> dict[str, Any]:
    """A part of a round, in a process of its own."""
    command = [sys.executable, __file__, "--measure", engine, folder, part]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(engine: Any, folder: str, part: str) -> dict[str, Any]:
    """What one process finds."""
    import psutil

    from benchmarks.data import texts
    from rekindle import Session

    started = time.perf_counter()
    with Session("smollm2", engine=engine, cache=folder, context=2048) as session:
        loaded = time.perf_counter() - started
        session.generate("Warm up.", max_tokens=2, reuse="off")
        document = (session.engine.tokenizer.encode(texts(None)[0]) * 4)[:TOKENS]
        question = session.engine.tokenizer.encode(" What is this about?")
        first = session.generate(document + question, max_tokens=1)
        session.flush()
        if part == "restarted":
            assert first.reuse.disk >= TOKENS
            return {"restarted_ms": first.timings.first_token_seconds * 1e3}
        again = session.generate(document + question[:-1], max_tokens=REPLY, min_tokens=REPLY)
        return {
            "load_s": loaded,
            "cold_ms": first.timings.first_token_seconds * 1e3,
            "warm_ms": again.timings.first_token_seconds * 1e3,
            "reply_tokens_s": again.timings.tokens_per_second,
            "memory_mb": psutil.Process().memory_info().rss / 1e6,
            "kv_kb": session.engine.layout.token_bytes / 1e3,
        }


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Medians, as Markdown."""
    from rekindle.machine import describe_machine

    here = describe_machine()
    rows = {
        f"first token of {TOKENS} new tokens": ("cold_ms", "{:,.0f} ms"),
        "the same document again": ("warm_ms", "{:,.0f} ms"),
        "in a new process, from disk": ("restarted_ms", "{:,.0f} ms"),
        "a reply": ("reply_tokens_s", "{:.0f} tokens/s"),
        "loading the model": ("load_s", "{:.1f} s"),
        "memory of the process": ("memory_mb", "{:,.0f} MB"),
        "KV of a token": ("kv_kb", "{:.0f} kB"),
    }
    lines = [
        f"Printed by `make engines`: SmolLM2-135M on {here['processor']}, {here['cores']} cores, medians of "
        f"{len(next(iter(found.values())))} rounds.",
        "",
        "| | " + " | ".join(TITLES.values()) + " |",
        "|---|" + "---:|" * len(TITLES),
    ]
    for what, (name, form) in rows.items():
        values = [form.format(statistics.median(row[name] for row in found[engine])) for engine in TITLES]
        lines.append(f"| {what} | " + " | ".join(values) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
