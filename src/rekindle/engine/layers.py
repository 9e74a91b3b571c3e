"""The loop over a model's layers.

The model's own forward runs embedding, final norm and head; its layers are replaced by one, `LayerLoop`, which runs
the real ones over the packed tokens of a step. Between layers it waits for feeds and lets selectors choose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from rekindle.engine.attention import Scores
from rekindle.engine.lora import Portions
from rekindle.engine.rope import Rope, Rotation


class KvWritten(Exception):
    """The layer's keys and values are written; nothing else of it is wanted."""


class StepPass(ABC):
    """One step on its way through the layers: which tokens are there, and where they meet their contexts."""

    tokens: Tensor  # [1, tokens] what the step begins with
    positions: Tensor  # [1, tokens] of the tokens still there

    def __init__(self) -> None:
        self._writing_only = False

    @property
    def until(self) -> int | None:
        """So many layers are computed, if not all."""
        return None

    def ends_with_kv(self, layer: int) -> bool:  # noqa: ARG002  (all of a layer is wanted by default)
        """Whether the step ends with this layer, and nothing but its keys and values is wanted."""
        return False

    def check_cancelled(self) -> None:  # noqa: B027  (nobody can cancel by default)
        """Raises `Cancelled` if the caller asked to stop."""

    def select(self, layer: int, hidden: Tensor) -> Tensor:  # noqa: ARG002  (nothing is chosen by default)
        """The hidden states `[1, tokens, hidden]` that `layer` shall compute."""
        return hidden

    def fill(self, layer: int) -> None:  # noqa: B027  (nothing comes by default)
        """Wait for what feeds bring to this layer."""

    @abstractmethod
    def rotations(self, rope: Rope, hidden: Tensor) -> dict[str, Rotation] | None:
        """The rotations of the tokens still there, by layer type."""

    @property
    @abstractmethod
    def portions(self) -> Portions:
        """Which adapter the tokens still there belong to."""

    @property
    @abstractmethod
    def ends_early(self) -> bool:
        """Whether the last layer's output is read for some of the tokens only."""

    @abstractmethod
    def gather(self, hidden: Tensor) -> Tensor:
        """The hidden states whose logits are wanted, `[1, wanted, hidden]`; the pass goes on with those."""

    @abstractmethod
    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Put new keys and values `[1, kv_heads, tokens, dim]` where they belong."""

    @abstractmethod
    def mix(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Write, then attend: `[1, heads, tokens, value_dim]`."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """What a layer's attention gets: `[1, tokens, heads, value_dim]`."""
        if self._writing_only:
            self.write(layer, key, value)
            raise KvWritten
        return self.mix(layer, query, key, value, scores).transpose(1, 2).contiguous()

    @contextmanager
    def writing_only(self) -> Iterator[None]:
        """A layer called inside the block ends as soon as its keys and values are written."""
        self._writing_only = True
        try:
            yield
        except KvWritten:
            pass
        finally:
            self._writing_only = False


class LayerLoop(nn.Module):
    """Stands where the model's layers stood, and runs them."""

    def __init__(self, layers: Sequence[nn.Module], rope: Rope) -> None:
        super().__init__()
        self._layers = list(layers)  # a plain list: the real layers stay out of this module's tree
        self._rope = rope
        self.current: StepPass | None = None

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """Run the current pass; what the model's forward prepared (masks, rotations) is not needed."""
        assert self.current is not None, "the loop runs inside Decoder.run only"
        step, layers = self.current, self._layers
        stop = len(layers) if step.until is None else step.until
        for index in range(stop):
            step.check_cancelled()
            hidden = step.select(index, hidden)
            step.fill(index)
            if step.ends_with_kv(index):
                with step.writing_only():
                    self._run(index, hidden)
                break
            if index == len(layers) - 1 and step.ends_early:
                # Above the last layer only some tokens are read; of the others it owes nothing but keys and values.
                # That spares most of one layer: measured, a prefill of 1,024 tokens of SmolLM2 takes 2.3 % less time.
                with step.writing_only():
                    self._run(index, hidden)
                hidden = step.gather(hidden)
            if hidden.shape[1] > 0:  # else every token was dropped: only feeds go on
                hidden = self._run(index, hidden)
        return step.gather(hidden)

    def _run(self, index: int, hidden: Tensor) -> Tensor:
        assert self.current is not None
        rotations = self.current.rotations(self._rope, hidden)
        named = {} if rotations is None else {"position_embeddings": rotations[self._rope.kind(index)]}
        layer = self._layers[index]
        output = layer(hidden, attention_mask=None, position_ids=self.current.positions, use_cache=False, **named)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result
