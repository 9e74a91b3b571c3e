"""GGUF files of repositories, in place in the hub's cache and LM Studio's folders; chosen by quantization."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from rekindle.cli.main import app
from rekindle.errors import BrokenModel, ModelNotFound, NotAModel
from rekindle.models import registry
from rekindle.models.files import ModelFiles, part_names
from rekindle.models.hub import choose_file, hub_cache, model_names, spec_for
from rekindle.models.other_tools import list_in_place, studio_folders
from rekindle.models.pull import obtain, pull
from rekindle.models.sources import GgufModel, HubModel, find, gguf_files, parse
from tests.models.ggufs import ELSEWHERE, REVISION, Hub, cached, folder_form, stranger, write_gguf

# Where things are.


@pytest.mark.parametrize(
    ("variables", "where"),
    [
        ({}, "~/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x", "HF_HOME": "~/h"}, "~/h/hub"),
        ({"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/c"}, "/c"),
        ({"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/c", "HF_HUB_CACHE": "$HOME/d"}, "~/d"),
        ({"HF_HOME": "", "HF_HUB_CACHE": ""}, "~/.cache/huggingface/hub"),
    ],
)
def test_the_hubs_cache_is_where_its_client_has_it(
    variables: dict[str, str], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub_cache() == Path(where).expanduser()


def test_lm_studio_is_where_its_settings_say(home: Path) -> None:
    assert studio_folders() == [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]
    (home / ".lmstudio").mkdir()
    settings = home / ".lmstudio" / "settings.json"
    settings.write_text(json.dumps({"downloadsFolder": "~/large"}))
    (home / ".lmstudio-home-pointer").write_text(f"{home / 'moved'}\n")
    assert studio_folders()[:3] == [home / "moved" / "models", home / "large", home / ".lmstudio" / "models"]
    for damage in ("", "{", "[]", "[" * 100_000, '{"downloadsFolder": 7}', '{"downloadsFolder": ""}'):
        settings.write_text(damage)
        assert studio_folders()[1] == home / ".lmstudio" / "models"
    settings.write_text(json.dumps({"downloadsFolder": "a\0b"}))
    with pytest.raises(ModelNotFound):
        find("org/name")
    assert list_in_place() == []


# In the hub's cache.


def test_a_gguf_in_the_hubs_cache_is_used_in_place() -> None:
    path = cached("org/name-GGUF", "name-Q8_0.gguf")
    for spec in ("org/name-GGUF", "org/name-GGUF:Q8_0", "org/name-GGUF:q8_0", "org/name-GGUF/name-Q8_0.gguf"):
        files = find(spec)
        assert files.gguf == path.resolve().parent.parent / "snapshots" / REVISION / path.name
        assert files.name == "org/name-GGUF:Q8_0" and files == obtain(spec, form="gguf")
    assert "/" not in files.folder.name.removeprefix("org-") and ":" not in files.folder.name


def test_the_main_branch_comes_first_then_the_newest(home: Path) -> None:
    main = cached("org/name", "a-Q8_0.gguf")
    for age, revision in enumerate(("old", "new")):
        cached("org/name", "a-Q8_0.gguf", revision)
        other = cached("org/name", "a-Q6_K.gguf", revision)
        os.utime(other.parent, (age, age))
    assert find("org/name:Q8_0").gguf == main
    assert find("org/name:Q6_K").gguf == other
    shutil.rmtree(main.parent)
    assert find("org/name:Q8_0").gguf == other.with_name("a-Q8_0.gguf")


def test_links_to_nowhere_and_damaged_refs_are_as_good_as_nothing() -> None:
    path = cached("org/name", "a-Q8_0.gguf")
    (path.parents[2] / "refs" / "main").write_bytes(b"\xff../../..\n")
    assert find("org/name").gguf == path
    path.resolve().unlink()
    with pytest.raises(ModelNotFound, match="org/name is not on this machine. Get it with: rekindle pull org/name"):
        find("org/name")


def test_files_in_folders_of_a_repository_are_found() -> None:
    path = cached("org/name", "UD-Q4_K_XL/name-UD-Q4_K_XL.gguf", parts=3)
    cached("org/name", "BF16/name.gguf")
    assert find("org/name:UD-Q4_K_XL").gguf == find("org/name:Q4_K_XL").gguf == path
    assert find("org/name:bf16").gguf == path.parents[1] / "BF16" / "name.gguf"


# LM Studio.


def test_a_gguf_of_lm_studio_is_used_in_place(home: Path) -> None:
    path = write_gguf(home / ".lmstudio" / "models" / "org" / "name-GGUF" / "name-Q4_0.gguf")
    older = write_gguf(home / ".cache" / "lm-studio" / "models" / "org" / "other" / "other.gguf")
    assert find("org/name-GGUF").gguf == path and find("org/name-GGUF:q4_0").name == "org/name-GGUF:Q4_0"
    assert find("org/other").gguf == older and find("org/other").name == "org/other/other.gguf"


def test_the_hubs_cache_wins_over_lm_studio(home: Path) -> None:
    write_gguf(home / ".lmstudio" / "models" / "org" / "name" / "a-Q4_0.gguf")
    studio = write_gguf(home / ".lmstudio" / "models" / "org" / "name" / "a-Q6_K.gguf")
    hub = cached("org/name", "a-Q4_0.gguf")
    assert find("org/name").gguf == hub and find("org/name:Q6_K").gguf == studio


# Which file is meant.

NAMES = ["m-Q4_K_M.gguf", "m-Q4_0.gguf", "m-Q4_K_S.gguf", "m-IQ4_XS.gguf", "m-BF16.gguf", "m-F16.gguf"]


def test_the_default_is_q4_k_m_then_q4_0_then_the_only_one() -> None:
    assert choose_file("o/n", NAMES, None) == "m-Q4_K_M.gguf"
    assert choose_file("o/n", NAMES[1:], None) == "m-Q4_0.gguf"
    assert choose_file("o/n", NAMES[4:5], None) == "m-BF16.gguf"
    assert choose_file("o/n", [], None) is None
    with pytest.raises(NotAModel) as caught:
        choose_file("o/n", NAMES[2:], None)
    assert str(caught.value) == (
        "o/n is not one model but 4 GGUF files. Name one: o/n:Q4_K_S, o/n:IQ4_XS, o/n:BF16, o/n:F16"
    )


def test_a_quantization_is_matched_whole() -> None:
    assert choose_file("o/n", NAMES, "f16") == "m-F16.gguf"
    assert choose_file("o/n", NAMES, "Q4_K") is None and choose_file("o/n", NAMES, "Q4_XS") is None
    assert choose_file("o/n", ["x.q5_k_m.gguf", "tiny_Q5_0.gguf", "x.i1-Q6_K.gguf"], "Q5_0") == "tiny_Q5_0.gguf"
    assert choose_file("o/n", ["x.q5_k_m.gguf", "x.i1-Q6_K.gguf"], "Q6_K") == "x.i1-Q6_K.gguf"
    assert choose_file("o/n", NAMES, ".*") is None
    with pytest.raises(
        NotAModel, match="o/n:Q8_0 is not one model but 2 GGUF files. Name one: o/n/a-Q8_0.gguf, o/n/b-"
    ):
        choose_file("o/n", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0")


def test_a_file_is_named_exactly_or_by_its_last_name() -> None:
    assert choose_file("o/n", ["a/x.gguf", "x.gguf"], "x.gguf") == "x.gguf"
    assert choose_file("o/n", ["a/y.gguf", "x.gguf"], "y.gguf") == "a/y.gguf"
    assert choose_file("o/n", ["x.gguf"], "../x.gguf") is None
    assert choose_file("o/n", ["x-00001-of-00002.gguf"], "x-00002-of-00002.gguf") == "x-00001-of-00002.gguf"


def test_projectors_and_matrices_are_never_the_model() -> None:
    others = ["mmproj-F16.gguf", "m.mmproj-Q8_0.gguf", "MMPROJ.gguf", "imatrix_unsloth.gguf", "m-imatrix.gguf"]
    assert model_names([*others, "README.md", "m.safetensors", "sub/m-Q8_0.GGUF"]) == ["sub/m-Q8_0.GGUF"]


words = st.lists(
    st.builds(
        "{}{}{}{}.gguf".format,
        st.sampled_from(["", "Q4_K_M/", "UD/"]),
        st.sampled_from(["m", "Qwen3-0.6B", "x_y"]),
        st.sampled_from(["", "-Q4_K_M", ".q4_0", "_F16", "-UD-Q4_K_XL", "-BF16", "-IQ1_S-v2", "-Q4_K_M-Q8_0"]),
        st.sampled_from(["", "-00001-of-00002", "-00002-of-00002"]),
    ),
    min_size=1,
)


@given(words)
def test_what_is_said_to_type_means_that_file_and_no_other(files: list[str]) -> None:
    names = model_names(files)
    for name in names:
        source = parse(spec_for("org/name", name, names))
        assert isinstance(source, HubModel) and source.repository == "org/name"
        assert choose_file("org/name", names, source.wanted) == name


def test_an_unclear_name_is_not_fetched_again(hub: Hub) -> None:
    cached("org/name", "a-Q8_0.gguf")
    cached("org/name", "a-Q6_K.gguf")
    for ask in (find, obtain, pull):
        with pytest.raises(NotAModel, match="Name one: org/name:Q6_K, org/name:Q8_0"):
            ask("org/name")
    assert hub.asked == []


def test_what_is_here_is_told_when_another_is_wanted() -> None:
    cached("org/name", "a-Q8_0.gguf")
    with pytest.raises(ModelNotFound) as caught:
        find("org/name:Q4_K_M")
    assert str(caught.value) == (
        "org/name:Q4_K_M is not on this machine (but org/name:Q8_0). Get it with: rekindle pull org/name:Q4_K_M"
    )


def test_words_for_repositories_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse("org/name:Q4_K_M") == HubModel("org/name", "Q4_K_M")
    assert parse("org/name/a/b.gguf") == HubModel("org/name", "a/b.gguf")
    assert parse("org/name.gguf") == GgufModel(Path("org/name.gguf"))
    assert parse("./org/name/b.gguf") == GgufModel(Path("org/name/b.gguf"))
    assert parse("org/name:") is None and parse("org/name:a/b") is None
    assert parse("org/" + "x" * 300) == HubModel("org/" + "x" * 300) and parse("x" * 300) is None
    blob = write_gguf(tmp_path / "org" / "name" / "b.gguf")
    assert parse("org/name/b.gguf") == GgufModel(Path("org/name/b.gguf"))
    nameless = blob.rename(tmp_path / "sha256-0")
    assert parse(str(nameless)) == GgufModel(nameless) and find(str(nameless)).gguf == nameless


# Split files.


def test_the_first_part_stands_for_all(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "big-Q4_0.gguf", parts=3)
    files = find(str(first.with_name("big-Q4_0-00002-of-00003.gguf")))
    assert files.gguf == first and files.name == "big-Q4_0"
    assert [part.name for part in files.parts] == [f"big-Q4_0-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert pull(str(first)).size_bytes() >= sum(part.stat().st_size for part in files.parts)
    assert find("big-Q4_0").parts == files.parts
    files.parts[2].unlink()
    assert registry.lookup("big-Q4_0") is None


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "big.gguf", parts=3)
    for missing in ("big-00003-of-00003.gguf", "big-00001-of-00003.gguf"):
        (tmp_path / missing).rename(tmp_path / "away")
        with pytest.raises(BrokenModel, match=f"is one of 3 parts, and {missing} is not beside it"):
            find(str(tmp_path / "big-00002-of-00003.gguf"))
        (tmp_path / "away").rename(tmp_path / missing)
    with pytest.raises(ModelNotFound, match="no file"):
        find(str(tmp_path / "none-00001-of-00003.gguf"))
    assert find(str(first)).gguf == first


def test_a_missing_part_in_a_cache_is_named() -> None:
    first = cached("org/name", "big-Q4_0.gguf", parts=3)
    assert len(find("org/name").parts) == 3
    for number in (2, 1):
        path = first.with_name(f"big-Q4_0-0000{number}-of-00003.gguf")
        path.unlink()
        with pytest.raises(
            BrokenModel, match=f"org/name:Q4_0 lacks {path.name}, one of its 3 parts. Get it with: rekin"
        ):
            find("org/name")
        assert list_in_place() == []


def test_a_whole_one_is_preferred_to_an_incomplete_one(home: Path) -> None:
    first = cached("org/name", "big-Q4_0.gguf", parts=2)
    first.with_name("big-Q4_0-00002-of-00002.gguf").unlink()
    studio = write_gguf(home / ".lmstudio" / "models" / "org" / "name" / "big-Q4_0.gguf", parts=2)
    assert find("org/name").gguf == studio
    assert [(other.name, other.gguf) for other in list_in_place()] == [("org/name:Q4_0", studio)]


def test_a_link_with_another_name_leads_to_all_parts(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "big.gguf", parts=2)
    (tmp_path / "easy.gguf").symlink_to(first)
    assert find(str(tmp_path / "easy.gguf")).parts == find(str(first)).parts


def test_another_conversion_when_any_part_changes(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "big.gguf", parts=2)
    before = gguf_files(first)
    os.utime(before.parts[1], (1, 1))
    assert gguf_files(first).folder != before.folder


def test_part_names_are_only_those_of_split_files() -> None:
    assert part_names("x.gguf") == ("x.gguf",)
    assert part_names("x-00003-of-00002.gguf") == ("x-00003-of-00002.gguf",)
    assert part_names("x-00000-of-00000.gguf") == ("x-00000-of-00000.gguf",)
    assert part_names("a/x-00002-of-00002.gguf") == ("a/x-00001-of-00002.gguf", "a/x-00002-of-00002.gguf")
    assert ModelFiles("x", Path()).parts == ()


# What an engine takes.


def test_a_model_in_folder_form_alone_is_no_gguf(tiny_folder: Path, tmp_path: Path, hub: Hub) -> None:
    folder_form(tiny_folder, "org/name")
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "mine"))
    pull(str(folder))
    for spec in ("org/name", "mine", str(folder)):
        for ask in (find, obtain):
            with pytest.raises(NotAModel, match=r"llama.cpp needs a GGUF file. Pull one \(.*or use engine='hf'"):
                ask(spec, form="gguf")
    assert find("mine").gguf is None and hub.asked == []


def test_folder_form_in_the_hubs_cache_stays_with_the_hubs_client(tiny_folder: Path, hub: Hub) -> None:
    folder = folder_form(tiny_folder, "org/name")
    gguf = cached("org/name", "a-Q4_0.gguf")
    with pytest.raises(ModelNotFound, match="rekindle pull org/name"):
        find("org/name")
    hub.publish("org/name", *(path.name for path in tiny_folder.iterdir()))
    assert obtain("org/name").folder == folder
    assert find("org/name").gguf is None and find("org/name", form="gguf").gguf == gguf
    assert find("org/name:Q4_0").gguf == gguf


def test_a_projector_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotAModel, match="vision is the projector of a vision model, not the model"):
        find(str(write_gguf(tmp_path / "vision.gguf", architecture="clip")))


def test_an_embedder_is_told(tiny_folder: Path, tmp_path: Path, home: Path) -> None:
    write_gguf(home / ".lmstudio" / "models" / "nomic-ai" / "embed" / "embed.gguf", architecture="nomic-bert")
    with pytest.raises(NotAModel, match=r"computes embeddings \(nomic-bert\), it does not generate text"):
        find("nomic-ai/embed")
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "bert"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    pull(str(folder))
    with pytest.raises(NotAModel, match="computes embeddings"):
        find("bert", form="gguf")


# In the list.


def test_list_shows_what_is_there(home: Path, hub: Hub) -> None:
    cached("org/name", "a-Q8_0.gguf")
    split = cached("org/name", "b-Q4_0.gguf", parts=2)
    cached("org/name", "mmproj-F16.gguf")
    write_gguf(home / ".lmstudio" / "models" / "org" / "name" / "a-Q8_0.gguf")
    write_gguf(home / ".lmstudio" / "models" / "us" / "mine" / "mine.gguf")
    write_gguf(home / ".lmstudio" / "models" / ".hidden" / "x" / "x.gguf")
    pull("org/name:Q8_0")
    first, *rest = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)
    assert first["name"] == "org/name:Q8_0" and first["in_place"]
    assert [(one["name"], one["source"], one["in_place"]) for one in rest] == [
        ("org/name:Q4_0", "Hugging Face cache", True),
        ("us/mine/mine.gguf", "LM Studio", True),
    ]
    assert rest[0]["bytes"] == sum(part.stat().st_size for part in find("org/name:Q4_0").parts)
    assert rest[0]["gguf"] == str(split)
    assert all(find(one["name"]).gguf == Path(one["gguf"]) for one in rest)
    assert "in place: LM Studio" in " ".join(CliRunner().invoke(app, ["list"]).stdout.split())


def test_an_unreadable_folder_never_breaks_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for name in ELSEWHERE:
            monkeypatch.setenv(name, folder)
        monkeypatch.chdir("/")
        path = cached("org/name", "a-Q8_0.gguf")
        for closed in (path.resolve(), path.parent, path.parents[1], path.parents[2], Path(folder)):
            mode = closed.stat().st_mode
            closed.chmod(0)
            with stranger():
                assert [other.name for other in list_in_place()] == (
                    ["org/name:Q8_0"] if closed == path.resolve() else []
                )
            closed.chmod(mode)
        path.resolve().chmod(0)
        with stranger(), pytest.raises(ModelNotFound, match="may not be read by this user. Change its permissions"):
            find("org/name")
