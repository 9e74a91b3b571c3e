"""Which engine runs a model, and what is said where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rekindle.core.request import Message
from rekindle.engine import load as module
from rekindle.engine.llamacpp.options import LlamaOptions
from rekindle.engine.load import (
    ENGINES,
    EngineOptions,
    choose_engine,
    convert_gguf,
    load_engine,
    missing_packages,
    require_packages,
)
from rekindle.errors import (
    EngineMissing,
    InvalidSetting,
    ModelError,
    ModelNotFound,
    NotAModel,
    RekindleError,
    UnsupportedModel,
)
from rekindle.models import registry
from rekindle.models.files import ModelFiles
from rekindle.settings import Settings
from tests.models.ggufs import cached, folder_form, write_gguf
from tests.tiny_gguf import files_of, write_llama

BEGINNING = 257  # the token <|start|> of tiny GGUF models

HF, LLAMACPP, ONNX = (set(packages) for packages in ENGINES.values())


def have(*packages: str) -> Callable[[str], object]:
    return lambda package: package if package in packages else None


BOTH, ONLY_HF, ONLY_LLAMACPP, NEITHER = have(*HF, *LLAMACPP), have(*HF), have(*LLAMACPP), have()


@pytest.fixture
def models(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A model of every kind, by what it is."""
    monkeypatch.chdir(tmp_path)
    file = write_gguf(tmp_path / "plain.gguf")
    nameless = tmp_path / "blob"
    nameless.write_bytes(file.read_bytes())
    cached("org/files", "model-Q4_K_M.gguf")
    folder_form(tiny_folder, "org/folder")
    registry.add("mine", "decoder", "a file", ModelFiles("mine", tmp_path / "hf", file))
    registry.add("ours", "decoder", "a folder", ModelFiles("ours", tiny_folder, None))
    return {
        "a GGUF file": str(file),
        "a GGUF file of another name": str(nameless),
        "a split GGUF file": str(write_gguf(tmp_path / "split.gguf", parts=3)),
        "a model of Ollama": "ollama:llama3",
        "a repository's GGUF file in the hub's cache": "org/files",
        "a quantization": "org/elsewhere:Q4_K_M",
        "a file of a repository": "org/elsewhere/model.gguf",
        "a GGUF file that was pulled": "mine",
        "a folder": str(tiny_folder),
        "a folder that was pulled": "ours",
        "a named model": "smollm2",
        "a repository in folder form in the hub's cache": "org/folder",
        "a repository that is not here": "org/unseen",
        "a name nobody knows": "whatever",
        "a file that is not there": "./gone.gguf",
        "a folder that is not there": "./gone",
    }


GGUF = {
    "a GGUF file",
    "a GGUF file of another name",
    "a split GGUF file",
    "a model of Ollama",
    "a repository's GGUF file in the hub's cache",
    "a quantization",
    "a file of a repository",
    "a GGUF file that was pulled",
    "a file that is not there",
}


def test_what_is_a_gguf_file_goes_to_llamacpp_and_the_rest_to_hf(models: dict[str, str]) -> None:
    assert set(models) > GGUF
    for what, name in models.items():
        first, second = ("llamacpp", "hf") if what in GGUF else ("hf", "llamacpp")
        only = {"hf": ONLY_HF, "llamacpp": ONLY_LLAMACPP}
        assert choose_engine(name, "auto", BOTH) == first, what
        assert choose_engine(name, "auto", only[first]) == first, what
        assert choose_engine(name, "auto", only[second]) == second, f"{what}: the other one, where one is missing"
        assert choose_engine(name, "auto", NEITHER) == first, f"{what}: the one to install"


def test_an_engine_that_is_asked_for_is_taken_whatever_is_installed(models: dict[str, str]) -> None:
    for name in models.values():
        for installed in (BOTH, ONLY_HF, ONLY_LLAMACPP, NEITHER):
            assert choose_engine(name, "hf", installed) == "hf"
            assert choose_engine(name, "llamacpp", installed) == "llamacpp"


@pytest.mark.parametrize("wrong", ["vllm", "", "HF", "llama.cpp", "Auto"])
def test_an_unknown_engine_is_refused_with_those_that_are_known(wrong: str) -> None:
    with pytest.raises(InvalidSetting, match="Use auto, hf, llamacpp"):
        choose_engine("smollm2", wrong)


@pytest.mark.parametrize("package", sorted(HF | LLAMACPP | ONNX))
def test_an_engine_that_lacks_one_package_is_not_chosen(package: str, models: dict[str, str]) -> None:
    installed = have(*(HF | LLAMACPP | ONNX) - {package})
    lacking = {name for name, packages in ENGINES.items() if package in packages}
    chosen = choose_engine(models["a GGUF file"], "auto", installed)
    if lacking != set(ENGINES):
        assert chosen not in lacking
    for name in ENGINES:
        assert missing_packages(name, installed) == ([package] if name in lacking else [])


@pytest.mark.parametrize(
    "name, title, extras",
    [
        ("hf", "The Hugging Face engine", "hf"),
        ("llamacpp", "The llama.cpp engine", "llamacpp,knowledge"),
        ("onnx", "The ONNX Runtime engine", "onnx"),
    ],
)
def test_what_is_missing_is_named_with_how_to_install_it(name: Any, title: str, extras: str) -> None:
    with pytest.raises(EngineMissing) as raised:
        require_packages(name, NEITHER)
    said = str(raised.value)
    assert said.startswith(title) and said.endswith(f"pip install 'rekindle-llm[{extras}]'")
    assert all(package in said for package in ENGINES[name])
    first, *others = ENGINES[name]
    with pytest.raises(EngineMissing, match=f"needs {first}. Install"):
        require_packages(name, have(*others))
    require_packages(name, have(*ENGINES[name]))


def test_a_missing_engine_is_told_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "missing_packages", lambda name, have=None: ["xllamacpp"])
    monkeypatch.setattr(module, "obtain", lambda *a, **k: pytest.fail("it was fetched"))
    with pytest.raises(EngineMissing, match="needs xllamacpp"):
        load_engine("org/unseen:Q4_K_M", EngineOptions())


# Settings of the wrong engine


WRONG_FOR_HF = {
    "threads": 3,
    "batch_tokens": 99,
    "micro_batch_tokens": 99,
    "flash_attention": "on",
    "gpu_layers": 5,
    "kv_type": "q8_0",
    "kv_tokens": 9999,
    "swa_full": False,
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed here, all engines are; and no model is ever looked for."""
    monkeypatch.setattr(module, "missing_packages", lambda name, have=None: [])
    monkeypatch.setattr(module, "obtain", lambda *a, **k: pytest.fail("the model was looked for"))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", WRONG_FOR_HF)
def test_a_setting_of_llamacpp_is_refused_by_name_with_hf(name: str) -> None:
    settings = Settings.load({"engine": "hf", name: WRONG_FOR_HF[name]})
    with pytest.raises(InvalidSetting, match=f"{name}={WRONG_FOR_HF[name]!r} is for llama.cpp.*engine='llamacpp'"):
        load_engine("smollm2", EngineOptions.of(settings))


def test_every_setting_of_llamacpp_is_refused_with_hf() -> None:
    """Those that both engines have are not; `sequences` is no setting.

    `llama_library` says where something is, not how to run a model: it may be in the user's rekindle.toml for good.
    """
    shared = {"device", "context_tokens", "sequences", "llama_library"}
    assert {field.name for field in fields(LlamaOptions)} - shared == set(WRONG_FOR_HF)
    settings = {field.name for field in fields(Settings)}
    assert set(WRONG_FOR_HF) <= settings


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_setting_of_hf_is_refused_by_name_with_llamacpp(dtype: str) -> None:
    settings = Settings.load({"engine": "llamacpp", "dtype": dtype})
    with pytest.raises(InvalidSetting, match=f"dtype='{dtype}' is for engine='hf'.*kv_type"):
        load_engine("smollm2", EngineOptions.of(settings))


@pytest.mark.usefixtures("installed")
def test_settings_of_both_are_refused_by_neither() -> None:
    settings = Settings.load({"engine": "hf", "device": "cpu", "context": 100, "llama_library": "libllama.so"})
    options = EngineOptions.of(settings)
    assert (options.context_tokens, options.llama.context_tokens, options.llama.device) == (100, 100, "cpu")
    with pytest.raises(pytest.fail.Exception, match="looked for"):
        load_engine("smollm2", options)


def test_settings_become_options() -> None:
    given = {**WRONG_FOR_HF, "device": "gpu", "context": 2048}
    llama = EngineOptions.of(Settings.load(given)).llama
    for name, value in {**WRONG_FOR_HF, "device": "gpu", "context_tokens": 2048}.items():
        assert getattr(llama, name) == value
    assert EngineOptions.of(Settings.load({})).llama == LlamaOptions()


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"kv_type": "f61"}, {"kv_type": "q8_0", "flash_attention": "off"}])
def test_a_setting_that_makes_no_sense_is_refused_before_a_model_is_looked_for(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(wrong))):
        EngineOptions.of(Settings.load(wrong))


# Files of the wrong form


def test_a_split_gguf_file_is_refused_by_hf(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "missing_packages", lambda name, have=None: [])
    with pytest.raises(UnsupportedModel, match="split into 3 GGUF files.*engine='llamacpp'"):
        load_engine(models["a split GGUF file"], EngineOptions(engine="hf"))


def test_what_is_converted_already_or_no_gguf_file_needs_nothing(tmp_path: Path, tiny_folder: Path) -> None:
    told: list[object] = []
    convert_gguf(ModelFiles("folder", tiny_folder, None), lambda *what: told.append(what))
    converted = ModelFiles("both", tiny_folder, tmp_path / "gone.gguf")
    assert converted.converted
    convert_gguf(converted, lambda *what: told.append(what))
    assert not told


@pytest.mark.parametrize(
    "what", ["a folder", "a folder that was pulled", "a repository in folder form in the hub's cache"]
)
def test_a_folder_is_refused_by_llamacpp(what: str, models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "missing_packages", lambda name, have=None: [])
    with pytest.raises(NotAModel, match="Hugging Face form; llama.cpp needs a GGUF file.*engine='hf'"):
        load_engine(models[what], EngineOptions(engine="llamacpp"))


@pytest.mark.parametrize("engine", ["auto", "hf", "llamacpp", "onnx"])
@pytest.mark.parametrize("what", ["a file that is not there", "a folder that is not there", "a name nobody knows"])
def test_a_model_that_is_not_there_is_a_sentence(
    what: str, engine: str, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "missing_packages", lambda name, have=None: [])
    with pytest.raises(ModelError) as raised:
        load_engine(models[what], EngineOptions(engine=engine))
    assert isinstance(raised.value, (ModelNotFound, NotAModel)) and str(raised.value).rstrip().endswith((".", "?"))


def test_a_name_that_no_model_of_ollama_can_have_is_a_sentence() -> None:
    with pytest.raises(RekindleError):
        choose_engine("ollama:!!", "auto", BOTH)


@pytest.mark.parametrize("begins", [True, False])
def test_a_converted_model_begins_texts_as_its_gguf_says(begins: bool, tmp_path: Path) -> None:
    files = files_of(write_llama(tmp_path / "model.gguf", begins=begins))
    convert_gguf(files)
    with closing(load_engine(str(files.folder), EngineOptions("hf", "cpu"))) as engine:
        tokens = engine.tokenizer.encode("text")
        chat = engine.tokenizer.encode_chat([Message("user", "text")])
    assert (tokens[0] == BEGINNING) == begins and len(tokens) == 4 + begins
    assert chat.count(BEGINNING) == 2  # the template's own
