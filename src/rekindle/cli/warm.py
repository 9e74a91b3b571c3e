"""`rekindle warm` and `rekindle explain`: prepare prompts, and ask why one is fast or slow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rekindle.cli import app
from rekindle.cli.options import AsJson, System, complete_model, loading_options, takes
from rekindle.errors import CacheUnusable, InvalidSetting

ModelOption = Annotated[
    str,
    typer.Option("--model", "-m", help="A name, a folder, a .gguf file, or ORG/NAME.", autocompletion=complete_model),
]
Raw = Annotated[bool, typer.Option("--raw", help="A text is continued as it is, without the chat template.")]
AsSystem = Annotated[bool, typer.Option("--as-system", help="A text is the system message, not the user's.")]


@app.command()
@takes(loading=loading_options)
def warm(
    loading: dict[str, Any],
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="Texts, .json or .jsonl with messages.")
    ] = None,
    knowledge: Annotated[
        bool, typer.Option("--knowledge", help="What questions begin with: the system prompt, passages often used.")
    ] = False,
    passages: Annotated[int, typer.Option(min=0, max=1000, help="With --knowledge: so many passages.")] = 8,
    model: ModelOption = "smollm2",
    raw: Raw = False,
    as_system: AsSystem = False,
    json: AsJson = False,
) -> None:
    """Compute prompts now and keep their KV: what begins like them then starts at once, also after a restart."""
    from rekindle.cli.console import counting, print_json, progress
    from rekindle.cli.prompts import read_prompts
    from rekindle.run.session import Session

    if not files and not knowledge:
        raise InvalidSetting("Name files with prompts, or say --knowledge.")
    named = [(str(path), prompt) for path in files or () for prompt in read_prompts(path, raw=raw, as_system=as_system)]
    with progress(model) as report, Session(model, **loading, progress=report) as session:
        if session.cache.store is None:
            raise InvalidSetting("There is no cache to warm: leave out --cache off and --reuse off.")
        started = time.perf_counter()
        with counting("warm") as count:
            done = session.warm([prompt for _, prompt in named], progress=count)
        if knowledge:
            with counting("warm passages") as count:
                known = session.warm_knowledge(passages, progress=count)
            names = ["the system prompt of ask", *(f"passage {number}" for number in range(1, len(known)))]
            named += [(name, "") for name in names]
            done += known
        seconds = time.perf_counter() - started
        outcomes = dict(session.cache.keeper.outcomes) if session.cache.keeper else {}
    computed, reused = sum(reuse.computed for reuse in done), sum(reuse.reused for reuse in done)
    if json:
        print_json({"prompts": len(done), "computed_tokens": computed, "known_tokens": reused, "seconds": seconds})
        return
    for (path, _), reuse in zip(named, done, strict=True):
        typer.echo(f"{path}: {reuse.computed + reuse.reused} tokens, {reuse.reused} known before")
    typer.echo(f"{computed} tokens computed, {reused} known before, {seconds:.1f} s")
    if refused := outcomes.get("refused", 0) + outcomes.get("failed", 0):
        typer.echo(f"{refused} could not be kept: is the limit too small? `rekindle cache stats` tells.", err=True)


@app.command()
@takes(loading=loading_options)
def explain(
    loading: dict[str, Any],
    file: Annotated[Path | None, typer.Argument(help="A prompt: a text, or .json with messages.")] = None,
    question: Annotated[str | None, typer.Option(help="In place of a prompt: a question about your documents.")] = None,
    last: Annotated[bool, typer.Option("--last", help="Explain the last request that was answered.")] = False,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="With --last: the last so many.")] = 1,
    model: ModelOption = "smollm2",
    raw: Raw = False,
    system: System = None,
    json: AsJson = False,
) -> None:
    """Say which spans of a prompt come from where, why the others do not, and what would help."""
    from rekindle.cli.console import print_json, progress
    from rekindle.cli.prompts import read_prompts
    from rekindle.run.session import Session

    if [last, file is not None, question is not None].count(True) != 1:
        raise InvalidSetting("Name a file with a prompt, give a --question, or say --last.")
    if last:
        told = _last(loading, number)
    elif question is not None:
        with progress(model) as report, Session(model, **loading, progress=report) as session:
            told = [session.explain_request(session.prepare(question).request)]
    else:
        assert file is not None
        (prompt, *_) = read_prompts(file, raw=raw, as_system=False)
        if system is not None and isinstance(prompt, list):
            prompt = [{"role": "system", "content": system}, *prompt]
        with progress(model) as report, Session(model, **loading, progress=report) as session:
            told = [session.explain(prompt)]
    if json:
        print_json([one.as_dict() for one in told] if last else told[0].as_dict())
        return
    for one in told:
        if one.at is not None:
            typer.echo(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.at)))
        typer.echo(str(one))


def _last(loading: dict[str, Any], number: int) -> list[Any]:
    """What was noted about the last requests; no model is needed for that."""
    from rekindle.cli.cache import opened
    from rekindle.run.explain import Explanation
    from rekindle.store import history

    named = loading.get("cache")
    with opened(Path(named) if named else None, None) as disk:
        found = history.last(disk, number)
        if not found:
            raise CacheUnusable(f"Nothing was asked yet with the cache in {disk.folder}.")
    return [Explanation.from_dict(asked.record) for asked in found]
