"""Block-sparse attention: which blocks of keys each head and block of queries keeps, and attention over those alone.

A block of 128 queries keeps some blocks of keys: those the estimate gives the most mass, and always the first block and
its own diagonal. The estimate is the attention of the mean query of a block to the mean keys. On a CPU kept blocks are
gathered for each head and block of queries; on CUDA FlexAttention skips the others.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

QUERIES = 128  # tokens of a block of queries
KEYS, CUDA_KEYS = 64, 128  # of a block of keys: as published; what FlexAttention's kernels take


@dataclass(frozen=True)
class BlockRule:
    """Which blocks are kept: a share of all of a layer, or of each row as many as hold this share of the mass."""

    density: float | None = None
    mass: float | None = None

    def __str__(self) -> str:
        return f"density={self.density:g}" if self.density is not None else f"mass={self.mass:g}"


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """What transformers hands to an attention function, of one prompt."""

    query: torch.Tensor  # [1, heads, tokens, width]
    key: torch.Tensor  # [1, kv_heads, tokens, width]
    value: torch.Tensor  # [1, kv_heads, tokens, width]
    scaling: float

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[1] // self.key.shape[1]


def causal_blocks(tokens: int, keys: int, device: torch.device) -> torch.Tensor:
    """[query blocks, key blocks] 2 on the diagonal, 1 before it, 0 behind it."""
    first = torch.arange(0, tokens, keys, device=device)
    start = torch.arange(0, tokens, QUERIES, device=device)[:, None]
    return (first < start + QUERIES).int() + ((first >= start) & (first < start + QUERIES)).int()


def estimate_mass(inputs: AttentionInputs, causal: torch.Tensor) -> torch.Tensor:
    """[heads, query blocks, key blocks] share of the attention of each block of queries: mean query, mean keys."""
    query, key = inputs.query[0], inputs.key[0]
    heads, kv_heads, width = len(query), len(key), query.shape[2]
    queries = query.view(heads, causal.shape[0], -1, width).mean(2)
    keys = key.view(kv_heads, causal.shape[1], -1, width).mean(2)
    scores = queries.view(kv_heads, -1, width) @ keys.mT * inputs.scaling
    scores = scores.view(heads, *causal.shape).float()
    return scores.masked_fill(causal == 0, -torch.inf).softmax(-1)


def choose_blocks(mass: torch.Tensor, causal: torch.Tensor, rule: BlockRule) -> torch.Tensor:
    """[heads, query blocks, key blocks] whether each block is kept."""
    kept = (causal == 2).expand_as(mass).clone()
    kept[..., 0] = True
    if rule.density is not None:
        count = round(rule.density * int((causal > 0).sum()) * len(mass)) - int(kept.sum())
        best = mass.masked_fill(kept | (causal == 0), -1.0).flatten().topk(max(count, 0)).indices
        kept.view(-1)[best] = True
    elif rule.mass is not None:
        ordered, order = mass.sort(-1, descending=True)
        needed = ordered.cumsum(-1) - ordered < rule.mass
        kept |= torch.zeros_like(kept).scatter(-1, order, needed)
    return kept & (causal > 0)


def attend_tiles(inputs: AttentionInputs, kept: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    """Attention over kept blocks, gathered for each head and block of queries, and the seconds of each such block."""
    query, group = inputs.query[0], inputs.group
    keys, values = (one[0].view(one.shape[1], -1, KEYS, one.shape[3]) for one in (inputs.key, inputs.value))
    output, mask, seconds = torch.empty_like(query), _tail_mask(query.shape[1]), []
    for block, start in enumerate(range(0, query.shape[1], QUERIES)):
        began = time.perf_counter()
        for head, row in enumerate(kept[:, block]):
            chosen = row.nonzero()[:, 0]  # in order: the diagonal is last
            key, value = (one[head // group, chosen].view(1, 1, -1, one.shape[3]) for one in (keys, values))
            tile = query[head, start : start + QUERIES].view(1, 1, QUERIES, -1)
            bias = mask[:, mask.shape[1] - key.shape[2] :]
            found = functional.scaled_dot_product_attention(tile, key, value, attn_mask=bias, scale=inputs.scaling)
            output[head, start : start + QUERIES] = found[0, 0]
        seconds.append(time.perf_counter() - began)
    return output[None], seconds


@cache
def _tail_mask(tokens: int) -> torch.Tensor:
    """[QUERIES, tokens] added to scores: causal within the last QUERIES keys."""
    mask = torch.zeros(QUERIES, tokens)
    mask[:, tokens - QUERIES :] = torch.full((QUERIES, QUERIES), -torch.inf).triu(1)
    return mask


def attend_flex(inputs: AttentionInputs, kept: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
    """The same by FlexAttention."""
    attend, blocks = _compiled_flex(), flex_blocks(kept, causal)
    found: torch.Tensor = attend(
        inputs.query, inputs.key, inputs.value, block_mask=blocks, scale=inputs.scaling, enable_gqa=True
    )
    return found


def flex_blocks(kept: torch.Tensor, causal: torch.Tensor) -> BlockMask:
    """Kept blocks as FlexAttention takes them: those on the diagonal are masked, the others whole."""
    diagonal, whole = (_block_lists(kept & (causal == where)) for where in (2, 1))
    return BlockMask.from_kv_blocks(
        *diagonal, *whole, BLOCK_SIZE=(QUERIES, CUDA_KEYS), mask_mod=_is_causal, compute_q_blocks=False
    )


def _block_lists(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, heads, query blocks] how many there are, and their numbers first in [1, heads, query blocks, key blocks]."""
    return kept.sum(-1, dtype=torch.int32)[None], kept.int().argsort(dim=-1, descending=True).int()[None]


def _is_causal(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
    return query >= key


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)
