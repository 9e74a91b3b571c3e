"""Replies that belong to a grammar: at every step, only the tokens that can still lead to its end are left.

The work is llguidance's. It reads grammars of several kinds and tells which tokens may follow; it knows nothing of the
model but the bytes of its tokens. Here its limits are set, and what it refuses becomes an `InvalidGrammar`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from, regex_to_lark
from llguidance.gbnf_to_lark import is_lark_syntax
from numpy.typing import NDArray

from rekindle.core.grammar import Grammar, Schema
from rekindle.engine.base import Tokenizer
from rekindle.errors import InvalidGrammar, StepRefused

# No whitespace but one space behind a comma or a colon, if the model wants it: a small model that may write blanks and
# newlines between two values writes nothing else until its tokens run out. Strings and numbers end when it wants.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "lenient": False}
# The model chooses how to cut up text that is certain: it knows better than a greedy tokenizer how it is usually cut.
_FREE = '%llguidance {"no_forcing": true}\n'
# A compiled rule refers to others, and the library follows them by recursion; it does not check its stack, and an
# overflow ends the process. 256 kB of grammar need at most about 130 MB, which are only taken when they are used.
_STACK_BYTES = 256 * 1024 * 1024
_REASON_LETTERS = 400
_NO_WAY = "NoExtensionBias"  # the library's word for a place where nothing may follow
# A piece of a Lark grammar: a comment, a string, a pattern; or a name. (What else there is needs no care.)
_LARK_PIECE = re.compile(r'//[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|(?P<name>[A-Za-z_]\w*)')

_thread_settings = threading.Lock()


class Constrainer:
    """Starts grammars over the tokens of one model. From any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Nothing happens before the first grammar is started; that takes some 100 ms more."""
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def start(self, grammar: Grammar) -> Constraint:
        """A reply that has not begun. Raises `InvalidGrammar` if no reply can follow the grammar."""
        with self._lock:  # else two threads would build the same
            words = self._words
        text = _as_lark(grammar)
        matcher = _with_deep_stack(lambda: LLMatcher(words.library, text, log_level=0, limits=_limits()))
        return Constraint(matcher, words)

    @cached_property
    def _words(self) -> _Words:
        return _Words(self._tokenizer)


class Constraint:
    """Where a reply stands in its grammar. Not for two threads at once."""

    def __init__(self, matcher: LLMatcher, words: _Words) -> None:
        self._matcher = matcher
        self._words = words
        self._ended = False
        self._allowed = self._look()  # [vocabulary]

    @property
    def finished(self) -> bool:
        """Whether nothing but the end may follow: whoever draws tokens ends the reply, with or without a stop token."""
        return self._ended or self._complete

    def mask(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """A copy of logits `[vocabulary]` in which what may not follow is -inf; never all of it.

        Stop tokens may follow where the grammar may end. Where the logits leave nothing that may follow, all that may
        is equally likely. Raises `StepRefused` where nothing may follow, and the model has no stop token to say so.
        """
        if not self._allowed.any():
            raise StepRefused("The reply is finished: nothing may follow.")
        masked: NDArray[np.float32] = np.where(self._allowed, logits, np.float32(-np.inf))
        if np.isneginf(masked.max()):
            masked[self._allowed] = 0.0
        return masked

    def accept(self, token: int) -> None:
        """Go on with the token that was drawn.

        Raises `StepRefused` for one that `mask` leaves out, and `InvalidGrammar` if what may follow it cannot be told:
        the grammar turned out too complex here, or is one that has no end.
        """
        if not self._allowed[token]:
            raise StepRefused(f"Token {token} does not follow the grammar: draw one from the masked logits.")
        if token in self._words.stop_ids:
            self._ended = True
            return
        self._matcher.consume_token(token)
        self._allowed = self._look()

    def _look(self) -> NDArray[np.bool_]:
        """What may follow now, stop tokens included."""
        bits = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise _refusal(self._matcher.get_error())
        size = len(self._words.usable)
        known = np.unpackbits(np.frombuffer(bits, np.uint8), count=size + 1, bitorder="little").view(np.bool_)
        allowed, may_end = known[:size] & self._words.usable, bool(known[size])
        self._complete = not allowed.any()
        if self._complete and not may_end:
            raise _refusal(_NO_WAY)
        allowed[self._words.stops] = may_end
        return allowed


class _Words:
    """The model's tokens as the library wants them, and one more: the end, by whichever stop token it is said."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = tokenizer.pieces()
        self.stop_ids = tokenizer.stop_ids
        self.stops = np.array(sorted(self.stop_ids), dtype=np.int64)  # [stop tokens]
        self.usable = np.array([bool(piece) for piece in pieces], dtype=np.bool_)  # [vocabulary]
        self.usable[self.stops] = False  # whatever their text: they end the reply
        # Written by the library's rules: a special token begins with a byte that no text has.
        self.tokens = [piece if use else b"" for piece, use in zip(pieces, self.usable, strict=True)] + [b"\xff<end>"]
        self.eos_token_id, self.bos_token_id = len(pieces), None
        self.special_token_ids = [len(pieces)]
        self.library = LLTokenizer(TokenizerWrapper(self))

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a text, for the library: any that spell it will do."""
        if not hasattr(self, "library"):  # it asks for a trial before it is there
            return []
        written = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
        return self.library.greedy_tokenize(written)


def _limits() -> LLParserLimits:
    """Of compiling and of a step: what exceeds them is refused. Steps stay below some 20 ms, memory below 100 MB."""
    return LLParserLimits(
        initial_lexer_fuel=300_000, max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False
    )


def _as_lark(grammar: Grammar) -> str:
    """The grammar in the one syntax that has all the others in it. Raises `InvalidGrammar`."""
    if grammar.kind == "json":
        return f"{_FREE}start: %json {_with_style(grammar.schemas()[0])}"
    if grammar.kind == "regex":
        return f"{_FREE}start: /(?:{regex_to_lark(grammar.text, '')})/"
    if grammar.kind == "lark":
        text = grammar.text
        for schema in reversed(grammar.schemas()):
            text = text[: schema.start] + _with_style(schema) + text[schema.stop :]
        return _FREE + text
    return _FREE + _gbnf_as_lark(grammar.text)


def _with_style(schema: Schema) -> str:
    value = schema.value
    return json.dumps({**value, "x-guidance": _JSON_STYLE} if isinstance(value, dict) else value)


def _gbnf_as_lark(text: str) -> str:
    """llama.cpp's rules as Lark's. Raises `InvalidGrammar`.

    The library makes every rule without recursion a terminal, which matches as much as it can: `[a-z]+ "b"`, in two
    rules, would never come to its end. So either everything is one terminal, or, if there is recursion, nothing is.
    """
    if is_lark_syntax(text):
        raise InvalidGrammar("The grammar is not GBNF, or has a rule named 'start'. Write GBNF, its first rule 'root'.")
    try:
        lark = grammar_from("gbnf", text)
    except ValueError as error:
        raise _refusal(str(error)) from None
    names = [found["name"] for found in _LARK_PIECE.finditer(lark) if found["name"]]
    recursive = [name for name in names if name.islower() and name != "llguidance"] != ["start"]

    def renamed(found: re.Match[str]) -> str:
        name = found["name"]
        if not name or name == "llguidance":
            return found.group()
        if recursive:
            return f"terminal_{name.lower()}" if name.isupper() else name
        return "WHOLE_REPLY" if name == "start" else name

    rules = _LARK_PIECE.sub(renamed, lark)
    return rules if recursive else f"{rules}\nstart: WHOLE_REPLY\n"


def _with_deep_stack(build: Callable[[], LLMatcher]) -> LLMatcher:
    """What `build` gives, built in a thread whose stack is deep enough for any grammar."""
    built: list[LLMatcher] = []
    with _thread_settings:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=lambda: built.append(build()), name="rekindle-grammar")
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return built[0]


def _refusal(reason: str) -> InvalidGrammar:
    """The library's reason, without the listing it adds to it."""
    if reason.startswith(_NO_WAY):
        return InvalidGrammar("The grammar leads to a place where nothing may follow. Give every rule a way to end.")
    lines = [line.strip() for line in reason.splitlines() if line.strip() and not re.match(r"\s*(\d+ \||\^|<)", line)]
    told = re.sub(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?", "", " ".join(lines))
    shortened = told if len(told) <= _REASON_LETTERS else told[:_REASON_LETTERS] + "..."
    return InvalidGrammar(f"The grammar cannot be followed: {shortened.rstrip('.')}. Change it, or leave that out.")
