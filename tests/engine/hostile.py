"""Grammars made to hurt: deep, wide, endless or exponential. As a program: follows one, and tells what it took."""

from __future__ import annotations

import json
import resource
import sys
import threading
from collections.abc import Callable
from typing import Any

from rekindle.core.grammar import Grammar


def _nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = {"type": "integer"}
    for _ in range(depth):
        value = wrap(value)
    return value


def _chain(length: int, link: Callable[[dict[str, str]], Any]) -> Grammar:
    links = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return Grammar.json_schema({"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "integer"}}})


def _rules(count: int, rule: str, last: str, define: str) -> str:
    return "".join(f"{rule.format(here=i, next=i + 1)}\n" for i in range(count)) + last.format(
        here=count, define=define
    )


HOSTILE: dict[str, Callable[[], Grammar]] = {
    "deep objects": lambda: Grammar.json_schema(
        _nested(60, lambda s: {"type": "object", "properties": {"a": s}, "required": ["a"]})
    ),
    "too deep": lambda: Grammar.json_schema(_nested(20_000, lambda s: {"items": s})),
    "as deep as text can": lambda: Grammar("json", '{"items":' * 20_000 + "{}" + "}" * 20_000),
    "deep choices": lambda: Grammar.json_schema(_nested(40, lambda s: {"anyOf": [s, {"type": "null"}]})),
    "a chain of references": lambda: _chain(5000, lambda ref: ref),
    "a chain of arrays": lambda: _chain(4000, lambda ref: {"items": ref, "minItems": 1}),
    "a chain of objects": lambda: _chain(3000, lambda ref: {"properties": {"a": ref}, "required": ["a"]}),
    "a chain of choices": lambda: _chain(3500, lambda ref: {"anyOf": [ref, {"type": "null"}]}),
    "references that double": lambda: _chain(30, lambda ref: {"allOf": [ref, ref]}),
    "references that branch": lambda: _chain(30, lambda ref: {"anyOf": [ref, {"properties": {"x": ref}}]}),
    "references to themselves": lambda: Grammar.json_schema(
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}}}
    ),
    "endless objects": lambda: Grammar.json_schema(
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
    ),
    "many values": lambda: Grammar.json_schema({"enum": [f"{i * 7919 % 99991:05d}" for i in range(20_000)]}),
    "many properties": lambda: Grammar.json_schema({"properties": {f"p{i}": {} for i in range(1000)}}),
    "many objects": lambda: Grammar.json_schema(
        {"anyOf": [{"properties": {f"{k}{i}": {"type": "null"} for i in range(900)}} for k in "abcdefgh"]}
    ),
    "many cases": lambda: Grammar.json_schema({"allOf": [{"anyOf": [{"const": i}, {"const": -i}]} for i in range(24)]}),
    "long strings": lambda: Grammar.json_schema({"type": "string", "minLength": 10**9}),
    "long arrays": lambda: Grammar.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
    "large remainders": lambda: Grammar.json_schema({"type": "integer", "multipleOf": 99_991}),
    "many remainders": lambda: Grammar.json_schema({"allOf": [{"multipleOf": p} for p in (8, 9, 5, 7, 11)]}),
    "exponential patterns": lambda: Grammar.json_schema({"type": "string", "pattern": "^(.*a.{20}){3}$"}),
    "patterns of patterns": lambda: Grammar.json_schema({"type": "string", "pattern": "^((a{0,99}){0,99}){0,99}$"}),
    "a long pattern": lambda: Grammar.json_schema({"type": "string", "pattern": "a?" * 100_000}),
    "a long expression": lambda: Grammar.regex("x?" * 4000),
    "deep brackets": lambda: Grammar.regex("(" * 3900 + "a" + ")" * 3900),
    "rules that double": lambda: Grammar.lark(
        "start: r0\n" + _rules(40, "r{here}: r{next} r{next}", 'r{here}{define} "a"', ":")
    ),
    "terminals that double": lambda: Grammar.lark(
        "start: R0\n" + _rules(40, "R{here}: R{next} R{next}", 'R{here}{define} "a"', ":")
    ),
    "a chain of rules": lambda: Grammar.lark(
        "start: r0\n" + _rules(1800, "r{here}:r{next}", 'r{here}{define} "a"', ":")
    ),
    "a chain of longer rules": lambda: Grammar.lark(
        "start: r0\n" + _rules(900, 'r{here}: "x" (r{next} "y")?', 'r{here}{define} "a"', ":")
    ),
    "ambiguous rules": lambda: Grammar.lark('start: s\ns: s s | "a" | "a" s | '),
    "deep rules": lambda: Grammar.lark("start: " + "(" * 9000 + '"a"' + ")" * 9000),
    "many rules of llama.cpp": lambda: Grammar.gbnf(
        "root ::= r0\n" + _rules(700, "r{here} ::= r{next}", 'r{here} {define} "a"', "::=")
    ),
    "deep rules of llama.cpp": lambda: Grammar.gbnf("root ::= " + "(" * 7000 + '"a"' + ")" * 7000),
}


def follow(name: str) -> None:
    """Write up to 60 tokens of it, or be refused: nothing else."""
    import numpy as np

    from rekindle.engine.constrain import Constrainer
    from rekindle.engine.fake_tokenizer import ByteTokenizer
    from rekindle.errors import InvalidGrammar

    constrainer, random = Constrainer(ByteTokenizer()), np.random.default_rng(0)
    constrainer.start(Grammar.json_object())
    try:
        constraint = constrainer.start(HOSTILE[name]())
        for _ in range(60):
            if constraint.finished:
                break
            constraint.accept(int(constraint.mask(random.normal(0, 1, 258).astype(np.float32)).argmax()))
    except InvalidGrammar as refusal:
        print(json.dumps(str(refusal)))


if __name__ == "__main__":
    import numpy as np  # noqa: F401  (its memory is not the grammar's)

    import rekindle.engine.constrain  # noqa: F401

    # Some systems give a thread no more: what a grammar needs it must get by itself.
    threading.stack_size(512 * 1024)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    thread = threading.Thread(target=follow, args=(sys.argv[1],))
    thread.start()
    thread.join()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
