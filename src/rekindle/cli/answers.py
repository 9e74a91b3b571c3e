"""`rekindle answers`: stored questions, asked or predicted, and their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli.knowledge import Yes, open_knowledge
from rekindle.cli.options import AsJson, brief, command_group, library_options, print_json, print_listing, takes
from rekindle.core.size import count_of, human_bytes
from rekindle.errors import InvalidSetting
from rekindle.text.visible import printable

if TYPE_CHECKING:
    from rekindle.answers.bank import AnswerBank
    from rekindle.answers.bank_rows import BankEntry

answers = command_group("answers", "Look at stored questions and answers (see the setting `answers`), and remove them.")
_SHOWN = 60


@answers.command("ls")
@takes(settings=library_options)
def list_answers(
    settings: dict[str, Any],
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many, the most recently used first.")] = 50,
    json: AsJson = False,
) -> None:
    """List questions: their origin, whether their answer is up to date, how often it was used, the time it saved."""

    with _bank(settings) as bank:
        found = bank.entries(where="1 ORDER BY used DESC, id DESC", max_count=limit)
    columns: dict[str, Callable[[BankEntry], object]] = {
        "id": lambda one: one.id,
        "question": lambda one: brief(printable(one.question), _SHOWN),
        "from": lambda one: one.origin,
        "state": lambda one: one.state,
        "used": lambda one: one.uses,
        "saved": lambda one: f"{one.saved:.1f} s",
        "answer": lambda one: "" if one.answer is None else brief(printable(one.answer.text), _SHOWN),
    }
    print_listing(found, columns, json, asdict, empty="No question is stored yet.")


@answers.command("show")
@takes(settings=library_options)
def show_answer(
    number: Annotated[int, typer.Argument(metavar="ID", help="From `rekindle answers ls`.")],
    settings: dict[str, Any],
    json: AsJson = False,
) -> None:
    """Show a question with its answer, and the passages it came from."""

    with _bank(settings) as bank:
        found = bank.entries([number])
        chunks = bank.library.chunks(found[0].evidence) if found else {}
    if not found:
        raise InvalidSetting(f"There is no question {number}. `rekindle answers ls` lists them.")
    (entry,) = found
    if json:
        print_json({**asdict(entry), "passages": [asdict(chunks[id]) for id in entry.evidence if id in chunks]})
        return
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.made))
    typer.echo(printable(entry.question))
    typer.echo(
        f"{entry.state}, from {entry.origin}, {made}, used {count_of(entry.uses, 'time')}, saved {entry.saved:.1f} s\n"
    )
    if entry.answer is not None:
        typer.echo(printable(entry.answer.text) + "\n")
    for place, id in enumerate(entry.evidence, start=1):
        chunk = chunks.get(id)
        typer.echo(printable(f"[{place}] {chunk.title}  ({chunk.source})") if chunk else f"[{place}] was removed")


@answers.command("stats")
@takes(settings=library_options)
def show_stats(settings: dict[str, Any], json: AsJson = False) -> None:
    """Show the number of stored questions, their size, and the time they saved."""

    with _bank(settings) as bank:
        counts = bank.counts()
    if json:
        print_json(counts)
        return
    typer.echo(
        f"{count_of(int(counts['questions']), 'question')}: {counts['fresh']:,} with an answer, {counts['stale']:,} "
        f"whose documents changed, {counts['open']:,} not answered yet; {human_bytes(int(counts['bytes']))}; "
        f"used {count_of(int(counts['uses']), 'time')}, {counts['saved_seconds']:,.1f} s saved"
    )


@answers.command("rm")
@takes(settings=library_options)
def remove_answers(
    settings: dict[str, Any],
    numbers: Annotated[list[int] | None, typer.Argument(metavar="[ID]...", help="Questions by id.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All questions and answers.")] = False,
    yes: Yes = False,
) -> None:
    """Remove questions with their answers. Documents stay."""
    if not numbers and not everything:
        raise InvalidSetting("Say what to remove: questions by id, or --all.")
    if everything and not yes:
        typer.confirm("Remove all questions and answers?", abort=True)
    with _bank(settings) as bank:
        typer.echo(f"{count_of(bank.remove(None if everything else numbers), 'question')} removed")


@contextmanager
def _bank(settings: dict[str, Any]) -> Iterator[AnswerBank]:
    """The bank of the settings' tenant; administration needs no vectors."""
    from rekindle.answers.bank import AnswerBank

    with open_knowledge(settings) as libraries:
        libraries.warn()
        yield AnswerBank(libraries.library(), "", 1)
