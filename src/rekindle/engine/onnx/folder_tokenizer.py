"""The tokenizer and chat template of a folder in Hugging Face form, without transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers

from rekindle.errors import BrokenModel
from rekindle.models.files import is_file, read_text
from rekindle.models.hf_folder import read_json, read_tokenizer_config
from rekindle.text.chat_template import make_renderer
from rekindle.text.tokenizer import HfTokenizer


def load_tokenizer(folder: Path, stop_ids: frozenset[int], vocabulary_size: int) -> HfTokenizer:
    """The folder's tokenizer; `stop_ids` end a reply, beside its own end token. Raises `BrokenModel`."""
    path = folder / "tokenizer.json"
    if not is_file(path):
        raise BrokenModel(f"{folder} has no tokenizer.json. Copy it from where the model came from.")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise BrokenModel(f"{path} cannot be read ({error}). Get it again.") from error
    config = read_tokenizer_config(folder)
    template, bos, eos = _template(folder, config), _token(config, "bos_token"), _token(config, "eos_token")
    end = backend.token_to_id(eos) if eos else None
    return HfTokenizer(
        backend,
        render=make_renderer(template, bos, eos) if template else None,
        stop_ids=stop_ids | ({end} if end is not None and end < vocabulary_size else set()),
        vocabulary_size=vocabulary_size,
        template=template,
    )


def _template(folder: Path, config: dict[str, Any]) -> str:
    """The chat template: a file of its own, or in the tokenizer's configuration, as text or as a list of named ones."""
    if is_file(folder / "chat_template.jinja"):
        return read_text(folder / "chat_template.jinja")
    if is_file(folder / "chat_template.json"):
        try:
            found = read_json(folder / "chat_template.json")
        except ValueError as error:
            raise BrokenModel(f"{folder / 'chat_template.json'} is not JSON ({error}). Get it again.") from error
    else:
        found = config
    value = found.get("chat_template") if isinstance(found, dict) else None
    if isinstance(value, list):
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""


def _token(config: dict[str, Any], name: str) -> str:
    value = config.get(name)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""
