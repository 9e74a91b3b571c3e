"""What determines the KV of an attached model: measured once, and remembered for when the same model comes again.

Measuring hashes all weights with SHA-256 and runs a few tokens through the model. A model that was measured before is
recognized by a fast digest of every byte of its weights. Its seed is random and stays on this machine: nobody can
prepare weights that are taken for others.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
import transformers
import xxhash
from transformers import PreTrainedModel

from rekindle import __version__
from rekindle.core.identity import Identity, digest_of_config, digest_of_fields
from rekindle.core.kv import KvLayout, KvType, LayerShape
from rekindle.engine.hf.checkpoint import Fingerprint, fingerprint_of, hash_weights
from rekindle.engine.hf.decoder import Decoder
from rekindle.engine.hf.rope import Rope
from rekindle.integrations.weights import Interference, Weights, refuse_untested
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder

_REMEMBERED = 1000  # models
_SEED = "seed"


@dataclass(frozen=True)
class _Measured:
    fingerprint: Fingerprint
    layout: KvLayout


class ModelFacts:
    """Everything about a model that determines its KV. Reads all its weights.

    Raises `UnsupportedModel` for a model whose KV cannot be kept.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.weights = Weights(model)  # first: changes from here on are detected
        self.interference = Interference(model)
        config = model.config.get_text_config()
        self.family = str(config.model_type)
        measured = _recall(model)
        self.fingerprint, self.layout = measured.fingerprint, measured.layout
        self.rope = Rope(getattr(model.get_decoder(), "rotary_emb", None), config)

    def identity(self, regime: str) -> Identity:
        """The model's identity under a RoPE regime."""
        return Identity(**asdict(self.fingerprint), dtype=self.layout.dtype, rope=regime)


def _recall(model: PreTrainedModel) -> _Measured:
    memo = JsonMemo(home_folder() / "attached.json", _REMEMBERED + 1)
    seed = memo.recall(_SEED)
    if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        seed = secrets.randbits(64)
    key = _recognize(model, seed)
    known = _parse(memo.recall(key))
    if known is None:
        known = _measure(model)
        memo.keep(key, {"fingerprint": asdict(known.fingerprint), "layout": asdict(known.layout)})
        memo.keep(_SEED, seed)  # as the newest, which is not forgotten
    return known


def _recognize(model: PreTrainedModel, seed: int) -> str:
    """A digest of all that is measured: the weights, the config, the code."""
    state = xxhash.xxh3_128(seed=seed)
    hash_weights(model, state.update)
    code = f"{type(model).__module__}.{type(model).__qualname__}"
    versions = (__version__, transformers.__version__, torch.__version__)
    return digest_of_fields(state.hexdigest(), digest_of_config(model.config.to_dict()), code, *versions)


def _measure(model: PreTrainedModel) -> _Measured:
    fingerprint = fingerprint_of(model)
    decoder = Decoder(model)
    refuse_untested(model, decoder.family, decoder.layout.dtype)
    return _Measured(fingerprint, decoder.layout)


def _parse(value: Any) -> _Measured | None:
    """What was remembered; None if it is nothing, or damaged."""
    try:
        fingerprint, layout = Fingerprint(**value["fingerprint"]), value["layout"]
        layers = tuple(LayerShape(**shape) for shape in layout["layers"])
        digests = all(isinstance(digest, str) for digest in asdict(fingerprint).values())
        sizes = all(isinstance(size, int) and size > 0 for shape in layers for size in asdict(shape).values())
        if not (digests and sizes and layers and layout["dtype"] in get_args(KvType)):
            return None
        return _Measured(fingerprint, KvLayout(layout["dtype"], layers))
    except (TypeError, KeyError, ValueError):
        return None
