"""Where a model's files are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model found on this machine.

    `folder` holds the files in Hugging Face form (config, safetensors, tokenizer). A model that came as one GGUF
    file has `gguf`; its `folder` may not exist yet and is where an engine writes the converted form, once.
    """

    name: str
    folder: Path
    gguf: Path | None = None

    @property
    def converted(self) -> bool:
        """Whether the Hugging Face form is there."""
        return (self.folder / "config.json").is_file()
