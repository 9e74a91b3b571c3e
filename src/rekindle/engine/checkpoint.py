"""A model folder, loaded with transformers: weights, tokenizer, template, and what identifies them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rekindle.core.identity import digest_of_config, digest_of_fields
from rekindle.engine.decoder import ADVICE, refusal
from rekindle.engine.device import Placement, place
from rekindle.engine.quiet import quiet_transformers
from rekindle.engine.template import TEMPLATE_ERRORS
from rekindle.engine.tokenizer import TextTokenizer
from rekindle.errors import BrokenModel, InvalidPrompt, OutOfMemory, UnsupportedModel
from rekindle.models.check import GENERATING, TOKENIZER_FILES, check_folder
from rekindle.models.digest import digest_of_files

_TOKENIZER_FILES = (
    *TOKENIZER_FILES,
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digests of what was loaded."""

    weights: str
    config: str
    tokenizer: str
    template: str


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model folder. `fingerprint` reads the weight files when it is asked, unless they were read before."""

    model: PreTrainedModel
    tokenizer: TextTokenizer
    placement: Placement
    fingerprint: Callable[[], Fingerprint]


def load_checkpoint(folder: Path, device: str, dtype: str) -> Checkpoint:
    """Load a folder in Hugging Face form.

    Raises `BrokenModel`, `NotAModel` or `UnsupportedModel`, and `InvalidSetting` for a device that is not there.
    """
    weights = check_folder(folder)
    with quiet_transformers():
        config = _load_config(folder)
        placement = place(device, dtype, getattr(config.get_text_config(), "dtype", None) or torch.float32)
        model = _load_model(folder, config, placement)
        tokenizer = load_tokenizer(folder, model)
    config_digest = digest_of_config(config.to_dict())

    def fingerprint() -> Fingerprint:
        return Fingerprint(digest_of_files(weights), config_digest, _tokenizer_digest(folder), _template_digest(folder))

    return Checkpoint(model, tokenizer, placement, fingerprint)


def load_tokenizer(folder: Path, model: PreTrainedModel) -> TextTokenizer:
    """The folder's tokenizer and chat template."""
    try:
        loaded = AutoTokenizer.from_pretrained(folder)
        backend = loaded.backend_tokenizer
    except (OSError, ValueError, AttributeError, KeyError, ImportError) as error:
        raise BrokenModel(f"The tokenizer in {folder} cannot be read ({error}). Get its tokenizer.json.") from error
    vocabulary_size = int(model.config.get_text_config().vocab_size)

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        try:
            return str(loaded.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True))
        except TEMPLATE_ERRORS as error:
            raise InvalidPrompt(f"The model's chat template refuses these messages: {error}") from error

    templates = loaded.chat_template or ""  # or several, one of them for when there are tools
    return TextTokenizer(
        backend,
        render=render if loaded.chat_template else None,
        stop_ids=frozenset(i for i in _stop_ids(loaded, model) if 0 <= i < vocabulary_size),
        vocabulary_size=vocabulary_size,
        template="\n".join(templates.values()) if isinstance(templates, dict) else str(templates),
    )


def fingerprint_of(model: PreTrainedModel) -> Fingerprint:
    """Digests of a model in memory: its tensors, its config, and no tokenizer."""
    state = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().cpu().contiguous()
        state.update(f"{name} {tuple(flat.shape)} {flat.dtype}\n".encode())
        state.update(flat.view(-1).view(torch.uint8).numpy().data)
    config = digest_of_config(model.config.to_dict())
    return Fingerprint(state.hexdigest(), config, digest_of_fields("no tokenizer"), digest_of_fields("no template"))


def _load_config(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModel(f"{folder} cannot be loaded: {str(error).splitlines()[0]} {ADVICE}") from error


def _load_model(folder: Path, config: Any, placement: Placement) -> PreTrainedModel:
    named = config.architectures or []
    reason = "it is an encoder-decoder" if config.is_encoder_decoder else None
    if named and not any(word in name for name in named for word in GENERATING):
        reason = f"its architecture is {', '.join(named)}, which does not generate text"
    if reason is not None:
        raise UnsupportedModel(refusal(config.model_type, reason))
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=placement.dtype, device_map={"": placement.device}, output_loading_info=True
        )
    except ValueError as error:  # transformers' word for a config that no causal model belongs to
        raise UnsupportedModel(f"{folder} is no text decoder: {str(error).splitlines()[0]} {ADVICE}") from error
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"{folder} does not fit into the memory of {placement.device} as {placement.dtype_name}. "
            "Use another device, a smaller model, or dtype='bfloat16'."
        ) from error
    except (SafetensorError, RuntimeError) as error:
        raise BrokenModel(
            f"The weights in {folder} cannot be read ({str(error).splitlines()[0]}). Get them again."
        ) from error
    lost = sorted(info["missing_keys"])
    if lost:
        raise BrokenModel(f"{folder} lacks {len(lost)} tensors ({lost[0]}). Get the model again.")
    return model.eval()


def _stop_ids(tokenizer: Any, model: PreTrainedModel) -> list[int]:
    named = getattr(model.generation_config, "eos_token_id", None)
    ids = list(named) if isinstance(named, (list, tuple)) else [named]
    ids.append(tokenizer.eos_token_id)
    return [int(i) for i in ids if i is not None]


def _tokenizer_digest(folder: Path) -> str:
    fields: list[str | bytes] = ["rekindle/tokenizer/2"]
    for name in _TOKENIZER_FILES:
        path = folder / name
        fields += [name, path.read_bytes() if path.is_file() else b""]
    config, _ = _tokenizer_config(folder)
    return digest_of_fields(*fields, config)


def _template_digest(folder: Path) -> str:
    _, inline = _tokenizer_config(folder)
    files = [path.read_bytes() if (path := folder / name).is_file() else b"" for name in _TEMPLATE_FILES]
    return digest_of_fields("rekindle/template/1", *files, inline)


def _tokenizer_config(folder: Path) -> tuple[str, str]:
    """The tokenizer's config without its chat template, and the template, which older folders keep in there."""
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return "", ""
    template = config.pop("chat_template", None)
    return json.dumps(config, sort_keys=True), json.dumps(template, sort_keys=True)
