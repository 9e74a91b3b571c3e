"""SmolLM2 under a grammar, on both engines: what it writes is what was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import numpy as np
import pytest

from rekindle import Session
from rekindle.core.grammar import Grammar
from rekindle.core.request import parse_prompt
from rekindle.engine.base import Engine, Row
from rekindle.text.constraint import GrammarBackend

pytestmark = pytest.mark.real

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "country": {"type": "string", "maxLength": 40},
        "inhabitants": {"type": "integer", "minimum": 1, "maximum": 100_000_000},
        "sights": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1, "maxItems": 3},
        "size": {"enum": ["small", "large"]},
    },
    "required": ["city", "country", "inhabitants", "sights", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["hf", pytest.param("llamacpp", marks=[pytest.mark.llamacpp, pytest.mark.long])])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "hf":
        yield request.getfixturevalue("smollm2")
        return
    pytest.importorskip("xllamacpp")
    with Session("smollm2", engine=request.param, device="cpu", threads=1, context=1024) as session:
        yield session.engine


def greedy(engine: Engine, grammar: Grammar, asked: str, *, most: int = 200) -> str:
    tokens = engine.tokenizer.encode_chat(parse_prompt([{"role": "user", "content": asked}]))
    constraint = GrammarBackend(engine.tokenizer).start(grammar)
    room = len(tokens) + most
    sequence = engine.open(room, engine.regime(room))
    reply: list[int] = []
    row = Row.following(sequence, tokens)
    while not constraint.finished and len(reply) < most:
        reply.append(int(constraint.mask(engine.step([row])[0][-1]).argmax()))
        constraint.accept(reply[-1])
        row = Row.following(sequence, reply[-1:])
    sequence.close()
    assert constraint.finished, engine.tokenizer.decode(reply)
    return engine.tokenizer.decode(reply)


def test_a_schema_gives_json_that_obeys_it(engine: Engine) -> None:
    value = json.loads(greedy(engine, Grammar.json_schema(CITY), "Describe the city of Paris as JSON."))
    assert list(value) == CITY["required"]
    assert "Paris" in value["city"] and 1 <= value["inhabitants"] <= 100_000_000
    assert 1 <= len(value["sights"]) <= 3 and value["size"] in ("small", "large")


def test_a_pattern_is_matched_from_beginning_to_end(engine: Engine) -> None:
    text = greedy(engine, Grammar.regex(r"(January|May|July) [1-9][0-9]?, [0-9]{4}"), "When was Napoleon born?")
    assert re.fullmatch(r"(January|May|July) [1-9][0-9]?, [0-9]{4}", text)


def test_the_pieces_of_all_tokens_make_up_the_text_that_is_decoded(engine: Engine) -> None:
    tokenizer, random = engine.tokenizer, np.random.default_rng(0)
    pieces = tokenizer.pieces()
    assert len(pieces) == tokenizer.vocabulary_size
    used = [i for i, piece in enumerate(pieces) if piece]
    assert set(range(len(pieces))) - set(used) >= set(tokenizer.stop_ids)
    assert len(used) > 49_000
    for _ in range(1000):
        tokens = random.choice(used, 8).tolist()
        expected = b"".join(pieces[token] for token in tokens).decode("utf-8", errors="replace")
        assert tokenizer.decode(tokens) == expected
