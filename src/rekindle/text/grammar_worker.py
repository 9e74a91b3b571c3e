"""The sandboxed process that compiles a grammar and computes token masks: all of llguidance runs here.

    vocabulary   the bytes of every token, as a list of Latin-1 texts; the last one stands for the end of the reply
    grammars     a list of [kind, text]: begins a reply that follows one of them
    token        a number: advances it

These are JSON; grammars and a token are answered by a bit mask of the tokens allowed next.

Its limits are set here, and what it refuses becomes an `InvalidGrammar`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from, regex_to_lark
from llguidance.gbnf_to_lark import is_lark_syntax

from rekindle.core.grammar import NOTHING_FOLLOWS, EmbeddedSchema, Grammar
from rekindle.errors import InvalidGrammar
from rekindle.text.sandbox_worker import serve_messages

# At most one space after a comma or colon: a small model that may write white space between values writes nothing else
# until its tokens run out.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "lenient": False}
# The model itself tokenizes forced text: it knows better than a greedy tokenizer how that is usually done.
_FREE = '%llguidance {"no_forcing": true}\n'
_REASON_LETTERS = 400
_NO_WAY = "NoExtensionBias"  # llguidance's error where nothing may follow
# A comment, string, pattern or name of a Lark grammar.
_LARK_PIECE = re.compile(r'//[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|(?P<name>[A-Za-z_]\w*)')


def main() -> None:
    """Answer the messages of the parent: the vocabulary, then grammars and tokens."""
    serve_messages(_GrammarWorker().answer, (InvalidGrammar,))


class _GrammarWorker:
    """Matches one grammar at a time, over one vocabulary."""

    def __init__(self) -> None:
        self._vocabulary: _LibraryVocabulary | None = None
        self._matcher: LLMatcher | None = None

    def answer(self, message: bytes) -> bytes:
        told = json.loads(message)
        if self._vocabulary is None:
            self._vocabulary = _LibraryVocabulary([piece.encode("latin-1") for piece in told])
            return b""
        if isinstance(told, list):
            self._matcher = None  # first, for its memory
            text = _as_library_grammar([Grammar(*one) for one in told])
            self._matcher = LLMatcher(self._vocabulary.library, text, log_level=0, limits=_limits())
        else:
            assert self._matcher is not None, "a token follows a grammar"
            self._matcher.consume_token(told)
        return _mask(self._matcher)


class _LibraryVocabulary:
    """The model's tokens as llguidance wants them; the last stands for all stop tokens."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.tokens = pieces
        self.eos_token_id, self.bos_token_id = len(pieces) - 1, None
        self.special_token_ids = [len(pieces) - 1]
        self.library = LLTokenizer(TokenizerWrapper(self))

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a text, for llguidance: any that spell it will do."""
        if not hasattr(self, "library"):  # llguidance tries it while it is being built
            return []
        written = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
        return self.library.greedy_tokenize(written)


def _mask(matcher: LLMatcher) -> bytes:
    """The tokens allowed next, one bit each. Raises `InvalidGrammar`."""
    bits = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        raise _refusal(matcher.get_error())
    return bits


def _limits() -> LLParserLimits:
    """Limits of compiling and of a step. They do not cover everything, but give a reason for what they refuse."""
    return LLParserLimits(
        initial_lexer_fuel=300_000, max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False
    )


def _as_library_grammar(grammars: Sequence[Grammar]) -> str:
    """What llguidance reads: the grammar itself, or a list of grammars whose first one is a choice of the others."""
    texts = [_as_lark(grammar) for grammar in grammars]
    if len(texts) == 1:
        return texts[0]
    choice = f"{_FREE}start: {' | '.join(f'@way{number}' for number in range(len(texts)))}"
    ways = [{"name": f"way{number}", "lark_grammar": text} for number, text in enumerate(texts)]
    return json.dumps({"grammars": [{"lark_grammar": choice}, *ways]})


def _as_lark(grammar: Grammar) -> str:
    """The grammar in Lark syntax, which can express all others. Raises `InvalidGrammar`."""
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


def _with_style(schema: EmbeddedSchema) -> str:
    value = schema.value
    return json.dumps({**value, "x-guidance": _JSON_STYLE} if isinstance(value, dict) else value)


def _gbnf_as_lark(text: str) -> str:
    """llama.cpp's GBNF rules as Lark. Raises `InvalidGrammar`.

    llguidance makes every rule without recursion a terminal, which matches greedily: `[a-z]+ "b"` in two rules would
    never end. So either the whole grammar is one terminal or, if there is recursion, nothing is.
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


def _refusal(reason: str) -> InvalidGrammar:
    """llguidance's reason without its source listing."""
    if reason.startswith(_NO_WAY):
        return InvalidGrammar(NOTHING_FOLLOWS)
    lines = [line.strip() for line in reason.splitlines() if line.strip() and not re.match(r"\s*(\d+ \||\^|<)", line)]
    text = re.sub(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?", "", " ".join(lines))
    shortened = text if len(text) <= _REASON_LETTERS else text[:_REASON_LETTERS] + "..."
    return InvalidGrammar(f"The grammar cannot be followed: {shortened.rstrip('.')}. Change it, or leave that out.")
