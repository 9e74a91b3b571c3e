"""Which models can be attached, whether their weights changed, and whether something interferes with the compute."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from rekindle.core.kv import KvType
from rekindle.engine.hf.decoder import TESTED_FAMILIES, refusal
from rekindle.errors import UnsupportedModel

_SAMPLES = 16  # numbers of each tensor that are compared
_CHECK_TOKENS = 12
_CHECK_TOLERANCE: dict[KvType, float] = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}  # of the largest logit
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Modules whose hooks only observe.
_OBSERVERS = frozenset({"rekindle.integrations.transformers", "transformers.utils.output_capturing"})


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
