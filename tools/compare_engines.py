"""`make engines`: both engines on the embedded model, each in processes of its own, for docs/guide/llamacpp.md.

One process a round and engine, in turns: load, a cold prompt, the same document with another question, a long reply;
then another process that finds the document on disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

TITLES = {"hf": "transformers, float32", "llamacpp": "llama.cpp, Q4_1"}
TOKENS, REPLY = 1000, 64


def main() -> None:
    """Measure and print; `--write` keeps it and rewrites the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep it in docs/numbers and write it into the guide")
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
    result = report(found)
    print(json.dumps(result, indent=1))
    if chosen.write:
        from tools import write_numbers

        write_numbers.keep(result)
        write_numbers.write_pages()


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


def report(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians, as benches print them."""
    from rekindle.machine import describe_machine

    forms = {
        f"first token of {TOKENS} new tokens": ("cold_ms", "{:,.0f} ms"),
        "the same document again": ("warm_ms", "{:,.0f} ms"),
        "in a new process, from disk": ("restarted_ms", "{:,.0f} ms"),
        "a reply": ("reply_tokens_s", "{:.0f} tokens/s"),
        "loading the model": ("load_s", "{:.1f} s"),
        "memory of the process": ("memory_mb", "{:,.0f} MB"),
        "KV of a token": ("kv_kb", "{:.0f} kB"),
    }
    middle = {
        engine: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for engine, rows in found.items()
    }
    table = [
        {"measure": what} | {TITLES[engine]: form.format(values[name]) for engine, values in middle.items()}
        for what, (name, form) in forms.items()
    ]
    return {
        "bench": "engines",
        "command": "make engines",
        "machine": describe_machine(),
        "model": "smollm2",
        "device": "cpu",
        "rounds": len(next(iter(found.values()))),
        "medians": middle,
        "table": table,
    }


if __name__ == "__main__":
    main()
