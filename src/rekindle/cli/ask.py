"""`rekindle ask`: a question, answered from your own documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli.options import AsJson, ModelOption, app, loading_options, print_json, sampling_options, takes
from rekindle.text.visible import printable

if TYPE_CHECKING:
    from rich.text import Text

    from rekindle.core.reply import AnswerSource, ChunkReuse, Reuse
    from rekindle.core.request import Request
    from rekindle.session.session import Session


TopK = Annotated[int, typer.Option("--top-k", "-k", min=1, max=1000, help="Number of passages to quote.")]
Retrieval = Annotated[
    str, typer.Option(help="How passages are found: fused (BM25 and embeddings), weighted, bm25, embedding.")
]


@app.command()
@takes(sampling=sampling_options, loading=loading_options, without={"top_k"})
def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    sampling: dict[str, Any],
    loading: dict[str, Any],
    model: ModelOption = "smollm2",
    top_k: TopK = 5,
    retrieval: Retrieval = "fused",
    sources: Annotated[bool, typer.Option("--sources", help="Show the passages themselves, too.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what was reused, and which tokens were recomputed.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Answer a question from the documents that were ingested, with numbered sources."""
    from rekindle.cli.ask import show_reuse
    from rekindle.cli.console import notes, progress
    from rekindle.session.session import Session

    sampling.pop("top_k")  # of sampling; here it counts passages
    with progress(model) as report, Session(model, **loading, progress=report) as session:
        stream = session.ask_stream(question, top_k=top_k, retrieval=retrieval, **sampling)  # type: ignore[arg-type]
        for piece in stream:
            if not json:
                typer.echo(piece, nl=False)
        if json:
            print_json({"model": session.engine.name, **stream.answer.as_dict()})
            return
        typer.echo("\n")
        show_sources(stream.sources, whole=sources)
        if verbose:
            show_reuse(session, stream.request, stream.answer.reuse)
        notes.print(stream.answer.summary(), style="dim", soft_wrap=True)
        if stream.answer.refused is not None:
            typer.echo(f"note: no earlier answer was given: {printable(stream.answer.refused)}", err=True)


def show_sources(sources: Sequence[AnswerSource], *, whole: bool) -> None:
    """Print the sources, numbered as in the answer, quoted line by line."""
    for source in sources:
        where = "" if source.source == source.title else f"  ({source.source})"
        typer.echo(printable(f"[{source.number}] {source.title}{where}"))
        if whole:
            for line in printable(source.text).splitlines():
                typer.echo(f"    | {line}")


_SOURCES = {
    "exact": "exact",
    "reused": "reused",
    "computed": "computed, behind reused passages",
}


def show_reuse(session: Session, request: Request, reuse: Reuse) -> None:
    """Print where the tokens of a prompt came from; of reused passages, the tokens themselves."""
    from rich.text import Text

    from rekindle.cli.console import notes
    from rekindle.session.prompt import encode_prompt

    parts = {"from the engine": reuse.engine, "from memory": reuse.memory, "from disk": reuse.disk}
    counts = [f"{count} {where}" for where, count in parts.items() if count]
    if reuse.from_chunks:
        counts.append(f"{reuse.from_chunks} from other prompts ({reuse.recomputed} of them recomputed)")
    if reuse.streamed:
        counts.append(f"{reuse.streamed} from the origin")
    counts.append(f"{reuse.computed} computed")
    notes.print(f"reuse: {reuse.level}; {', '.join(counts)}", soft_wrap=True)
    if not reuse.from_chunks:
        return
    if reuse.budget is not None:
        known = "calibrated for this model" if reuse.calibrated else "not calibrated for this model"
        notes.print(
            f"recompute policy {reuse.recompute_policy}, budget {reuse.budget:.2f}, {known}; ",
            Text("recomputed", _RECOMPUTED),
        )
    tokens = encode_prompt(session.engine, request).tokens
    for chunk in reuse.chunks:
        came = ", from the origin" if chunk.streamed else ""
        line = f"[{chunk.number or '-'}] {_SOURCES[chunk.source]}{came}{_scores(chunk)}"
        notes.print(line, markup=False, soft_wrap=True)
        if chunk.source == "reused":
            notes.print(_coloured(session, tokens, chunk), soft_wrap=True)


_RECOMPUTED, _STALE = "bold yellow", "dim"


def _coloured(session: Session, tokens: tuple[int, ...], chunk: ChunkReuse) -> Text:
    from rich.text import Text

    shown = Text("    ")
    for again, run in _runs(chunk):
        text = session.engine.tokenizer.spell([tokens[position] for position in run])
        shown.append(printable(text), _RECOMPUTED if again else _STALE)
    return shown


def _runs(chunk: ChunkReuse) -> Iterator[tuple[bool, list[int]]]:
    """The chunk's positions in runs: recomputed, or not."""
    chosen = set(chunk.recomputed_positions)
    for again, run in groupby(range(chunk.start, chunk.stop), key=lambda position: position in chosen):
        yield again, list(run)


def _scores(chunk: ChunkReuse) -> str:
    names = {"impact": chunk.impact, "overlap": chunk.overlap, "disorder": chunk.disorder, "overhead": chunk.overhead}
    known = [f"{name} {value:.2f}" for name, value in names.items() if value is not None]
    again = f": {chunk.recomputed} of {chunk.stop - chunk.start} tokens recomputed" if chunk.source == "reused" else ""
    return again + (f" ({', '.join(known)})" if known else "")
