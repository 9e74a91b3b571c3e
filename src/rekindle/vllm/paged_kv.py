"""vLLM's paged KV of one layer, read and written as Rekindle's KV.

A layer is one tensor `[blocks, kv_heads, block_tokens, key_dim + value_dim]`, but what lies where inside a block is the
attention kernel's affair. So the layout is not looked up by name: vLLM's own function writes one block of random keys
and values, and the layout that reads them back is the right one. If none does, nothing is stored or loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rekindle.core.kv import LayerKv, Span
from rekindle.engine.hf.sequence import raw_view

# Writes keys and values, each [tokens, kv_heads, dim], to slots [tokens] of a layer.
WriteSlots = Callable[[Tensor, Tensor, Tensor], None]
NULL_BLOCK = 0  # of tokens that vLLM does not hold: outside a sliding window


@dataclass(frozen=True, eq=False)
class PagedLayer:
    """Keys and values of a layer as views of vLLM's memory, `[blocks, kv_heads, block_tokens, dim]` each."""

    keys: Tensor
    values: Tensor

    def read(self, block_ids: Sequence[int], block_tokens: int, span: Span) -> LayerKv:
        """A copy of the KV of a request's tokens; `block_tokens` are those of one of its blocks."""
        block, offset = _places(tuple(block_ids), block_tokens, span, self.keys.shape[2])
        keys, values = (
            view[block, :, offset].transpose(0, 1).to("cpu").contiguous() for view in (self.keys, self.values)
        )  # [kv_heads, tokens, dim]
        return LayerKv(raw_view(keys), raw_view(values))

    def write(self, block_ids: Sequence[int], block_tokens: int, span: Span, keys: Tensor, values: Tensor) -> None:
        """Write keys and values, `[kv_heads, tokens, dim]` each, to the places of a request's tokens.

        Tokens in the null block are left out.
        """
        block, offset = _places(tuple(block_ids), block_tokens, span, self.keys.shape[2])
        held = block != NULL_BLOCK
        for view, new in ((self.keys, keys), (self.values, values)):
            view[block[held], :, offset[held]] = new.transpose(0, 1)[held].to(view.device)


@lru_cache(maxsize=16)  # all layers of a load or a save ask for the same
def _places(block_ids: tuple[int, ...], block_tokens: int, span: Span, size: int) -> tuple[Tensor, Tensor]:
    """Block and offset of each token in views whose blocks have `size` tokens, perhaps fewer than a request's."""
    positions = torch.arange(span.start, span.stop)
    slots = torch.tensor(block_ids)[positions // block_tokens] * block_tokens + positions % block_tokens
    return slots // size, slots % size


def paged_layer(layer: Tensor, key_dim: int, write: WriteSlots) -> PagedLayer | None:
    """The views through which what `write` wrote is read back; None if there are none. Overwrites the null block."""
    _, heads, tokens, width = layer.shape
    dims = (key_dim, width - key_dim)
    keys, values = (torch.randn(tokens, heads, dim).to(layer.device, layer.dtype) for dim in dims)
    write(keys, values, torch.arange(tokens, device=layer.device))
    try:
        for layout in (_side_by_side, _keys_transposed):
            views = layout(layer, key_dim)
            if views is not None and _holds(views.keys, keys) and _holds(views.values, values):
                return views
    finally:
        layer[NULL_BLOCK].zero_()
    return None


def _holds(view: Tensor, written: Tensor) -> bool:
    return torch.equal(view[NULL_BLOCK].transpose(0, 1), written)


def _side_by_side(layer: Tensor, key_dim: int) -> PagedLayer:
    """Key and value of a token one after the other: FlashAttention."""
    return PagedLayer(layer[..., :key_dim], layer[..., key_dim:])


def _keys_transposed(layer: Tensor, key_dim: int) -> PagedLayer | None:
    """In each block of a head all keys, transposed, then all values: vLLM's CPU kernels, but for packed bfloat16."""
    blocks, heads, tokens, width = layer.shape
    try:
        flat = layer.view(blocks, heads, tokens * width)
    except RuntimeError:  # its tokens do not lie side by side
        return None
    keys = flat[..., : tokens * key_dim].view(blocks, heads, key_dim, tokens).transpose(2, 3)
    values = flat[..., tokens * key_dim :].view(blocks, heads, tokens, width - key_dim)
    return PagedLayer(keys, values)
