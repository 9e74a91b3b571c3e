"""Small files that took all time, memory or disk: each is refused at once, with the error that is documented.

They are read in a process of their own, whose memory, time and files are bounded, so that one that is not refused does
no harm.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from rekindle.codec.coder import Coder
from rekindle.codec.digest import PlainDigester
from rekindle.codec.extent import Coding, ExtentPlan
from rekindle.codec.quantizer import BitPlan
from rekindle.core.keys import NodeKey, token_bytes
from rekindle.core.kv import KvLayout, LayerShape

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux tells it")

_READER = """
import json, resource, sys, time
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
from pathlib import Path

path = Path(sys.argv[1])
{setup}
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), -1))
resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, -1))
Path("/proc/self/clear_refs").write_text("5")
def hwm():
    text = Path("/proc/self/status").read_text()
    return int(text[text.index("VmHWM:") + 6 :].split(None, 1)[0]) << 10
def written():
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split(None, 1)[0])
before, started, wrote, error = hwm(), time.process_time(), written(), "nothing"
try:
    {read}
except BaseException as caught:
    error = type(caught).__name__
print(json.dumps([error, hwm() - before, time.process_time() - started, written() - wrote]))
"""


@dataclass(frozen=True)
class Outcome:
    """What became of a file that was read."""

    error: str
    memory_bytes: int
    cpu_seconds: float
    written_bytes: int


def outcome_of(path: Path, setup: str, read: str) -> Outcome:
    """Read a file in a process of its own."""
    code = _READER.format(setup=setup, read=read)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"it had to be stopped: {done.returncode} {done.stderr[-500:]}"
    return Outcome(*json.loads(done.stdout))


def refused(outcome: Outcome, error: str) -> bool:
    """Whether a file was refused, at once and for little."""
    cheap = outcome.memory_bytes <= 64 << 20 and outcome.cpu_seconds <= 2 and outcome.written_bytes <= 1 << 20
    return cheap and outcome.error == error


def zeros_frame(size: int) -> bytes:
    """A zstd frame of so many zeros, 4 bytes for 128 KB."""
    blocks = [(min(131072, size - at) << 3 | 2).to_bytes(3, "little") + b"\0" for at in range(0, size, 131072)]
    blocks[-1] = bytes([blocks[-1][0] | 1]) + blocks[-1][1:]
    return b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + b"".join(blocks)


def bomb(path: Path, dim: int, layout: KvLayout, kv_space: str) -> None:
    """An extent of 32 tokens, whose one layer says that its keys have so many channels. All digests fit."""
    side = zeros_frame(2 * (2 * dim + 1 + 32 + 1))
    keys, values = zeros_frame(8 * dim), zeros_frame(8)
    header = struct.pack("<4sBBHIIIII", b"RKq1", 0, 1, 1, 32, dim, 1, 128, len(side))
    layer = header + struct.pack("<IIIIBB", len(keys), len(values), 0, 0, 4, 4) + side + keys + values
    coding = Coding(Coder(BitPlan.uniform(1, 4)), None, (len(layer),))
    plan = ExtentPlan(path.stem, kv_space, NodeKey(bytes(16)), layout, token_bytes(range(32)), "xxh3-64", 8, coding)
    state = PlainDigester().data()
    state.update(layer)
    path.write_bytes(plan.header(state.digest()) + layer)
    assert path.stat().st_size < 12_000


_OPEN = """
import numpy as np
from rekindle.codec.digest import PlainDigester
from rekindle.core.kv import LayerKv, Span
from rekindle.store.catalog.catalog import Extent
from rekindle.store.extents import ExtentFiles
from rekindle.store.files import Files
data, files = path.read_bytes(), ExtentFiles(path.parent, Files(), PlainDigester())
digest = files.digester.header(data[: int.from_bytes(data[:8], "little") + 8])
row = Extent(1, path.stem, 1, "live", len(data), "", digest, 0, 1, 1, 32, 0, 0, 0, 0, 0, None)
out = LayerKv(np.zeros((1, 32, 4), np.float16), np.zeros((1, 32, 1), np.float16))
"""


@pytest.mark.parametrize("dim", [24_576_000, 400_000_000, 2**32 - 1])
def test_a_coded_layer_of_other_dims_than_the_layout_is_refused(tmp_path: Path, dim: int) -> None:
    small = KvLayout("float16", (LayerShape(1, 4, 1),))
    if dim < 10**8:
        bomb(tmp_path / "x.kv", dim, small, "kv_space")
    else:
        bomb(tmp_path / "x.kv", 24_576_000, small, "kv_space")
        data = (tmp_path / "x.kv").read_bytes().replace(struct.pack("<I", 24_576_000), struct.pack("<I", dim))
        at = data.index(b"RKq1")
        plan_header = data[:at]
        digest = PlainDigester().data()
        digest.update(data[at:])
        old = json.loads(plan_header[8:])["__metadata__"]["digests"].encode()
        (tmp_path / "x.kv").write_bytes(plan_header.replace(old, digest.digest().hex().encode()) + data[at:])
    outcome = outcome_of(tmp_path / "x.kv", _OPEN, 'files.read(files.open(row, "kv_space"), 0, Span(0, 32), out)')
    assert refused(outcome, "Damaged"), outcome


def test_an_extent_of_another_layout_than_the_engine_has_is_refused(tmp_path: Path) -> None:
    bomb(tmp_path / "x.kv", 24_576_000, KvLayout("float16", (LayerShape(1, 24_576_000, 1),)), "kv_space")
    outcome = outcome_of(tmp_path / "x.kv", _OPEN, 'files.read(files.open(row, "kv_space"), 0, Span(0, 32), out)')
    assert refused(outcome, "Damaged"), outcome


def test_the_longest_manifest_takes_itself_and_little_more(tmp_path: Path) -> None:
    from rekindle.remote.index import KvModel
    from rekindle.remote.manifest import MAX_BYTES, LevelFile, Manifest, TokenFile

    cells, layers = 1000, 85
    level = LevelFile(
        "raw", 16.0, "0" * 64 + ".kv", np.ones((cells, layers), np.int64), np.ones((cells, layers, 16), np.uint8)
    )
    manifest = Manifest(
        context="0" * 32,
        model=KvModel("x", "y", KvLayout("float16", (LayerShape(8, 128, 128),) * layers)),
        tokens=cells * 128,
        chain=(bytes(32),) * cells,
        levels=tuple(replace(level, name=f"l{number}") for number in range(5)),
        token_file=TokenFile("0" * 64 + ".tokens", 4),
        created=0,
    )
    (tmp_path / "manifest").write_bytes(manifest.to_bytes())
    size_bytes = (tmp_path / "manifest").stat().st_size
    assert 0.9 * MAX_BYTES < size_bytes < MAX_BYTES
    setup, read = "from rekindle.remote.manifest import Manifest", "Manifest.from_bytes(path.read_bytes())"
    outcome = outcome_of(tmp_path / "manifest", setup, read)
    assert outcome.error == "nothing" and outcome.memory_bytes <= size_bytes + (64 << 20), outcome


_ADAPTER = "from rekindle.engine.lora_files import read_adapter"


def adapter(folder: Path, header: dict[str, object], size_bytes: int, **config: object) -> Path:
    """An adapter whose weights are zeros."""
    folder.mkdir()
    told = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(size_bytes)
    (folder / "adapter_model.safetensors").write_bytes(data)
    return folder


def one_layer(name: str) -> dict[str, object]:
    """The header of two matrices of one number each."""
    place = {"dtype": "F32", "shape": [1, 1]}
    return {
        f"base_model.model.{name}.lora_{half}.weight": place | {"data_offsets": [4 * n, 4 * n + 4]}
        for n, half in enumerate("AB")
    }


def test_tensors_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    place = {"dtype": "F32", "shape": [1, 250_000], "data_offsets": [0, 1_000_000]}
    names = [f"base_model.model.layers.{n}.lora_{half}.weight" for n in range(1000) for half in "AB"]
    folder = adapter(tmp_path / "a", dict.fromkeys(names, place), 1_000_000)
    outcome = outcome_of(folder, _ADAPTER, "read_adapter(path)")
    assert refused(outcome, "AdapterRefused"), outcome


def test_a_pattern_that_backtracks_takes_no_time(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", one_layer("a" * 40), 8, rank_pattern={"(a+)+b": 3}, target_modules="(a+)+b")
    outcome = outcome_of(folder, _ADAPTER, "read_adapter(path)")
    assert outcome.error == "nothing" and outcome.cpu_seconds < 2, outcome


@pytest.mark.parametrize("r", [10**400, 1e308 * 10], ids=["digits", "infinity"])
def test_a_rank_without_end_is_refused(tmp_path: Path, r: float) -> None:
    outcome = outcome_of(adapter(tmp_path / "a", one_layer("x"), 8, r=r), _ADAPTER, "read_adapter(path)")
    assert refused(outcome, "AdapterRefused"), outcome


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 1 << 40])
def test_a_header_longer_than_its_file_is_refused(tmp_path: Path, length: int) -> None:
    folder = adapter(tmp_path / "a", {}, 8)
    (folder / "adapter_model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    outcome = outcome_of(folder, _ADAPTER, "read_adapter(path)")
    assert refused(outcome, "AdapterRefused"), outcome


SETTINGS = {
    "nesting without end": "context = " + "[" * 30_000,
    "a name of 20,000 parts": "a." * 20_000 + "b = 1",
    "a number of 5,000 digits": "context = " + "9" * 5000,
    "a number beyond all floats": "recompute_budget = " + "9" * 400,
    "a path that no system has": 'cache = "~\\u0000"',
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_that_no_one_means_are_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / "rekindle.toml").write_text(SETTINGS[what])
    setup, read = "from rekindle.settings import Settings", "Settings.load(environment={}, file=path)"
    outcome = outcome_of(tmp_path / "rekindle.toml", setup, read)
    assert refused(outcome, "InvalidSetting"), outcome


def test_a_gguf_of_a_million_pairs_is_refused(tmp_path: Path) -> None:
    pairs = b"".join(struct.pack("<Q4sII", 4, n.to_bytes(4, "big").hex()[:4].encode(), 4, n) for n in range(1 << 20))
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 20) + pairs)
    setup = "from rekindle.models.gguf import read_header"
    outcome = outcome_of(tmp_path / "m.gguf", setup, "read_header(path)")
    assert refused(outcome, "BrokenModel"), outcome


def test_a_folder_whose_config_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    outcome = outcome_of(tmp_path, "from rekindle.models.hf_folder import check_folder", "check_folder(path)")
    assert refused(outcome, "BrokenModel"), outcome
