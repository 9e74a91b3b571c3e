"""KV of the embedded model through the store, across a restart: the same logits, bit by bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rekindle import Session
from rekindle.core.keys import KvSpace, Namespace
from rekindle.core.kv import Span
from rekindle.engine.base import Engine, Row
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore

pytestmark = pytest.mark.real

TEXT = "A lighthouse keeper writes down every ship that passes, in a book that nobody reads. " * 8
SUFFIX = 20

# What a second process does: look up, feed the store's KV into an empty sequence, compute the rest.
SECOND = """
import sys
import numpy as np
from tests.real.test_stored_kv import SUFFIX, opened, prompt_of, kv_space_of
from rekindle import Session
from rekindle.engine.base import Row

session = Session("smollm2", dtype="float32", device="cpu")
engine, tokens = session.engine, prompt_of(session)
with opened(sys.argv[1]) as store:
    match = store.lookup(kv_space_of(engine), tokens[:-SUFFIX])
    assert match.length == len(tokens) - SUFFIX, match.length
    with engine.open(len(tokens), engine.regime(len(tokens))) as sequence:
        feed = store.load(kv_space_of(engine), match)
        row = Row(sequence, tokens[-SUFFIX:], range(match.length, len(tokens)), feeds=(feed,))
        (logits,) = engine.step([row])
np.save(sys.argv[2], logits)
"""


def opened(folder: object) -> TieredStore:
    return TieredStore(Path(str(folder)), StoreSettings(disk_limit="1GB", memory_limit=0))


def prompt_of(session: Session) -> list[int]:
    return session.engine.tokenizer.encode(TEXT)


def kv_space_of(engine) -> KvSpace:  # type: ignore[no-untyped-def]
    return KvSpace(Namespace(engine.identity(engine.regime(1)).digest), engine.layout, model=engine.name)


def test_kv_that_another_process_reads_back_gives_the_same_logits(smollm2: Engine, tmp_path: Path) -> None:
    with Session(smollm2, cache="off") as session:
        engine, tokens = session.engine, prompt_of(session)
        with engine.open(len(tokens), engine.regime(len(tokens))) as sequence:  # type: ignore[attr-defined]
            engine.step([Row.following(sequence, tokens[:-SUFFIX], logits="none")])
            kv = sequence.export(Span(0, len(tokens) - SUFFIX))
            with opened(tmp_path / "cache") as store:
                assert store.keep(kv_space_of(engine), tokens, kv).outcome == "kept"
            (expected,) = engine.step([Row.following(sequence, tokens[-SUFFIX:])])
    out = tmp_path / "logits.npy"
    subprocess.run([sys.executable, "-c", SECOND, str(tmp_path / "cache"), str(out)], check=True)
    assert np.array_equal(np.load(out), expected)
