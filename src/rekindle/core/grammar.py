"""Grammars that constrain a reply, as values: `text/constraint` compiles and applies them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, get_args

from rekindle.errors import InvalidGrammar

GrammarKind = Literal["json", "regex", "lark", "gbnf"]
NOTHING_FOLLOWS = "The grammar leads to a place where nothing may follow. Give every rule a way to end."

# A grammar is compiled before the reply begins, in a process that is killed if that takes too long. Inputs that
# take quadratic time are refused before, with a better error: long patterns, many optional properties, remainders.
_LARGEST_BYTES = 256_000
_LARGEST_RULES_BYTES: dict[GrammarKind, int] = {"json": 0, "regex": 8_000, "lark": 24_000, "gbnf": 16_000}
_MAX_PROPERTIES = 1_000  # of one object
_LARGEST_DIVISOR = 100_000  # of all `multipleOf` together: they may have to be obeyed at once
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_OPTIONS = "x-guidance"  # llguidance's options in a schema


@dataclass(frozen=True, slots=True)
class EmbeddedSchema:
    """A JSON schema at `[start, stop)` of a grammar's text."""

    value: Any
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Grammar:
    """The language of a reply. Hashable.

    json    a JSON schema, as text
    regex   a regular expression for the whole reply, in the syntax of Rust's `regex`: no look-around, no references
    lark    a context-free grammar in llguidance's variant of Lark's syntax; its first rule is `start`
    gbnf    a context-free grammar as llama.cpp has it; its first rule is `root`

    Raises `InvalidGrammar` if it is too large or not text. It is compiled only when a reply begins.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise InvalidGrammar(f"A grammar is one of {', '.join(get_args(GrammarKind))}, not {self.kind!r}.")
        if not isinstance(self.text, str):
            raise InvalidGrammar(f"A grammar is a text, not {type(self.text).__name__}.")
        try:
            size_bytes = len(self.text.encode("utf-8"))
        except UnicodeEncodeError:
            raise InvalidGrammar("The grammar has a lone surrogate in it. Give valid Unicode.") from None
        if size_bytes > _LARGEST_BYTES:  # before anything is read
            raise _too_large(size_bytes, _LARGEST_BYTES)
        schemas = self.schemas()
        rules_bytes = max(0, size_bytes - sum(schema.stop - schema.start for schema in schemas))
        if rules_bytes > _LARGEST_RULES_BYTES[self.kind]:
            raise _too_large(rules_bytes, _LARGEST_RULES_BYTES[self.kind])
        _check_cost([schema.value for schema in schemas])

    def schemas(self) -> tuple[EmbeddedSchema, ...]:
        """The JSON schemas in it, in order: itself, or those in Lark rules (`%json {...}`)."""
        return _schemas(self.kind, self.text)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json", '{"type":"object"}')

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """JSON that the schema allows, with properties in the schema's order."""
        if not isinstance(schema, Mapping | bool):
            raise InvalidGrammar(f"A JSON schema is an object, not {type(schema).__name__}.")
        try:
            # Not sorted: the order of the properties is the order of the reply.
            text = json.dumps(dict(schema) if isinstance(schema, Mapping) else schema, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidGrammar(f"The JSON schema cannot be written as JSON: {error}.") from None
        except RecursionError:
            raise InvalidGrammar("The JSON schema is nested too deeply. Flatten it with $defs.") from None
        return cls("json", text)

    @classmethod
    def regex(cls, text: str) -> Grammar:
        """Text that the regular expression matches as a whole."""
        return cls("regex", text)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text of the rule `start` of a Lark grammar."""
        return cls("lark", text)

    @classmethod
    def gbnf(cls, text: str) -> Grammar:
        """Text of the rule `root` of a llama.cpp grammar."""
        return cls("gbnf", text)


def _too_large(size_bytes: int, max_bytes: int) -> InvalidGrammar:
    return InvalidGrammar(f"A grammar of {size_bytes:,} bytes is too large: {max_bytes:,} are allowed. Shorten it.")


def _schemas(kind: GrammarKind, text: str) -> tuple[EmbeddedSchema, ...]:
    if kind == "json":
        schema = _read_schema(text, 0)
        if schema.stop != len(text):
            raise InvalidGrammar("There is text after the JSON schema. Remove it.")
        if isinstance(schema.value, dict) and _OPTIONS in schema.value:
            raise InvalidGrammar(f"The JSON schema has {_OPTIONS!r}, which is not a keyword of a schema. Leave it out.")
        return (schema,)
    if kind == "lark":
        return tuple(_read_schema(text, found.end()) for found in _EMBEDDED.finditer(text))
    return ()


def _read_schema(text: str, start: int) -> EmbeddedSchema:
    try:
        value, stop = json.JSONDecoder().raw_decode(text, start)
    except ValueError as error:
        raise InvalidGrammar(f"The JSON schema is not JSON: {error}.") from None
    except RecursionError:
        raise InvalidGrammar("The JSON schema is nested too deeply. Flatten it with $defs.") from None
    return EmbeddedSchema(value, start, stop)


def _check_cost(schemas: list[Any]) -> None:
    """Refuse schemas that would take too long to compile."""
    divisors: list[Decimal] = []
    for part in _objects(schemas):
        for keyword in ("properties", "patternProperties", "required"):
            named = part.get(keyword)
            if isinstance(named, dict | list) and len(named) > _MAX_PROPERTIES:
                raise InvalidGrammar(
                    f"An object of the JSON schema has {len(named):,} {keyword}. Use {_MAX_PROPERTIES:,} at most."
                )
        divisor = part.get("multipleOf")
        if isinstance(divisor, int | float) and math.isfinite(divisor):
            divisors.append(abs(Decimal(str(divisor + 0)).normalize()))
    if not _divisors_fit(divisors):
        raise InvalidGrammar(
            "The JSON schema's multipleOf are too large, or do not fit together: what is a multiple of all of them, "
            f"written without a point, may be {_LARGEST_DIVISOR:,} at most. Use rounder ones, or leave them out."
        )


def _divisors_fit(divisors: list[Decimal]) -> bool:
    """Whether there are few enough remainders to have one state each."""
    points = max((-int(divisor.as_tuple().exponent) for divisor in divisors), default=0)
    if any(divisor.adjusted() + points > len(str(_LARGEST_DIVISOR)) for divisor in divisors):
        return False
    whole = [int(divisor.scaleb(points)) for divisor in divisors if divisor]
    return sum(whole) <= _LARGEST_DIVISOR and math.lcm(*whole) <= _LARGEST_DIVISOR


def _objects(parts: list[object]) -> Iterator[dict[str, Any]]:
    """Every object inside, at any depth, without recursion."""
    waiting = list(parts)
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)
