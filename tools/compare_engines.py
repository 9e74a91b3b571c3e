"""`make engines`: all engines on the embedded model, each in processes of its own, for docs/guide/onnx.md.

One process a round and engine, in turns: load, a cold prompt, the same document with another question, a long reply;
then another process that finds the document on disk. Beside them, onnxruntime-genai with its own continuous decoding,
on the graphs that ONNX Runtime gets: it goes back to the end of the document, and a new process knows nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rekindle.models.onnx_folder import OnnxForm

TITLES = {
    "hf": "transformers, float32",
    "llamacpp": "llama.cpp, Q4_1",
    "onnx float32": "ONNX Runtime, float32",
    "genai float32": "onnxruntime-genai itself, float32",
    "onnx int4": "ONNX Runtime, int4",
    "genai int4": "onnxruntime-genai itself, int4",
}
FORMS: dict[str, OnnxForm] = {"float32": "onnx", "int4": "onnx-int4"}
MODEL, CONTEXT, TOKENS, REPLY = "smollm2", 2048, 1000, 64


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
    command = [sys.executable, "-m", "tools.compare_engines", "--measure", engine, folder, part]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(way: str, folder: str, part: str) -> dict[str, Any]:
    """What one process finds."""
    engine, _, dtype = way.partition(" ")
    return measure_genai(dtype, part) if engine == "genai" else measure_session(engine, dtype or "auto", folder, part)


def measure_session(engine: Any, dtype: str, folder: str, part: str) -> dict[str, Any]:
    """An engine of Rekindle, with its cache in `folder`."""
    from rekindle import Session

    started = time.perf_counter()
    with Session(MODEL, engine=engine, dtype=dtype, cache=folder, context=CONTEXT) as session:
        loaded = time.perf_counter() - started
        session.generate("Warm up.", max_tokens=2, reuse="off")
        document, question = prompt(session.engine.tokenizer.encode)
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
            "memory_mb": memory_mb(),
            "kv_kb": session.engine.layout.token_bytes / 1e3,
        }


def measure_genai(dtype: str, part: str) -> dict[str, Any]:
    """onnxruntime-genai on the graph that the engine gets, without Rekindle."""
    import numpy as np
    import onnxruntime_genai as genai

    from rekindle.engine.onnx.onnx_engine import load_tokenizer
    from rekindle.models.onnx_folder import read_onnx_model
    from rekindle.models.sources import find

    graph = find(MODEL, form=FORMS[dtype]).onnx
    assert graph is not None, f"rekindle pull {MODEL} --format {FORMS[dtype]}"
    about = read_onnx_model(graph)
    started = time.perf_counter()
    model = genai.Model(str(graph.parent))
    loaded = time.perf_counter() - started
    options = genai.GeneratorParams(model)
    options.set_search_options(max_length=CONTEXT, min_length=CONTEXT, do_sample=False)
    document, question = prompt(load_tokenizer(about.folder, about.stop_ids, about.vocabulary_size).encode)
    generator = genai.Generator(model, options)
    generator.append_tokens(np.array(question, np.int32))
    generator.generate_next_token()
    generator.rewind_to(0)

    def first_token_ms(tokens: list[int]) -> float:
        begun = time.perf_counter()
        generator.append_tokens(np.array(tokens, np.int32))
        generator.generate_next_token()
        return (time.perf_counter() - begun) * 1e3

    cold = first_token_ms(document + question)
    if part == "restarted":  # nothing is left of the other process
        return {"restarted_ms": cold}
    generator.rewind_to(len(document))
    warm = first_token_ms(question[:-1])
    begun = time.perf_counter()
    for _ in range(REPLY - 1):
        generator.generate_next_token()
    return {
        "load_s": loaded,
        "cold_ms": cold,
        "warm_ms": warm,
        "reply_tokens_s": (REPLY - 1) / (time.perf_counter() - begun),
        "memory_mb": memory_mb(),
        "kv_kb": about.layout.token_bytes / 1e3,
    }


def prompt(encode: Callable[[str], Sequence[int]]) -> tuple[list[int], list[int]]:
    """The tokens of a document and of a question about it."""
    from benchmarks.data import texts

    return (list(encode(texts(None)[0])) * 4)[:TOKENS], list(encode(" What is this about?"))


def memory_mb() -> float:
    """What this process takes."""
    import psutil

    return float(psutil.Process().memory_info().rss / 1e6)


def report(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians, as benches print them."""
    from rekindle.machine import describe_machine, usable_cores

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
        "machine": {**describe_machine(), "cores": usable_cores()},  # `taskset` can make them fewer
        "model": "smollm2",
        "device": "cpu",
        "rounds": len(next(iter(found.values()))),
        "medians": middle,
        "table": table,
    }


if __name__ == "__main__":
    main()
