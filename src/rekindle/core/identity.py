"""Identity: everything on which a model's KV depends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

# Fields about the tool that wrote the config, not about the model: a re-saved folder is the same model. The dtype of
# the files is left out because the weights digest covers it; the dtype computed with is a field of its own.
_CONFIG_NOISE = frozenset(
    {"transformers_version", "_name_or_path", "_model_name_or_path", "torch_dtype", "dtype", "use_cache"}
)


@dataclass(frozen=True, slots=True)
class Identity:
    """Two sequences may share KV only if their identities are equal.

    `rope` is the regime of the rotary embedding: longrope rotates keys differently past its original length, so the
    same tokens have other KV there.
    """

    weights: str
    config: str
    tokenizer: str
    template: str
    dtype: str
    rope: str

    @property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        return digest_of_fields("rekindle/identity/2", *asdict(self).values())

    @property
    def model(self) -> str:
        """32 hexadecimal digits, the same for every dtype and engine that loads these files: what KV of given tokens
        depends on before it is rounded. A file that holds its tokenizer (GGUF) holds its config as well."""
        config = "" if self.tokenizer == self.weights else self.config
        return digest_of_fields("rekindle/model/1", self.weights, config, self.rope)


def digest_of_fields(*fields: str | bytes) -> str:
    """BLAKE2b-128 over the fields, each preceded by its length, so that no two lists collide by concatenation."""
    state = hashlib.blake2b(digest_size=16)
    for field in fields:
        data = field.encode() if isinstance(field, str) else field
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def digest_of_config(config: Mapping[str, object]) -> str:
    """The digest of a model's configuration, whatever tool wrote it and in whatever order."""
    kept = {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
    return digest_of_fields("rekindle/config/1", json.dumps(kept, sort_keys=True, default=str))
