"""What can be chosen about a session, each thing once: name, type, default and meaning.

    given         arguments and flags        memory_limit="1GB", --memory-limit 1GB
    environment   REKINDLE_ and the name     REKINDLE_MEMORY_LIMIT=1GB
    file          rekindle.toml              memory_limit = "1GB"
    default       the one below

The upper beats the lower. A name that is unknown, or a value of the wrong type, is refused in all of them. What a text
may say (a size, a policy, a device) is checked by the part that uses it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypedDict, get_type_hints

from rekindle.config import config_folder
from rekindle.errors import InvalidSetting, nearest
from rekindle.setting_values import Kind, expand, kind_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_NAME = "rekindle.toml"
_PREFIX = "REKINDLE_"
_FOLDERS = (f"{_PREFIX}HOME", f"{_PREFIX}CONFIG", f"{_PREFIX}API_KEYS")  # known variables that are no settings


def _setting(default: object, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class Settings:
    """The choices. Make one with `Settings.load`: the constructor takes its values unchecked."""

    engine: Literal["auto", "hf", "llamacpp"] = _setting(
        "auto",
        "The engine: hf (Hugging Face transformers), llamacpp (llama.cpp), auto (llamacpp for GGUF files and what "
        "Ollama has, hf for the rest; the other one where one is not installed).",
    )
    device: str = _setting("auto", "Where the model runs: auto, cpu, cuda, cuda:1, mps; for llamacpp auto, cpu, gpu.")
    dtype: str = _setting("auto", "hf: the numbers it computes with: auto, float32, bfloat16, float16.")
    context: int | None = _setting(
        None, "Use at most so many tokens of the model's context; none: all of it, with llamacpp up to 8192."
    )
    threads: int | None = _setting(None, "llamacpp: how many threads compute; none: one a core.")
    gpu_layers: int | None = _setting(None, "llamacpp: how many layers go to the GPU; none: all, if there is one.")
    flash_attention: Literal["auto", "on", "off"] = _setting(
        "auto",
        "llamacpp: flash attention: on, off, auto (on for GPUs and quantized KV; off for CPUs, where a few tokens "
        "after many are slower with it).",
    )
    kv_type: str = _setting("f16", "llamacpp: the numbers of KV: f16, f32, bf16, q8_0, q5_1, q5_0, q4_1, q4_0.")
    kv_tokens: int | None = _setting(
        None, "llamacpp: how many tokens its KV buffer holds for all contexts together; none: one context and 4096."
    )
    batch_tokens: int = _setting(2048, "llamacpp: how many tokens are given to it at once.")
    micro_batch_tokens: int = _setting(512, "llamacpp: how many tokens it computes at once.")
    parallel: int | None = _setting(
        None,
        "How many requests are answered at the same time, sharing the engine's steps; none: 8 in the server, else "
        "those of several threads take turns.",
    )
    keep_alive: str | None = _setting(
        None,
        "Free the model when it was not used for so long (30s, 5m), and load it again when it is; its KV stays warm. "
        "none: never.",
    )
    cache: str | None = _setting(
        None, "The folder of the cache; none: the user's own cache folder; off: no cache at all."
    )
    library: str | None = _setting(
        None,
        "The folder of documents that were ingested; none: `knowledge` in the folder of the cache if one is named, "
        "else the user's own.",
    )
    embedder: str = _setting("minilm", "The model that makes vectors of documents and questions: a name or a folder.")
    reuse: Literal["exact", "near", "approximate", "off"] = _setting(
        "exact",
        "What may be reused: exact (same tokens, same bits), near (KV is kept quantized: smaller, nearly the same), "
        "approximate (also passages computed in other prompts, mended), off (compute everything, keep nothing). Every "
        "reply says what was really done.",
    )
    codec: Literal["auto", "raw", "q8", "q5", "q4", "q3", "mobilora"] = _setting(
        "auto",
        "How KV is coded on disk: auto (KV of an adapter as a difference from the base model's, without loss; under "
        "near all of it quantized, with the bits that were calibrated for the model), raw (never), q8, q5, q4, q3 "
        "(under near: about so many bits a number), mobilora (under near: differences as published).",
    )
    answers: Literal["off", "verified", "direct"] = _setting(
        "off",
        "Whether earlier answers help with new ones: off, verified (as drafts that the model checks: the text is what "
        "it would have written anyway), direct (the stored answer to nearly the same question is given at once; the "
        "reply says so). Questions and answers are then kept with the documents.",
    )
    similarity_threshold: float = _setting(
        0.85,
        "answers=direct: how near a question must be to an earlier one (cosine); beside that, nothing in the two may "
        "differ that matters (see the guard).",
    )
    answers_verifier: bool = _setting(
        False, "answers=direct: ask the model, too, whether the two questions are the same; better with a larger one."
    )
    scheduler_threshold: float = _setting(
        0.9,
        "From this similarity_threshold on, questions that are foreseen when idle are only read by the model (KV); "
        "below it they are answered too.",
    )
    answers_limit: str = _setting("100MB", "How much stored questions and answers take on disk: bytes, or 100MB.")
    answers_policy: Literal["utility", "lfu"] = _setting(
        "utility", "Which stored answers go first: utility (by what they save), lfu (least used, as published)."
    )
    mender: str = _setting(
        "rekindle",
        "How passages are mended under approximate: rekindle, leading, or a published way to compare with: "
        "cache-craft, full-cache, set-cache, random, h2o; or signals joined by * (outside*seen).",
    )
    mend_budget: float | None = _setting(
        None,
        "The share of the passages' tokens that is computed anew (cache-craft: its alpha); none: what was calibrated, "
        "else a safe share.",
    )
    memory_limit: str = _setting("512MB", "How much KV is held in memory: bytes, 512MB, or 10% of all memory.")
    disk_limit: str = _setting(
        "10%", "How much the cache takes on disk: bytes, 20GB, or 10% of what is free or already the cache's."
    )
    policy: str = _setting(
        "utility",
        "What goes first when room is needed: utility (by what reuse saves, how likely it is, and the state of the "
        "apps that ask; while no app is known, as weighted-lru), weighted-lru, lru, lfu, mobilora (as published).",
    )
    ttl: str | None = _setting(None, "KV older than this is not served: 90s, 30m, 12h, 7d; none: of any age.")
    killed_ttl: str | None = _setting(
        "60s", "What only apps used that were killed goes after so long; none: when room is needed."
    )
    admission: Literal["always", "second-use"] = _setting(
        "always", "What is kept: always (everything), second-use (only what was met before)."
    )
    write_budget: str | None = _setting(
        None, "How much is written within an hour at most, to spare flash: 10GB; none: no limit."
    )
    origin: str | None = _setting(
        None,
        "The address of an origin: KV of long prompts that others published comes from there, where that is sooner "
        "than computing all of it. Under exact only what lost nothing (level raw). See `rekindle origin`.",
    )
    origin_keys: str | None = _setting(
        None, "The public keys of publishers that are trusted, or the files with them, with commas between."
    )
    origin_token: str | None = _setting(None, "The file with the token that the origin asks for.")
    origin_secret: str | None = _setting(
        None, "The file with the secret that what is published is encrypted with; the origin does not have it."
    )
    local_tenants: str = _setting(
        "", "Tenants, with commas between, whose prompts are never published nor looked for at an origin; *: all."
    )
    key_file: str | None = _setting(
        None, "A file with 16 to 64 secret bytes: digests are keyed, and KV that others wrote is never served."
    )
    adapter: str | None = _setting(
        None,
        "The LoRA adapter that the model answers with: a name known from `rekindle adapters`, NAME=PATH, or "
        "NAME=PATH,scale=0.5; none: the model alone.",
    )
    tenant: str = _setting("local", "Whose KV it is: tenants never share any.")
    cache_salt: str = _setting("", "KV is shared only where this text is the same.")
    deterministic: bool = _setting(
        False, "Cut cold and warm prefills into the same pieces, so that their logits are bit-equal."
    )
    keep_reply_tokens: bool = _setting(
        False,
        "In chats, let the tokens that the model generated stand in for its reply, if they decode to exactly its text.",
    )

    @classmethod
    def load(
        cls,
        given: Mapping[str, object] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        file: Path | None = None,
    ) -> Settings:
        """Collect the settings from everywhere.

        given        by name; None counts as not given, "none" is the value None
        environment  in place of the process's `REKINDLE_*` variables; an empty value counts as not given
        file         in place of the one that `REKINDLE_CONFIG` names, else `rekindle.toml` here, else the user's

        Raises `InvalidSetting` for unknown names, wrong values and files that cannot be read, also where a stronger
        source overrules them. Paths in a file are relative to its folder; `~` is the user's home everywhere.
        """
        variables = os.environ if environment is None else environment
        source = file or _find_file(variables)
        values = {} if source is None else _from_file(source)
        return cls(**values | _from_environment(variables) | _from_arguments(given or {}))


class CacheSettings(TypedDict, total=False):
    """The settings of a cache as keyword arguments; None counts as not given."""

    cache: str | os.PathLike[str] | None
    reuse: Literal["exact", "near", "approximate", "off"] | None
    codec: Literal["auto", "raw", "q8", "q5", "q4", "q3", "mobilora"] | None
    answers: Literal["off", "verified", "direct"] | None
    similarity_threshold: float | None
    answers_verifier: bool | None
    scheduler_threshold: float | None
    answers_limit: str | int | None
    answers_policy: Literal["utility", "lfu"] | None
    mender: str | None
    mend_budget: float | None
    memory_limit: str | int | None
    disk_limit: str | int | None
    policy: str | None
    ttl: str | int | None
    killed_ttl: str | int | None
    admission: Literal["always", "second-use"] | None
    write_budget: str | int | None
    origin: str | None
    origin_keys: str | None
    origin_token: str | os.PathLike[str] | None
    origin_secret: str | os.PathLike[str] | None
    local_tenants: str | None
    key_file: str | os.PathLike[str] | None
    tenant: str | None
    cache_salt: str | None
    adapter: str | None


class SettingsLike(CacheSettings, total=False):
    """All settings as keyword arguments; None counts as not given."""

    engine: Literal["auto", "hf", "llamacpp"] | None
    device: str | None
    dtype: str | None
    context: int | None
    threads: int | None
    gpu_layers: int | None
    flash_attention: Literal["auto", "on", "off"] | None
    kv_type: str | None
    kv_tokens: int | None
    batch_tokens: int | None
    micro_batch_tokens: int | None
    parallel: int | None
    keep_alive: str | int | None
    library: str | os.PathLike[str] | None
    embedder: str | None
    deterministic: bool | None
    keep_reply_tokens: bool | None


def doc_of(name: str) -> str:
    """What the setting of this name means, in one line for people."""
    return next(str(setting.metadata["doc"]) for setting in fields(Settings) if setting.name == name)


def variable_of(name: str) -> str:
    """The variable of the environment that holds the setting of this name."""
    return _PREFIX + name.upper()


def _from_arguments(given: Mapping[str, object]) -> dict[str, Any]:
    _refuse_unknown(given, _names(), "argument")
    return {n: _parse(n, value, f"The argument {n}") for n, value in given.items() if value is not None}


def _from_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    given = {name: text for name, text in variables.items() if name.startswith(_PREFIX) and text}
    names = {variable_of(name): name for name in _names()}
    _refuse_unknown(given, {*names, *_FOLDERS}, "variable")
    return {names[v]: _parse(names[v], text, f"The variable {v}") for v, text in given.items() if v in names}


def _from_file(path: Path) -> dict[str, Any]:
    try:
        given = tomllib.loads(path.read_text("utf-8-sig"))  # some editors put a byte order mark first
    except OSError as error:
        reason = error.strerror or "no reason given"
        raise InvalidSetting(
            f"{path} cannot be read ({reason}). Mend it, or name another in REKINDLE_CONFIG."
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidSetting(f"{path} is not UTF-8 text: byte {error.start}. Save it as UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidSetting(f'{path} is not TOML: {error}. Lines look like memory_limit = "1GB".') from None
    _refuse_unknown(given, _names(), f"key in {path}:")
    folder = path.absolute().parent
    return {n: _parse(n, value, f"{n} in {path}", folder) for n, value in given.items()}


def _find_file(variables: Mapping[str, str]) -> Path | None:
    if chosen := variables.get(f"{_PREFIX}CONFIG"):
        return Path(expand(chosen) or chosen)
    folder = config_folder()
    candidates = [Path(FILE_NAME), *([] if folder is None else [folder / FILE_NAME])]
    return next((path for path in candidates if _is_there(path)), None)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:  # a folder that this user may not enter holds nothing of theirs
        return False


def _names() -> list[str]:
    return [setting.name for setting in fields(Settings)]


def _refuse_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    for name in given:
        if name not in known:
            raise InvalidSetting(f"Unknown {what} {name!r}.{nearest(name, known)}")


@cache
def _kind(name: str) -> Kind:
    return kind_of(name, get_type_hints(Settings)[name], getattr(Settings, name))


def _parse(name: str, value: object, where: str, folder: Path | None = None) -> object:
    """The value as the setting's type; `folder` is what a relative path starts from. Raises `InvalidSetting`."""
    kind = _kind(name)
    if kind.optional and isinstance(value, str) and value.strip().lower() == "none":
        return None
    parsed = kind.read(value)
    if parsed is None:
        raise InvalidSetting(f"{where} is {value!r}. Use {kind.right}{', or none' if kind.optional else ''}.")
    if folder is not None and kind.is_path and parsed != "off":
        return str(folder / str(parsed))
    return parsed
