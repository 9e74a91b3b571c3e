"""`make demo`: the engine as it is today, on the embedded model. Text proved equal, times side by side."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

import torch
from rich.console import Console
from rich.table import Table

from rekindle import Session
from rekindle.bench.base import machine
from rekindle.core.request import parse_prompt
from rekindle.engine.hf import HfEngine

QUESTIONS = [
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about a lighthouse.",
    "List three uses of a paper clip.",
]
NEW_TOKENS = 24


def main() -> None:
    """Run the demo."""
    console = Console(highlight=False)
    about = machine()
    console.print(f"[bold]Rekindle[/bold] on {about['processor']}, {about['cores']} cores")
    console.print("Model: SmolLM2-135M, the embedded default: it shows speed, not wisdom.\n")
    with console.status("loading the model"), Session("smollm2") as session:
        rows = measure(session)
        fresh = ask_in_a_new_process(QUESTIONS[0])
        same = fresh["text"] == session.chat(QUESTIONS[0], max_tokens=NEW_TOKENS).text
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "first token", "tokens/s", "same text"):
        table.add_column(column, justify="left" if not column else "right")
    for name, firsts, rates, equal in rows:
        table.add_row(name, f"{statistics.median(firsts) * 1e3:,.0f} ms", f"{statistics.median(rates):.1f}", equal)
    times = fresh["timings"]
    table.add_row(
        "rekindle, new process",
        f"{times['first_token_seconds'] * 1e3:,.0f} ms",
        f"{times['tokens_per_second']:.1f}",
        "1/1" if same else "0/1",
    )
    console.print(table)
    console.print(
        "\nThere is no cache yet: this is the engine that it will stand on.\n"
        "Try:     .venv/bin/rekindle chat smollm2\n"
        "         .venv/bin/rekindle bench engine --quick\n"
        "Remove:  .venv/bin/rekindle rm smollm2 minilm && make clean"
    )
    if not same or any(equal != f"{len(QUESTIONS)}/{len(QUESTIONS)}" for *_, equal in rows):
        sys.exit("The texts differ: this should never happen. Please report it.")


def measure(session: Session) -> list[tuple[str, list[float], list[float], str]]:
    """transformers' own generate and our session, in turns, on the same questions."""
    engine = session.engine
    assert isinstance(engine, HfEngine)
    session.chat(QUESTIONS[0], max_tokens=2)
    theirs: tuple[list[float], list[float]] = ([], [])
    ours: tuple[list[float], list[float]] = ([], [])
    equal = 0
    for question in QUESTIONS:
        tokens = engine.tokenizer.encode_chat(parse_prompt([{"role": "user", "content": question}]))
        expected, first, rate = generate(engine, tokens)
        theirs[0].append(first)
        theirs[1].append(rate)
        reply = session.chat(question, max_tokens=NEW_TOKENS)
        ours[0].append(reply.timings.first_token_seconds)
        ours[1].append(reply.timings.tokens_per_second or 0.0)
        equal += list(reply.tokens) == expected
    share = f"{equal}/{len(QUESTIONS)}"
    count = f"{len(QUESTIONS)}/{len(QUESTIONS)}"
    return [("transformers", *theirs, count), ("rekindle", *ours, share)]


def generate(engine: HfEngine, tokens: list[int]) -> tuple[list[int], float, float]:
    """Tokens, time to the first, and tokens a second of `model.generate`."""
    times: list[float] = []

    class Clock:
        def put(self, _: object) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            pass

    with torch.inference_mode():
        ids = torch.tensor([tokens], device=engine.model.device)
        output = engine.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            streamer=Clock(),
        )
    return output[0, len(tokens) :].tolist(), times[1] - times[0], (len(times) - 2) / (times[-1] - times[1])


def ask_in_a_new_process(question: str) -> dict[str, object]:
    """The same question to the command line, in an interpreter of its own."""
    command = [sys.executable, "-m", "rekindle", "run", "smollm2", question, "-n", str(NEW_TOKENS), "--json"]
    answer: dict[str, object] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return answer


if __name__ == "__main__":
    main()
