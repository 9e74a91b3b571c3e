"""Options that several commands share, declared once.

    @takes(loading=loading_options, sampling=sampling_options)
    def run(prompt: str, loading: dict[str, Any], sampling: dict[str, Any]) -> None: ...

gives the command every option of both groups; it receives each group as one dictionary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container
from pathlib import Path
from typing import Annotated, Any

import typer

from rekindle.core.request import DEFAULT_MAX_TOKENS
from rekindle.errors import InvalidPrompt
from rekindle.settings import doc_of

Group = Callable[..., dict[str, Any]]


def complete_model(incomplete: str) -> list[str]:
    """Model names for the shell's completion."""
    from rekindle.models.ollama import names
    from rekindle.models.registry import entries
    from rekindle.models.sources import NAMED

    known = {*NAMED, *(e.name for e in entries()), *map(str, names())}
    return sorted(n for n in known if n.startswith(incomplete))


Model = Annotated[
    str,
    typer.Argument(
        help="A name (smollm2), a folder, a .gguf file, ollama:NAME, or ORG/NAME[:QUANT] on the hub.",
        autocompletion=complete_model,
    ),
]
OptionalModel = Annotated[str | None, Model.__metadata__[0]]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
System = Annotated[str | None, typer.Option(help="The system message.")]


def loading_options(
    engine: Annotated[str | None, typer.Option(help=doc_of("engine"))] = None,
    device: Annotated[str | None, typer.Option(help=doc_of("device"))] = None,
    dtype: Annotated[str | None, typer.Option(help=doc_of("dtype"))] = None,
    context: Annotated[int | None, typer.Option(help=doc_of("context"))] = None,
    threads: Annotated[int | None, typer.Option(help=doc_of("threads"))] = None,
    gpu_layers: Annotated[int | None, typer.Option(help=doc_of("gpu_layers"))] = None,
    flash_attention: Annotated[str | None, typer.Option(help=doc_of("flash_attention"))] = None,
    kv_type: Annotated[str | None, typer.Option(help=doc_of("kv_type"))] = None,
    kv_tokens: Annotated[int | None, typer.Option(help=doc_of("kv_tokens"))] = None,
    batch_tokens: Annotated[int | None, typer.Option(help=doc_of("batch_tokens"))] = None,
    micro_batch_tokens: Annotated[int | None, typer.Option(help=doc_of("micro_batch_tokens"))] = None,
    cache: Annotated[str | None, typer.Option(help=doc_of("cache"))] = None,
    library: Annotated[str | None, typer.Option(help=doc_of("library"))] = None,
    embedder: Annotated[str | None, typer.Option(help=doc_of("embedder"))] = None,
    reuse: Annotated[str | None, typer.Option(help=doc_of("reuse"))] = None,
    codec: Annotated[str | None, typer.Option(help=doc_of("codec"))] = None,
    answers: Annotated[str | None, typer.Option(help=doc_of("answers"))] = None,
    similarity_threshold: Annotated[float | None, typer.Option(help=doc_of("similarity_threshold"))] = None,
    origin: Annotated[str | None, typer.Option(help=doc_of("origin"))] = None,
    origin_keys: Annotated[str | None, typer.Option(help=doc_of("origin_keys"))] = None,
    origin_token: Annotated[str | None, typer.Option(help=doc_of("origin_token"))] = None,
    origin_secret: Annotated[str | None, typer.Option(help=doc_of("origin_secret"))] = None,
    mender: Annotated[str | None, typer.Option(help=doc_of("mender"))] = None,
    mend_budget: Annotated[float | None, typer.Option(help=doc_of("mend_budget"))] = None,
    memory_limit: Annotated[str | None, typer.Option(help=doc_of("memory_limit"))] = None,
    disk_limit: Annotated[str | None, typer.Option(help=doc_of("disk_limit"))] = None,
    adapter: Annotated[str | None, typer.Option(help=doc_of("adapter"))] = None,
    tenant: Annotated[str | None, typer.Option(help=doc_of("tenant"))] = None,
    cache_salt: Annotated[str | None, typer.Option(help=doc_of("cache_salt"))] = None,
    deterministic: Annotated[
        bool | None, typer.Option("--deterministic/--no-deterministic", help=doc_of("deterministic"))
    ] = None,
    keep_reply_tokens: Annotated[
        bool | None, typer.Option("--keep-reply-tokens/--no-keep-reply-tokens", help=doc_of("keep_reply_tokens"))
    ] = None,
) -> dict[str, Any]:
    """The settings that were given as flags; the others come from the environment, the file and the defaults."""
    given = dict(locals())  # the parameters: nothing else is local yet
    return {name: value for name, value in given.items() if value is not None}


def library_options(
    cache: Annotated[str | None, typer.Option(help=doc_of("cache"))] = None,
    library: Annotated[str | None, typer.Option(help=doc_of("library"))] = None,
    embedder: Annotated[str | None, typer.Option(help=doc_of("embedder"))] = None,
    key_file: Annotated[str | None, typer.Option(help=doc_of("key_file"))] = None,
    tenant: Annotated[str | None, typer.Option(help=doc_of("tenant"))] = None,
    cache_salt: Annotated[str | None, typer.Option(help=doc_of("cache_salt"))] = None,
) -> dict[str, Any]:
    """The settings of what needs no model to write, as far as they were given."""
    given = dict(locals())  # the parameters: nothing else is local yet
    return {name: value for name, value in given.items() if value is not None}


def sampling_options(
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Stop after so many tokens.")
    ] = DEFAULT_MAX_TOKENS,
    min_tokens: Annotated[int, typer.Option(help="Do not let the model end its reply before.")] = 0,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Only the k most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens that hold this share.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Only tokens this share as likely as the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 avoids repetition.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text (may be given more than once).")] = None,
) -> dict[str, Any]:
    """How a reply is drawn."""
    return {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": stop or (),
    }


def takes(without: Container[str] = (), **groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of these groups, in place of its parameters of the same names.

    Those named in `without` are left out, and keep their defaults.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        shared = {
            name: {
                option: p
                for option, p in inspect.signature(group, eval_str=True).parameters.items()
                if option not in without
            }
            for name, group in groups.items()
        }

        @functools.wraps(command)
        def with_groups(**given: Any) -> None:
            for name, group in groups.items():
                given[name] = group(**{option: given.pop(option) for option in shared[name]})
            command(**given)

        parameters = [p for p in own.parameters.values() if p.name not in groups]
        parameters += [p for group in shared.values() for p in group.values()]
        with_groups.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        with_groups.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_groups

    return decorate


def read_text(path: Path) -> str:
    """The text of a file; raises `InvalidPrompt` if it is none."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPrompt(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}. "
            "Convert it first, for example with: iconv -f latin1 -t utf-8"
        ) from None
    except OSError as error:
        raise InvalidPrompt(f"{path} cannot be read ({error.strerror}).") from None
