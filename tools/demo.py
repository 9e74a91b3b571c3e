"""`make demo`: the same questions cold and warm, across a restart, with damage and with isolation; then questions about
a small library of documents; then one prompt under several adapters. Text proved equal.

Nothing is left behind: the demo's cache is a temporary folder of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.personal import personal_sets
from rekindle import Reply, Session
from rekindle.machine import describe_machine
from rekindle.session.calibrate.prompts import sample_text

NEW_TOKENS = 16
RULES_WORDS = 260
QUESTIONS = ("Who brought the lamp?", "What is this text about?", "Name one object in it.")
ASKED = 3
ANSWER_TOKENS = 48
ADAPTERS = ("list", "json", "pirate")
LEVELS = ("exact", "quantized")
CHANGED = ("Where does it happen?", "How many people are in it?")


@dataclass
class Line:
    """One line of the table."""

    name: str
    seconds: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)

    def add(self, reply: dict[str, Any], expected: list[int]) -> None:
        """Note a reply, and whether it says what it should."""
        self.seconds.append(reply["seconds"])
        self.cached.append(reply["cached"])
        self.same.append(reply["tokens"] == expected)

    def cells(self, cold: float) -> list[str]:
        """What the table shows."""
        median = statistics.median(self.seconds)
        return [
            self.name,
            f"{median * 1e3:,.0f} ms ({min(self.seconds) * 1e3:,.0f}-{max(self.seconds) * 1e3:,.0f})",
            f"{cold / median:.1f}x",
            f"{statistics.median(self.cached):.0f}",
            f"{sum(self.same)}/{len(self.same)}",
        ]


def main() -> None:
    """Run the demo, or a part of it in a process of its own."""
    if len(sys.argv) > 1:
        part: Callable[[dict[str, Any]], list[dict[str, Any]]] = {
            "restart": restart,
            "theirs": theirs,
            "asked again": ask_again,
            "adapted again": adapted_again,
        }[sys.argv[1]]
        json.dump(part(json.load(sys.stdin)), sys.stdout)
        return
    console = Console(highlight=False)
    about = describe_machine()
    console.print(f"[bold]Rekindle[/bold] on {about['processor']}, {about['cores']} cores")
    with tempfile.TemporaryDirectory(prefix="rekindle-demo-") as folder:
        size, lines = measure(console, Path(folder) / "cache")
        summary, answers = measure_answers(console, Path(folder) / "answers")
        sizes, adapted = measure_adapters(console, Path(folder) / "adapters")
    console.print("Model: SmolLM2-135M, the embedded default. It shows speed; its answers are weak.")
    console.print(f"Prompt: {size} tokens of rules and a question; {NEW_TOKENS} tokens of reply.")
    console.print("Medians (range) of as many runs as the last column counts.\n")
    show(console, lines)
    console.print(f"\n{summary}\n")
    show(console, answers)
    console.print(f"\n{sizes}\n")
    show(console, adapted)
    console.print(
        "\nTry:     .venv/bin/rekindle chat smollm2         turns after the first start at once, also tomorrow\n"
        "         .venv/bin/rekindle ingest docs; .venv/bin/rekindle ask 'How do I limit the cache?'\n"
        "         .venv/bin/rekindle chat smollm2 --adapter pirate\n"
        "         .venv/bin/rekindle explain --last       why the last request was not faster\n"
        "         .venv/bin/rekindle bench smollm2        cold, warm and restarted, here\n"
        "Remove:  .venv/bin/rekindle cache clear; .venv/bin/rekindle rm smollm2 minilm; make clean"
    )
    if not all(all(line.same) for line in [*lines, *answers, *adapted[:2]]):  # the last may differ, and says so
        sys.exit("The texts differ: this should never happen. Please report it.")


def measure(console: Console, folder: Path) -> tuple[int, list[Line]]:
    """All lines of the table, cold first; and how long the prompts are."""
    rules = sample(RULES_WORDS)
    names = ("cold", "same process", "NEW PROCESS, from disk", "end changed", "second turn",
             "one byte flipped on disk", "other cache_salt", "transformers, restarted")  # fmt: skip
    cold, again, new, changed, turn, flipped, salted, alone = lines = [Line(name) for name in names]
    prompts = [chat(rules, question) for question in QUESTIONS]
    with console.status("loading the model") as status, Session("smollm2", cache=str(folder)) as session:
        session.generate("Hello", max_tokens=2, reuse="off")
        status.update("cold and warm")
        expected = []
        for number, prompt in enumerate(prompts):
            # Each first one is a prompt whose rules nobody has seen: its own salt keeps it from finding the others'.
            reply = ask(session, prompt, cache_salt=f"{number}")
            expected.append(reply["tokens"])
            cold.add(reply, reply["tokens"])
            again.add(ask(session, prompt, cache_salt=f"{number}"), expected[-1])
        for question in CHANGED:
            prompt = chat(rules, question)
            right = ask(session, prompt, reuse="off")["tokens"]
            changed.add(ask(session, prompt, cache_salt="0"), right)
        for number in range(2):
            prompt = [*prompts[number], {"role": "assistant", "content": decode(session, expected[number])},
                      {"role": "user", "content": "Tell me more."}]  # fmt: skip
            right = ask(session, prompt, reuse="off")["tokens"]
            turn.add(ask(session, prompt, cache_salt=f"{number}"), right)
        salted.add(ask(session, prompts[0], cache_salt="somebody else"), expected[0])
        size = session.chat(prompts[0], max_tokens=0, reuse="off").usage.prompt_tokens
    with console.status("a new process"):
        task = {"folder": str(folder), "prompts": prompts}
        *replies, damaged = run_part("restart", task)
        for reply, right in zip(replies, expected, strict=True):
            new.add(reply, right)
        flipped.add(damaged, expected[0])
    with console.status("transformers alone, in a new process"):
        for reply, right in zip(run_part("theirs", {"prompts": prompts[:2]}), expected, strict=False):
            alone.add(reply, right)
    return size, lines


def measure_answers(console: Console, folder: Path) -> tuple[str, list[Line]]:
    """Ingest documents and ask about them: what happened in words, and the lines of a table, cold first."""
    person = personal_sets(None)[0].people[0]
    asked = [question.text for question in person.questions[:ASKED]]
    names = ("question, cold", "asked again", "NEW PROCESS, from disk")
    cold, again, new = lines = [Line(name) for name in names]
    with console.status("ingesting documents") as status, Session("smollm2", cache=str(folder)) as session:
        session.knowledge.embedder()
        done = session.ingest(documents=person.documents)
        status.update("asking")
        expected = []
        for question in asked:
            right = answer(session, question, reuse="off")
            expected.append(right["tokens"])
            cold.add(answer(session, question), right["tokens"])
            again.add(answer(session, question), right["tokens"])
        shown = session.ask(asked[0], max_tokens=1)
        status.update("asking again, with the earlier answers as drafts")
        checked = check_again(session, asked)
    with console.status("a new process"):
        for reply, tokens in zip(
            run_part("asked again", {"folder": str(folder), "asked": asked}), expected, strict=True
        ):
            new.add(reply, tokens)
    source = shown.sources[0]
    summary = (
        f"[bold]Documents[/bold]: {done.added} ingested, {done.passages} passages, {done.seconds:.1f} s. "
        f"Each question quotes five, found in {shown.retrieve_seconds * 1e3:.0f} ms.\n"
        f"  {asked[0]}\n  \\[1] {source.title}: {' '.join(source.text.split())[:200]} ...\n{checked}"
    )
    return summary, lines


def measure_adapters(console: Console, folder: Path) -> tuple[str, list[Line]]:
    """One prompt under the model and three adapters: what is kept of it, in words, and the lines of a table."""
    cold, exact, near = lines = [Line(name) for name in ("adapter, cold", "NEW PROCESS, exact", "NEW PROCESS, near")]
    prompt = chat(sample(RULES_WORDS), QUESTIONS[1])
    raw, taken = 0, []
    expected: dict[str, list[int]] = {}
    for level in LEVELS:
        with console.status(f"one prompt, four models: {level}"):
            with Session("smollm2", cache=str(folder / level), reuse=level) as session:
                session.generate("Hello", max_tokens=2, reuse="off")
                ask(session, prompt)  # the model alone: what the adapters' KV is a difference from
                for name in ADAPTERS:
                    reply = ask(session, prompt, adapter=name)
                    expected.setdefault(name, reply["tokens"])
                    cold.add(reply, expected[name])
                session.flush()
                assert session.cache.store is not None
                rows = session.cache.store.disk.entries()
                raw = sum(row.tokens for row in rows) * session.engine.layout.token_bytes
                taken.append(sum(row.size_bytes for row in rows))
            for name, reply in zip(ADAPTERS, run_part("adapted again", _adapted(folder, level, prompt)), strict=True):
                (exact if level == "exact" else near).add(reply, expected[name])
    summary = (
        f"[bold]Adapters[/bold]: the KV of one prompt under the model and {len(ADAPTERS)} adapters takes "
        f"{raw / 1e6:.0f} MB raw, {taken[0] / 1e6:.0f} MB\nas kept without loss, {taken[1] / 1e6:.1f} MB under "
        "reuse='quantized',\nwhere the numbers are nearly the same, and a text may take another turn."
    )
    return summary, lines


def _adapted(folder: Path, level: str, prompt: list[dict[str, str]]) -> dict[str, Any]:
    return {"folder": str(folder / level), "level": level, "prompt": prompt}


def adapted_again(task: dict[str, Any]) -> list[dict[str, Any]]:
    """In a new process: the prompt again under every adapter."""
    with Session("smollm2", cache=task["folder"], reuse=task["level"], memory_limit=0) as session:
        session.generate("Hello", max_tokens=2, reuse="off")
        for name in ADAPTERS:  # loading one takes some milliseconds, once
            session.generate("Hello", max_tokens=2, reuse="off", adapter=name)
        return [ask(session, task["prompt"], adapter=name) for name in ADAPTERS]


def sample(words: int) -> str:
    """The first words of a text that comes with the package."""
    return " ".join(sample_text().split()[:words])


def answer(session: Session, question: str, **options: Any) -> dict[str, Any]:
    """Ask about the documents when nothing else is going on."""
    session.flush()
    found = session.ask(question, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, **options)
    seconds, cached = found.timings.first_token_seconds, found.usage.cached_tokens
    return {"seconds": seconds, "cached": cached, "tokens": list(found.tokens)}


def check_again(session: Session, asked: list[str]) -> str:
    """Whole answers, written again and checked against the earlier ones: in words. The texts must be equal."""
    took: dict[str, list[float]] = {"off": [], "verified": []}
    foreseen = 0
    for question in asked:
        texts = []
        for way in ("verified", "off", "verified"):  # the first time it is only kept
            session.flush()
            started = time.perf_counter()
            found = session.ask(question, max_tokens=ANSWER_TOKENS, min_tokens=ANSWER_TOKENS, answers=way)
            took[way].append(time.perf_counter() - started)
            texts.append(found.text)
        foreseen += found.usage.drafted_tokens
        if len(set(texts)) != 1:
            sys.exit("A checked answer is not what the model writes: this should never happen. Please report it.")
    written, checked = statistics.median(took["off"]), statistics.median(took["verified"][1::2])
    share = foreseen / (ANSWER_TOKENS * len(asked))
    return (
        f"Whole answers of {ANSWER_TOKENS} tokens, asked again: {written:.2f} s, checked against the earlier one "
        f"(answers=verified) {checked:.2f} s; {share:.0%} of the tokens foreseen, the same text."
    )


def ask_again(task: dict[str, Any]) -> list[dict[str, Any]]:
    """In a new process: every question again."""
    with Session("smollm2", cache=task["folder"], memory_limit=0) as session:
        session.generate("Hello", max_tokens=2, reuse="off")
        session.knowledge.search(task["asked"][0])  # loads the embedder and the vectors
        return [answer(session, question) for question in task["asked"]]


def show(console: Console, lines: list[Line]) -> None:
    """A table of lines, the first of them cold."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "first token", "speed-up", "cached", "same text"):
        table.add_column(column, justify="left" if not column else "right")
    cold = statistics.median(lines[0].seconds)
    for line in lines:
        table.add_row(*line.cells(cold))
    console.print(table)


def chat(rules: str, question: str) -> list[dict[str, str]]:
    """A long system message and a short question."""
    return [{"role": "system", "content": rules}, {"role": "user", "content": question}]


def ask(session: Session, prompt: list[dict[str, str]], **options: Any) -> dict[str, Any]:
    """Ask when nothing else is going on."""
    session.flush()
    reply: Reply = session.chat(prompt, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, **options)
    seconds, cached = reply.timings.first_token_seconds, reply.usage.cached_tokens
    return {"seconds": seconds, "cached": cached, "tokens": list(reply.tokens)}


def decode(session: Session, tokens: list[int]) -> str:
    """The text of a reply."""
    return session.engine.tokenizer.decode(tokens)


def restart(task: dict[str, Any]) -> list[dict[str, Any]]:
    """In a new process: every prompt from disk; then the first again, after a byte of its file was flipped."""
    replies = []
    with Session("smollm2", cache=task["folder"], memory_limit=0) as session:
        session.generate("Hello", max_tokens=2, reuse="off")
        for number, prompt in enumerate(task["prompts"]):
            replies.append(ask(session, prompt, cache_salt=f"{number}"))
        session.flush()
        flip(session, task["prompts"][0])
        replies.append(ask(session, task["prompts"][0], cache_salt="0"))
        assert session.cache.store is not None and session.cache.store.counts.quarantined == 1
    return replies


def flip(session: Session, prompt: list[dict[str, str]]) -> None:
    """Flip one bit in the middle of the file that holds a prompt."""
    summary = session.explain(prompt, cache_salt="0")
    store = session.cache.store
    assert store is not None and summary.parts[0].entry is not None
    path = store.disk.extents.path(summary.parts[0].entry)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def theirs(task: dict[str, Any]) -> list[dict[str, Any]]:
    """What transformers does with the same prompts after a restart: `model.generate`, everything computed."""
    import torch

    from rekindle.core.request import parse_prompt
    from rekindle.engine.hf.engine import HfEngine

    class Clock:
        def __init__(self) -> None:
            self.at: list[float] = []

        def put(self, _: object) -> None:
            self.at.append(time.perf_counter())

        def end(self) -> None:
            pass

    replies = []
    with Session("smollm2", cache="off") as session:
        engine = session.engine
        assert isinstance(engine, HfEngine)
        for warm_up, prompt in [(True, [{"role": "user", "content": "Hello"}]), *((False, p) for p in task["prompts"])]:
            ids = torch.tensor([engine.tokenizer.encode_chat(parse_prompt(prompt))])
            clock = Clock()
            with torch.inference_mode():
                output = engine.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=NEW_TOKENS,
                    min_new_tokens=NEW_TOKENS,
                    do_sample=False,
                    streamer=clock,
                )
            if not warm_up:
                tokens = output[0, ids.shape[1] :].tolist()
                replies.append({"seconds": clock.at[1] - clock.at[0], "cached": 0, "tokens": tokens})
    return replies


def run_part(name: str, task: dict[str, Any]) -> list[dict[str, Any]]:
    """A part of the demo in an interpreter of its own."""
    command = [sys.executable, "-m", "tools.demo", name]
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the part {name!r} of the demo failed:\n{done.stderr}")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
