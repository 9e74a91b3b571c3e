"""What became of the passages of a prompt, for people: reused, mended (which tokens, in colour), computed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from rekindle.core.visible import printable

if TYPE_CHECKING:
    from rich.text import Text

    from rekindle.core.reply import ChunkReuse, Reuse
    from rekindle.core.request import Request
    from rekindle.run.session import Session

_SOURCES = {
    "exact": "exact",
    "mended": "mended",
    "computed": "computed, behind mended passages",
}


def show_reuse(session: Session, request: Request, reuse: Reuse) -> None:
    """Print where the tokens of a prompt came from; of mended passages, the tokens themselves."""
    from rich.text import Text

    from rekindle.cli.console import notes
    from rekindle.run.prompt import encode_prompt

    parts = {"from the engine": reuse.engine, "from memory": reuse.memory, "from disk": reuse.disk}
    told = [f"{count} {where}" for where, count in parts.items() if count]
    if reuse.mended:
        told.append(f"{reuse.mended} mended ({reuse.recomputed} of them computed anew)")
    if reuse.streamed:
        told.append(f"{reuse.streamed} from the origin")
    told.append(f"{reuse.computed} computed")
    notes.print(f"reuse: {reuse.level}; {', '.join(told)}", soft_wrap=True)
    if not reuse.mended:
        return
    if reuse.budget is not None:
        known = "calibrated for this model" if reuse.calibrated else "not calibrated for this model"
        notes.print(f"mended by {reuse.mender}, budget {reuse.budget:.2f}, {known}; ", Text("computed anew", _ANEW))
    tokens = encode_prompt(session.engine, request).tokens
    for chunk in reuse.chunks:
        came = ", from the origin" if chunk.streamed else ""
        line = f"[{chunk.number or '-'}] {_SOURCES[chunk.source]}{came}{_scores(chunk)}"
        notes.print(line, markup=False, soft_wrap=True)
        if chunk.source == "mended":
            notes.print(_coloured(session, tokens, chunk), soft_wrap=True)


_ANEW, _STALE = "bold yellow", "dim"


def _coloured(session: Session, tokens: tuple[int, ...], chunk: ChunkReuse) -> Text:
    from rich.text import Text

    shown = Text("    ")
    for anew, run in _runs(chunk):
        text = session.engine.tokenizer.spell([tokens[position] for position in run])
        shown.append(printable(text), _ANEW if anew else _STALE)
    return shown


def _runs(chunk: ChunkReuse) -> Iterator[tuple[bool, list[int]]]:
    """The chunk's positions in runs: computed anew, or not."""
    chosen = set(chunk.anew)
    for anew, run in groupby(range(chunk.start, chunk.stop), key=lambda position: position in chosen):
        yield anew, list(run)


def _scores(chunk: ChunkReuse) -> str:
    names = {"impact": chunk.impact, "overlap": chunk.overlap, "disorder": chunk.disorder, "overhead": chunk.overhead}
    known = [f"{name} {value:.2f}" for name, value in names.items() if value is not None]
    anew = f": {chunk.recomputed} of {chunk.stop - chunk.start} tokens anew" if chunk.source == "mended" else ""
    return anew + (f" ({', '.join(known)})" if known else "")
