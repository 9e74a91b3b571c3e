"""`rekindle ask`: a question, answered from your own documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from rekindle.cli import STARTED
from rekindle.cli.options import (
    AsJson,
    ModelOption,
    app,
    daemon_options,
    loading_options,
    print_json,
    sampling_options,
    takes,
)
from rekindle.text.visible import printable

TopK = Annotated[int, typer.Option("--top-k", "-k", min=1, max=1000, help="Number of passages to quote.")]
Passages = Annotated[
    int | None,
    typer.Option("--top-k", "-k", min=1, max=1000, help="Number of passages to quote; default: the relevant ones."),
]
Retrieval = Annotated[
    str, typer.Option(help="How passages are found: fused (BM25 and embeddings), weighted, bm25, embedding.")
]


@app.command()
@takes(sampling=sampling_options, loading=loading_options, daemon=daemon_options, without={"top_k"})
def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    sampling: dict[str, Any],
    loading: dict[str, Any],
    daemon: dict[str, Any],
    model: ModelOption = "smollm2",
    top_k: Passages = None,
    retrieval: Retrieval = "fused",
    sources: Annotated[bool, typer.Option("--sources", help="Show the passages themselves, too.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what was reused, and which tokens were recomputed.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Answer a question from the documents that were ingested, with numbered sources."""
    from rekindle.cli.runner import ReplyPrinter, open_runner, stored_answer

    sampling["top_k"] = top_k  # of passages
    options = {**sampling, "retrieval": retrieval}
    with ReplyPrinter(STARTED, silent=json) as printer:
        result = stored_answer(question, model, loading, options)
        if result is not None:
            printer.take({"text": result["answer"]["text"]})
        else:
            with open_runner(model, loading, daemon) as runner:
                job = {"kind": "ask", "question": question, "options": options, "spelled": verbose}
                result = runner.run(job, printer.take)
    answer = result["answer"]
    if json:
        print_json({"model": result["model"], **answer})
        return
    typer.echo()
    show_quote(answer)
    show_sources(answer["sources"], whole=sources)
    if verbose:
        show_reuse(answer["reuse"], result["reuse"], result["spelled"])
    printer.print_footer(result, answer)
    if answer["refused"] is not None:
        typer.echo(f"note: no earlier answer was given: {printable(answer['refused'])}", err=True)


def show_quote(answer: dict[str, Any]) -> None:
    """Print the sentence of a source that is likely to answer, word for word, and whether that is uncertain."""
    quote = answer["quote"]
    if quote is None:
        return
    if answer["uncertain"]:
        typer.echo("Uncertain: no passage is clearly about the question. The nearest one says:")
    typer.echo(f'[{quote["number"]}] "{printable(quote["text"])}"\n')


def show_sources(sources: Sequence[dict[str, Any]], *, whole: bool) -> None:
    """Print the sources, numbered as in the answer, quoted line by line."""
    for source in sources:
        where = "" if source["source"] == source["title"] else f"  ({source['source']})"
        typer.echo(printable(f"[{source['number']}] {source['title']}{where}"))
        if whole:
            for line in printable(source["text"]).splitlines():
                typer.echo(f"    | {line}")


_SOURCES = {
    "exact": "exact",
    "reused": "reused",
    "computed": "computed, behind reused passages",
}


def show_reuse(reuse: dict[str, Any], line: str, spelled: Sequence[Sequence[tuple[bool, str]]]) -> None:
    """Print where the tokens of a prompt came from, as `line` says; of reused passages the tokens, as `spelled`."""
    from rich.text import Text

    from rekindle.cli.console import notes

    notes.print(f"reuse: {reuse['level']}; {line}", soft_wrap=True)
    if not reuse["from_chunks"]:
        return
    if reuse["budget"] is not None:
        known = "calibrated for this model" if reuse["calibrated"] else "not calibrated for this model"
        notes.print(
            f"recompute policy {reuse['recompute_policy']}, budget {reuse['budget']:.2f}, {known}; ",
            Text("recomputed", _RECOMPUTED),
        )
    for chunk, runs in zip(reuse["chunks"], spelled, strict=True):
        came = ", from the origin" if chunk["streamed"] else ""
        about = f"[{chunk['number'] or '-'}] {_SOURCES[chunk['source']]}{came}{_scores(chunk)}"
        notes.print(about, markup=False, soft_wrap=True)
        if chunk["source"] == "reused":
            shown = Text("    ")
            for again, text in runs:
                shown.append(printable(text), _RECOMPUTED if again else _STALE)
            notes.print(shown, soft_wrap=True)


_RECOMPUTED, _STALE = "bold yellow", "dim"


def _scores(chunk: dict[str, Any]) -> str:
    names = ("impact", "overlap", "disorder", "change", "share")
    known = [f"{name} {chunk[name]:.2f}" for name in names if chunk[name] is not None]
    tokens = chunk["stop"] - chunk["start"]
    again = f": {chunk['recomputed']} of {tokens} tokens recomputed" if chunk["source"] == "reused" else ""
    return again + (f" ({', '.join(known)})" if known else "")
