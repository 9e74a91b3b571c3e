"""`rekindle origin`: publish KV as signed files, list, check, remove and serve them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli.cache import AsSystem, Raw
from rekindle.cli.options import (
    AsJson,
    Model,
    ModelOption,
    System,
    command_group,
    loading_options,
    print_json,
    print_listing,
    read_prompts,
    takes,
)
from rekindle.core.request import Request, as_messages
from rekindle.core.size import count_of, human_bytes
from rekindle.errors import InvalidPrompt, InvalidSetting
from rekindle.safe_read import read_secret_file

if TYPE_CHECKING:
    from rekindle.core.kv import KvLayout
    from rekindle.remote.publish.folder import PublishedContext
    from rekindle.remote.publish.publisher import PublishResult

origin = command_group("origin", "Publish KV for other machines: plain files, signed, encrypted if you want.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the origin.")]
SecretFile = Annotated[
    Path | None, typer.Option("--secret", help="Encrypt with this secret, which the origin does not have.")
]


@origin.command()
def key(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The file to create. Never an existing one.")],
    secret: Annotated[bool, typer.Option("--secret", help="A secret to encrypt with, instead of a key.")] = False,
) -> None:
    """Make a signing key and FILE.pub, which clients trust; or a secret to encrypt with."""
    from rekindle.remote.signing import make_secret, make_signing_key

    if secret:
        make_secret(path)
        typer.echo(f"{path}: a new secret. Give it to publishers and clients, not to the origin.")
        return
    made = make_signing_key(path)
    typer.echo(f"{path}: signing key {made.name[:8]}, for publishers. Clients trust {path}.pub:\n{made.public}")


@origin.command()
@takes(without={"reuse", "answers", "similarity_threshold", "recompute_budget", "kl_budget"}, loading=loading_options)
def publish(
    model: Model,
    loading: dict[str, Any],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The folder of the origin; created if needed.")],
    sign: Annotated[Path, typer.Option("--key", help="The key to sign with: rekindle origin key FILE")],
    prompt: Annotated[str | None, typer.Argument(help="A prompt.")] = None,
    file: Annotated[
        list[Path] | None, typer.Option("--file", "-f", help="Documents, .json or .jsonl with messages. Repeatable.")
    ] = None,
    knowledge: Annotated[
        bool, typer.Option("--knowledge", help="What questions begin with: the system prompt, frequent passages.")
    ] = False,
    passages: Annotated[int, typer.Option(min=0, max=1000, help="With --knowledge: number of passages.")] = 8,
    raw: Raw = False,
    as_system: AsSystem = False,
    levels: Annotated[
        str, typer.Option(help="Quality levels to publish: quantized (as codec says), raw, q8, q5, q4, q3, q2.")
    ] = "raw,quantized,q4,q3",
    secret: SecretFile = None,
    json: AsJson = False,
) -> None:
    """Publish the KV of prompts, computed or from the cache. What is already published costs nothing."""
    from rekindle.cli.console import counting, progress
    from rekindle.codec.cipher import read_secret
    from rekindle.core.cells import CHUNK_TOKENS
    from rekindle.remote.publish.publisher import Publisher
    from rekindle.remote.remote_kv import local_tenants
    from rekindle.remote.signing import SigningKey
    from rekindle.session.publish import beginnings, computed, levels_of
    from rekindle.session.session import Session

    prompts = _prompts(prompt, file or (), raw=raw, as_system=as_system)
    if not prompts and not knowledge:
        raise InvalidSetting("Give a prompt, name files with --file, or say --knowledge.")
    signing, secrets = SigningKey.read(sign), None if secret is None else read_secret(secret)
    done: list[tuple[PublishResult, KvLayout]] = []
    short = 0
    with progress(model) as report, Session(model, **loading, progress=report) as session:
        publisher = Publisher(to, signing, secret=secrets, local_only=local_tenants(session.settings.local_tenants))
        chosen = levels_of(levels, session)
        requests = [Request.of(one, max_tokens=0) for one in prompts]
        extra = beginnings(session, passages) if knowledge else []
        for request in (*requests, *extra):
            with computed(session, request) as source, counting("publish") as count:
                if request in extra and len(source.tokens) < CHUNK_TOKENS:
                    short += 1
                    continue
                done.append((publisher.publish(source, chosen, count), source.model.layout))
    if json:
        print_json([_fields(published, layout) for published, layout in done])
        return
    for published, layout in done:
        typer.echo(f"{published.context[:8]}: {count_of(published.tokens, 'token')}")
        for line in _lines(published, layout):
            typer.echo(f"  {line}")
    if short:
        typer.echo(
            f"Not published: {short} of fewer than {CHUNK_TOKENS} tokens, faster to compute than to fetch.", err=True
        )


@origin.command()
@takes(without={"origin"}, loading=loading_options)
def check(
    url: Annotated[str, typer.Argument(metavar="URL", help="The origin.")],
    loading: dict[str, Any],
    model: ModelOption = "smollm2",
    prompt: Annotated[str | None, typer.Argument(help="A prompt that would be asked.")] = None,
    file: Annotated[
        list[Path] | None, typer.Option("--file", "-f", help="Put this file before the prompt. Repeatable.")
    ] = None,
    raw: Raw = False,
    system: System = None,
    json: AsJson = False,
) -> None:
    """Say what a client would find: key, model, levels, contexts, and how much of a prompt, as `run` takes it."""
    from rekindle.cli.chat import prompt_of
    from rekindle.cli.console import progress
    from rekindle.remote.check import check_origin
    from rekindle.remote.remote_kv import RemoteKv
    from rekindle.session.prompt import encode_prompt
    from rekindle.session.session import Session

    wanted = prompt is not None or bool(file)
    asked = prompt_of(prompt, file, raw=raw, system=system) if wanted else as_messages("Hello")
    request = Request.of(asked, max_tokens=0)
    with progress(model) as report, Session(model, **loading, origin=url, progress=report) as session:
        remote, encoded = session.cache.remote, encode_prompt(session.engine, request)
        assert isinstance(remote, RemoteKv)
        with session.cache.peek(request, encoded.tokens, encoded.prompt_layout) as prefill:
            found = dict(check_origin(remote, prefill.lookup, prefill.plan if wanted else None))
    if json:
        print_json(found)
        return
    for name, what in found.items():
        typer.echo(f"{name:9} {what}")


@origin.command()
@takes(without={"origin", "reuse"}, loading=loading_options)
def pair(
    url: Annotated[str, typer.Argument(metavar="URL", help="The origin.")],
    loading: dict[str, Any],
    model: ModelOption = "smollm2",
    published: Annotated[
        str | None, typer.Option(help="The name of the published model, if several have the shape of this one.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Let a model (a GGUF, say) take quantized KV published for another file form of it, if measured to be near."""
    from dataclasses import asdict

    from rekindle.cli.console import progress
    from rekindle.remote.remote_kv import RemoteKv
    from rekindle.session.publish import pair as measure
    from rekindle.session.session import Session

    with progress(model) as report, Session(model, **loading, origin=url, progress=report) as session:
        remote = session.cache.remote
        assert isinstance(remote, RemoteKv)
        pairing = measure(session.engine, remote.origin, published)
    if json:
        print_json(asdict(pairing))
        return
    typer.echo(f"{model} takes quantized KV of {pairing}. Use it with --reuse quantized.")
    levels = ", ".join(f"{name} {kl:.4f}" for name, kl in pairing.levels.items())
    typer.echo(f"KL by level: {levels}. Those within --kl-budget come, larger ones for a part of a prompt.")


@origin.command("ls")
def list_contexts(folder: Folder, secret: SecretFile = None, json: AsJson = False) -> None:
    """List the contexts in a folder. Without the secret, encrypted ones only show their size."""
    from rekindle.codec.cipher import read_secret
    from rekindle.remote.publish.folder import OriginFolder

    secrets = None if secret is None else read_secret(secret)
    found = [_about(listed, secrets) for listed in OriginFolder(folder).contexts()]
    columns: dict[str, Callable[[dict[str, Any]], object]] = {
        "context": lambda one: one["context"][:8],
        "model": lambda one: one["state"] if one["model"] is None else one["model"],
        "tokens": lambda one: "-" if one["tokens"] is None else one["tokens"],
        "levels": lambda one: ", ".join(one["levels"]) or "-",
        "size": lambda one: human_bytes(one["size_bytes"]),
        "published": lambda one: (
            "-" if one["created"] is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(one["created"]))
        ),
        "key": lambda one: (one["key"] or "-")[:8],
    }
    print_listing(found, columns, json, dict, empty=f"Nothing is published in {folder}.")


@origin.command("rm")
def remove(
    folder: Folder,
    contexts: Annotated[list[str], typer.Argument(metavar="CONTEXT...", help="By a prefix of their names.")],
) -> None:
    """Remove contexts from the index, then their files. Clients and CDNs keep what they fetched."""
    from rekindle.remote.publish.folder import OriginFolder

    place = OriginFolder(folder)
    for name in contexts:
        typer.echo(f"{place.remove(name)[:8]} removed")


@origin.command()
def serve(
    folder: Folder,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 takes a free one.")] = 8378,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with tokens, one per line; a client must send one of them.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="A file with the certificate chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="A file with the certificate's key.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Let others read without a token.")] = False,
) -> None:
    """Serve a folder over HTTP, as any web server could. Needs no model and no keys."""
    from rekindle.cli.console import notes
    from rekindle.remote.publish.serve import AccessTokens, OriginServer, OriginSettings

    settings = OriginSettings(host, port, AccessTokens(_read_tokens(token_file)), tls_cert, tls_key, public)
    server = OriginServer(folder, settings)
    notes.print(f"{folder} at {server.url}", soft_wrap=True)
    server.run()


def _prompts(prompt: str | None, files: Sequence[Path], *, raw: bool, as_system: bool) -> list[Any]:
    found = [one for path in files for one in read_prompts(path, raw=raw, as_system=as_system)]
    if prompt is not None:
        if not prompt.strip():
            raise InvalidPrompt("The prompt is empty.")
        found.insert(0, prompt if raw else [{"role": "system" if as_system else "user", "content": prompt}])
    return found


def _fields(published: PublishResult, layout: KvLayout) -> dict[str, Any]:
    numbers = published.tokens * layout.token_bytes // layout.numpy_dtype.itemsize
    return {
        "context": published.context,
        "tokens": published.tokens,
        "levels": [
            {
                "name": level.name,
                "nominal_bits": level.bits,
                "bits": 8 * level.size_bytes / numbers,
                "size_bytes": level.size_bytes,
                "new": level.new,
                "kl": level.kl,
            }
            for level in published.levels
        ],
    }


def _lines(published: PublishResult, layout: KvLayout) -> Iterator[str]:
    for level in _fields(published, layout)["levels"]:
        known = "" if level["new"] else ", already published"
        kl = "" if level["kl"] is None else f", KL {level['kl']:.4f}"
        yield f"{level['name']:9} {human_bytes(level['size_bytes'])}, {level['bits']:.2f} bits per number{kl}{known}"


def _about(listed: PublishedContext, secret: Any) -> dict[str, Any]:
    """What a context says of itself, unverified: clients verify it."""
    header, manifest = listed.header, None
    state = "damaged" if listed.manifest is None else "encrypted"
    if listed.manifest is not None:
        try:
            manifest = listed.manifest.peek(secret)
            state = "readable"
        except ValueError:
            state = "encrypted" if header is not None and header.salt is not None else "damaged"
    return {
        "context": listed.context,
        "state": state,
        "encrypted": header is not None and header.salt is not None,
        "key": None if header is None else header.key,
        "size_bytes": listed.size_bytes,
        "model": None if manifest is None else manifest.title,
        "tokens": None if manifest is None else manifest.tokens,
        "levels": [] if manifest is None else [level.name for level in manifest.levels],
        "created": None if manifest is None else manifest.created,
    }


def _read_tokens(path: Path | None) -> list[str]:
    if path is None:
        return []
    lines = [line.strip() for line in read_secret_file(path, "The token file").decode("utf-8", "replace").splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise InvalidSetting(f"The token file {path} has no token in it.")
    return found
