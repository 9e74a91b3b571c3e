"""What determines the KV of an attached model: measured once, and remembered for when the same model comes again.

Measuring hashes all weights with SHA-256 and runs a few tokens through the model. A model that was measured before is
recognized by a fast digest of every byte of its weights. Its seed is random and stays on this machine: nobody can
prepare weights that are taken for others.

Also here: which models can be attached, whether their weights changed since, and whether something interferes with the
compute.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
import transformers
import xxhash
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from rekindle import __version__
from rekindle.core.identity import Identity, digest_of_config, digest_of_fields
from rekindle.core.kv import KvLayout, KvType, LayerShape
from rekindle.engine.hf.checkpoint import Fingerprint, fingerprint_of, hash_weights
from rekindle.engine.hf.decoder import TESTED_FAMILIES, Decoder, refusal
from rekindle.engine.hf.rope import Rope
from rekindle.errors import UnsupportedModel
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder

_SAMPLES = 16  # numbers of each tensor that are compared
_CHECK_TOKENS = 12
_CHECK_TOLERANCE: dict[KvType, float] = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}  # of the largest logit
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Modules whose hooks only observe.
_OBSERVERS = frozenset({"rekindle.attached.transformers", "transformers.utils.output_capturing"})


class Weights:
    """The tensors of a model, with a quick check whether they changed.

    Detected are replaced tensors, in-place writes, and writes that bypass torch's counter (`weight.data += delta`, as
    when a LoRA is merged) if they touch one of a few sampled numbers in each tensor. Not detected is a write of the
    last kind that touches only other numbers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        tensors = self._tensors()
        self._marks = _marks(tensors)
        self._views = [_sample(tensor) for tensor in tensors]
        self._numbers = torch.cat(self._views)

    def changed(self) -> bool:
        """Whether the weights changed. Takes a millisecond; synchronizes with the device."""
        if _marks(self._tensors()) != self._marks:
            return True
        return not torch.equal(torch.cat(self._views), self._numbers)

    def _tensors(self) -> list[Tensor]:
        state = self._model.state_dict(keep_vars=True)
        return [value for value in state.values() if isinstance(value, Tensor)]


class Interference:
    """What could make a model compute something else than its weights say: training mode, autocast, hooks."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # The dicts themselves, which live as long as their modules: quick enough to check on every call.
        self._hooks = [hooks for m in model.modules() for hooks in (m._forward_pre_hooks, m._forward_hooks)]

    def reason(self) -> str | None:
        """What interferes now; None if nothing does."""
        if self._model.training:
            return "the model is in training mode (model.eval() ends it)"
        if torch.is_autocast_enabled(self._model.device.type):
            return "autocast is on"
        for hooks in filter(None, self._hooks):
            for hook in hooks.values():
                if getattr(hook, "__module__", None) not in _OBSERVERS:
                    return "the model has a forward hook that may change what it computes"
        return None


def refuse_unfit(model: object) -> PreTrainedModel:
    """The model, if its weights and tokens determine its KV; else raises `UnsupportedModel`."""
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedModel(
            "The model carries a PEFT adapter, whose KV cannot be distinguished from the base model's yet. "
            "Merge it (merge_and_unload), or attach to the base model."
        )
    if hasattr(model, "_orig_mod"):
        raise UnsupportedModel("This is a compiled model. Attach to the model itself, before torch.compile.")
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(f"attach takes a transformers model; this is {type(model).__name__}.")
    _refuse_spread(model)
    if getattr(model, "is_quantized", False):
        raise UnsupportedModel("The model's weights are quantized, which is untested here. Load it in bfloat16.")
    return model


def refuse_untested(model: PreTrainedModel, family: str, dtype: KvType) -> None:
    """Refuse an untested family whose logits computed in two pieces with a cache differ from those in one."""
    if family in TESTED_FAMILIES:
        return
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = torch.tensor([[i % vocabulary for i in range(3, 3 + _CHECK_TOKENS)]], device=model.device)
    half = _CHECK_TOKENS // 2
    cache = DynamicCache()
    try:
        with torch.inference_mode():
            whole = model(input_ids=ids, use_cache=False).logits[0, -1].float()
            model(input_ids=ids[:, :half], past_key_values=cache, use_cache=True)
            pieces = model(input_ids=ids[:, half:], past_key_values=cache, use_cache=True).logits[0, -1].float()
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, RuntimeError, ValueError, LookupError) as error:
        raise UnsupportedModel(refusal(family, str(error))) from error
    share = float((pieces - whole).abs().max() / whole.abs().max().clamp(min=1e-6))
    if share > _CHECK_TOLERANCE[dtype]:
        raise UnsupportedModel(refusal(family, f"in two pieces its logits are off by {share:.1%}"))


def _refuse_spread(model: PreTrainedModel) -> None:
    planned = (getattr(model, "hf_device_map", None) or {}).values()
    devices = {_device_name(device) for device in (*(tensor.device for tensor in model.parameters()), *planned)}
    if any(name.startswith("meta") for name in devices):
        raise UnsupportedModel("The model has no weights (device meta). Load it with from_pretrained.")
    if len(devices) > 1:
        where = ", ".join(sorted(devices))
        raise UnsupportedModel(f"The model is spread over {where}. Load it onto one device (device_map={{'': 0}}).")
    if getattr(model, "_tp_size", None):
        raise UnsupportedModel("The model is split over several processes. Load it whole (tp_plan=None).")


def _device_name(device: torch.device | str | int) -> str:
    """One name for the same device: device maps have numbers, names and `disk`; tensors have devices."""
    if device == "disk":
        return "disk"
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return f"{place.type}:{place.index or 0}"


def _marks(tensors: list[Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLES)].view(_BITS[tensor.element_size()])


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
