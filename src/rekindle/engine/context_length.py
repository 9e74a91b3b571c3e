"""How long a context may be: what the setting `context` says, else as long as the model and the memory allow."""

from __future__ import annotations

from collections.abc import Callable

from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting

# Called before a model takes memory, with all that it takes then and the memory of its device. Makes room for that, and
# returns the bytes that it may take in all. Raises `OutOfMemory`.
Reserve = Callable[[int, int], int]

_MIN_TOKENS = 512  # a model that has less memory than this takes fails when it needs it
_ROUND_TOKENS = 256
_SHARE = 2  # one context takes at most half of what is free: others want some, too


def choose_context(wanted: int | None, longest: int, token_bytes: int, free_bytes: int) -> int:
    """The number of tokens of a context: `wanted`, if it is given, else the most whose KV fits half of `free_bytes`.

    Raises `InvalidSetting` if the model does not take as many as `wanted`.
    """
    if wanted is not None:
        if not 0 < wanted <= longest:
            raise InvalidSetting(f"--context {wanted} is out of range: this model takes 1 to {longest:,} tokens.")
        return wanted
    affordable = free_bytes // _SHARE // max(1, token_bytes)
    return min(longest, max(_MIN_TOKENS, affordable // _ROUND_TOKENS * _ROUND_TOKENS))


def describe_context(engine: Engine) -> str:
    """What to say when a model was loaded: its context, and that it could be longer."""
    tokens, longest = engine.context_tokens, engine.longest_context
    limited = f", of {longest:,} that the model takes: see --context" if tokens < longest else ""
    return f"a context of {tokens:,} tokens{limited}"
