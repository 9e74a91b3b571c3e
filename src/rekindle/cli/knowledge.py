"""`rekindle ingest`, `rekindle knowledge` and `rekindle forget`: put documents into the library, list, remove them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli.ask import Retrieval, TopK
from rekindle.cli.options import (
    AsJson,
    app,
    brief,
    command_group,
    library_options,
    print_json,
    print_listing,
    print_table,
    takes,
)
from rekindle.core.size import count_of, human_bytes, parse_duration
from rekindle.errors import ExtraMissing, InvalidSetting
from rekindle.settings import Settings
from rekindle.text.visible import printable

if TYPE_CHECKING:
    from rekindle.knowledge.ingest import IngestProgress, IngestResult
    from rekindle.knowledge.library import DocumentEntry
    from rekindle.knowledge.library_file import LibraryCheck
    from rekindle.session.library import Knowledge

knowledge = command_group("knowledge", "List and search the documents that were ingested.")

Names = Annotated[list[str], typer.Argument(metavar="DOCUMENT...", help="Documents: by name, path or source.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


@app.command()
@takes(settings=library_options)
def ingest(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files, folders, or patterns in quotes.")],
    settings: dict[str, Any],
    watch: Annotated[bool, typer.Option("--watch", help="Continue, and follow changes.")] = False,
    size: Annotated[int, typer.Option(min=10, help="About the length of a passage.")] = 100,
    by: Annotated[str, typer.Option(help="The unit of length: words, or tokens of the embedder.")] = "words",
    overlap: Annotated[int, typer.Option(min=0, help="How much of a passage the next one repeats.")] = 0,
    owner: Annotated[str | None, typer.Option("--app", help="The app they belong to, for `forget --app`.")] = None,
    json: AsJson = False,
) -> None:
    """Read documents into the library: txt, md, html, pdf, eml, mbox, docx, json, jsonl, csv.

    Unchanged files are not read again; documents whose files vanished from a folder are removed. Exit status 1 if
    something could not be read.
    """
    from rekindle.knowledge.split import Splitting

    splitting = Splitting(size, by, overlap)  # type: ignore[arg-type]
    with open_knowledge(settings) as libraries:

        def once(some: list[str], *, watched: bool = False) -> IngestResult:
            with _progress() as report:
                done = libraries.ingest(some, splitting=splitting, app=owner, report=report, watched=watched)
            if json:
                print_json({**asdict(done), "problems": [asdict(problem) for problem in done.problems]})
            else:
                _show(done)
            for line in _notes(done):
                typer.echo(f"note: {line}", err=True)
            if done.begun and (kept := libraries.what_is_kept(str(libraries.library().path))):
                typer.echo(f"note: {kept}", err=True)
            return done

        try:
            if watch:
                _watch(paths, once)
            done = None if watch else once(paths)
        except KeyboardInterrupt:
            counts = libraries.library().counts()
            kept = _documents(counts["documents"], counts["chunks"])
            typer.echo(f"stopped; the library holds {kept}. The same command goes on from there.", err=True)
            raise typer.Exit(0 if watch else 130) from None
        if done is not None and done.problems:
            raise typer.Exit(1)


@knowledge.command("ls")
@takes(settings=library_options)
def list_documents(settings: dict[str, Any], json: AsJson = False) -> None:
    """List the documents, the newest first."""

    with open_knowledge(settings) as libraries:
        libraries.warn()
        entries = libraries.library().entries()
    columns: dict[str, Callable[[DocumentEntry], object]] = {
        "document": lambda one: one.name,
        "title": lambda one: brief(printable(one.title), 60),
        "passages": lambda one: one.chunks,
        "ingested": lambda one: time.strftime("%Y-%m-%d", time.localtime(one.added)),
        "app": lambda one: printable(one.app or ""),
        "source": lambda one: printable(one.source),
    }
    print_listing(entries, columns, json, asdict, empty="Nothing was ingested yet.")


@knowledge.command("show")
@takes(settings=library_options)
def show_document(names: Names, settings: dict[str, Any], json: AsJson = False) -> None:
    """Show the passages of documents."""

    with open_knowledge(settings) as libraries:
        libraries.warn()
        library = libraries.library()
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
    """Find passages, without a model."""
    from rekindle.cli.console import notes

    with open_knowledge(settings) as libraries:
        found = libraries.search(question, top_k, retrieval)  # type: ignore[arg-type]
    if json:
        print_json([asdict(hit) for hit in found.hits])
        return
    if not found.hits:
        typer.echo("No passage was found.")
    for number, hit in enumerate(found.hits, start=1):
        ranks = f"bm25 {hit.bm25_rank or '-'}, embedding {hit.embedding_rank or '-'}"
        typer.echo(printable(f"[{number}] {hit.chunk.title}  ({hit.chunk.source}, {hit.chunk.name})  {ranks}"))
        for line in printable(hit.chunk.passage.shown).splitlines():
            typer.echo(f"    | {line}")
    notes.print(
        f"{found.seconds * 1e3:.1f} ms: {found.embed_seconds * 1e3:.1f} to embed the question, "
        f"{found.search_seconds * 1e3:.1f} to search",
        style="dim",
    )


@knowledge.command("stats")
@takes(settings=library_options)
def show_stats(settings: dict[str, Any], json: AsJson = False) -> None:
    """Show the size of the library, and the passages retrieved most."""

    with open_knowledge(settings) as libraries:
        libraries.warn()
        library = libraries.library()
        counts, top = library.counts(), library.top_retrieved(10)
        used, limit = libraries.limit.used_bytes(), libraries.limit.limit_bytes
    if json:
        space = {"folder": str(libraries.folder), "folder_bytes": used, "limit_bytes": limit}
        print_json({**counts, **space, "top_retrieved": [asdict(chunk) for chunk in top]})
        return
    typer.echo(
        f"{count_of(counts['documents'], 'document')}, {count_of(counts['chunks'], 'passage')} "
        f"({counts['embedded']:,} with a vector), {count_of(counts['characters'], 'character')}, "
        f"{human_bytes(counts['file_bytes'])} in {libraries.folder}"
    )
    allowed = "no limit" if limit is None else f"library_limit {human_bytes(limit)}"
    typer.echo(f"{human_bytes(used)} in all libraries, of every tenant and salt ({allowed})")
    if top:
        rows = [
            [chunk.name, brief(printable(chunk.title), 40), brief(printable(chunk.passage.text), 60)] for chunk in top
        ]
        print_table(["document", "title", "passage"], rows, title="Passages retrieved most")


@knowledge.command("check")
@takes(settings=library_options)
def check(
    settings: dict[str, Any],
    fix: Annotated[bool, typer.Option("--fix", help="Salvage a damaged library.")] = False,
    acknowledge: Annotated[bool, typer.Option("--acknowledge", help="Stop reporting what was lost.")] = False,
    remove_damaged: Annotated[
        bool, typer.Option("--remove-damaged", help="Remove damaged files that were salvaged; nothing else does.")
    ] = False,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    """Check the whole file of the library. A damaged file is never written to: it stays beside the new one.

    A library that is found damaged in use is salvaged at once; this also finds damage that was not met yet.
    """
    from rekindle.session.library import ADVICE

    if remove_damaged and not yes and not json:
        typer.confirm("Remove damaged files of the library? What was not saved from them is lost.", abort=True)
    with open_knowledge(settings) as libraries:
        found = libraries.check(fix=fix)
        sound = found.damage is None or found.salvaged is not None
        if acknowledge and sound:
            libraries.acknowledge()
        lost = libraries.losses() if sound else []
        removed = libraries.remove_damaged() if remove_damaged and sound else ()
    left = [str(path) for path in found.damaged_files if path not in removed]
    if json:
        saved = None if found.salvaged is None else asdict(found.salvaged)
        print_json(
            {"damage": found.damage, "salvaged": saved, "lost": [asdict(loss) for loss in lost], "damaged_files": left}
        )
    else:
        _show_check(found, [loss.sentence(ADVICE) for loss in lost], left, len(removed))
    if not sound:
        raise typer.Exit(1)


@knowledge.command("export")
@takes(settings=library_options)
def export_library(
    file: Annotated[Path, typer.Argument(help="The backup to write.")], settings: dict[str, Any], json: AsJson = False
) -> None:
    """Write all documents with their passages to a backup file, one JSON value per line."""

    with open_knowledge(settings) as libraries:
        done = libraries.export(file)
    if json:
        print_json(asdict(done))
    else:
        typer.echo(f"{_documents(done.documents, done.passages)} exported to {file}")


@knowledge.command("import")
@takes(settings=library_options)
def import_library(
    file: Annotated[Path, typer.Argument(help="A backup that `rekindle knowledge export` wrote.")],
    settings: dict[str, Any],
    json: AsJson = False,
) -> None:
    """Verify a whole backup, then add the documents that the library lacks or has incompletely."""
    from rekindle.cli.console import notes

    with open_knowledge(settings) as libraries, notes.status("importing"):
        done = libraries.import_(file)
    if json:
        print_json(asdict(done))
    else:
        typer.echo(f"{_documents(done.documents, done.passages)} added, {done.known} were there already")


@app.command()
@takes(settings=library_options)
def forget(
    settings: dict[str, Any],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[DOCUMENT]...", help="Documents: by name, path or source.")
    ] = None,
    owner: Annotated[str | None, typer.Option("--app", help="The documents of this app.")] = None,
    before: Annotated[
        str | None, typer.Option(help="Documents ingested before: 2026-01-31, 2026-01-31T12:00, or 30d ago.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All documents.")] = False,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    """Forget documents: their text, vectors and words, and all KV computed from them, to the last byte."""
    from rekindle.cli.console import notes

    if everything and not yes and not json:
        typer.confirm("Forget all documents?", abort=True)
    with open_knowledge(settings) as libraries, notes.status("forgetting"):
        forgotten = libraries.forget(*(names or ()), app=owner, before=_moment(before), everything=everything)
    if json:
        damaged = [str(path) for path in forgotten.damaged_files]
        documents = [asdict(entry) for entry in forgotten.documents]
        print_json({"documents": documents, "passages": forgotten.passages, "damaged_files": damaged})
        return
    for entry in forgotten.documents:
        typer.echo(printable(f"forgot {entry.name}  {entry.title}  ({entry.source})"))
    typer.echo(f"{_documents(len(forgotten.documents), forgotten.passages)} forgotten")


def _show_check(found: LibraryCheck, lost: list[str], left: list[str], removed: int) -> None:
    if found.salvaged is not None:
        saved = found.salvaged
        typer.echo(f"damaged ({found.damage}); saved: {_documents(saved.documents, saved.passages)}")
    else:
        typer.echo(
            "no damage" if found.damage is None else f"damaged: {found.damage}. Save what can be read with --fix."
        )
    for sentence in lost:
        typer.echo(printable(sentence))
    for path in left:
        typer.echo(f"damaged file: {path}")
    if removed:
        typer.echo(f"{count_of(removed, 'damaged file')} removed")


@contextmanager
def open_knowledge(settings: dict[str, Any]) -> Iterator[Knowledge]:
    """The libraries of the settings, without a language model."""
    from rekindle.session.library import Knowledge, purging

    chosen = Settings.load(settings)
    libraries = Knowledge(chosen, purging(chosen))
    try:
        yield libraries
    finally:
        libraries.close()


@contextmanager
def _progress() -> Iterator[Callable[[IngestProgress], None]]:
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from rekindle.cli.console import notes

    columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TextColumn("files  {task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def report(step: IngestProgress) -> None:
            done = f"{count_of(step.documents, 'document')}, {count_of(step.passages, 'passage')}"
            words = f"{done}  {escape(brief(printable(step.name), 40))}"
            bar.update(task, completed=step.files_done, total=step.files, description=words)

        yield report


def _show(done: IngestResult) -> None:
    if done.problems:
        rows = [[printable(problem.source), printable(problem.reason)] for problem in done.problems]
        print_table(["not ingested", "why"], rows)
    typer.echo(
        f"{count_of(done.added, 'document')} added, {done.changed:,} changed, {done.removed:,} removed, "
        f"{done.unchanged:,} unchanged; {count_of(done.passages, 'passage')}, {done.seconds:.1f} s"
        + (f"; {count_of(done.truncated, 'passage')} longer than the embedder reads" if done.truncated else "")
        + (f"; {count_of(len(done.problems), 'problem')}" if done.problems else "")
    )


def _notes(done: IngestResult) -> Iterator[str]:
    """What people may not expect: files that were left out, or none at all."""
    names = [printable(Path(path).name) for path in done.skipped[:3]]
    if more := len(done.skipped) - len(names):
        names.append(f"{more:,} more")
    if names:
        yield f"skipped, because their kind is not read: {', '.join(names)}. Name a file itself to read it as text."
    elif not done.problems and not done.changes + done.unchanged:
        yield "no documents were found there; rekindle ingest --help lists the kinds that are read."


def _documents(documents: int, passages: int) -> str:
    return f"{count_of(documents, 'document')} with {count_of(passages, 'passage')}"


def _watch(paths: list[str], once: Callable[..., IngestResult]) -> None:
    """Ingest everything, then what changes, until Ctrl-C."""
    from rekindle.cli.console import notes
    from rekindle.knowledge.paths import watch_changes

    notes.print("watching; stop with Ctrl-C", style="dim")
    try:
        for number, some in enumerate(watch_changes(paths)):
            once(some, watched=number > 0)
    except ImportError as error:
        raise ExtraMissing('--watch needs: pip install "rekindle-llm[knowledge]"') from error


def _moment(text: str | None) -> float | None:
    """A time, in seconds since 1970, from a date or an age."""
    from datetime import datetime

    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        pass
    try:
        return time.time() - parse_duration(text.removesuffix("ago").strip())
    except InvalidSetting:
        raise InvalidSetting(f"--before {text!r} is not a time. Use 2026-01-31, 2026-01-31T12:00, or 30d.") from None
