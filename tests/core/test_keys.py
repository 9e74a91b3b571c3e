"""Keys: equal contexts, and only those, have equal keys."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.core.keys import BLOCK_TOKENS, KvSpace, Namespace, chain, token_bytes
from rekindle.core.kv import KvLayout, LayerShape
from rekindle.errors import InvalidPrompt

tokens = st.lists(st.integers(0, 2), max_size=100)


@given(a=tokens, b=tokens)
def test_chains_agree_exactly_as_far_as_whole_blocks_do(a: list[int], b: list[int]) -> None:
    root = Namespace("model").root
    one, two = chain(root, token_bytes(a)), chain(root, token_bytes(b))
    for depth, (left, right) in enumerate(zip(one, two, strict=False), start=1):
        stop = depth * BLOCK_TOKENS
        assert (left == right) == (a[:stop] == b[:stop])


def test_namespaces_share_no_key() -> None:
    names = [Namespace(*fields) for fields in itertools.product(("a", "ab", ""), repeat=3)]
    keys = {chain(name.root, token_bytes([1] * 40))[-1] for name in names}
    assert len(keys) == len(names)


def test_kv_spaces_differ_in_everything_that_makes_kv_different_and_in_nothing_else() -> None:
    layout = KvLayout("float32", (LayerShape(1, 2, 2),))
    base = KvSpace(Namespace("m"), layout)
    others = [
        KvSpace(Namespace("m2"), layout),
        KvSpace(Namespace("m", "tenant"), layout),
        KvSpace(Namespace("m", salt="salt"), layout),
        KvSpace(Namespace("m"), KvLayout("float16", layout.layers)),
        KvSpace(Namespace("m"), KvLayout("float32", (LayerShape(2, 1, 1),))),
        KvSpace(Namespace("m"), layout, adapter="base"),
        KvSpace(Namespace("m"), layout, codec="q8"),
    ]
    assert len({kv_space.digest for kv_space in [base, *others]}) == len(others) + 1
    assert KvSpace(Namespace("m"), layout, model="a name for people").digest == base.digest


@pytest.mark.parametrize(
    "wrong",
    [[-1], [1 << 32], np.array([(1 << 32) + 5]), np.array([-5]), [1.5], np.array([1.7]), ["a"], [[1, 2]], [None]],
)
def test_what_is_no_token_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidPrompt, match="whole numbers"):
        token_bytes(wrong)  # type: ignore[arg-type]


def test_tokens_of_any_integer_type_are_the_same_tokens() -> None:
    plain = token_bytes([1, 2, 3])
    assert plain == token_bytes(np.array([1, 2, 3], np.int64)) == token_bytes((1, 2, 3)) == token_bytes(range(1, 4))
    assert token_bytes([]) == b""
