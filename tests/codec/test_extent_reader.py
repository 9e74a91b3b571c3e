"""A program in another language reads what the store wrote: contrib/extent_reader.js, by docs/reference/extent.md."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rekindle.codec.coder import Coder
from rekindle.codec.quantizer import BitPlan
from rekindle.core.identity import Identity
from rekindle.core.keys import KvSpace, Namespace, chain, layout_text, token_bytes
from rekindle.core.kv import KvLayout, KvType, LayerShape, Span
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import keep, make_kv

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="the reader runs in node, which is not here")

READER = Path(__file__).parents[2] / "contrib" / "extent_reader.js"
MAX_LINES = 150
ROOMY = StoreSettings(disk_limit="50MB", memory_limit=0)
IDENTITY = Identity("weights", "config", "tokenizer", "template", "float16", "plain")
LAYERS = (LayerShape(2, 4, 4), LayerShape(1, 8, 4), LayerShape(3, 64, 32))
PROMPT = list(range(100))  # three blocks and a part


def space(dtype: KvType, **fields: Any) -> KvSpace:
    return KvSpace(Namespace(IDENTITY.digest, "somebody", "sälty"), KvLayout(dtype, LAYERS), **fields)


def run(*arguments: str | Path) -> dict[str, Any]:
    """What the reader prints. Raises `CalledProcessError` if it refuses."""
    done = subprocess.run(
        [str(NODE), str(READER), *map(str, arguments)], capture_output=True, text=True, check=True, timeout=60
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def extents(folder: Path) -> list[Path]:
    return sorted((folder / "extents").iterdir())


@pytest.mark.parametrize(("dtype", "tokens"), [("float32", 100), ("float16", 1), ("bfloat16", 64)])
def test_raw_kv_is_read_byte_for_byte(dtype: KvType, tokens: int, tmp_path: Path) -> None:
    kv_space, prompt = space(dtype), PROMPT[:tokens]
    with TieredStore(tmp_path / "cache", ROOMY) as store:
        keep(store, prompt, kv_space)
    (path,) = extents(tmp_path / "cache")
    found = run(path, tmp_path / "out")
    kv = make_kv(prompt, Span(0, tokens), kv_space)
    data = b"".join(half.tobytes() for layer in kv.layers for half in (layer.keys, layer.values))
    assert (tmp_path / "out").read_bytes() == data
    keys = [key.hex() for key in chain(kv_space.namespace.root, token_bytes(prompt))]
    assert (found["extent"], found["kv_space"], found["keys"]) == (path.stem, f"{kv_space.digest}:xxh3-64", keys)
    assert found["layout"] == layout_text(kv_space.layout)
    with sqlite3.connect(tmp_path / "cache" / "catalog.sqlite") as catalog:
        rows = catalog.execute(
            "SELECT b.key, e.name, e.digest FROM blocks b JOIN extents e ON e.id = b.extent "
            "JOIN kv_spaces s ON s.id = b.kv_space WHERE s.digest = ? AND e.state = 'live' ORDER BY b.place",
            (found["kv_space"],),
        ).fetchall()
    assert [(key.hex(), name, digest.hex()) for key, name, digest in rows] == [
        (key, path.stem, found["header"]) for key in keys
    ]


def test_a_continuation_follows_the_keys_of_what_it_continues(tmp_path: Path) -> None:
    kv_space = space("float16")
    with TieredStore(tmp_path / "cache", ROOMY) as store:
        keep(store, PROMPT[:64], kv_space)
        keep(store, PROMPT, kv_space)
    found = [run(path, tmp_path / "out")["keys"] for path in extents(tmp_path / "cache")]
    whole = [key.hex() for key in chain(kv_space.namespace.root, token_bytes(PROMPT))]
    assert sorted(found) == sorted([whole[:2], whole[2:]])


def test_coded_kv_is_checked_and_given_as_it_is_coded(tmp_path: Path) -> None:
    kv_space = replace(space("float16"), codec="quantized")
    with TieredStore(tmp_path / "cache", replace(ROOMY, quantized=Coder(BitPlan.uniform(3, 5.0)))) as store:
        keep(store, PROMPT, kv_space)
    (path,) = extents(tmp_path / "cache")
    found = run(path, tmp_path / "out")
    sizes = json.loads(found["coding"])["sizes"]
    data = (tmp_path / "out").read_bytes()
    assert data == path.read_bytes()[-sum(sizes) :]
    assert [data[sum(sizes[:layer]) :][:4] for layer in range(3)] == [b"RKq1"] * 3


@pytest.mark.parametrize("adapter", [None, "0123abcd"])
def test_the_kv_space_of_a_model_is_computed_alike(adapter: str | None) -> None:
    kv_space = space("float16", adapter=adapter)
    fields = [*asdict(IDENTITY).values(), "somebody", "sälty", adapter or "", "raw", layout_text(kv_space.layout)]
    assert run("--kv-space", *fields) == {"root": kv_space.namespace.root.hex(), "kv_space": kv_space.digest}


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "cache", ROOMY) as store:
        keep(store, PROMPT, space("float16"))
    (path,) = extents(tmp_path / "cache")
    whole = path.read_bytes()
    for place in (len(whole) - 1, len(whole) - 5000, whole.index(b'"digests":"') + 11):
        data = bytearray(whole)
        data[place] ^= 1
        (tmp_path / "changed").write_bytes(data)
        with pytest.raises(subprocess.CalledProcessError) as raised:
            run(tmp_path / "changed", tmp_path / "out")
        assert "is damaged" in raised.value.stderr


def test_an_extent_that_is_cut_off_or_keyed_is_refused(tmp_path: Path) -> None:
    for name, settings in (("plain", ROOMY), ("keyed", replace(ROOMY, key=bytes(32)))):
        with TieredStore(tmp_path / name, settings) as store:
            keep(store, PROMPT, space("float16"))
    (plain,), (keyed,) = extents(tmp_path / "plain"), extents(tmp_path / "keyed")
    (tmp_path / "cut").write_bytes(plain.read_bytes()[:-1])
    for path, words in ((tmp_path / "cut", "cut off"), (keyed, "need a key")):
        with pytest.raises(subprocess.CalledProcessError) as raised:
            run(path, tmp_path / "out")
        assert words in raised.value.stderr


def test_it_is_short() -> None:
    lines = [line.strip() for line in READER.read_text("utf-8").splitlines()]
    assert len([line for line in lines if line and not line.startswith("//")]) <= MAX_LINES
