"""Loading a model folder with transformers: weights, tokenizer, template, fingerprint; and converting GGUF files."""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from rekindle.core.identity import digest_of_config, digest_of_fields
from rekindle.core.request import Think
from rekindle.core.size import count_of
from rekindle.engine.base import Reserve
from rekindle.engine.hf.decoder import ADVICE, refusal
from rekindle.engine.hf.device import Placement, choose_placement, total_memory
from rekindle.errors import BrokenModel, InvalidPrompt, OutOfMemory, UnsupportedModel
from rekindle.machine import make_private_folder, narrow_tree
from rekindle.models.download import no_space
from rekindle.models.files import digest_of_files
from rekindle.models.gguf import read_header
from rekindle.models.hf_folder import GENERATING, check_folder, refuse_other_weights, template_digest, tokenizer_digest
from rekindle.text.chat_template import render_template, start_renderer
from rekindle.text.reasoning import think_variables
from rekindle.text.tokenizer import HfTokenizer


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' log and progress bars inside the block."""
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the field in messages


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digests of what was loaded."""

    weights: str
    config: str
    tokenizer: str
    template: str


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model folder. `fingerprint()` reads the weight files unless their digests are known."""

    model: PreTrainedModel
    tokenizer: HfTokenizer
    placement: Placement
    fingerprint: Callable[[], Fingerprint]


def load_checkpoint(folder: Path, device: str, dtype: str, reserve: Reserve | None = None) -> Checkpoint:
    """Load a folder in Hugging Face form; `reserve` makes room for it first.

    Raises `BrokenModel`, `NotAModel` or `UnsupportedModel`, and `InvalidSetting` for a device that is not there.
    """
    weights = check_folder(folder)
    with quiet_transformers():
        config = _load_config(folder)
        stored = getattr(config.get_text_config(), "dtype", None) or torch.float32
        placement = choose_placement(device, dtype, stored)
        if reserve is not None:
            numbers = sum(file.stat().st_size for file in weights) // stored.itemsize
            reserve(numbers * placement.dtype.itemsize, total_memory(placement.device))
        model = _load_model(folder, config, placement)
        tokenizer = load_tokenizer(folder, model)
    return Checkpoint(model, tokenizer, placement, partial(_folder_fingerprint, folder, config.to_dict()))


def folder_fingerprint(folder: Path) -> Fingerprint:
    """Digests of a model folder that another program loads. Reads the weight files unless their digests are known.

    Raises `BrokenModel`, `NotAModel` or `UnsupportedModel`.
    """
    with quiet_transformers():
        return _folder_fingerprint(folder, _load_config(folder).to_dict())


def _folder_fingerprint(folder: Path, config: Mapping[str, object]) -> Fingerprint:
    weights = digest_of_files(check_folder(folder))
    return Fingerprint(weights, digest_of_config(config), tokenizer_digest(folder), template_digest(folder))


def load_tokenizer(folder: Path, model: PreTrainedModel) -> HfTokenizer:
    """The folder's tokenizer and chat template."""
    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        backend = loaded.backend_tokenizer
    except (OSError, ValueError, AttributeError, KeyError, ImportError) as error:
        raise BrokenModel(f"The tokenizer in {folder} cannot be read ({error}). Get its tokenizer.json.") from error
    vocabulary_size = int(model.config.get_text_config().vocab_size)

    def render(
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        think: Think | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        try:
            template = str(loaded.get_chat_template(tools=tools))
        except ValueError as error:
            raise InvalidPrompt(f"The model's chat template cannot be chosen: {error}") from error
        known: dict[str, Any] = {"messages": [_with_reasoning(m) for m in messages], "tools": tools, "documents": None}
        known |= {**think_variables(think), "add_generation_prompt": add_generation_prompt}
        return render_template(template, {**loaded.special_tokens_map, **known})

    if loaded.chat_template:
        start_renderer()
    templates = loaded.chat_template or ""  # or several, one of them for when there are tools
    return HfTokenizer(
        backend,
        render=render if loaded.chat_template else None,
        stop_ids=frozenset(i for i in _stop_ids(loaded, model) if 0 <= i < vocabulary_size),
        vocabulary_size=vocabulary_size,
        template="\n".join(templates.values()) if isinstance(templates, dict) else str(templates),
    )


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under both names that templates read, as transformers does."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def hash_weights(model: PreTrainedModel, update: Callable[[bytes | memoryview], object]) -> None:
    """Give a digest the name, shape, type and bytes of every tensor of a model."""
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().cpu().contiguous()
        update(f"{name} {tuple(flat.shape)} {flat.dtype}\n".encode())
        update(flat.view(-1).view(torch.uint8).numpy().data)


def fingerprint_of(model: PreTrainedModel) -> Fingerprint:
    """Digests of a model in memory: its tensors, its config, and no tokenizer."""
    state = hashlib.sha256()
    hash_weights(model, state.update)
    config = digest_of_config(model.config.to_dict())
    return Fingerprint(state.hexdigest(), config, digest_of_fields("no tokenizer"), digest_of_fields("no template"))


def _load_config(folder: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config._attn_implementation = config._experts_implementation = None  # a folder could name code to download
        return config
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
            folder,
            config=config,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            dtype=placement.dtype,
            device_map={"": placement.device},
            output_loading_info=True,
        )
    except ValueError as error:  # no causal model for this config
        raise UnsupportedModel(f"{folder} is not a text decoder: {str(error).splitlines()[0]} {ADVICE}") from error
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
        raise BrokenModel(f"{folder} lacks {count_of(len(lost), 'tensor')} ({lost[0]}). Get the model again.")
    return model.eval()


def _stop_ids(tokenizer: Any, model: PreTrainedModel) -> list[int]:
    named = getattr(model.generation_config, "eos_token_id", None)
    ids = list(named) if isinstance(named, (list, tuple)) else [named]
    ids.append(tokenizer.eos_token_id)
    return [int(i) for i in ids if i is not None]


# transformers reads the merges of a GGUF but not its pre-tokenizer. These values of `tokenizer.ggml.pre` mean that
# every digit is split off, also before a space.
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` as a Hugging Face folder. The folder appears only when it is complete.

    Raises `UnsupportedModel` for an architecture transformers cannot read, `BrokenModel` for a damaged file and
    `NoSpace` for a full disk.
    """
    make_private_folder(folder.parent)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):  # its GGUF reader draws a bar of its own
            _write_folder(gguf, work)
        narrow_tree(work)
        if not folder.exists():  # else another process was faster
            work.replace(folder)
    except OSError as error:
        raise no_space(error, folder) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_folder(gguf: Path, work: Path) -> None:
    where, file = str(gguf.parent), gguf.name
    refuse_other_weights(gguf.parent)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file, trust_remote_code=False)
        loaded = AutoModelForCausalLM.from_pretrained(
            where, gguf_file=file, dtype=torch.float32, trust_remote_code=False
        )
    except (ValueError, NotImplementedError) as error:
        if "not supported" in str(error):  # transformers has no mapping for the architecture
            raise UnsupportedModel(f"{file} cannot be read by the Hugging Face engine: {error}") from error
        raise BrokenModel(f"{file} is damaged ({error}). Get it again.") from error
    except (KeyError, IndexError, RuntimeError) as error:
        raise BrokenModel(f"{file} is damaged ({error}). Get it again.") from error
    header = read_header(gguf).metadata
    _restore_digits(tokenizer, header)
    if header.get("tokenizer.ggml.add_bos_token"):  # transformers does not read it
        tokenizer.add_bos_token = True
    config = loaded.config
    del config.quantization_config  # what is written is no longer quantized
    config._name_or_path = ""
    fresh = type(loaded)(config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(work)
    tokenizer.save_pretrained(work)


def _restore_digits(tokenizer: Any, header: Mapping[str, object]) -> None:
    if header.get("tokenizer.ggml.pre") not in _SINGLE_DIGITS:
        return
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
