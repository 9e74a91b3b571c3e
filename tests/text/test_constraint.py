"""Replies under a grammar: whatever the logits, the text belongs to it; what cannot be followed is refused."""

from __future__ import annotations

import itertools
import json
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from rekindle.core.grammar import Grammar
from rekindle.engine.base import Row
from rekindle.engine.fake import ByteTokenizer, FakeEngine
from rekindle.errors import Cancelled, InvalidGrammar, StepRefused
from rekindle.text import sandbox as limited_process
from rekindle.text.base import Tokenizer
from rekindle.text.constraint import Constraint, GrammarBackend
from rekindle.text.tokenizer import vocabulary_bytes
from tests.engine.llamacpp.conftest import Load, load, tiny  # noqa: F401  (fixtures)
from tests.text.hostile_grammars import HOSTILE
from tests.tiny import byte_tokenizer

pytestmark = pytest.mark.thorough

CONSTRAINER = GrammarBackend(ByteTokenizer())
END = 256
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "pets": {"type": "array", "items": {"$ref": "#/$defs/pet"}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"type": "string", "format": "ipv4"}]},
    },
    "required": ["name", "age", "pets", "home"],
    "additionalProperties": False,
    "$defs": {"pet": {"enum": ["cat", "dog", None, 3]}},
}


def written(constraint: Constraint, tokenizer: Tokenizer, *, seed: int = 0, most: int = 3000) -> str:
    """The text that random logits write."""
    random, tokens = np.random.default_rng(seed), []
    while not constraint.finished:
        assert len(tokens) < most, f"no end in sight: {tokenizer.decode(tokens)[:200]}"
        logits = random.normal(0, 3, tokenizer.vocabulary_size).astype(np.float32)
        token = int(constraint.mask(logits).argmax())
        constraint.accept(token)
        if token not in tokenizer.stop_ids:
            tokens.append(token)
    return tokenizer.decode(tokens)


def allowed(constraint: Constraint, size: int = 258) -> list[int]:
    return np.flatnonzero(np.isfinite(constraint.mask(np.zeros(size, np.float32)))).tolist()


def follow(grammar: Grammar, text: str) -> Constraint:
    constraint = CONSTRAINER.start(grammar)
    for byte in text.encode():
        constraint.accept(byte)
    return constraint


def belongs(grammar: Grammar, text: str) -> bool:
    try:
        constraint = follow(grammar, text)
    except StepRefused:
        return False
    return constraint.finished or END in allowed(constraint)


def fits(schema: dict[str, Any], value: Any) -> bool:
    """Whether the value obeys a schema of the family below: written without a look at any library."""
    if "anyOf" in schema:
        return any(fits(one, value) for one in schema["anyOf"])
    if "enum" in schema:
        return any(type(one) is type(value) and one == value for one in schema["enum"])
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
        case "array":
            sized = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return sized and all(fits(schema["items"], item) for item in value)
        case _:
            named = schema["properties"]
            complete = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(named)
            return complete and all(fits(named[name], item) for name, item in value.items())


def _bounds(low: int, high: int, names: tuple[str, str]) -> st.SearchStrategy[dict[str, int]]:
    pair = st.tuples(st.integers(low, high), st.integers(low, high))
    return pair.map(lambda p: {names[0]: min(p), names[1]: max(p)})


def _object(named: dict[str, Any], needed: list[str]) -> dict[str, Any]:
    required = [name for name in needed if name in named]
    return {"type": "object", "properties": named, "required": required, "additionalProperties": False}


NAMES = st.sampled_from(["a", "b", "long name", "ключ", 'quo"te', "back\\slash", "\n"])
LEAVES = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    _bounds(-1000, 1000, ("minimum", "maximum")).map(lambda b: {"type": "integer", **b}),
    _bounds(0, 6, ("minLength", "maxLength")).map(lambda b: {"type": "string", **b}),
    st.lists(st.text(max_size=5) | st.integers(-9, 9) | st.none(), min_size=1, max_size=4).map(lambda e: {"enum": e}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, _bounds(0, 3, ("minItems", "maxItems"))).map(
            lambda p: {"type": "array", "items": p[0], **p[1]}
        ),
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=4), st.lists(NAMES, unique=True)),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
    ),
    max_leaves=6,
)


@settings(max_examples=60)
@given(SCHEMAS, st.integers(0, 2**32))
def test_any_logits_write_json_that_obeys_the_schema(schema: dict[str, Any], seed: int) -> None:
    text = written(CONSTRAINER.start(Grammar.json_schema(schema)), ByteTokenizer(), seed=seed)
    assert fits(schema, json.loads(text)), text


@pytest.mark.parametrize("seed", range(5))
def test_properties_come_in_the_order_of_the_schema(seed: int) -> None:
    text = written(CONSTRAINER.start(Grammar.json_schema(PERSON)), ByteTokenizer(), seed=seed)
    value = json.loads(text)
    assert list(value) == ["name", "age", "pets", "home"] and set(map(str, value["pets"])) <= {
        "cat",
        "dog",
        "None",
        "3",
    }
    assert value["home"] is None or re.fullmatch(r"\d+(\.\d+){3}", value["home"])


def test_the_fake_engine_writes_what_the_schema_asks_for() -> None:
    engine = FakeEngine()
    constraint = GrammarBackend(engine.tokenizer).start(Grammar.json_schema(PERSON))
    tokens: list[int] = []
    sequence = engine.open(512, engine.regime(512))
    row = Row.following(sequence, engine.tokenizer.encode("Who?"))
    while not constraint.finished:
        tokens.append(int(constraint.mask(engine.step([row])[0][-1]).argmax()))
        constraint.accept(tokens[-1])
        row = Row.following(sequence, tokens[-1:])
    assert list(json.loads(engine.tokenizer.decode(tokens))) == ["name", "age", "pets", "home"]


def test_whitespace_cannot_go_on_forever() -> None:
    for grammar in (Grammar.json_object(), Grammar.lark('start: "call " %json {"type": "object"}')):
        start = "call " if grammar.kind == "lark" else ""
        assert belongs(grammar, start + '{"a": [1, 2], "b":{"c":"  \\n"}}')
        for text in (" {}", "{ }", "{}\n", '{"a":  1}', '{"a" :1}', '{"a":[1 ,2]}', '{"a":\n1}'):
            assert not belongs(grammar, start + text), text


def test_an_object_is_any_object_and_nothing_else() -> None:
    assert belongs(Grammar.json_object(), '{"é": [{}, -1.5e3, true, null, "é\\n\\""]}')
    assert allowed(CONSTRAINER.start(Grammar.json_object())) == [ord("{")]


def test_grammars_of_every_kind_are_followed() -> None:
    assert belongs(Grammar.regex(r"\d{3}/[a-c]+"), "123/ab") and not belongs(Grammar.regex(r"\d{3}/[a-c]+"), "123/")
    assert belongs(Grammar.regex("a|b"), "b") and belongs(Grammar.regex(""), "")
    sums = Grammar.lark('start: part ("+" part)*\npart: /[0-9]+/ | "(" start ")"')
    assert belongs(sums, "1+(22+3)") and not belongs(sums, "1+(2")
    nested = Grammar.gbnf('root ::= "(" root ")" | word "b" # a comment: "x"\nword ::= [a-c]+\n')
    assert belongs(nested, "((acb))") and not belongs(nested, "((ac))")


@pytest.mark.parametrize("rule", ["root", "(root | nothing)"])
def test_a_rule_of_gbnf_takes_no_more_than_it_must(rule: str) -> None:
    recursive = f' | "(" {rule} ")"\nnothing ::= "-"\n' if rule != "root" else "\n"
    grammar = Grammar.gbnf(f'root ::= word "b"{recursive}word ::= [a-z]+\n')
    assert belongs(grammar, "ab") and belongs(grammar, "abbb") and not belongs(grammar, "aba")


def test_every_stop_token_is_allowed_exactly_where_the_grammar_may_end() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.stop_ids == {256, 258}
    pieces = tokenizer.pieces()
    constraint = GrammarBackend(tokenizer).start(Grammar.regex("[0-9]{2,3}"))
    for _ in range(2):
        assert not {256, 257, 258} & set(allowed(constraint, 320)) and not constraint.finished
        constraint.accept(pieces.index(b"7"))
    assert {256, 258} < set(allowed(constraint, 320)) and not constraint.finished
    constraint.accept(258)
    assert constraint.finished


def test_a_grammar_that_can_only_end_is_finished_without_a_stop_token() -> None:
    constraint = follow(Grammar.regex("ab"), "ab")
    assert constraint.finished and allowed(constraint) == [END]


def test_unlikely_tokens_are_drawn_where_nothing_else_may_follow() -> None:
    logits = np.full(258, -np.inf, np.float32)
    logits[0] = 5.0
    masked = CONSTRAINER.start(Grammar.regex("[ab]")).mask(logits)
    assert np.flatnonzero(np.isfinite(masked)).tolist() == [97, 98] and logits[0] == 5.0


def test_a_token_that_was_left_out_is_refused() -> None:
    constraint = CONSTRAINER.start(Grammar.regex("ab"))
    for token in (ord("b"), END, 257):
        with pytest.raises(StepRefused):
            constraint.accept(token)
    constraint.accept(ord("a"))


def test_control_tokens_are_out_of_reach_of_a_grammar() -> None:
    for text in ("start: <[257]>", "start: <end>", 'start: "a" <[257]> "b"', "start: <[*]>"):
        try:
            constraint = follow(Grammar.lark(text), "a" if '"a"' in text else "")
            assert not set(allowed(constraint)) & {257}, text
        except InvalidGrammar:
            continue


def test_two_threads_may_start_the_first_grammar_at_once() -> None:
    constrainer, texts = GrammarBackend(ByteTokenizer()), []

    def write() -> None:
        texts.append(written(constrainer.start(Grammar.json_schema(PERSON)), ByteTokenizer()))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 4 and len(set(texts)) == 1


# What is refused


REFUSED: dict[str, tuple[Any, str]] = {
    "false": (False, "false"),
    "unknown type": ({"type": "bar"}, "bar"),
    "not": ({"not": {}}, "not"),
    "unique items": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "condition": ({"if": {}, "then": {}}, "if"),
    "unknown format": ({"type": "string", "format": "regex"}, "regex"),
    "overlapping oneOf": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
    "broken pattern": ({"type": "string", "pattern": "("}, "unclosed group"),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
    "empty range": ({"type": "integer", "minimum": 5, "maximum": 3}, "greater than"),
    "empty enum": ({"enum": []}, "empty"),
    "remote": ({"$ref": "https://example.com/schema.json"}, "example.com"),
    "file": ({"properties": {"a": {"$ref": "file:///etc/hosts"}}}, "file:"),
    "nowhere": ({"$ref": "#/$defs/no"}, "no"),
    "only itself": ({"$ref": "#"}, "nothing may follow"),
    "options": ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance"),
    "a number": (3, "object"),
    "not JSON": ({"const": {1, 2}}, "JSON"),
    "not a number": ({"const": float("nan")}, "JSON"),
    "half a character": ({"const": "\ud800"}, "hex escape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_followed_is_refused_with_the_reason(name: str) -> None:
    schema, reason = REFUSED[name]
    with pytest.raises(InvalidGrammar, match=re.escape(reason)) as caught:
        CONSTRAINER.start(Grammar.json_schema(schema))
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.regex("("),
        lambda: Grammar.regex(r"(a)\1"),
        lambda: Grammar.regex("[^\\s\\S]"),
        lambda: Grammar.lark("start: nowhere"),
        lambda: Grammar.lark("start: start"),
        lambda: Grammar.lark('start: %json {"a'),
        lambda: Grammar.lark('start: "\ud800"'),
        lambda: Grammar.gbnf("root ::= nowhere"),
        lambda: Grammar.gbnf('root ::= "\\'),
        lambda: Grammar.gbnf('start: "lark"'),
        lambda: Grammar.gbnf(""),
        lambda: Grammar("yaml", "a"),  # type: ignore[arg-type]
        lambda: Grammar("json", "{} {}"),
        lambda: Grammar("json", "{"),
    ],
)
def test_a_grammar_that_makes_no_sense_is_refused(make: Callable[[], Grammar]) -> None:
    with pytest.raises(InvalidGrammar):
        CONSTRAINER.start(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.json_schema({"enum": ["x" * 100] * 4000}),
        lambda: Grammar.json_schema({"properties": {f"p{i}": {} for i in range(10_000)}}),
        lambda: Grammar.json_schema({"multipleOf": 999_983}),
        lambda: Grammar.lark('start: %json {"multipleOf": 9999.83}'),
        lambda: Grammar.json_schema({"anyOf": [{"multipleOf": 997}] * 200}),
        lambda: Grammar.json_schema({"allOf": [{"multipleOf": p} for p in (997, 991, 983, 977, 971)]}),
        lambda: Grammar.json_schema({"allOf": [{"multipleOf": 1e300}, {"multipleOf": 1e-300}]}),
        lambda: Grammar.regex("x?" * 10_000),
        lambda: Grammar.lark("start: " + '"a" ' * 10_000),
        lambda: Grammar.gbnf('root ::= "' + "a" * 20_000 + '"'),
    ],
)
def test_what_would_take_too_long_to_compile_is_refused_before(make: Callable[[], Grammar]) -> None:
    with pytest.raises(InvalidGrammar):
        make()


def test_divisors_that_people_use_are_followed() -> None:
    cents = Grammar.json_schema({"type": "object", "properties": {"price": {"multipleOf": 0.01, "type": "number"}}})
    assert belongs(cents, '{"price":12.35}') and not belongs(cents, '{"price":12.355}')
    dozens = Grammar.json_schema({"allOf": [{"type": "integer", "multipleOf": 4}, {"multipleOf": 6.0}]})
    assert belongs(dozens, "36") and not belongs(dozens, "30")


def test_equal_grammars_are_equal_and_the_order_of_properties_counts() -> None:
    ab, ba = ({"properties": {x: {} for x in names}} for names in ("ab", "ba"))
    assert hash(Grammar.json_schema(ab)) == hash(Grammar.json_schema(dict(ab)))
    assert len({Grammar.json_schema(ab), Grammar.json_schema(dict(ab)), Grammar.json_schema(ba)}) == 2


def test_a_grammar_that_turns_out_too_complex_says_so_midway() -> None:
    constraint = CONSTRAINER.start(Grammar.regex("(((a{1,1000}){1,1000}){1,1000})"))
    with pytest.raises(InvalidGrammar, match="too many"):
        for _ in range(1000):
            constraint.accept(ord("a"))


def test_no_grammar_takes_more_than_two_seconds_and_200_mb() -> None:
    """In a process of its own, whose memory is that of grammars alone: what each took to compile, and at any step."""
    command = [sys.executable, "-m", "tests.text.hostile_grammars"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=540, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stderr[-2000:]
    taken = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [one["name"] for one in taken] == list(HOSTILE)
    assert not [one for one in taken if one["cpu_seconds"] > 2.0 or one["bytes"] > 200 * 1024 * 1024]
    assert sum(one["outcome"] == "followed" for one in taken) > len(taken) // 2, "most of them are no more than odd"


def test_a_schema_that_took_a_gigabyte_is_refused_and_the_next_is_followed() -> None:
    with pytest.raises(InvalidGrammar, match="too complex"):
        CONSTRAINER.start(HOSTILE["all of patterns (26)"]())
    assert belongs(Grammar.json_schema({"allOf": [{"type": "string"}, {"maxLength": 3}]}), '"abc"')


def endless(monkeypatch: pytest.MonkeyPatch) -> Grammar:
    """One that takes until it is cancelled."""
    monkeypatch.setattr(limited_process, "CPU_SECONDS", 3600.0)
    monkeypatch.setattr(limited_process, "HEAP_BYTES", 64 * 1024**3)
    CONSTRAINER.close()  # those that wait have the usual limit
    return HOSTILE["all of patterns (26)"]()


def test_compiling_is_over_as_soon_as_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, asked = endless(monkeypatch), itertools.count(1)
    with pytest.raises(Cancelled):
        CONSTRAINER.start(grammar, lambda: next(asked) == 3)
    assert next(asked) == 4 and belongs(Grammar.regex("a"), "a")


def test_others_are_compiled_and_followed_while_a_grammar_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, stop, asked, ended = endless(monkeypatch), threading.Event(), threading.Event(), queue.SimpleQueue()

    def cancelled() -> bool:
        asked.set()
        return stop.is_set()

    def compile_it() -> None:
        with pytest.raises(Cancelled):
            CONSTRAINER.start(grammar, cancelled)
        ended.put(True)

    thread = threading.Thread(target=compile_it)
    thread.start()
    try:
        assert asked.wait(60)
        text = written(CONSTRAINER.start(Grammar.json_schema(PERSON)), ByteTokenizer())
        assert list(json.loads(text)) == ["name", "age", "pets", "home"] and ended.empty()
    finally:
        stop.set()
        thread.join(60)
    assert ended.get(timeout=1)


def test_closing_ends_every_process() -> None:
    own = GrammarBackend(ByteTokenizer())
    with own.start(Grammar.regex("a")), own.start(Grammar.regex("b")):
        pass
    before = len(psutil.Process().children())
    own.close()
    assert len(psutil.Process().children()) == before - 2


# The bytes of tokens


def llama_like() -> tokenizers.Tokenizer:
    """As Llama 2: a mark for spaces, bytes for what has no piece, the first space of a text is dropped."""
    words = ["▁", "a", "b", "▁a", "▁the", "é", "▁▁", "th", "e", "▁é"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens(["<tool>", " odd "])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    model = models.Unigram([("<unk>", 0.0), ("▁", -2.0), ("▁a", -1.0), ("b", -1.0), ("é", -1.0)], unk_id=0)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens(["<unk>"])
    return backend


def wordpiece(decoder: Any) -> tokenizers.Tokenizer:
    pieces = ["[UNK]", "a", "##b", "word", "##s", ".", "##é", "<x>"]
    backend = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["[UNK]"])
    return backend


def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "Ġa", "Ã©", "âĤ", "Ċ", "<|end|>"]
    vocab = {p: i for i, p in enumerate(dict.fromkeys(pieces))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens(["<tool>", "日本", "é"])
    return backend


BACKENDS: dict[str, tokenizers.Tokenizer] = {
    "llama": llama_like(),
    "metaspace": metaspace(),
    "wordpiece": wordpiece(decoders.WordPiece()),
    "no decoder": wordpiece(None),
    "byte level": byte_level(),
}


def _inside(backend: tokenizers.Tokenizer, tokens: list[int]) -> str:
    before = backend.token_to_id("b" if backend.token_to_id("b") is not None else "a")
    return str(backend.decode([before, *tokens])).removeprefix(backend.decode([before]))


@given(st.data())
@pytest.mark.parametrize("name", BACKENDS)
def test_the_pieces_of_tokens_make_up_the_text_that_is_decoded(name: str, data: st.DataObject) -> None:
    backend = BACKENDS[name]
    size = backend.get_vocab_size() + 3
    pieces = vocabulary_bytes(backend, size)
    assert len(pieces) == size and pieces[-3:] == [b""] * 3
    # Broken characters are shown in different ways: of a fallback's bytes, only those that are characters are drawn.
    single = [i for i in range(size) if name != "llama" or not 0x80 + 3 <= i < 256 + 3]
    tokens = data.draw(st.lists(st.sampled_from(single), max_size=8))
    if name == "llama":
        tokens += [3 + byte for byte in data.draw(st.text(max_size=4)).encode()]
    assert b"".join(pieces[token] for token in tokens).decode("utf-8", errors="replace") == _inside(backend, tokens)


@pytest.mark.llamacpp
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_the_pieces_of_llamacpps_tokens_make_up_the_text_that_is_decoded(
    kind: str,
    tmp_path: Path,
    load: Load,  # noqa: F811
) -> None:
    pytest.importorskip("xllamacpp")
    from tests.engine.llamacpp import vocabularies

    vocabulary = vocabularies.byte_level("<tool>") if kind == "bytes" else vocabularies.sentencepiece("<tool>")
    tokenizer = load(vocabulary.write(tmp_path / "words.gguf")).tokenizer
    pieces = tokenizer.pieces()
    assert len(pieces) == tokenizer.vocabulary_size
    assert pieces[vocabulary.id("<tool>")] == b"<tool>"
    assert not any(pieces[token] for token in tokenizer.stop_ids)
    for text in ("hello world", " hello", "é 東京 🙂", "a\n\tb"):
        tokens = [token for token in tokenizer.encode(text) if pieces[token]]
        assert b"".join(pieces[token] for token in tokens).decode().strip() == text.strip()
    plain = [i for i in range(len(pieces)) if pieces[i].isascii()]
    random = np.random.default_rng(0)
    for _ in range(200):
        tokens = random.choice(plain, 8).tolist()
        before = tokenizer.encode("h")
        shown = tokenizer.decode([*before, *tokens]).removeprefix(tokenizer.decode(before))
        assert b"".join(pieces[token] for token in tokens).decode() == shown


@pytest.mark.llamacpp
def test_a_tiny_gguf_writes_what_the_schema_asks_for(tiny: Path, load: Load) -> None:  # noqa: F811
    pytest.importorskip("xllamacpp")
    tokenizer = load(tiny).tokenizer
    text = written(GrammarBackend(tokenizer).start(Grammar.json_schema(PERSON)), tokenizer)
    assert list(json.loads(text)) == ["name", "age", "pets", "home"]


def test_a_reply_may_follow_either_of_two_grammars() -> None:
    form, calls = Grammar.json_schema(PERSON), Grammar.lark('start: "<call>" /[a-z]+/ "</call>"')
    constraint = CONSTRAINER.start(form, calls=calls)
    assert allowed(constraint) == [ord("<"), ord("{")]
    constraint.accept(ord("<"))
    assert allowed(constraint) == [ord("c")]
    assert json.loads(written(CONSTRAINER.start(form, calls=Grammar.regex("<{9}")), ByteTokenizer(), seed=2))


def test_a_control_token_may_announce_the_second_grammar() -> None:
    start = 257
    constraint = CONSTRAINER.start(Grammar.json_object(), calls=Grammar.gbnf('root ::= "[1]"'), openers=[start])
    assert allowed(constraint) == [ord("["), ord("{"), start]
    constraint.accept(start)
    assert allowed(constraint) == [ord("[")], "only what it announced may follow"
    assert written(constraint, ByteTokenizer()) == "[1]"
