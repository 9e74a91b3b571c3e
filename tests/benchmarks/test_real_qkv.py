"""QKV reuse as published, on the embedded model: the same answer, with fewer rows projected."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.baselines.qkv_engine import QkvReuse
from benchmarks.baselines.qkv_tree import QkvTree, answer
from rekindle import Session
from rekindle.engine.hf.engine import HfEngine
from tests.benchmarks.test_qkv_engine import PROJECTIONS, counted

pytestmark = [pytest.mark.real, pytest.mark.long]  # on tiny models: test_qkv_engine.py, test_qkv_tree.py

SYSTEM = "You answer questions from the notes that follow, in one short sentence.\n\n"
GARDEN = "The tomatoes were planted on the third of May, two weeks after the beans. They need water twice a day. " * 3
BOAT = "The boat is moored in Elm Harbour. Its keys hang behind the trials door, beside the old lantern. " * 3
TRAIN = "The last train home leaves at ten past eleven, from platform four. On Sundays it leaves an hour earlier. " * 3
REPLY = 16


def test_answers_are_equal_and_known_rows_are_not_projected(tmp_path: Path) -> None:
    with Session("smollm2", dtype="float32", device="cpu", reuse="off") as session:
        engine = session.engine
        assert isinstance(engine, HfEngine)
        encode = engine.tokenizer.encode
        system, garden, boat, train = map(encode, (SYSTEM, GARDEN, BOAT, TRAIN))
        asked, question = encode("\nWhen were the beans planted?"), encode("\nWhere are the keys of the boat?")
        reuse, tree = QkvReuse(engine), QkvTree(tmp_path / "tree", 1 << 30)
        answer(reuse, tree, [system, garden, boat, train], asked, 1)
        segments = [system, garden, boat, garden]
        with counted(engine) as usual:
            plain = answer(reuse, None, segments, question, REPLY)
        with counted(engine) as spared:
            got = answer(reuse, tree, segments, question, REPLY)
        assert got.tokens == plain.tokens
        assert got.known_tokens == sum(map(len, segments[:3]))
        for name, rows in usual.items():
            projects = name.rpartition(".")[2] in PROJECTIONS
            assert spared[name] == rows - (got.known_tokens if projects else 0), name
