"""Manifests, their headers and indexes of an origin: signed by a key that is trusted, whatever they say."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from rekindle.remote.index import Index
from rekindle.remote.manifest import SignedManifest, canonical
from rekindle.remote.signing import SigningKey, TrustedKeys
from tests.fuzz import mutations
from tests.fuzz.family import Family
from tests.remote.places import publish


class Inputs(Family):
    """A manifest of two levels and the index that lists it."""

    errors = (ValueError,)

    def __init__(self, folder: Path) -> None:
        self.key = SigningKey.new()
        self.keys = TrustedKeys([self.key.public])
        context = publish(folder / "origin", self.key, "raw,q4").context
        self.manifest = SignedManifest.from_bytes((folder / "origin" / "contexts" / context / "manifest").read_bytes())
        self.index = next((folder / "origin" / "by-chunk").iterdir()).read_bytes()
        self.data, self.is_index = b"", False

    def prepare(self, random: Random) -> int:
        self.is_index = random.randrange(4) == 0
        if self.is_index:
            self.data = _changed(random, self.index)
        else:
            head, body = self.manifest.header.to_bytes(), _changed(random, self.manifest.body)
            if random.randrange(4) == 0:
                head = _changed(random, head)
            signature = self.key.sign(b"rekindle/manifest/1\n" + head + b"\n" + body)
            self.data = b"\n".join([head, signature.hex().encode(), body])
        if random.randrange(8) == 0:
            self.data = mutations.bits(random, self.data)
        return len(self.data)

    def read(self) -> None:
        if self.is_index:
            Index.from_bytes(self.data)
        else:
            SignedManifest.from_bytes(self.data).open(self.keys, None)


def _changed(random: Random, data: bytes) -> bytes:
    fields = json.loads(data)
    if isinstance(fields.get("layout"), str) and random.randrange(3) == 0:
        fields["layout"] = mutations.text_of(mutations.tree(random, json.loads(fields["layout"])))
    changed = mutations.tree(random, fields) if random.randrange(8) else fields
    return mutations.text_of(changed, lambda root: _canonical(root)).encode("utf-8", "surrogatepass")


def _canonical(root: object) -> str:
    try:
        return canonical(root).decode()  # type: ignore[arg-type]
    except ValueError:  # NaN
        return json.dumps(root)
