"""What determines the KV that a vLLM server computes, from its configuration and the files of its model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

from rekindle.cache.cost import Costs, prior_rates
from rekindle.core.identity import Identity, digest_of_fields
from rekindle.core.kv import KvLayout, KvType, LayerShape
from rekindle.engine.hf.checkpoint import folder_fingerprint
from rekindle.engine.hf.rope import PLAIN
from rekindle.errors import UnsupportedModel
from rekindle.models.hf_folder import check_folder, read_tensor_infos

# Whose KV is the same in transformers and in vLLM: tests/fleet computes it in each and uses it in the other.
SHARED_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_SPECS = frozenset({"FullAttentionSpec", "SlidingWindowSpec"})
_DRAFTS_WITHOUT_LAYERS = frozenset({"ngram", "ngram_gpu", "suffix"})
_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ServedLayer:
    """A layer by vLLM's name, and its group: layers of one group have the same blocks."""

    name: str
    group: int
    shape: LayerShape


@dataclass(frozen=True)
class ServedLayers:
    """The layers that hold KV, in the order of the model, as far as one worker has them."""

    layers: tuple[ServedLayer, ...]
    group_tokens: tuple[int, ...]  # of a block, by group
    dtype: KvType

    @property
    def layout(self) -> KvLayout:
        return KvLayout(self.dtype, tuple(layer.shape for layer in self.layers))


@dataclass(frozen=True)
class VllmModel:
    """A model as vLLM serves it. `ranks` workers hold a part of the heads each."""

    identity: str
    name: str
    layout: KvLayout
    ranks: int
    costs: Costs


def served_layers(kv_cache_config: Any) -> ServedLayers:
    """The layers of a server. Raises `UnsupportedModel` for KV that is not keys and values of every token."""
    groups = kv_cache_config.kv_cache_groups
    found: dict[int, ServedLayer] = {}
    dtypes = set()
    for group, name, spec in _specs(groups):
        if type(spec).__name__ not in _SPECS or getattr(spec.kv_quant_mode, "name", "NONE") != "NONE":
            raise UnsupportedModel(f"{name} has a {type(spec).__name__} cache, which cannot be kept.")
        numbers = _NUMBER.findall(name)
        if len(numbers) != 1 or int(numbers[0]) in found:
            raise UnsupportedModel(f"{name} has no number of its own among the layers.")
        found[int(numbers[0])] = ServedLayer(
            name, group, LayerShape(spec.num_kv_heads, spec.head_size, spec.head_size_v)
        )
        dtypes.add(str(spec.dtype).removeprefix("torch."))
    if len(dtypes) != 1 or not dtypes <= {*get_args(KvType)}:
        raise UnsupportedModel(f"KV of type {', '.join(sorted(dtypes))} cannot be kept.")
    layers = tuple(found[number] for number in sorted(found))
    return ServedLayers(layers, tuple(group.kv_cache_spec.block_size for group in groups), dtypes.pop())  # type: ignore[arg-type]


def _specs(groups: Any) -> Iterator[tuple[int, str, Any]]:
    for number, group in enumerate(groups):
        for name in group.layer_names:
            by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
            yield number, name, group.kv_cache_spec if by_layer is None else by_layer[name]


def served_model(vllm_config: Any, layers: ServedLayers) -> VllmModel:
    """The model of a server. Reads its weight files unless their digests are known.

    Raises `UnsupportedModel` for what is not distinguished by files, tokens and adapters, and `ModelError` for files
    that cannot be read.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    drafts = vllm_config.speculative_config
    if drafts is not None and drafts.method not in _DRAFTS_WITHOUT_LAYERS:
        raise UnsupportedModel(f"drafts by {drafts.method} have KV of their own.")
    if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        raise UnsupportedModel("its layers or tokens are spread over workers; only heads may be.")
    if vllm_config.load_config.load_format == "dummy":
        raise UnsupportedModel("its weights are random (load_format=dummy).")
    folder = _folder(model)
    known = folder_fingerprint(folder)
    identity = Identity(**asdict(known), dtype=layers.dtype, rope=_regime(vllm_config, layers.dtype))
    return VllmModel(
        identity.digest, str(model.model), layers.layout, parallel.tensor_parallel_size, _costs(vllm_config, layers)
    )


def _folder(model: Any) -> Path:
    """The folder of the model's files, which vLLM has fetched if need be. Raises `UnsupportedModel`."""
    place = Path(model.model)
    if place.is_dir():
        return place
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"the files of {model.model} are not in a folder ({error}).") from error


def _regime(vllm_config: Any, dtype: KvType) -> str:
    """`plain` if the files alone say what is computed, as in transformers; else a name of its own for what does."""
    model = vllm_config.model_config
    text = str(model.hf_text_config.to_dict())
    own = [
        str(model.quantization),
        str(model.hf_overrides or ""),
        "" if str(model.dtype) == f"torch.{dtype}" else str(model.dtype),
        # These rotate keys by the length of a context, or by what vLLM allows for it.
        str(model.max_model_len) if "'longrope'" in text or "'dynamic'" in text else "",
        "" if model.hf_text_config.model_type in SHARED_FAMILIES else "vllm",
    ]
    return PLAIN if own == ["None", "", "", "", ""] else f"vllm/{digest_of_fields(*own)}"


def _costs(vllm_config: Any, layers: ServedLayers) -> Costs:
    """What computing and loading are expected to take before anything was measured."""
    model = vllm_config.model_config
    infos = (read_tensor_infos(file) for file in check_folder(_folder(model)))
    shapes = [info.shape for tensors in infos for info in tensors.values()]
    facts: Any = SimpleNamespace(
        device=vllm_config.device_config.device_type,
        layout=layers.layout,
        parameters=sum(map(math.prod, shapes)),
        attention=len(layers.layers) * model.hf_text_config.num_attention_heads * layers.layers[0].shape.key_dim,
        capabilities=SimpleNamespace(decodes=False),
    )
    return Costs(prior_rates(facts), compiles=facts.device != "cpu")
