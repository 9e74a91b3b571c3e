"""`rekindle warm` and `rekindle explain`: prefill prompts in advance, and explain why one is fast or slow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rekindle.cli.app import app
from rekindle.cli.options import AsJson, ModelOption, System, loading_options, takes
from rekindle.errors import CacheUnusable, InvalidSetting

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
        bool, typer.Option("--knowledge", help="What questions begin with: the system prompt, frequent passages.")
    ] = False,
    passages: Annotated[int, typer.Option(min=0, max=1000, help="With --knowledge: number of passages.")] = 8,
    model: ModelOption = "smollm2",
    raw: Raw = False,
    as_system: AsSystem = False,
    json: AsJson = False,
) -> None:
    """Prefill prompts now and keep their KV: prompts that begin like them start at once, also after a restart."""
    from rekindle.cli.console import counting, print_json, progress
    from rekindle.cli.options import read_prompts
    from rekindle.session.session import Session

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
        outcomes = dict(session.cache.writer.outcomes) if session.cache.writer else {}
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
    question: Annotated[str | None, typer.Option(help="Instead of a prompt: a question about your documents.")] = None,
    last: Annotated[bool, typer.Option("--last", help="Explain the last request that was answered.")] = False,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="With --last: number of requests.")] = 1,
    model: ModelOption = "smollm2",
    raw: Raw = False,
    system: System = None,
    json: AsJson = False,
) -> None:
    """Show where each span of a prompt comes from, why the others are computed, and what would help."""
    from rekindle.cli.console import print_json, progress
    from rekindle.cli.options import read_prompts
    from rekindle.session.session import Session

    if [last, file is not None, question is not None].count(True) != 1:
        raise InvalidSetting("Name a file with a prompt, give a --question, or say --last.")
    if last:
        explanations = _last(loading, number)
    elif question is not None:
        with progress(model) as report, Session(model, **loading, progress=report) as session:
            explanations = [session.explain_request(session.prepare(question).request)]
    else:
        assert file is not None
        (prompt, *_) = read_prompts(file, raw=raw, as_system=False)
        if system is not None and isinstance(prompt, list):
            prompt = [{"role": "system", "content": system}, *prompt]
        with progress(model) as report, Session(model, **loading, progress=report) as session:
            explanations = [session.explain(prompt)]
    if json:
        print_json([one.as_dict() for one in explanations] if last else explanations[0].as_dict())
        return
    for one in explanations:
        if one.at is not None:
            typer.echo(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.at)))
        typer.echo(str(one))


def _last(loading: dict[str, Any], number: int) -> list[Any]:
    """What was recorded about the last requests; needs no model."""
    from rekindle.cache.explain import Explanation
    from rekindle.cli.cache import open_cache
    from rekindle.store import history

    named = loading.get("cache")
    with open_cache(Path(named) if named else None, None) as disk:
        found = history.last(disk, number)
        if not found:
            raise CacheUnusable(f"Nothing was asked yet with the cache in {disk.folder}.")
    return [Explanation.from_dict(asked.record) for asked in found]
