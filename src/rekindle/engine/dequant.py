"""GGUF files for the Hugging Face engine: converted once into a safetensors folder, numbers unchanged (float32)."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from rekindle.engine.quiet import quiet_transformers
from rekindle.errors import BrokenModel, UnsupportedModel
from rekindle.models.download import no_space
from rekindle.models.gguf import read_header

# transformers reads the merges of a GGUF but not how it cuts text beforehand. These names (`tokenizer.ggml.pre`) mean
# that every digit stands alone, also before a space.
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` as a Hugging Face folder. The folder appears whole or not at all.

    Raises `UnsupportedModel` for an architecture transformers cannot read, `BrokenModel` for a damaged file and
    `NoSpace` for a full disk.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):  # its GGUF reader draws its own bar
            _write(gguf, work)
        if not folder.exists():  # else another process was faster, with the same result
            work.replace(folder)
    except OSError as error:
        raise no_space(error, folder) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(gguf: Path, work: Path) -> None:
    where, file = str(gguf.parent), gguf.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file)
        loaded = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32)
    except (ValueError, NotImplementedError) as error:
        if "not supported" in str(error):  # transformers' words for an architecture it has no mapping for
            raise UnsupportedModel(f"{file} cannot be read by the Hugging Face engine: {error}") from error
        raise BrokenModel(f"{file} is damaged ({error}). Get it again.") from error
    except (KeyError, IndexError, RuntimeError) as error:
        raise BrokenModel(f"{file} is damaged ({error}). Get it again.") from error
    _restore_digits(tokenizer, gguf)
    config = loaded.config
    del config.quantization_config  # what is written is no longer quantized
    config._name_or_path = ""
    fresh = type(loaded)(config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(work)
    tokenizer.save_pretrained(work)


def _restore_digits(tokenizer: Any, gguf: Path) -> None:
    if read_header(gguf).metadata.get("tokenizer.ggml.pre") not in _SINGLE_DIGITS:
        return
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
