"""`rekindle ingest`, `rekindle knowledge` and `rekindle forget`: documents into the library, and out of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli import app
from rekindle.cli.ask import Retrieval, TopK
from rekindle.cli.options import AsJson, library_options, takes
from rekindle.core.visible import printable
from rekindle.errors import ExtraMissing, InvalidSetting

if TYPE_CHECKING:
    from rekindle.knowledge.ingest import Ingested, Step
    from rekindle.run.knowledge import Knowledge

knowledge = typer.Typer(
    help="Look at the documents that were ingested, and search them.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(knowledge, name="knowledge")

Names = Annotated[list[str], typer.Argument(metavar="DOCUMENT...", help="Documents: by name, path or source.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command()
@takes(settings=library_options)
def ingest(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files, folders, or patterns in quotes.")],
    settings: dict[str, Any],
    watch: Annotated[bool, typer.Option("--watch", help="Go on, and follow what changes.")] = False,
    size: Annotated[int, typer.Option(min=10, help="About how long a passage is.")] = 100,
    by: Annotated[str, typer.Option(help="In what passages are measured: words, or tokens of the embedder.")] = "words",
    overlap: Annotated[int, typer.Option(min=0, help="How much of a passage the next one repeats.")] = 0,
    owner: Annotated[str | None, typer.Option("--app", help="Whose documents they are, for `forget --app`.")] = None,
    json: AsJson = False,
) -> None:
    """Read documents into the library: txt, md, html, pdf, eml, mbox, docx, json, jsonl, csv.

    What did not change is not read again; what is gone from a folder is removed.
    """
    from rekindle.cli.console import print_json
    from rekindle.knowledge.split import Splitting

    splitting = Splitting(size, by, overlap)  # type: ignore[arg-type]
    with opened(settings) as known:

        def once(some: list[str]) -> Ingested:
            with _progress() as report:
                done = known.ingest(some, splitting=splitting, app=owner, report=report)
            if json:
                print_json({**asdict(done), "problems": [asdict(problem) for problem in done.problems]})
            else:
                _show(done)
            return done

        if watch:
            _watch(paths, once)
            return
        done = once(paths)
        if done.problems and not done.changes + done.unchanged:
            raise typer.Exit(1)


@knowledge.command("ls")
@takes(settings=library_options)
def list_documents(settings: dict[str, Any], json: AsJson = False) -> None:
    """List the documents, the newest first."""
    from rekindle.cli.console import print_json, print_table

    with opened(settings) as known:
        entries = known.library().entries()
    if json:
        print_json([asdict(entry) for entry in entries])
        return
    rows = [
        [entry.name, printable(entry.title)[:60], str(entry.chunks), _when(entry.added), printable(entry.app or ""),
         printable(entry.source)]
        for entry in entries
    ]  # fmt: skip
    print_table(["document", "title", "passages", "ingested", "app", "source"], rows)


@knowledge.command("show")
@takes(settings=library_options)
def show_document(names: Names, settings: dict[str, Any], json: AsJson = False) -> None:
    """Show the passages of documents as they are retrieved."""
    from rekindle.cli.console import print_json

    with opened(settings) as known:
        library = known.library()
        found = [(entry, library.chunks_of(entry.id)) for name in names for entry in library.find(name)]
    if json:
        print_json([{**asdict(entry), "passages": [asdict(c.passage) for c in chunks]} for entry, chunks in found])
        return
    for entry, chunks in found:
        typer.echo(printable(f"{entry.name}  {entry.title}  ({entry.source})"))
        for chunk in chunks:
            typer.echo(f"  -- {chunk.place + 1} of {len(chunks)}")
            for line in printable(chunk.passage.shown).splitlines():
                typer.echo(f"  | {line}")


@knowledge.command()
@takes(settings=library_options)
def search(
    question: Annotated[str, typer.Argument(help="A question, or words.")],
    settings: dict[str, Any],
    top_k: TopK = 5,
    retrieval: Retrieval = "fused",
    json: AsJson = False,
) -> None:
    """Find passages, without asking a model."""
    from rekindle.cli.console import notes, print_json

    with opened(settings) as known:
        found = known.search(question, top_k, retrieval)  # type: ignore[arg-type]
    if json:
        print_json([asdict(hit) for hit in found.hits])
        return
    for number, hit in enumerate(found.hits, start=1):
        ranks = f"words {hit.word_rank or '-'}, meaning {hit.meaning_rank or '-'}"
        typer.echo(printable(f"[{number}] {hit.chunk.title}  ({hit.chunk.source}, {hit.chunk.name})  {ranks}"))
        for line in printable(hit.chunk.passage.shown).splitlines():
            typer.echo(f"    | {line}")
    notes.print(
        f"{found.seconds * 1e3:.1f} ms: {found.embed_seconds * 1e3:.1f} for the question's vector, "
        f"{found.search_seconds * 1e3:.1f} to search",
        style="dim",
    )


@knowledge.command("stats")
@takes(settings=library_options)
def show_stats(settings: dict[str, Any], json: AsJson = False) -> None:
    """How much there is, and what is retrieved most."""
    from rekindle.cli.console import print_json, print_table
    from rekindle.core.size import human_bytes

    with opened(settings) as known:
        library = known.library()
        counts, most = library.counts(), library.most_retrieved(10)
    if json:
        print_json({**counts, "folder": str(known.folder), "most_retrieved": [asdict(chunk) for chunk in most]})
        return
    typer.echo(
        f"{counts['documents']:,} documents, {counts['chunks']:,} passages ({counts['embedded']:,} with a vector), "
        f"{counts['characters']:,} characters, {human_bytes(counts['file_bytes'])} in {known.folder}"
    )
    if most:
        rows = [[chunk.name, printable(chunk.title)[:40], printable(chunk.passage.text)[:60]] for chunk in most]
        print_table(["document", "title", "passage"], rows, title="retrieved most")


@knowledge.command("rm")
@takes(settings=library_options)
def remove(names: Names, settings: dict[str, Any], json: AsJson = False) -> None:
    """Remove documents: the same as `rekindle forget`."""
    _forget(settings, json, *names)


@app.command()
@takes(settings=library_options)
def forget(
    settings: dict[str, Any],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[DOCUMENT]...", help="Documents: by name, path or source.")
    ] = None,
    owner: Annotated[str | None, typer.Option("--app", help="The documents of this app.")] = None,
    before: Annotated[
        str | None, typer.Option(help="Those ingested before: 2026-01-31, 2026-01-31T12:00, or 30d ago.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All documents.")] = False,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    """Forget documents: their text, vectors and words, and all KV that was computed from them, to the last byte."""
    if everything and not yes and not json:
        typer.confirm("Forget all documents?", abort=True)
    _forget(settings, json, *(names or ()), app=owner, before=_moment(before), everything=everything)


def _forget(settings: dict[str, Any], json: bool, *names: str, **choice: Any) -> None:
    from rekindle.cli.console import notes, print_json

    with opened(settings) as known, notes.status("forgetting"):
        gone = known.forget(*names, **choice)
    if json:
        print_json({"documents": [asdict(entry) for entry in gone.documents], "passages": gone.passages})
        return
    for entry in gone.documents:
        typer.echo(printable(f"forgot {entry.name}  {entry.title}  ({entry.source})"))
    typer.echo(f"{len(gone.documents)} documents with {gone.passages} passages")


@contextmanager
def opened(settings: dict[str, Any]) -> Iterator[Knowledge]:
    """The libraries that the settings name; no model that writes is loaded."""
    from rekindle.run.knowledge import Knowledge, purging
    from rekindle.settings import Settings

    chosen = Settings.load(settings)
    known = Knowledge(chosen, purging(chosen))
    try:
        yield known
    finally:
        known.close()


@contextmanager
def _progress() -> Iterator[Callable[[Step], None]]:
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from rekindle.cli.console import notes

    columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TextColumn("files  {task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def report(step: Step) -> None:
            words = f"{step.documents:,} documents, {step.passages:,} passages  {escape(printable(step.name)[:40])}"
            bar.update(task, completed=step.files_done, total=step.files, description=words)

        yield report


def _show(done: Ingested) -> None:
    from rekindle.cli.console import print_table

    if done.problems:
        rows = [[printable(problem.source), printable(problem.reason)] for problem in done.problems]
        print_table(["not ingested", "why"], rows)
    typer.echo(
        f"{done.added} documents added, {done.changed} changed, {done.removed} removed, {done.unchanged} unchanged; "
        f"{done.passages} passages, {done.seconds:.1f} s"
        + (f"; {done.truncated} passages are longer than the embedder reads" if done.truncated else "")
        + (f"; {len(done.problems)} problems" if done.problems else "")
    )


def _watch(paths: list[str], once: Callable[[list[str]], Ingested]) -> None:
    """Ingest everything, then what changes, until somebody stops it."""
    from rekindle.cli.console import notes
    from rekindle.knowledge.watch import changes

    notes.print("watching; stop with Ctrl-C", style="dim")
    try:
        for some in changes(paths):
            once(some)
    except ImportError as error:
        raise ExtraMissing('--watch needs: pip install "rekindle[knowledge]"') from error
    except KeyboardInterrupt:
        return


def _moment(text: str | None) -> float | None:
    """A time, in seconds since 1970, from a date or an age."""
    from datetime import datetime

    from rekindle.core.size import parse_duration

    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        pass
    try:
        return time.time() - parse_duration(text.removesuffix("ago").strip())
    except InvalidSetting:
        raise InvalidSetting(f"--before {text!r} is no time. Use 2026-01-31, 2026-01-31T12:00, or 30d.") from None


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
