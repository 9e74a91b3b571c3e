"""The C layer: one library for a process, and none that differs from what the structs here say."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xllamacpp")

import rekindle
from rekindle.engine.llamacpp import c_api
from rekindle.engine.llamacpp.c_api import (
    KNOWN_VERSIONS,
    TESTED,
    LlamaLibrary,
    ModelParams,
    NewContextParams,
    OldContextParams,
    llama,
)
from rekindle.engine.load import EngineOptions, load_engine, missing_packages, packages_beside
from rekindle.errors import EngineMissing, InvalidSetting
from rekindle.settings import Settings
from tests.engine.llamacpp.alone import alone

pytestmark = [pytest.mark.llamacpp]

NONE_OF_IT = "cannot be used as llama.cpp's library.*Tested: xllamacpp"


@pytest.fixture
def path() -> Path:
    """The library of the wheel."""
    return next(c_api._candidates(None))[0]


@pytest.fixture
def elsewhere(path: Path, tmp_path: Path) -> Path:
    """The same library under another name."""
    link = tmp_path / "libllama.so"
    link.symlink_to(path)
    return link


class Changed:
    """The library, but for some functions."""

    def __init__(self, path: Path, **changes: Any) -> None:
        self._library, self._changes = ctypes.CDLL(str(path)), changes

    def __getattr__(self, name: str) -> Any:
        return self._changes.get(name) or getattr(self._library, name)


@pytest.fixture
def bind(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Binds the library with other functions."""

    def binding(**changes: Any) -> dict[str, Any]:
        changed = Changed(path, **changes)
        monkeypatch.setattr(c_api.ctypes, "CDLL", lambda _: changed)
        try:
            return c_api._bind(path)
        finally:
            monkeypatch.undo()

    return binding


# Which library


def test_the_wheel_is_taken_unless_a_library_is_named(path: Path) -> None:
    library = LlamaLibrary()
    library.load()
    assert library.path == path and re.fullmatch(r"xllamacpp [\d.]+, ggml [\d.]+.*", library.name)
    assert library.name.split(",")[0] in TESTED


def test_a_named_library_comes_before_the_wheel(elsewhere: Path) -> None:
    library = LlamaLibrary()
    library.load(str(elsewhere))
    assert library.path == elsewhere and re.fullmatch(r"libllama\.so, ggml [\d.]+.*", library.name)
    assert library.llama_print_system_info()


def test_the_one_inside_llama_cpp_python_comes_last(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "llama_cpp" / "lib"
    inside.mkdir(parents=True)
    (inside.parent / "__init__.py").write_text("raise AssertionError('nothing of it is imported')")
    (inside / "libggml.so").write_bytes(b"")
    (inside / "libllama.so").symlink_to(path)
    about = tmp_path / "llama_cpp_python-0.3.36.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 0.3.36\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert [name for _, name in c_api._candidates(None)][1:] == ["llama-cpp-python 0.3.36"]
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xllamacpp" else found(name))
    library = LlamaLibrary()
    library.load()
    assert library.path == inside / "libllama.so" and library.name.startswith("llama-cpp-python 0.3.36, ggml ")


def test_without_a_package_that_brings_a_library_one_can_still_be_named() -> None:
    def nothing(package: str) -> object:
        return package == "jinja2"

    assert missing_packages("llamacpp", nothing) == ["xllamacpp"]
    assert missing_packages("llamacpp", packages_beside("libllama.so")) == []
    assert packages_beside(None)("jinja2") and not packages_beside(None)("no_such_package")


def test_where_there_is_none_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_api.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EngineMissing, match=r"pip install 'rekindle-llm\[llamacpp,knowledge\]'.*llama_library"):
        LlamaLibrary().load()


def test_one_that_cannot_be_used_is_passed_over_for_the_next(path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    assert c_api._first_usable(iter([(broken, "broken"), (path, "good")]))[:1] == (path,)
    with pytest.raises(EngineMissing, match="broken.so"):
        c_api._first_usable(iter([(broken, "broken"), (tmp_path / "gone.so", "gone")]))


def test_a_file_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    named = str(tmp_path / "libllama.so")
    for library in (LlamaLibrary(), llama):  # before and after one is loaded
        with pytest.raises(InvalidSetting, match="llama_library=.*there is no such file. Name libllama.so"):
            library.load(named)
    with pytest.raises(InvalidSetting, match="no such file"):
        LlamaLibrary().load(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF" + bytes(100)], ids=["empty", "text", "cut"])
def test_a_file_that_is_no_library_is_a_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "libllama.so").write_bytes(content)
    with pytest.raises(EngineMissing, match=NONE_OF_IT):
        LlamaLibrary().load(str(tmp_path / "libllama.so"))


def test_a_library_of_something_else_is_a_sentence(tmp_path: Path) -> None:
    import _ctypes

    other = tmp_path / "libllama.so"
    shutil.copy(_ctypes.__file__, other)
    with pytest.raises(EngineMissing, match=NONE_OF_IT):
        LlamaLibrary().load(str(other))


def test_a_process_that_has_loaded_one_takes_no_other(tmp_path: Path) -> None:
    llama.load()
    assert llama.path is not None
    elsewhere = tmp_path / "libllama.so"
    elsewhere.symlink_to(llama.path)
    llama.load(str(llama.path))
    llama.load(str(elsewhere))  # the same file
    other = tmp_path / "other.so"
    other.write_bytes(b"")
    with pytest.raises(InvalidSetting, match=f"has loaded {llama.path} already. Start another one"):
        llama.load(str(other))


def test_a_setting_that_names_no_library_is_a_sentence_before_anything_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "libllama.so").write_text("no library")
    alone(f"""
        from rekindle.engine import load as module
        from rekindle.errors import EngineMissing
        from rekindle.settings import Settings

        def fetched(*a, **k):
            raise AssertionError("it was fetched")

        module.obtain = fetched
        settings = Settings.load({{"engine": "llamacpp", "llama_library": {str(tmp_path / "libllama.so")!r}}})
        try:
            module.load_engine("org/unseen:Q4_K_M", module.EngineOptions.of(settings))
            raise AssertionError("it was loaded")
        except EngineMissing as error:
            assert "cannot be used as llama.cpp's library" in str(error)
    """)


def test_a_setting_that_names_the_library_in_use_loads_a_model(tiny: Path) -> None:
    llama.load()
    settings = Settings.load({"engine": "llamacpp", "llama_library": str(llama.path), "threads": 1, "device": "cpu"})
    engine = load_engine(str(tiny), EngineOptions.of(settings))
    assert engine.tokenizer.encode("a")
    engine.close()


# What it must be


@pytest.mark.parametrize("version", ["0.24.9", "0.27.0", "1.0.0", "0.2.6", "0.260.1", "unknown", ""])
def test_an_unknown_version_is_refused_with_those_that_are_known(version: str, bind: Callable[..., Any]) -> None:
    with pytest.raises(EngineMissing) as raised:
        bind(ggml_version=lambda: version.encode())
    said = str(raised.value)
    assert f"ggml {version}, which is not known here" in said and TESTED in said
    assert all(f"{known}.x" in said for known in KNOWN_VERSIONS)


@pytest.mark.parametrize("version", [*(f"{known}.9" for known in KNOWN_VERSIONS), f"{KNOWN_VERSIONS[-1]}.0-dirty"])
def test_later_patches_of_a_known_version_are_taken(version: str, bind: Callable[..., Any]) -> None:
    assert bind(ggml_version=lambda: version.encode())


class Moved:
    """A function that returns a struct whose fields from `offset` on lie elsewhere."""

    def __init__(self, function: Any, struct: type[ctypes.Structure], offset: int, more_bytes: int) -> None:
        function.restype = struct
        data = bytes(function())
        rest = data[offset:] if more_bytes > 0 else data[offset - more_bytes :]
        self._data = data[:offset] + bytes(max(0, more_bytes)) + rest
        self.restype: Any = None

    def __call__(self) -> Any:
        size = ctypes.sizeof(self.restype)
        return self.restype.from_buffer_copy(self._data[:size].ljust(size, b"\0"))


def offsets(struct: type[ctypes.Structure], last: str) -> list[tuple[str, int]]:
    """Where fields begin, up to the last one that the engine sets."""
    names = [field[0] for field in struct._fields_]
    return [(name, getattr(struct, name).offset) for name in names[: names.index(last) + 1]]


@pytest.mark.parametrize("more_bytes", [8, 4, -4, -8])
@pytest.mark.parametrize(
    "function, last", [("llama_context_default_params", "swa_full"), ("llama_model_default_params", "use_extra_bufts")]
)
def test_structs_with_a_field_more_or_less_are_refused(
    function: str, last: str, more_bytes: int, path: Path, bind: Callable[..., Any]
) -> None:
    """Else the engine would set something else than it means."""
    struct = NewContextParams if "context" in function else ModelParams
    original = getattr(ctypes.CDLL(str(path)), function)
    taken = []
    for name, offset in offsets(struct, last):
        try:
            bind(**{function: Moved(original, struct, offset, more_bytes)})
            taken.append(name)
        except EngineMissing as error:
            assert "has other structs than known here. Tested: xllamacpp" in str(error)
    known = "context" in function and more_bytes == -8  # ggml 0.25 has eight zero bytes less, somewhere among these
    assert taken == (["reserved", "abort_callback", "abort_callback_data"] if known else [])


def test_fields_that_a_later_version_adds_at_the_end_keep_their_defaults(path: Path, bind: Callable[..., Any]) -> None:
    struct, original = NewContextParams, ctypes.CDLL(str(path)).llama_context_default_params
    end = struct.room.offset
    added = Moved(original, struct, end, 8)
    added._data = added._data[:end] + b"\x07" * 8 + added._data[end + 8 :]
    functions = bind(llama_context_default_params=added)
    params = functions["llama_context_default_params"]()
    assert bytes(params.room[:8]) == b"\x07" * 8, "and they are passed on"


def test_the_context_of_both_versions_differs_by_one_field() -> None:
    new, old = ([field[0] for field in struct._fields_] for struct in (NewContextParams, OldContextParams))
    assert [name for name in new if name != "reserved"] == old


def test_a_batch_or_a_sampler_that_answers_otherwise_is_refused(bind: Callable[..., Any]) -> None:
    def other_batch(tokens: Any, count: int) -> Any:
        return c_api.LlamaBatch(n_tokens=count + 1)

    for changes in ({"llama_batch_get_one": other_batch}, {"llama_sampler_apply": lambda *_: None}):
        with pytest.raises(EngineMissing, match="other structs"):
            bind(**changes)


# Backends in libraries of their own


class Backends:
    """Some devices after loading, none before."""

    def __init__(self, after: int) -> None:
        self.count, self.after, self.asked = 0, after, list[bytes]()

    def functions(self) -> dict[str, Any]:
        def count() -> int:
            return self.count

        def load_all(folder: bytes) -> None:
            self.asked.append(folder)
            self.count = self.after

        def set_log(callback: Any, _: Any) -> None:
            pass  # the engines of other tests have set theirs

        named = {"ggml_backend_dev_count": count, "ggml_backend_load_all_from_path": load_all}
        return {**named, "llama_log_set": set_log}


def test_backends_that_are_libraries_of_their_own_are_loaded_from_its_folder(
    path: Path, bind: Callable[..., Any]
) -> None:
    backends = Backends(1)
    bind(**backends.functions())
    assert backends.asked == [str(path.resolve().parent).encode()]
    bind(**backends.functions())
    assert len(backends.asked) == 1, "not where there are some"
    with pytest.raises(EngineMissing, match="finds no backend in"):
        bind(**Backends(0).functions())


# What is bound


def test_every_function_that_is_bound_is_called() -> None:
    """A function that nobody calls only makes libraries without it unusable."""
    source = "\n".join(file.read_text() for file in (Path(rekindle.__file__).parent / "engine/llamacpp").glob("*.py"))
    called = set(re.findall(r'\bllama\.(\w+)|functions\["(\w+)"\]', source))
    names = {name for pair in called for name in pair if name}
    assert set(c_api._FUNCTIONS) <= names
    bound = {*c_api._FUNCTIONS, "llama_context_default_params", "llama_init_from_model"}
    assert {name for name in names if name.startswith(("llama_", "ggml_"))} <= bound


def test_what_is_not_bound_is_no_attribute() -> None:
    with pytest.raises(AttributeError):
        _ = LlamaLibrary().llama_backend_free


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP says its settings there")
@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, {"6000", "500"}), ({"GOMP_SPINCOUNT": "77"}, {"77"}), ({"OMP_WAIT_POLICY": "passive"}, {"0"})],
)
def test_waiting_threads_soon_sleep_unless_the_user_says_otherwise(chosen: dict[str, str], spins: set[str]) -> None:
    load = "import os; from rekindle.engine.llamacpp.c_api import llama; llama.load(); print(dict(os.environ))"
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", load],
        env={**plain, "OMP_DISPLAY_ENV": "verbose", **chosen},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found = set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr))
    assert found and found <= spins, done.stderr
    assert ("GOMP_SPINCOUNT" in done.stdout) == ("GOMP_SPINCOUNT" in chosen)  # nothing is left in the environment
