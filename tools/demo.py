"""`make demo`: what a prompt costs the first time, and what it costs when its KV is kept; every text is checked.

Runs on llama.cpp, without torch. Nothing is left behind: the cache is a temporary folder.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.personal import personal_sets
from rekindle import Session
from rekindle.core.size import count_of
from rekindle.machine import describe_machine
from rekindle.session.calibrate.prompts import sample_text

MODEL = "smollm2"
PROBE_WORDS = 60
COLD_SECONDS = 2.0  # a prompt of the demo takes about as long to compute
NEW_TOKENS = 16
FIRST, OTHER, MORE = "Who brought the lamp?", "What is this text about?", "Tell me more."
SALE = "When does the spring sale begin?"
ADAPTERS = ("json", "pirate")
BAR_CELLS = 32
EIGHTHS = " ▏▎▍▌▋▊▉█"

Answered = dict[str, Any]  # what `answer` says of a reply
Prompt = str | list[dict[str, str]]  # a question about the documents, or a chat
Job = tuple[Prompt, dict[str, Any]]  # with the options of the request


@dataclass(frozen=True)
class Row:
    """One way to start: replies, and those with the text they must have."""

    name: str
    replies: list[Answered]
    expected: list[Answered]
    drawn: bool = False  # also in the picture

    @property
    def seconds(self) -> float:
        """Median time to the first token."""
        return statistics.median(reply["seconds"] for reply in self.replies)

    @property
    def same(self) -> int:
        """How many texts are as expected."""
        pairs = zip(self.replies, self.expected, strict=True)
        return sum(reply["tokens"] == right["tokens"] for reply, right in pairs)


@dataclass(frozen=True)
class Part:
    """What a part of the demo measured, the slowest way to start first."""

    title: str
    rows: list[Row]
    facts: list[str] = field(default_factory=list)


def main() -> None:
    """Run the demo, or some jobs of it in a process of their own."""
    if sys.argv[1:] == ["jobs"]:
        json.dump(run_jobs(**json.load(sys.stdin)), sys.stdout)
        return
    started = time.perf_counter()
    console = Console(highlight=False)
    machine = describe_machine()
    console.print(f"[bold]Rekindle[/bold] with llama.cpp on {machine['processor']}, {machine['cores']} cores.")
    console.print(f"The model, {MODEL}, is embedded and tiny: it shows speed, not wisdom.")
    with tempfile.TemporaryDirectory(prefix="rekindle-demo-") as folder:
        with console.status("finding out how fast this machine is"):
            rules = choose_rules()
        cache = str(Path(folder) / "cache")  # the library of documents lies beside it
        parts = [run_part(console, part, cache, rules) for part in (chat, safety, documents, adapters)]
    draw(console, parts)
    console.print(
        f"\nThe demo took {time.perf_counter() - started:.0f} s. Go on in .venv/bin:\n"
        "  rekindle chat smollm2 --adapter pirate    later turns start at once\n"
        "  rekindle ingest docs/guide; rekindle ask 'How do I limit the cache?'\n"
        "  rekindle explain --last                   what was reused, and why not more\n"
        "  rekindle bench smollm2                    cold, warm, restarted; a minute\n"
        "Remove it all: rekindle cache clear; rekindle rm smollm2 minilm; make clean"
    )
    if any(row.same < len(row.replies) for part in parts for row in part.rows):
        sys.exit("Some texts differ: this should never happen. Please report it.")


def run_part(console: Console, part: Callable[[str, str], Part], folder: str, rules: str) -> Part:
    """Say what a part shows, run it, show what it measured."""
    title, _, shows = (part.__doc__ or "").partition(": ")
    console.print(f"\n[bold]{title}[/bold]: {shows}")
    with console.status("measuring"):
        found = part(folder, rules)
    for fact in found.facts:
        console.print(fact)
    table = Table(box=None, header_style="dim")
    for column in ("", "first token", "speed-up", "cached tokens", "same text"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in found.rows:
        cached, size = (statistics.median_low(reply[name] for reply in row.replies) for name in ("cached", "size"))
        speedup = found.rows[0].seconds / row.seconds
        same = f"{row.same} of {len(row.replies)}"
        table.add_row(row.name, f"{row.seconds * 1e3:,.0f} ms", f"{speedup:.1f}x", f"{cached} of {size}", same)
    console.print(table)
    return found


def chat(folder: str, rules: str) -> Part:
    """Chat: a prompt computed before starts at once, here and in a new process."""
    first, other = talk(rules, FIRST), talk(rules, OTHER)
    salts = [{"cache_salt": salt} for salt in "ab"]  # a salt of its own: finds nothing of the others
    with open_session(MODEL, folder) as session:
        cold = [answer(session, first, **salt) for salt in salts]
        again = [answer(session, first, **salt) for salt in salts]
        changed = answer(session, other, **salts[0])
        longer = [*first, {"role": "assistant", "content": cold[0]["text"]}, {"role": "user", "content": MORE}]
        turn = answer(session, longer, **salts[0])
    new = in_new_process(folder, [(first, salt) for salt in salts])
    alone = in_new_process("off", [(first, {}), (other, {}), (longer, {})])  # llama.cpp computes every prompt
    both = [alone[0]] * 2
    rows = [
        Row("llama.cpp alone, restarted", alone, alone, drawn=True),
        Row("Rekindle, cold", cold, both, drawn=True),
        Row("same process", again, both, drawn=True),
        Row("another question", [changed], alone[1:2]),
        Row("second turn", [turn], alone[2:]),
        Row("NEW PROCESS, from disk", new, both, drawn=True),
    ]
    return Part("Chat", rows)


def safety(folder: str, rules: str) -> Part:
    """Safety: damaged KV and that of another cache_salt are computed, not used."""
    first = talk(rules, FIRST)
    found = in_new_process(folder, [(first, {"cache_salt": salt}) for salt in ("b", "a", "c")], damaged="a")
    right, flipped, foreign = ([reply] for reply in found)
    rows = [Row("one bit flipped on disk", flipped, right), Row("other cache_salt", foreign, right)]
    return Part("Safety", [*rows, Row("untouched, from disk", right, right)])


def documents(folder: str, _: str) -> Part:
    """Documents: an answer with its source; asked again, it starts at once."""
    with open_session(MODEL, folder) as session:
        done = session.ingest(documents=personal_sets(None)[0].people[0].documents)
        cold, again = ([answer(session, SALE)] for _ in range(2))
    new = in_new_process(folder, [(SALE, {})])
    names = ("cold", "asked again", "NEW PROCESS, from disk")
    rows = [Row(name, found, cold, drawn=True) for name, found in zip(names, (cold, again, new), strict=True)]
    facts = [
        f"  {count_of(done.added, 'document')}, {count_of(done.passages, 'passage')}, ingested in {done.seconds:.1f} s",
        f"  [cyan]{SALE}[/cyan] \\[1] {escape(cold[0]['source'])}",
        f"  {quote(cold[0]['text'])}",
    ]
    return Part("Documents", rows, facts)


def adapters(folder: str, rules: str) -> Part:
    """Adapters: each LoRA adapter has KV of its own, which a new process finds."""
    jobs: list[Job] = [(talk(rules, OTHER), {"adapter": name}) for name in ADAPTERS]
    with open_session(MODEL, folder) as session:
        warm_up(session, jobs)
        cold = [answer(session, prompt, **options) for prompt, options in jobs]
    new = in_new_process(folder, jobs)
    rows = [Row("cold", cold, cold, drawn=True), Row("NEW PROCESS, from disk", new, cold, drawn=True)]
    facts = [f"  [cyan]{name}[/cyan] {quote(reply['text'])}" for name, reply in zip(ADAPTERS, cold, strict=True)]
    return Part("Adapters", rows, facts)


def draw(console: Console, parts: list[Part]) -> None:
    """Bars of the times to the first token."""
    longest = max(row.seconds for part in parts for row in part.rows if row.drawn)
    console.print("\n[bold]Seconds to the first token[/bold], with the model loaded")
    for part in parts:
        for number, row in enumerate(row for row in part.rows if row.drawn):
            title = "" if number else part.title
            color = "green" if any(reply["cached"] for reply in row.replies) else "yellow"
            console.print(f"  {title:<10}{row.name:<27}[{color}]{bar(row.seconds / longest)}[/] {row.seconds:.2f}")


def bar(share: float) -> str:
    """A bar of up to `BAR_CELLS` cells, in steps of an eighth of one."""
    whole, eighths = divmod(max(1, round(share * BAR_CELLS * 8)), 8)
    return EIGHTHS[8] * whole + EIGHTHS[eighths].strip()


def choose_rules() -> str:
    """As much of a text as this machine computes in about `COLD_SECONDS`."""
    words = sample_text().split()
    with open_session(MODEL, "off") as session:
        probe = session.generate(" ".join(words[:PROBE_WORDS]), max_tokens=1)
    return " ".join(words[: int(PROBE_WORDS * COLD_SECONDS / probe.timings.first_token_seconds)])


def talk(rules: str, question: str) -> list[dict[str, str]]:
    """A long system message and a short question."""
    return [{"role": "system", "content": rules}, {"role": "user", "content": question}]


def quote(text: str) -> str:
    """A reply on one line."""
    return escape(f'"{textwrap.shorten(text, 64, placeholder="")} ..."')


def open_session(model: str, folder: str) -> Session:
    """A session on the CPU, where llama.cpp's results do not depend on how a prompt is cut into batches."""
    session = Session(model, engine="llamacpp", device="cpu", cache=folder)
    session.generate("Hello", max_tokens=2, reuse="off")  # what comes first is always slower
    return session


def warm_up(session: Session, jobs: list[Job]) -> None:
    """Load what jobs need besides the model: adapters, the embedder."""
    for prompt, options in jobs:
        if isinstance(prompt, str):
            session.knowledge.search(prompt)
        if "adapter" in options:
            session.generate("Hello", max_tokens=2, reuse="off", adapter=options["adapter"])


def answer(session: Session, prompt: Prompt, **options: Any) -> Answered:
    """Ask when nothing else is going on."""
    session.flush()
    send: Callable[..., Any] = session.ask if isinstance(prompt, str) else session.chat
    reply = send(prompt, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, **options)
    return {
        "seconds": reply.timings.first_token_seconds,
        "cached": reply.usage.cached_tokens,
        "size": reply.usage.prompt_tokens,
        "tokens": list(reply.tokens),
        "text": reply.text,
        "source": reply.sources[0].title if isinstance(prompt, str) else None,
    }


def in_new_process(folder: str, jobs: list[Job], damaged: str | None = None) -> list[Answered]:
    """Run jobs in an interpreter of their own; before that, damage the KV of the first prompt under a salt."""
    task = {"model": MODEL, "folder": folder, "jobs": jobs, "damaged": damaged}
    command = [sys.executable, "-m", "tools.demo", "jobs"]
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"a new process of the demo failed:\n{done.stderr}")
    found: list[Answered] = json.loads(done.stdout)
    return found


def run_jobs(model: str, folder: str, jobs: list[Job], damaged: str | None) -> list[Answered]:
    """What the new process does."""
    with open_session(model, folder) as session:
        warm_up(session, jobs)
        if damaged is not None:
            flip(session, jobs[0][0], damaged)
        replies = [answer(session, prompt, **options) for prompt, options in jobs]
        store = session.cache.store
        assert store is None or store.counts.quarantined == (damaged is not None)
    return replies


def flip(session: Session, prompt: Prompt, cache_salt: str) -> None:
    """Flip one bit in the middle of the file that holds a prompt."""
    part = session.explain(prompt, cache_salt=cache_salt).parts[0]
    assert session.cache.store is not None and part.entry is not None
    path = Path(session.cache.store.disk.extents.path(part.entry))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


if __name__ == "__main__":
    main()
