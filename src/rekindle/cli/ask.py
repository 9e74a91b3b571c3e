"""`rekindle ask`: a question, answered from your own documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli import app
from rekindle.cli.options import AsJson, complete_model, loading_options, sampling_options, takes
from rekindle.core.visible import printable

if TYPE_CHECKING:
    from rekindle.core.answer import Source

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="A name, a folder, a .gguf file, or ORG/NAME.", autocompletion=complete_model),
]
TopK = Annotated[int, typer.Option("--top-k", "-k", min=1, max=1000, help="So many passages are quoted.")]
Retrieval = Annotated[
    str, typer.Option(help="How passages are found: fused (words and meaning), weighted, bm25, embedding.")
]


@app.command()
@takes(sampling=sampling_options, loading=loading_options, without={"top_k"})
def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    sampling: dict[str, Any],
    loading: dict[str, Any],
    model: Model = "smollm2",
    top_k: TopK = 5,
    retrieval: Retrieval = "fused",
    sources: Annotated[bool, typer.Option("--sources", help="Show the passages themselves, too.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what was reused, and which tokens were computed anew.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Answer a question from the documents that were ingested, with numbered sources."""
    from rekindle.cli.console import notes, print_json, progress
    from rekindle.cli.passages import show_reuse
    from rekindle.run.session import Session

    sampling.pop("top_k")  # of tokens: here it counts passages
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


def show_sources(sources: Sequence[Source], *, whole: bool) -> None:
    """The sources, numbered as in the answer. What they say is quoted line by line: it is data."""
    for source in sources:
        where = "" if source.source == source.title else f"  ({source.source})"
        typer.echo(printable(f"[{source.number}] {source.title}{where}"))
        if whole:
            for line in printable(source.text).splitlines():
                typer.echo(f"    | {line}")
