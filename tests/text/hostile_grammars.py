"""Grammars made to hurt: deep, wide, endless or exponential. As a program: follows them, and tells what each took."""

from __future__ import annotations

import json
import resource
import string
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rekindle.core.grammar import Grammar

Make = Callable[[], Grammar]
TOKENS = 40  # of a reply that are written


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


def _apart(count: int) -> list[str]:
    """Patterns whose intersection has a state for every subset of them, and more."""
    return [f".*{letter}.{{{place + 3}}}.*" for place, letter in enumerate(string.ascii_lowercase[:count])]


def _strings(patterns: list[str], **also: Any) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": pattern, **also} for pattern in patterns]


def _words(count: int) -> list[str]:
    return [f"{i * 7919 % 99991:05d}" for i in range(count)]


def _schema(value: Any) -> Make:
    return lambda: Grammar.json_schema(value)


def _sized(name: str, sizes: tuple[int, ...], make: Callable[[int], Grammar]) -> dict[str, Make]:
    return {f"{name} ({size})": lambda size=size: make(size) for size in sizes}  # type: ignore[misc]


DEEP: dict[str, Make] = {
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
    "references that branch in all": lambda: _chain(
        24, lambda ref: {"allOf": [{"anyOf": [ref, {"type": "null"}]}, {"anyOf": [{"type": "string"}, ref]}]}
    ),
    "references to themselves": _schema(
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}}}
    ),
    "references to the whole in all": _schema(
        {"anyOf": [{"type": "null"}, {"allOf": [{"$ref": "#"}, {"properties": {"a": {"$ref": "#"}}}]}]}
    ),
    "endless objects": _schema(
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
    ),
    "deep brackets": lambda: Grammar.regex("(" * 3900 + "a" + ")" * 3900),
    "deep rules": lambda: Grammar.lark("start: " + "(" * 9000 + '"a"' + ")" * 9000),
    "deep rules of llama.cpp": lambda: Grammar.gbnf("root ::= " + "(" * 7000 + '"a"' + ")" * 7000),
    "a chain of rules": lambda: Grammar.lark(
        "start: r0\n" + _rules(1800, "r{here}:r{next}", 'r{here}{define} "a"', ":")
    ),
    "a chain of longer rules": lambda: Grammar.lark(
        "start: r0\n" + _rules(900, 'r{here}: "x" (r{next} "y")?', 'r{here}{define} "a"', ":")
    ),
    "many rules of llama.cpp": lambda: Grammar.gbnf(
        "root ::= r0\n" + _rules(700, "r{here} ::= r{next}", 'r{here} {define} "a"', "::=")
    ),
}

WIDE: dict[str, Make] = {
    "many values": _schema({"enum": _words(20_000)}),
    "many numbers": _schema({"enum": list(range(0, 300_000, 11))}),
    "long values": _schema({"enum": [word * 300 for word in _words(150)]}),
    "a large constant": _schema({"const": [{word: word} for word in _words(10_000)]}),
    "many properties": _schema({"properties": {f"p{i}": {} for i in range(1000)}}),
    "many objects": _schema(
        {"anyOf": [{"properties": {f"{k}{i}": {"type": "null"} for i in range(900)}} for k in "abcdefgh"]}
    ),
    "many cases": _schema({"allOf": [{"anyOf": [{"const": i}, {"const": -i}]} for i in range(24)]}),
    "many cases of objects": _schema(
        {"allOf": [{"anyOf": [{"properties": {f"{a}{i}": {}}} for a in "abc"]} for i in range(12)]}
    ),
    "many exclusive cases": _schema(
        {"oneOf": [{"properties": {"k": {"const": i}}, "required": ["k"]} for i in range(800)]}
    ),
    "many types": _schema(
        {"anyOf": [{"type": ["string", "array", "object", "null"], "minLength": i} for i in range(900)]}
    ),
    "long strings": _schema({"type": "string", "minLength": 10**9}),
    "strings between": _schema({"type": "string", "minLength": 10**5, "maxLength": 10**9}),
    "long arrays": _schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
    "arrays between": _schema({"items": {"type": "string", "maxLength": 999}, "minItems": 10**4, "maxItems": 10**6}),
    "arrays of arrays": _schema(_nested(6, lambda s: {"type": "array", "items": s, "minItems": 50, "maxItems": 60})),
    "long tuples": _schema(
        {"prefixItems": [{"type": "string", "maxLength": i} for i in range(2000)], "minItems": 2000}
    ),
    "many entries": _schema({"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 10**6}),
    "large remainders": _schema({"type": "integer", "multipleOf": 99_991}),
    "many remainders": _schema({"allOf": [{"multipleOf": p} for p in (8, 9, 5, 7, 11)]}),
    "remainders in a range": _schema({"multipleOf": 0.00001, "minimum": -(10**15), "maximum": 10**15}),
    "numbers with many digits": _schema({"type": "number", "minimum": 1e-300, "maximum": 1e300}),
    "whole numbers with many digits": _schema({"type": "integer", "minimum": -(10**4000), "maximum": 10**4000 + 7}),
    "many schemas in rules": lambda: Grammar.lark(
        "start: "
        + " ".join(f"r{i}" for i in range(300))
        + "\n"
        + "".join(f'r{i}: %json {{"type": "object", "properties": {{"p{i}": {{}}}}}}\n' for i in range(300))
    ),
}

PATTERNS: dict[str, Make] = {
    **_sized("all of patterns", (8, 14, 18, 26), lambda n: Grammar.json_schema({"allOf": _strings(_apart(n))})),
    **_sized(
        "all of bounded patterns",
        (12, 24),
        lambda n: Grammar.json_schema({"allOf": _strings(_apart(n), minLength=40, maxLength=4000)}),
    ),
    **_sized("one of patterns", (12, 40), lambda n: Grammar.json_schema({"oneOf": _strings(_apart(26) * (n // 10))})),
    **_sized("any of patterns", (26,), lambda n: Grammar.json_schema({"anyOf": _strings(_apart(n))})),
    **_sized(
        "objects of patterns",
        (10, 18),
        lambda n: Grammar.json_schema(
            {"patternProperties": {p: {"type": "null"} for p in _apart(n)}, "additionalProperties": {"type": "string"}}
        ),
    ),
    **_sized(
        "all of objects of patterns",
        (12, 18),
        lambda n: Grammar.json_schema(
            {"allOf": [{"properties": {"a": s}, "required": ["a"]} for s in _strings(_apart(n))]}
        ),
    ),
    **_sized(
        "all of patterns by reference",
        (18,),
        lambda n: Grammar.json_schema(
            {
                "allOf": [{"$ref": f"#/$defs/{i}"} for i in range(n)],
                "$defs": {str(i): s for i, s in enumerate(_strings(_apart(n)))},
            }
        ),
    ),
    **_sized(
        "all of patterns in rules",
        (18,),
        lambda n: Grammar.lark(f'start: "x" %json {json.dumps({"allOf": _strings(_apart(n))})}'),
    ),
    **_sized(
        "counted intersections",
        (6, 12, 18),
        lambda n: Grammar.lark("start: X\nX: " + " & ".join(f"/(.|\\n)*{p[2:-2]}(.|\\n)*/" for p in _apart(n))),
    ),
    **_sized(
        "complements", (6, 12, 18), lambda n: Grammar.lark("start: X\nX: " + " & ".join(f"~/{p}/" for p in _apart(n)))
    ),
    "complements of complements": lambda: Grammar.lark(
        "start: R0\n"
        + _rules(40, "R{here}: ~(~R{next} & /(.|\\n)*{here}.{{{here}}}(.|\\n)*/)", "R{here}{define} /a*/", ":")
    ),
    "exponential patterns": _schema({"type": "string", "pattern": "^(.*a.{20}){3}$"}),
    "patterns of patterns": _schema({"type": "string", "pattern": "^((a{0,99}){0,99}){0,99}$"}),
    "patterns that count": _schema({"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}),
    "patterns of letters": _schema({"type": "string", "pattern": r"^(\p{L}{1,500}\P{L}{1,500}){1,500}$"}),
    "patterns of words": _schema({"type": "string", "pattern": r"^(\w{0,300}\W){0,300}\d{300}$"}),
    "a long pattern": _schema({"type": "string", "pattern": "a?" * 100_000}),
    "a pattern of many words": _schema({"type": "string", "pattern": f"^({'|'.join(_words(30_000))})*$"}),
    "a pattern of many classes": _schema({"type": "string", "pattern": r"[\p{L}\p{N}--\p{Lu}]?" * 4000}),
    "a long expression": lambda: Grammar.regex("x?" * 4000),
    "an expression that counts": lambda: Grammar.regex("((((a{1,999}){1,999}){1,999}){1,999}){1,999}"),
    "an expression of many words": lambda: Grammar.regex(f"({'|'.join(_words(1300))}){{1,1000}}"),
    "an expression of classes": lambda: Grammar.regex(r"(\p{L}|\p{N}|\p{S}|\p{P}){900}"),
    "an expression that looks back": lambda: Grammar.regex("(.*a.{200}){9}"),
    "an expression without case": lambda: Grammar.regex("(?i)(" + "|".join(["straße", "ſ", "ķ"] * 500) + "){1,99}"),
}

RULES: dict[str, Make] = {
    "rules that double": lambda: Grammar.lark(
        "start: r0\n" + _rules(40, "r{here}: r{next} r{next}", 'r{here}{define} "a"', ":")
    ),
    "terminals that double": lambda: Grammar.lark(
        "start: R0\n" + _rules(40, "R{here}: R{next} R{next}", 'R{here}{define} "a"', ":")
    ),
    "terminals that count": lambda: Grammar.lark(
        "start: R0\n" + _rules(12, "R{here}: R{next}{{1,99}}", 'R{here}{define} "a"', ":")
    ),
    "rules that count": lambda: Grammar.lark(
        "start: r0\n" + _rules(12, "r{here}: r{next}{{1,99}}", 'r{here}{define} "a"', ":")
    ),
    "ambiguous rules": lambda: Grammar.lark('start: s\ns: s s | "a" | "a" s | '),
    "more ambiguous rules": lambda: Grammar.lark('start: s\ns: s s s s | (s | "a" | "b")* | s "a" s | '),
    "many ambiguous rules": lambda: Grammar.lark(
        "start: r0\n" + _rules(60, "r{here}: r{next} | r{next} r{next} | start | ", 'r{here}{define} "a" | start', ":")
    ),
    "rules that begin with themselves": lambda: Grammar.lark('start: a\na: a "x" | b "y" | \nb: a "x" | b "z" | a b\n'),
    "many terminals at once": lambda: Grammar.lark(
        "start: ("
        + " | ".join(f"T{i}" for i in range(400))
        + ")*\n"
        + "".join(f"T{i}: /[a-z]{{1,{i + 1}}}{i}/\n" for i in range(400))
    ),
    "parts of a text": lambda: Grammar.lark(
        "start: X\nX: %regex " + json.dumps({"substring_chars": " ".join(_words(3000))})
    ),
    "imported terminals": lambda: Grammar.lark(
        "%import common.ESCAPED_STRING\n%import common.NUMBER\nstart: (ESCAPED_STRING | NUMBER){1,100000}"
    ),
    "counted rules of llama.cpp": lambda: Grammar.gbnf('root ::= ((("a"{1,999}){1,999}){1,999}){1,999}'),
    "counted recursion of llama.cpp": lambda: Grammar.gbnf('root ::= (root{1,999} "b"){1,999} | [a-z]{1,999}'),
    "rules of llama.cpp that double": lambda: Grammar.gbnf(
        "root ::= r0\n" + _rules(40, "r{here} ::= r{next} r{next}", 'r{here} {define} "a"', "::=")
    ),
}

HOSTILE = {**DEEP, **WIDE, **PATTERNS, **RULES}


def _spent_seconds(running: list[psutil.Process]) -> float:
    """CPU time of this process, of those that it started and that ended, and of those that run."""
    spent = 0.0
    for process in running:
        with suppress(psutil.Error):
            used = process.cpu_times()
            spent += used.user + used.system
    ended = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return spent + sum(used.ru_utime + used.ru_stime for used in ended)


def _max_bytes(running: list[psutil.Process]) -> int:
    """The most memory that this process ever had, and the most that one had which it started."""
    own, ended = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    status = [path.read_text() for process in running if (path := Path(f"/proc/{process.pid}/status")).exists()]
    peaks = [int(text.split("VmHWM:")[1].split()[0]) for text in status if "VmHWM:" in text]
    return (own + max(ended, *peaks, 0)) * 1024


def follow(names: list[str]) -> None:
    """Write some tokens of each, or be refused: nothing else."""
    import numpy as np

    from rekindle.engine.fake import ByteTokenizer
    from rekindle.errors import InvalidGrammar
    from rekindle.text.constraint import GrammarBackend

    constrainer, random = GrammarBackend(ByteTokenizer()), np.random.default_rng(0)
    constrainer.start(Grammar.json_object())
    ready_bytes = _max_bytes(psutil.Process().children())
    for name in names:
        constrainer.start(Grammar.json_object())  # a process that waits for the next
        running = psutil.Process().children()
        slowest, outcome, began = 0.0, "followed", _spent_seconds(running)
        try:
            constraint = constrainer.start(HOSTILE[name]())
            slowest = _spent_seconds(running) - began
            for _ in range(TOKENS):
                if constraint.finished:
                    break
                began = _spent_seconds(running)
                constraint.accept(int(constraint.mask(random.normal(0, 1, 258).astype(np.float32)).argmax()))
                slowest = max(slowest, _spent_seconds(running) - began)
        except InvalidGrammar as refusal:
            slowest, outcome = max(slowest, _spent_seconds(running) - began), str(refusal)
        constraint = None
        taken = {"name": name, "cpu_seconds": slowest, "bytes": _max_bytes(running) - ready_bytes, "outcome": outcome}
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    import numpy as np  # noqa: F401  (its memory is not the grammar's)

    import rekindle.text.constraint  # noqa: F401

    # Some systems give a thread no more: what a grammar needs it must get by itself.
    threading.stack_size(512 * 1024)
    thread = threading.Thread(target=follow, args=(sys.argv[1:] or list(HOSTILE),))
    thread.start()
    thread.join()
