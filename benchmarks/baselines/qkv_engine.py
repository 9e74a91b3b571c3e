"""Q, K and V of a known beginning, taken from storage in place of computing them, as PerCache has it.

Of every layer the projections alone are spared. Attention and MLP run over all tokens of the prompt:

    hidden       [ known tokens | the rest ]
    projected                   [ the rest ]
    Q, K, V      [ stored       | the rest ]  then norms, rotation, attention and MLP, as usual

The outputs of the projections are stored, with their biases and before any rotation, so they do not depend on
where a token stands, only on what stands before it. A baseline to measure against: reusing KV skips all of the prefix.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.engine.base import Logits, Row
from rekindle.engine.hf.engine import HfEngine
from rekindle.engine.hf.sequence import TorchSequence
from rekindle.errors import StepRefused, UnsupportedModel

_SEPARATE = ("q_proj", "k_proj", "v_proj")
_FUSED = ("qkv_proj", "query_key_value", "Wqkv")
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, eq=False)
class Qkv:
    """What the projections gave for a run of tokens. A layer has three tensors, or one where they are fused."""

    layers: tuple[tuple[Tensor, ...], ...]  # [tokens, features] each

    @property
    def tokens(self) -> int:
        """How many tokens it is of."""
        return len(self.layers[0][0])

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return sum(rows.nbytes for layer in self.layers for rows in layer)

    def slice(self, start: int, stop: int) -> Qkv:
        """The tokens `[start, stop)` of it, not copied. Raises `ValueError` if it has not all of them."""
        if not 0 <= start <= stop <= self.tokens:
            raise ValueError(f"[{start}, {stop}) is no part of {self.tokens} tokens")
        return Qkv(tuple(tuple(rows[start:stop] for rows in layer) for layer in self.layers))

    @classmethod
    def concat(cls, parts: Sequence[Qkv]) -> Qkv:
        """One after the other, copied. Raises `ValueError` for none, and for parts of different models."""
        if not parts or len({_widths(part) for part in parts}) > 1:
            raise ValueError("QKV is put together from at least one part, all of the same model")
        layers = zip(*(part.layers for part in parts), strict=True)
        return cls(tuple(tuple(torch.cat(rows) for rows in zip(*layer, strict=True)) for layer in layers))


class _Splice:
    """One projection during one prefill: stored rows skip it, and are put in front of its output."""

    def __init__(self, known: Tensor | None) -> None:
        self._known = known  # [known, features]
        self._thread = threading.get_ident()  # whose step it is: those of others pass by
        self.rows: Tensor | None = None  # [tokens, features], once its layer was computed

    @property
    def _passed(self) -> bool:
        # The last layer is called once more, for the token whose logits are read.
        return self.rows is not None or self._thread != threading.get_ident()

    def crop(self, _: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Before the projection: only the rows `[1, tokens, hidden]` behind the known ones."""
        if self._passed or self._known is None:
            return None
        return (given[0][:, len(self._known) :], *given[1:])

    def join(self, _: nn.Module, __: tuple[Any, ...], computed: Tensor) -> Tensor | None:
        """After it: all rows, the known ones first."""
        if self._passed:
            return None
        joined = computed if self._known is None else torch.cat((self._known[None], computed), dim=1)
        # Not copied: what models do in place to their projections, a clamp, changes nothing when it is done again.
        self.rows = joined[0]
        return joined


class QkvReuse:
    """Prefills of one engine that take Q, K and V of a known beginning from storage."""

    def __init__(self, engine: HfEngine) -> None:
        """Raises `UnsupportedModel` for a model without projections of its own for Q, K and V in every layer."""
        self.engine = engine
        self._projections = _find_projections(engine.linears, len(engine.layout.layers))

    def prefill(self, sequence: TorchSequence, tokens: Sequence[int], known: Qkv | None) -> tuple[Logits, Qkv]:
        """Compute a prompt in one step, whose first `known.tokens` tokens `known` is of.

        The last token's logits `[1, vocabulary]`, and the Q, K and V of all tokens. Afterwards `sequence` holds the KV
        of the prompt, as after any step. Raises `StepRefused` if it was not empty, has an adapter, or if `known` is
        longer than the prompt or of another model. Whether it is of these tokens is for the caller to know.
        """
        if sequence.length or sequence.adapter is not None:
            raise StepRefused("QKV is reused from the first token of an empty sequence on, without an adapter.")
        if known is not None:
            self._check(known, len(tokens))
        row = Row(sequence, tokens, range(len(tokens)), replay=False, prefill=True)
        with self._spliced(known) as splices:
            (logits,) = self.engine.step([row])
        found = tuple(tuple(_rows(splice) for splice in layer) for layer in splices)
        return logits, Qkv(found)

    def _check(self, known: Qkv, tokens: int) -> None:
        if known.tokens > tokens:
            raise StepRefused(f"QKV of {known.tokens} tokens is known, the prompt has {tokens}.")
        given = [[(tuple(rows.shape), rows.dtype) for rows in layer] for layer in known.layers]
        own = [[((known.tokens, one.out_features), one.weight.dtype) for one in layer] for layer in self._projections]
        if given != own:
            raise StepRefused("The QKV is of another model, or its tensors are of different lengths.")

    @contextmanager
    def _spliced(self, known: Qkv | None) -> Iterator[list[list[_Splice]]]:
        """Within it, the projections of this thread's steps are spliced."""
        splices: list[list[_Splice]] = []
        with ExitStack() as hooks:
            for index, layer in enumerate(self._projections):
                stored = [None] * len(layer) if known is None else known.layers[index]
                splices.append([])
                for projection, rows in zip(layer, stored, strict=True):
                    splice = _Splice(None if rows is None else rows.to(projection.weight.device))
                    hooks.callback(projection.register_forward_pre_hook(splice.crop).remove)
                    hooks.callback(projection.register_forward_hook(splice.join).remove)
                    splices[-1].append(splice)
            yield splices


def _rows(splice: _Splice) -> Tensor:
    assert splice.rows is not None, "every layer is computed in a step that ends well"
    return splice.rows


def _widths(qkv: Qkv) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(rows.shape[1] for rows in layer) for layer in qkv.layers)


def _find_projections(linears: Mapping[str, nn.Linear], layers: int) -> list[tuple[nn.Linear, ...]]:
    """The projections of every layer: for Q, K and V, or the one for all three."""
    found: dict[int, dict[str, nn.Linear]] = {}
    for name, linear in linears.items():
        own, layer = name.rpartition(".")[2], _LAYER.search(name)
        if layer is not None and own in (*_SEPARATE, *_FUSED):
            if own in found.setdefault(int(layer[1]), {}):
                raise UnsupportedModel(f"QKV reuse found two layers {own} where it expected one, as in {name}.")
            found[int(layer[1])][own] = linear
    projections = [found.get(index, {}) for index in range(layers)]
    for names in (_SEPARATE, *((fused,) for fused in _FUSED)):
        if all(set(layer) == set(names) for layer in projections):
            return [tuple(layer[name] for name in names) for layer in projections]
    raise UnsupportedModel("QKV reuse needs a model whose layers have projections for queries, keys and values.")
