"""The manifest: what an origin has of one context. `origin/signed` is how it stands in a file.

Slices of a level stand one behind the other without a gap, chunk by chunk and in a chunk layer by layer, so their sizes
say where each begins: there are no offsets that could contradict them. Chunk by chunk, because what is computed here is
always a chunk's lower layers: what is left to stream, one chunk's upper layers or all of several chunks, is one range.

Bytes have exactly one form: what does not come out the same when written again is refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.codec.cipher import SALT_BYTES, TAG_BYTES
from rekindle.core.cells import CHUNK_TOKENS, Cell, Cells
from rekindle.core.keys import layout_text, parse_layout
from rekindle.core.kv import Span
from rekindle.origin.names import CHAIN_BYTES, CONTEXT, FILE, Model
from rekindle.origin.slices import NAME, largest_bytes

FORMAT = "rekindle-origin/1"
SLICE_DIGEST_BYTES = 16  # against an origin that looks for other bytes with the same digest, not against the publisher
MOST_TOKENS = 1 << 24
MOST_TITLE = 200
_MOST_LEVELS = 16
_SIZE = np.dtype("<u4")


@dataclass(frozen=True)
class TokenFile:
    """The tokens of a context, as a file beside it."""

    file: str
    size_bytes: int
    salt: bytes | None = None


@dataclass(frozen=True, eq=False)
class LevelFile:
    """The slices of one level. `bits`: a number, before compression; `salt` if they are encrypted."""

    name: str
    bits: float
    file: str
    sizes: NDArray[np.int64]  # [chunks, layers], bytes as they stand in the file
    digests: NDArray[np.uint8]  # [chunks, layers, 16], of the same bytes
    salt: bytes | None = None

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate(self.sizes.reshape(-1).tolist(), initial=0))

    @property
    def size_bytes(self) -> int:
        """The length of the file."""
        return self._starts[-1]

    def number(self, cell: Cell) -> int:
        """The place of a slice among all. Raises `ValueError` if there is none."""
        chunks, layers = map(int, self.sizes.shape)
        if not (0 <= cell.chunk < chunks and 0 <= cell.layer < layers):
            raise ValueError(f"there is no slice of chunk {cell.chunk} in layer {cell.layer}")
        return cell.chunk * layers + cell.layer

    def place(self, cell: Cell) -> Span:
        """Where a slice stands in the file."""
        number = self.number(cell)
        return Span(self._starts[number], self._starts[number + 1])

    def digest(self, cell: Cell) -> bytes:
        """The digest of its bytes."""
        self.number(cell)
        return bytes(self.digests[cell.chunk, cell.layer])


@dataclass(frozen=True, eq=False)
class Manifest:
    """What there is of a context. `chain`: the digest of each chunk; `title`: the model's name, for people."""

    context: str
    model: Model
    tokens: int
    chain: tuple[bytes, ...]
    levels: tuple[LevelFile, ...]
    token_file: TokenFile
    created: int
    title: str = ""

    @property
    def cells(self) -> Cells:
        """How it is cut."""
        return Cells(self.tokens, len(self.model.layout.layers))

    def level(self, name: str) -> LevelFile:
        """The level of that name. Raises `ValueError` if there is none."""
        for level in self.levels:
            if level.name == name:
                return level
        raise ValueError(f"there is no level {name!r}, only {', '.join(level.name for level in self.levels)}")

    @property
    def files(self) -> frozenset[str]:
        """The names of all its files."""
        return frozenset({self.token_file.file, *(level.file for level in self.levels)})

    def to_bytes(self) -> bytes:
        """The body; always the same bytes for the same manifest."""
        return canonical(
            {
                "adapter": self.model.adapter,
                "chain": _base64(b"".join(self.chain)),
                "chunk_tokens": CHUNK_TOKENS,
                "context": self.context,
                "created": self.created,
                "format": FORMAT,
                "identity": self.model.identity,
                "layout": layout_text(self.model.layout),
                "levels": [_level_fields(level) for level in self.levels],
                "title": self.title,
                "token_file": {
                    "file": self.token_file.file,
                    "salt": hex_of(self.token_file.salt),
                    "size_bytes": self.token_file.size_bytes,
                },
                "tokens": self.tokens,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """A body that was read. Raises `ValueError` if it is not one of ours, whole and consistent."""
        try:
            fields = json.loads(data)
            if fields["format"] != FORMAT or fields["chunk_tokens"] != CHUNK_TOKENS:
                raise ValueError("a format that is not known here")
            manifest = _manifest(fields)
            same = manifest.to_bytes() == data
        except (KeyError, TypeError, AttributeError, ArithmeticError, RecursionError, IndexError) as error:
            raise ValueError(f"no manifest: {error!r}") from error
        if not same:
            raise ValueError("no manifest: its fields contradict each other")
        return manifest


def slice_digest(data: bytes | bytearray) -> bytes:
    """The digest of a slice as it stands in the file."""
    return hashlib.blake2b(data, digest_size=SLICE_DIGEST_BYTES).digest()


def slice_place(context: str, level: str, cell: Cell) -> bytes:
    """What an encrypted slice is bound to: it cannot be opened as another one."""
    return f"rekindle/slice/1 {context} {level} {cell.chunk} {cell.layer}".encode()


def tokens_place(context: str) -> bytes:
    """The same for the tokens of a context."""
    return f"rekindle/tokens/1 {context}".encode()


def _manifest(fields: Any) -> Manifest:
    model = Model(text_of(fields["identity"]), parse_layout(fields["layout"]), fields["adapter"])
    if model.adapter is not None:
        text_of(model.adapter)
    tokens = _whole(fields["tokens"], CHUNK_TOKENS, MOST_TOKENS)
    cells = Cells(tokens, len(model.layout.layers))
    chain = _bytes(fields["chain"], cells.chunks * CHAIN_BYTES)
    levels = tuple(_level(level, cells) for level in fields["levels"])
    if not 1 <= len(levels) <= _MOST_LEVELS or len({level.name for level in levels}) < len(levels):
        raise ValueError("its levels are none")
    for level in levels:
        _check_sizes(level, model, cells)
    about = fields["token_file"]
    token_file = TokenFile(text_of(about["file"], FILE), _whole(about["size_bytes"], 1, 1 << 30), salt_of(about))
    return Manifest(
        context=text_of(fields["context"], CONTEXT),
        model=model,
        tokens=tokens,
        chain=tuple(chain[start : start + CHAIN_BYTES] for start in range(0, len(chain), CHAIN_BYTES)),
        levels=levels,
        token_file=token_file,
        created=_whole(fields["created"], 0, 1 << 40),
        title=_title(fields["title"]),
    )


def _level(fields: Any, cells: Cells) -> LevelFile:
    count = cells.chunks * cells.layers
    sizes = np.frombuffer(_bytes(fields["sizes"], count * _SIZE.itemsize), _SIZE).astype(np.int64)
    digests = np.frombuffer(_bytes(fields["digests"], count * SLICE_DIGEST_BYTES), np.uint8)
    bits = fields["bits"]
    if type(bits) is not float or not 0 <= bits <= 64:
        raise ValueError("the bits of a level are none")
    return LevelFile(
        text_of(fields["name"], NAME),
        bits,
        text_of(fields["file"], FILE),
        sizes.reshape(cells.chunks, cells.layers),
        digests.reshape(cells.chunks, cells.layers, SLICE_DIGEST_BYTES),
        salt_of(fields),
    )


def _level_fields(level: LevelFile) -> dict[str, Any]:
    return {
        "bits": level.bits,
        "digests": _base64(level.digests.tobytes()),
        "file": level.file,
        "name": level.name,
        "salt": hex_of(level.salt),
        "sizes": _base64(level.sizes.astype(_SIZE).tobytes()),
    }


def _check_sizes(level: LevelFile, model: Model, cells: Cells) -> None:
    """Raises `ValueError` for slices larger than any could be: nobody shall take memory for them."""
    for chunk in {0, cells.chunks - 1}:  # all but the last have as many tokens as the first
        tokens = len(cells.span(chunk))
        most = np.array([largest_bytes(model.layout, layer, tokens) + TAG_BYTES for layer in range(cells.layers)])
        rows = level.sizes[chunk:] if chunk else level.sizes
        if (rows < 1).any() or (rows > most).any():
            raise ValueError("the size of a slice makes no sense")


def canonical(fields: dict[str, Any]) -> bytes:
    """JSON, in the one form that counts."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str, size: int) -> bytes:
    data = base64.b64decode(text, validate=True)
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes in place of {size}")
    return data


def hex_of(data: bytes | None) -> str | None:
    """A salt as text; none as none."""
    return None if data is None else data.hex()


def salt_of(fields: Any) -> bytes | None:
    """The salt among some fields. Raises `ValueError` if there is something else."""
    if fields["salt"] is None:
        return None
    salt = bytes.fromhex(fields["salt"])
    if len(salt) != SALT_BYTES:
        raise ValueError("a salt has another length")
    return salt


def text_of(value: Any, pattern: re.Pattern[str] | None = None) -> str:
    """A text of that form. Raises `ValueError` for anything else."""
    if not isinstance(value, str) or (pattern is not None and not pattern.fullmatch(value)):
        raise ValueError(f"not what should stand there: {str(value)[:80]!r}")
    return value


def _title(value: Any) -> str:
    """A name for people; nothing that a terminal obeys."""
    if not text_of(value).isprintable() or len(value) > MOST_TITLE:
        raise ValueError("a title cannot be shown")
    return str(value)


def _whole(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"not a number that makes sense: {str(value)[:80]!r}")
    return value
