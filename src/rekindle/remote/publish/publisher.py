"""Publishing: the KV of a context becomes slices at several levels, and a signed manifest."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from rekindle.codec.cipher import Cipher, Secret, new_salt
from rekindle.core.cells import CHUNK_TOKENS, Cell, CellGrid
from rekindle.core.chunk import Variant
from rekindle.core.keys import token_bytes
from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.core.size import count_of
from rekindle.errors import InvalidSetting
from rekindle.remote.index import ContextNames, IndexEntry, KvModel, context_path, hints_of, index_path, listed_depths
from rekindle.remote.manifest import (
    MAX_BYTES,
    MAX_TITLE,
    SLICE_DIGEST_BYTES,
    LevelFile,
    Manifest,
    PublishedPassage,
    SignedManifest,
    TokenFile,
    slice_digest,
    slice_place,
    tokens_place,
)
from rekindle.remote.publish.folder import OriginFolder, PartFile
from rekindle.remote.signing import SigningKey, TrustedKeys
from rekindle.remote.slices import Level, encode

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class PublishSource:
    """A context to publish: `export` returns the KV of a span. `title`: the model's name, for display.

    `passage` scores its first passage, if it has one that others may reuse; it is called if that was not published.
    `measure` gives the KL of each quantized level, for clients with a KL budget; it is called for those without.
    """

    model: KvModel
    tokens: tuple[int, ...]
    export: Callable[[Span], Kv]
    tenant: str
    title: str = ""
    passage: Callable[[], Variant] | None = None
    measure: Callable[[Sequence[Level]], Mapping[str, float]] | None = None


@dataclass(frozen=True)
class PublishedLevel:
    """A level of a published context. `new`: it was written now; `kl` as in `LevelFile`."""

    name: str
    bits: float
    size_bytes: int
    new: bool
    kl: float | None = None


@dataclass(frozen=True)
class PublishResult:
    context: str
    tokens: int
    levels: tuple[PublishedLevel, ...]


class Publisher:
    """Publishes into a folder, signed with a key, encrypted if there is a secret.

    `local_only`: tenants whose KV never leaves this machine; `*` means all.
    """

    def __init__(
        self, folder: Path, key: SigningKey, *, secret: Secret | None = None, local_only: Collection[str] = ()
    ) -> None:
        """Creates the folder if missing. Raises `InvalidSetting` if it cannot."""
        self.folder = OriginFolder(folder, create=True)
        self._key = key
        self._secret = secret
        self._local_only = frozenset(local_only)
        self._names = ContextNames(secret)

    def publish(
        self, source: PublishSource, levels: Sequence[Level], progress: OnProgress | None = None
    ) -> PublishResult:
        """Publish a context at some levels, in addition to existing ones, which are not written again.

        Raises `InvalidSetting` for a local tenant, for fewer tokens than a chunk, for KV that a level cannot hold, and
        if the folder cannot be written.
        """
        self._check(source, levels)
        chain = self._names.chain(source.model, source.tokens)
        context = self._names.context(chain[-1], source.model.exact, self._key.name)
        known = self._known(context)
        missing = [level for level in levels if _has(known, level, source.model) is None]
        try:
            with ExitStack() as parts:
                written = [self._open(parts, context, level, source.model) for level in missing]
                if written:
                    _write_slices(source, written, progress)
                kls = _measure(source, levels, known)
                files = [part.close(source.model) for part in written]
                manifest = self._settle(source, levels, chain, files, kls)
        except OSError as error:
            raise InvalidSetting(f"The origin in {self.folder.path} cannot be written: {error}.") from error
        new = {level.name for level in missing}
        published = (
            PublishedLevel(one.name, one.bits, one.size_bytes, one.name in new, one.kl) for one in manifest.levels
        )
        return PublishResult(context, manifest.tokens, tuple(published))

    def _check(self, source: PublishSource, levels: Sequence[Level]) -> None:
        if self._local_only & {source.tenant, "*"}:
            raise InvalidSetting(f"The tenant {source.tenant!r} is marked local: its KV is never published.")
        if len(source.tokens) < CHUNK_TOKENS:
            raise InvalidSetting(
                f"The prompt has {count_of(len(source.tokens), 'token')}, too few to publish. Give at least "
                f"{CHUNK_TOKENS}: a shorter one is computed faster than fetched."
            )
        if not levels or len({level.name for level in levels}) < len(levels):
            raise InvalidSetting("Name the levels to publish, each once.")

    def _known(self, context: str) -> Manifest | None:
        """The existing manifest if it is ours and complete."""
        signed = self.folder.manifest(context)
        if signed is None:
            return None
        try:
            manifest = signed.open(TrustedKeys([self._key.public]), self._secret)
        except ValueError:
            return None
        sizes = [(level.file, level.size_bytes) for level in manifest.levels]
        sizes.append((manifest.token_file.file, manifest.token_file.size_bytes))
        return manifest if all(self._size(context, file) == size for file, size in sizes) else None

    def _size(self, context: str, file: str) -> int | None:
        path = self.folder.path / context_path(context, file)
        return path.stat().st_size if path.is_file() else None

    def _open(self, parts: ExitStack, context: str, level: Level, model: KvModel) -> _Writing:
        part = self.folder.new_part()
        parts.callback(part.discard)
        salt = None if self._secret is None else new_salt()
        cipher = None if self._secret is None or salt is None else self._secret.cipher(b"slices", salt)
        return _Writing(context, level, len(model.layout.layers), part, salt, cipher)

    def _settle(
        self,
        source: PublishSource,
        requested: Sequence[Level],
        chain: Sequence[bytes],
        files: Sequence[_Written],
        kls: Mapping[str, float],
    ) -> Manifest:
        """Place all files and write manifest and index, the index last."""
        context = self._names.context(chain[-1], source.model.exact, self._key.name)
        known = self._known(context)
        passage = self._passage(source) if known is None or known.passage is None else known.passage
        with self.folder.locked():
            self.folder.sweep()
            before = self._known(context)  # another publisher may have added a level
            names = {one.level.name for one in files}
            kept = [] if before is None else [level for level in before.levels if level.name not in names]
            for one in files:
                self.folder.place(one.part, context_path(context, one.level.file))
            tokens = before.token_file if before is not None else self._write_tokens(context, source.tokens)
            if any(_has(before, level, source.model) is None for level in requested if level.name not in names):
                raise InvalidSetting("The context was removed while it was being published. Publish it again.")
            every = [replace(one, kl=kls.get(one.name, one.kl)) for one in (*kept, *(one.level for one in files))]
            levels = sorted(every, key=lambda level: (-level.bits, level.name))
            manifest = Manifest(
                context=context,
                model=source.model,
                tokens=len(source.tokens),
                chain=tuple(chain),
                levels=tuple(levels),
                token_file=tokens,
                created=int(time.time()),
                title="".join(filter(str.isprintable, source.title))[:MAX_TITLE],
                passage=passage,
            )
            whole = len(source.tokens) // CHUNK_TOKENS
            chunks = [self._names.root(source.model), *(chain[depth - 1] for depth in listed_depths(whole))]
            if passage is not None:
                chunks.append(passage.name)
            lookups, models = [*map(self._names.lookup, chunks)], self._names.lookup()
            signed = SignedManifest.seal(manifest, [models, *lookups], self._key, self._secret)
            if len(data := signed.to_bytes()) > MAX_BYTES:
                raise InvalidSetting("Its manifest would be too long for clients. Publish fewer levels, or less text.")
            self.folder.write(context_path(context), data)
            self.folder.keep_only(context, manifest.files)
            entry = IndexEntry(context, self._key.name, hints_of(chain))
            for lookup in lookups:
                self.folder.write(index_path(lookup), self.folder.index(lookup).adding(entry).to_bytes())
            model = replace(entry, hints=chunks[0])
            self.folder.write(index_path(models), self.folder.index(models).adding_model(model).to_bytes())
        return manifest

    def _passage(self, source: PublishSource) -> PublishedPassage | None:
        if source.passage is None:
            return None
        variant = source.passage()
        body = source.tokens[variant.span.start : variant.span.stop]
        return PublishedPassage(self._names.passage(source.model, body), variant.span, variant.scores)

    def _write_tokens(self, context: str, tokens: Sequence[int]) -> TokenFile:
        data, salt = token_bytes(tokens), None
        if self._secret is not None:
            salt = new_salt()
            data = self._secret.cipher(b"tokens", salt).seal(0, data, tokens_place(context))
        file = f"{hashlib.blake2b(data, digest_size=32).hexdigest()}.tokens"
        self.folder.write(context_path(context, file), data)
        return TokenFile(file, len(data), salt)


@dataclass(frozen=True)
class _Written:
    """The finished file of a level, not placed yet."""

    part: PartFile
    level: LevelFile


@dataclass
class _Writing:
    """The file of a level while slices are added to it."""

    context: str
    level: Level
    layers: int
    part: PartFile
    salt: bytes | None
    cipher: Cipher | None
    sizes: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    whole: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=32))

    def add(self, cell: Cell, model: KvModel, kv: LayerKv) -> None:
        """Append the next slice. Raises `InvalidSetting` if the level cannot hold it."""
        try:
            data = encode(self.level, model.layout, cell.layer, kv)
        except ValueError as error:
            raise InvalidSetting(f"The level {self.level.name} cannot hold this KV: {error}.") from error
        if self.cipher is not None:
            about = slice_place(self.context, self.level.name, cell)
            data = self.cipher.seal(cell.chunk * self.layers + cell.layer, data, about)
        self.part.write(data)
        self.whole.update(data)
        self.sizes.append(len(data))
        self.digests.append(slice_digest(data))

    def close(self, model: KvModel) -> _Written:
        """Finish the file; it is on disk when this returns."""
        self.part.finish()
        sizes = np.array(self.sizes, np.int64).reshape(-1, self.layers)
        digests = np.frombuffer(b"".join(self.digests), np.uint8).reshape(-1, self.layers, SLICE_DIGEST_BYTES)
        name = f"{self.whole.hexdigest()}.kv"
        level = LevelFile(self.level.name, self.level.bits(model.layout), name, sizes, digests, self.salt)
        return _Written(self.part, level)


def _has(known: Manifest | None, level: Level, model: KvModel) -> LevelFile | None:
    """The same level in the existing manifest, if any."""
    found = () if known is None else known.levels
    return next((one for one in found if (one.name, one.bits) == (level.name, level.bits(model.layout))), None)


def _measure(source: PublishSource, levels: Sequence[Level], known: Manifest | None) -> Mapping[str, float]:
    """The KL of the quantized levels that are new, or were published without."""
    files = [(level, _has(known, level, source.model)) for level in levels if level.plan is not None]
    new = [level for level, file in files if file is None or file.kl is None]
    return source.measure(new) if source.measure is not None and new else {}


def _write_slices(source: PublishSource, written: Sequence[_Writing], progress: OnProgress | None) -> None:
    """Export every chunk once, for all levels."""
    cells = CellGrid(len(source.tokens), len(source.model.layout.layers))
    for chunk, span in enumerate(cells.spans):
        kv = source.export(span)
        for layer, part in enumerate(kv.layers):
            for level in written:
                level.add(Cell(chunk, layer), source.model, part)
        if progress is not None:
            progress(chunk + 1, cells.chunks)
