"""`rekindle cache`: list, check, prune, export a cache folder, without a model; `rekindle warm`: fill it;
`rekindle explain`: why a prompt is fast or slow.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli.options import (
    AsJson,
    ModelOption,
    System,
    app,
    command_group,
    daemon_options,
    loading_options,
    print_json,
    print_listing,
    print_table,
    read_body,
    read_prompts,
    takes,
)
from rekindle.core.request import Message
from rekindle.core.size import count_of, human_bytes, parse_duration, parse_limit
from rekindle.errors import CacheUnusable, EntryNotFound, InvalidPrompt, InvalidSetting
from rekindle.machine import cache_folder
from rekindle.safe_read import read_secret_file
from rekindle.settings import Settings

if TYPE_CHECKING:
    from rekindle.store.disk import DiskStore

RENAMED = {"folder": "cache"}
cache = command_group("cache", "List, check, prune, export the cache.", RENAMED)

Folder = Annotated[Path | None, typer.Option("--cache", "-C", help="The cache folder; default: the user's own.")]
KeyFile = Annotated[Path | None, typer.Option(help="The key file of a cache with keyed digests.")]
Entries = Annotated[list[str], typer.Argument(metavar="ENTRY...", help="Entries, by a prefix of their names.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


@cache.command("ls")
def list_entries(folder: Folder = None, key_file: KeyFile = None, json: AsJson = False) -> None:
    """List the entries: model, tokens, size, hits."""
    from rekindle.store import report

    place = folder or chosen_folder()
    entries: list[report.CacheEntry] = []
    if not is_unused(folder):
        with open_cache(folder, key_file) as store:
            entries = report.entries(store)
    now, adapters = time.time(), adapter_names(one.kv_space.adapter for one in entries)
    columns: dict[str, Callable[[report.CacheEntry], object]] = {
        "entry": lambda one: one.extent.name[:8],
        "model": lambda one: one.kv_space.title,
        "adapter": lambda one: adapters.get(one.kv_space.adapter or "", ""),
        "tokens": lambda one: f"{one.extent.depth * 32}+{one.extent.tokens}",
        "size": lambda one: human_bytes(one.extent.size_bytes),
        "coding": lambda one: one.extent.coding,
        "hits": lambda one: one.extent.hits,
        "saved": lambda one: f"{one.extent.saved_ms / 1000:.1f} s",
        "used": lambda one: _age(now - one.extent.used),
        "": lambda one: "pinned" if one.extent.pinned else "",
    }
    print_listing(entries, columns, json, lambda one: one.as_dict(), empty=f"The cache in {place} is empty.")


@cache.command()
def stats(folder: Folder = None, key_file: KeyFile = None, json: AsJson = False) -> None:
    """Show totals: bytes, tokens, hits, time saved, bytes written; by model with the room left; the best entries."""
    from rekindle.store import report
    from rekindle.store.settings import StoreSettings

    with open_cache(folder, key_file) as store:
        chosen, used, free = Settings.load(), report.used_bytes(store), store.files.free_bytes(store.folder)
        limit, budget = chosen.disk_limit, StoreSettings(write_budget=chosen.write_budget).write_budget_bytes
        limit_bytes = parse_limit(limit).resolve(free + used)
        room_bytes = max(0, min(limit_bytes - used, free))  # that may be kept without evicting
        found: dict[str, Any] = {
            "folder": str(store.folder),
            "limit": limit,
            "limit_bytes": limit_bytes,
            "free_bytes": room_bytes,
            **report.summary(store),
            "write_budget": chosen.write_budget,
            **report.written(store, budget),
            "catalog_bytes": store.database.size_bytes(),
        }
        models = report.by_kv_space(store)
        entries = report.entries(store)
    names = adapter_names(model["adapter"] for model in models)
    for model in models:
        model["room_tokens"] = room_bytes // model.pop("token_bytes")
        model["adapter_name"] = names.get(model["adapter"] or "")
    best = [entry.as_dict() for entry in sorted(entries, key=lambda entry: -entry.extent.saved_ms)[:10]]
    if json:
        print_json({**found, "models": models, "best": best})
    else:
        _print_stats(found, models, best)


def _print_stats(found: dict[str, Any], models: list[dict[str, Any]], best: list[dict[str, Any]]) -> None:
    limit = parse_limit(found["limit"])
    shown = {
        "folder": found["folder"],
        "limit": str(limit) if limit.share is None else f"{limit} ({human_bytes(found['limit_bytes'])})",
        "room left": human_bytes(found["free_bytes"]),
        "entries": f"{found['entries']:,} ({found['pinned']:,} pinned)",
        "tokens": f"{found['tokens']:,}",
        "size": f"{human_bytes(found['bytes'])}, and {human_bytes(found['catalog_bytes'])} of catalog",
        "hits": f"{found['hits']:,}",
        "time saved": f"{found['saved_ms'] / 1000:,.1f} s",
        "written": f"{human_bytes(found['written_hour_bytes'])} in the last hour, "
        f"{human_bytes(found['written_day_bytes'])} in the last day",
        "budget left": _budget_left(found),
    }
    for name, value in shown.items():
        typer.echo(f"{name:11} {value}")
    if not found["entries"]:
        return
    typer.echo()
    print_table(
        ["model", "adapter", "tenant", "entries", "tokens", "size", "saved", "room for"],
        [
            [
                *(m["model"] or m["identity"][:8], m["adapter_name"] or "-", m["tenant"]),
                *(str(m["entries"]), str(m["tokens"]), human_bytes(m["bytes"]), f"{m['saved_ms'] / 1000:.1f} s"),
                count_of(m["room_tokens"], "token"),
            ]
            for m in models
        ],
    )
    print_table(
        ["entry", "model", "tokens", "hits", "saved"],
        [
            [
                *(row["name"][:8], row["model"] or row["identity"][:8]),
                *(f"{row['depth'] * 32}+{row['tokens']}", str(row["hits"]), f"{row['saved_ms'] / 1000:,.1f} s"),
            ]
            for row in best
        ],
        title="\nEntries that saved most",
    )


def _budget_left(found: dict[str, Any]) -> str:
    if found["write_budget_left_bytes"] is None:
        return "no limit" if found["write_budget"] is None else "none: the folder can only be read"
    left, refused = human_bytes(found["write_budget_left_bytes"]), found["refused_day_writes"]
    refusals = f"; {count_of(refused, 'write')} refused in the last day" if refused else ""
    return f"{left} of {parse_limit(found['write_budget'])} a day{refusals}"


@cache.command()
def check(
    fix: Annotated[bool, typer.Option("--fix", help="Remove damaged entries; they are computed again.")] = False,
    folder: Folder = None,
    key_file: KeyFile = None,
    json: AsJson = False,
) -> None:
    """Verify the catalog and every byte of every entry. Exit status 1 if problems remain."""
    from rekindle.cli.console import counting
    from rekindle.store.check import check as verify

    with open_cache(folder, key_file) as store, counting("check") as progress:
        found = verify(store, fix=fix, progress=progress)
    if json:
        print_json(asdict(found))
    else:
        for problem in found.problems:
            typer.echo(f"{problem.entry}: {problem.what}")
        done = "fixed" if fix else "`rekindle cache check --fix` removes them"
        verdict = f"{count_of(len(found.problems), 'problem')}; {done}" if found.problems else "no problems"
        typer.echo(f"{_entries(found.entries)}, {human_bytes(found.size_bytes)}: {verdict}")
        if found.foreign:
            typer.echo(f"left alone, not files of this cache: {', '.join(found.foreign)}")
        if found.under_other_keys:
            typer.echo(f"not checked, written with another key: {_entries(found.under_other_keys)}")
    if found.problems and not fix:
        raise typer.Exit(1)


@cache.command()
def rm(entries: Entries, folder: Folder = None, key_file: KeyFile = None) -> None:
    """Remove entries, and those that depend on them."""
    with open_cache(folder, key_file, write=True) as store:
        removed = store.remove(store.entries(entries))
    typer.echo(f"{_entries(removed)} removed")


@cache.command()
def prune(
    to: Annotated[str | None, typer.Option(help="Evict until the cache takes at most this: 2GB, 5%.")] = None,
    unused: Annotated[
        str | None, typer.Option(help="Remove entries that were not used for this long: 12h, 7d.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Remove everything of this model.")] = None,
    folder: Folder = None,
    key_file: KeyFile = None,
) -> None:
    """Make the cache smaller: to a size, by age, or by model. Pinned entries stay."""
    from rekindle.store import report

    if to is None and unused is None and model is None:
        raise InvalidSetting("Say what to prune: --to 2GB, --unused 7d or --model NAME.")
    with open_cache(folder, key_file, write=True) as store:
        before = len(store.entries())
        models = report.kv_spaces(store)
        if unused is not None:
            oldest = store.clock() - parse_duration(unused)
            store.evict(lambda row: row.used < oldest)
        if model is not None:
            if not any(model in (kv_space.model, kv_space.identity) for kv_space in models.values()):
                known = ", ".join(sorted({kv_space.model or kv_space.identity for kv_space in models.values()}))
                raise EntryNotFound(
                    f"The cache has no entries of a model {model!r}. It has entries of: {known or 'no model'}."
                )
            store.evict(lambda row: model in (models[row.kv_space].model, models[row.kv_space].identity))
        if to is not None:
            used = sum(row.size_bytes for row in store.entries()) + store.database.size_bytes()
            store.room.prune(parse_limit(to).resolve(store.files.free_bytes(store.folder) + used))
        store.collect()
        after = len(store.entries())
    typer.echo(f"{_entries(before - after)} removed, {after:,} left")


@cache.command()
def clear(yes: Yes = False, folder: Folder = None, key_file: KeyFile = None) -> None:
    """Remove everything, pinned entries too, and all traces: requests, apps, tenants, salts; with the user's own folder
    also what is on shared tiers."""
    from rekindle.cache.open_store import shared_tiers
    from rekindle.store import purge
    from rekindle.store.shared_tier import SharedTier
    from rekindle.store.sharing import remove_from

    with open_cache(folder, key_file, write=True) as store:
        rows = store.entries()
        objects = shared_tiers(Settings.load()) if folder is None else []
        tiers = [SharedTier(one, store.digester) for one in objects]
        where = " and ".join([str(store.folder), *(f"the shared tier {tier.name}" for tier in tiers)])
        if not yes and (rows or tiers):
            typer.confirm(f"Remove everything ({_entries(len(rows))}) from {where}?", abort=True)
        remove_from(tiers, None)
        removed = purge.clear(store)
    typer.echo(f"{_entries(removed)} removed")


@cache.command()
def pin(entries: Entries, folder: Folder = None, key_file: KeyFile = None) -> None:
    """Never evict these entries, nor those they depend on. Pinned entries take at most half of the disk limit."""

    with open_cache(folder, key_file, write=True, limit=Settings.load().disk_limit) as store:
        store.pin(store.entries(entries))
    typer.echo(f"{_entries(len(entries))} pinned")


@cache.command()
def unpin(entries: Entries, folder: Folder = None, key_file: KeyFile = None) -> None:
    """Allow these entries to be evicted again."""
    with open_cache(folder, key_file, write=True) as store:
        store.pin(store.entries(entries), pinned=False)
    typer.echo(f"{_entries(len(entries))} unpinned")


@cache.command()
def gc(folder: Folder = None, key_file: KeyFile = None) -> None:
    """Remove leftovers, rewrite sparse entries, shrink the catalog. No usable entry is lost."""
    with open_cache(folder, key_file, write=True) as store:
        removed = store.collect()
    typer.echo(f"{count_of(removed, 'leftover file')} removed")


@contextmanager
def open_cache(
    folder: Path | None, key_file: Path | None, *, write: bool = False, limit: str = "100%"
) -> Iterator[DiskStore]:
    """Open the cache of an existing folder: looking at a cache must not create one."""
    from rekindle.store.disk import DiskStore
    from rekindle.store.folder import may_hold_cache
    from rekindle.store.settings import StoreSettings

    place = folder or chosen_folder()
    if not may_hold_cache(place):
        raise CacheUnusable(f"There is no cache in {place}. Run a prompt first, or name another folder with --cache.")
    # The limit belongs to the process that uses the cache; looking at it here must not evict anything.
    store = DiskStore(place, StoreSettings(disk_limit=limit, killed_ttl_seconds=None, key=_key(key_file)))
    try:
        if write and store.database.read_only and not store.database.lacks_room:
            raise CacheUnusable(f"{place} is read-only.")
        yield store
    except (OSError, sqlite3.Error) as error:
        raise CacheUnusable(f"The cache in {place} could not be used: {error}. Try again.") from error
    finally:
        store.close()


def chosen_folder() -> Path:
    """The cache folder of the settings, else the user's own."""

    chosen = Settings.load().cache
    return cache_folder() if chosen is None or chosen == "off" else Path(chosen)


def is_unused(folder: Path | None) -> bool:
    """Whether no folder is named and the cache of the settings was never used: then it is empty, and no mistake."""
    return folder is None and not chosen_folder().exists()


def _key(path: Path | None) -> bytes | None:
    return None if path is None else read_secret_file(path, "The key file")


def _entries(count: int) -> str:
    return count_of(count, "entry", "entries")


def adapter_names(digests: Iterable[str | None]) -> dict[str, str]:
    """What people call the adapters with these digests: their registered name, else the beginning of the digest."""
    from rekindle.engine.lora_files import read_adapter
    from rekindle.errors import ModelError
    from rekindle.models.adapter_registry import entries

    names = {digest: digest[:8] for digest in digests if digest}
    for entry in entries() if names else ():
        with suppress(ModelError):
            digest = read_adapter(entry.path, entry.scale).digest
            names |= {digest: entry.name} if digest in names else {}
    return names


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"


Raw = Annotated[bool, typer.Option("--raw", help="A text is continued as it is, without the chat template.")]
AsSystem = Annotated[bool, typer.Option("--as-system", help="A text is the system message, not the user's.")]


@app.command()
@takes(loading=loading_options, daemon=daemon_options)
def warm(
    loading: dict[str, Any],
    daemon: dict[str, Any],
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="Documents, .json or .jsonl with messages.")
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
    from rekindle.cli.console import counting
    from rekindle.cli.runner import open_runner

    if not files and not knowledge:
        raise InvalidSetting("Name files with prompts, or say --knowledge.")
    named = [(str(path), prompt) for path in files or () for prompt in read_prompts(path, raw=raw, as_system=as_system)]
    job = {"kind": "warm", "prompts": [prompt for _, prompt in named], "passages": passages if knowledge else None}
    with open_runner(model, loading, daemon) as runner, counting("warm") as count:
        result = runner.run(job, lambda event: count(*event["warmed"]))
    done = result["prompts"]
    if knowledge:
        known = len(done) - len(named)
        named += [(name, "") for name in ("the system prompt of ask", *(f"passage {n}" for n in range(1, known)))]
    computed, reused = sum(one["computed"] for one in done), sum(one["reused"] for one in done)
    seconds = result["seconds"]
    if json:
        print_json({"prompts": len(done), "computed_tokens": computed, "known_tokens": reused, "seconds": seconds})
        return
    for (path, _), one in zip(named, done, strict=True):
        tokens = count_of(one["computed"] + one["reused"], "token")
        typer.echo(f"{path}: {tokens}, {one['reused']:,} already in the cache")
    typer.echo(f"{count_of(computed, 'token')} computed, {reused:,} already in the cache, {seconds:.1f} s")
    if refused := result["refused"]:
        why = "; ".join(result["reasons"]) or "is the limit too small? See `rekindle cache stats`"
        typer.echo(f"{refused} could not be kept: {why}.", err=True)


@app.command()
@takes(loading=loading_options, daemon=daemon_options)
def explain(
    loading: dict[str, Any],
    daemon: dict[str, Any],
    file: Annotated[
        Path | None, typer.Argument(help="A prompt: a document, .json with messages, or the body of a request.")
    ] = None,
    question: Annotated[str | None, typer.Option(help="Instead of a prompt: a question about your documents.")] = None,
    last: Annotated[bool, typer.Option("--last", help="Explain the last request that was answered.")] = False,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="With --last: number of requests.")] = 1,
    model: ModelOption = "smollm2",
    raw: Raw = False,
    system: System = None,
    json: AsJson = False,
) -> None:
    """Show where each span of a prompt comes from, why the others are computed, and what would help."""
    from rekindle.cache.explain import Explanation
    from rekindle.cli.runner import open_runner

    if [last, file is not None, question is not None].count(True) != 1:
        raise InvalidSetting("Name a file with a prompt, give a --question, or say --last.")
    if last:
        explanations = _last(loading, number)
    else:
        job: dict[str, Any] = {"kind": "explain", "question": question}
        if file is not None:
            job = {"kind": "explain", **_prompt_to_explain(file, raw)}
            if system is not None and isinstance(job["prompt"], list):
                job["prompt"] = [{"role": "system", "content": system}, *job["prompt"]]
        with open_runner(model, loading, daemon) as runner:
            explanations = [Explanation.from_dict(runner.run(job, lambda _: None)["explanation"])]
    if json:
        print_json([one.as_dict() for one in explanations] if last else explanations[0].as_dict())
        return
    for one in explanations:
        if one.at is not None:
            typer.echo(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.at)))
        typer.echo(str(one))


def _prompt_to_explain(file: Path, raw: bool) -> dict[str, Any]:
    """The prompt of a file and its options: a body of any protocol is read as the server reads it."""
    body = read_body(file)
    if body is None:
        (prompt, *_) = read_prompts(file, raw=raw, as_system=False)
        return {"prompt": prompt, "options": {}}
    from rekindle.server.canonical import canonical_request
    from rekindle.server.errors import ApiError
    from rekindle.server.recorded import recorded_request

    try:
        request, _ = canonical_request(recorded_request(body, ""), "default")
    except ApiError as refused:
        raise InvalidPrompt(f"{file}: {refused.message}") from None
    messages = [message.as_template_input() for message in request.prompt if isinstance(message, Message)]
    return {"prompt": messages, "options": {"tools": [t.as_openai() for t in request.tools], "think": request.think}}


def _last(loading: dict[str, Any], number: int) -> list[Any]:
    """What was recorded about the last requests; needs no model."""
    from rekindle.cache.explain import Explanation
    from rekindle.cli.cache import open_cache
    from rekindle.store import history

    named = loading.get("cache")
    with open_cache(Path(named) if named else None, None) as disk:
        found = history.last(disk, number)
        if not found:
            raise CacheUnusable(f"No request has used the cache in {disk.folder} yet.")
    return [Explanation.from_dict(asked.record) for asked in found]
