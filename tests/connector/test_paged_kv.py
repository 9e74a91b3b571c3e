"""vLLM's blocks as KV: the layout is found by what vLLM's own function writes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from rekindle.core.kv import Span
from rekindle.vllm.paged_kv import PagedLayer, WriteSlots, paged_layer

BLOCKS, HEADS, TOKENS, KEY_DIM, VALUE_DIM = 6, 2, 32, 8, 4


def side_by_side(layer: Tensor) -> WriteSlots:
    """As FlashAttention's cache is written."""

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for slot, key, value in zip(slots.tolist(), keys, values, strict=True):
            layer[slot // TOKENS, :, slot % TOKENS] = torch.cat([key, value], dim=-1)

    return write


def keys_transposed(layer: Tensor) -> WriteSlots:
    """As vLLM's CPU kernel writes: in a block of a head K as [key_dim, tokens], then V as [tokens, value_dim]."""
    flat = layer.view(BLOCKS, HEADS, TOKENS * (KEY_DIM + VALUE_DIM))

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for slot, key, value in zip(slots.tolist(), keys, values, strict=True):
            block, at = divmod(slot, TOKENS)
            for head in range(HEADS):
                flat[block, head, at : KEY_DIM * TOKENS : TOKENS] = key[head]
                start = KEY_DIM * TOKENS + at * VALUE_DIM
                flat[block, head, start : start + VALUE_DIM] = value[head]

    return write


def packed(layer: Tensor) -> WriteSlots:
    """As a kernel writes that nobody here knows."""

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        side_by_side(layer)(keys.flip(-1), values, slots)

    return write


@pytest.fixture(params=[side_by_side, keys_transposed])
def known(request: pytest.FixtureRequest) -> tuple[PagedLayer, WriteSlots]:
    layer = torch.zeros(BLOCKS, HEADS, TOKENS, KEY_DIM + VALUE_DIM)
    make: Callable[[Tensor], WriteSlots] = request.param
    found = paged_layer(layer, KEY_DIM, make(layer))
    assert found is not None
    assert not layer.any()  # the trial left nothing
    return found, make(layer)


def test_what_vllm_wrote_is_read(known: tuple[PagedLayer, WriteSlots]) -> None:
    paged, write = known
    keys, values = torch.randn(70, HEADS, KEY_DIM), torch.randn(70, HEADS, VALUE_DIM)
    table = [4, 1, 5]
    slots = torch.tensor([table[i // TOKENS] * TOKENS + i % TOKENS for i in range(70)])
    write(keys, values, slots)
    read = paged.read(table, TOKENS, Span(5, 70))
    np.testing.assert_array_equal(read.keys, keys[5:].transpose(0, 1).numpy())
    np.testing.assert_array_equal(read.values, values[5:].transpose(0, 1).numpy())


def test_what_is_written_is_read_and_nothing_else_changes(known: tuple[PagedLayer, WriteSlots]) -> None:
    paged, _ = known
    before = paged.read([1, 2, 3], TOKENS, Span(0, 96))
    keys, values = torch.randn(HEADS, 41, KEY_DIM), torch.randn(HEADS, 41, VALUE_DIM)
    paged.write([2, 3], TOKENS, Span(9, 50), keys, values)
    read = paged.read([2, 3], TOKENS, Span(9, 50))
    np.testing.assert_array_equal(read.keys, keys.numpy())
    np.testing.assert_array_equal(read.values, values.numpy())
    after = paged.read([1, 2, 3], TOKENS, Span(0, 96))
    np.testing.assert_array_equal(after.keys[:, :41], before.keys[:, :41])
    np.testing.assert_array_equal(after.keys[:, 82:], before.keys[:, 82:])


def test_tokens_outside_a_window_are_left_out(known: tuple[PagedLayer, WriteSlots]) -> None:
    paged, _ = known
    keys, values = torch.ones(HEADS, 64, KEY_DIM), torch.ones(HEADS, 64, VALUE_DIM)
    paged.write([0, 3], TOKENS, Span(0, 64), keys, values)
    assert not paged.read([0], TOKENS, Span(0, TOKENS)).keys.any()
    assert paged.read([3], TOKENS, Span(0, TOKENS)).keys.all()


def test_blocks_of_a_request_may_be_several_of_the_kernel() -> None:
    layer = torch.zeros(BLOCKS, HEADS, TOKENS, KEY_DIM + VALUE_DIM)
    paged = paged_layer(layer, KEY_DIM, side_by_side(layer))
    assert paged is not None
    keys, values = torch.randn(HEADS, 64, KEY_DIM), torch.randn(HEADS, 64, VALUE_DIM)
    paged.write([2], 2 * TOKENS, Span(0, 64), keys, values)  # blocks 4 and 5 of the kernel
    np.testing.assert_array_equal(paged.read([4, 5], TOKENS, Span(0, 64)).keys, keys.numpy())


def test_an_unknown_layout_is_not_guessed() -> None:
    layer = torch.zeros(BLOCKS, HEADS, TOKENS, KEY_DIM + VALUE_DIM)
    assert paged_layer(layer, KEY_DIM, packed(layer)) is None
    spread = torch.zeros(BLOCKS, TOKENS, HEADS, KEY_DIM + VALUE_DIM).transpose(1, 2)  # heads inside of tokens
    assert paged_layer(spread, KEY_DIM, packed(spread)) is None
    assert paged_layer(spread, KEY_DIM, side_by_side(spread)) is not None


def test_bfloat16_is_read_as_raw_bits() -> None:
    layer = torch.zeros(BLOCKS, HEADS, TOKENS, KEY_DIM + VALUE_DIM, dtype=torch.bfloat16)
    paged = paged_layer(layer, KEY_DIM, side_by_side(layer))
    assert paged is not None
    keys = torch.randn(HEADS, TOKENS, KEY_DIM).bfloat16()
    paged.write([1], TOKENS, Span(0, TOKENS), keys, torch.zeros(HEADS, TOKENS, VALUE_DIM, dtype=torch.bfloat16))
    read = paged.read([1], TOKENS, Span(0, TOKENS))
    np.testing.assert_array_equal(read.keys, keys.view(torch.uint16).numpy())
