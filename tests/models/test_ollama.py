"""Ollama's models, in place: found by the names Ollama gives them, and every way to fail has its sentence."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rekindle.cli.main import app
from rekindle.cli.options import complete_model
from rekindle.engine.load import missing_packages
from rekindle.errors import BrokenModel, ModelError, ModelNotFound, NotAModel, UnsupportedModel
from rekindle.models import ollama, registry
from rekindle.models.ollama import OllamaName, parse_name
from rekindle.models.other_tools import list_in_place
from rekindle.models.pull import obtain, pull
from rekindle.models.sources import OllamaModel, find, parse
from tests.models.ggufs import stranger, write_gguf
from tests.tiny_gguf import write_llama

KIND = "application/vnd.ollama.image."


class Ollama:
    """A folder as Ollama keeps it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs").mkdir(parents=True)
        self.gguf = write_gguf(folder.parent / "source.gguf").read_bytes()

    def blob(self, data: bytes) -> dict[str, Any]:
        """Store a blob; gives its digest and size, as a layer has them."""
        digest = hashlib.sha256(data).hexdigest()
        self.path_of(digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    def path_of(self, digest: str) -> Path:
        return self.folder / "blobs" / f"sha256-{digest.removeprefix('sha256:')}"

    def layer(self, kind: str, data: bytes) -> dict[str, Any]:
        return {"mediaType": KIND + kind, **self.blob(data)}

    def manifest(self, where: str, content: object, kind: str = "manifests") -> Path:
        path = self.folder / kind / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    def add(self, where: str = "registry.ollama.ai/library/llama3.2/latest", *more: dict[str, Any]) -> Path:
        """A model with weights, template, system prompt and parameters; gives its blob."""
        weights = self.layer("model", self.gguf)
        rest = [self.layer(kind, kind.encode()) for kind in ("template", "system", "params", "license")]
        self.manifest(where, {"schemaVersion": 2, "layers": [*rest, weights, *more]})
        return self.path_of(weights["digest"])


@pytest.fixture
def shop(home: Path) -> Ollama:
    return Ollama(home / ".ollama" / "models")


def test_a_model_of_ollama_is_used_in_place(shop: Ollama) -> None:
    blob = shop.add()
    files = find("ollama:llama3.2")
    assert files.gguf == blob.resolve() and files.parts == (blob.resolve(),)
    assert files.name == "ollama:llama3.2:latest" and not files.converted
    assert ":" not in files.folder.name
    assert files == find("ollama:llama3.2:latest", form="gguf") == obtain("ollama:llama3.2", form="gguf")


def test_names_of_users_and_other_registries(shop: Ollama) -> None:
    for where in ("registry.ollama.ai/me/mine/v1", "hf.co/org/name-GGUF/Q4_K_M", "localhost:5000/a/b/c"):
        shop.add(where)
    shop.add("registry.ollama.ai/library/qwen3/0.6b")
    listed = [
        "ollama:hf.co/org/name-GGUF:Q4_K_M",
        "ollama:localhost:5000/a/b:c",
        "ollama:me/mine:v1",
        "ollama:qwen3:0.6b",
    ]
    assert [str(name) for name in ollama.names()] == listed
    assert all(find(name).name == name for name in listed)
    assert find("ollama:hf.co/org/name-gguf:q4_k_m").gguf == find(listed[0]).gguf  # Ollama takes it too
    assert parse("ollama:qwen3:0.6b") == OllamaModel(OllamaName("qwen3", "0.6b"))
    assert parse_name("ollama.com/library/qwen3") == parse_name("qwen3") == OllamaName("qwen3")


@pytest.mark.parametrize(
    "name",
    ["", ":", "x:", ":x", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a/b/c/d", "x:../y", "x:.", "-x", "x y", "x\n",
     "a\\b", "%2e%2e", "x" * 200, "h/" + "y" * 200 + "/z", "../h/u/n:t"],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_refused(shop: Ollama, name: str) -> None:
    shop.add()
    for ask in (find, pull, obtain):
        with pytest.raises(ModelNotFound, match="is no name of an Ollama model. Write ollama:NAME"):
            ask(f"ollama:{name}")


def test_a_missing_model_is_told_with_what_is_near(shop: Ollama) -> None:
    for tag in ("1b", "3b"):
        shop.add(f"registry.ollama.ai/library/llama3.2/{tag}")
    shop.add("registry.ollama.ai/library/mistral/latest")
    with pytest.raises(ModelNotFound) as caught:
        find("ollama:llama3.2")
    assert str(caught.value) == (
        "Ollama has no llama3.2:latest. It has ollama:llama3.2:1b, ollama:llama3.2:3b. "
        "Get it with: ollama pull llama3.2:latest"
    )
    with pytest.raises(ModelNotFound, match="It has ollama:mistral:latest. Get it with: ollama pull mistrall:latest"):
        find("ollama:mistrall")
    with pytest.raises(ModelNotFound, match="It has ollama:llama3.2:1b, .*ollama:mistral:latest. Get it with"):
        obtain("ollama:zzz")
    with pytest.raises(ModelNotFound, match="Unknown model 'mistral'. Did you mean ollama:mistral:latest"):
        find("mistral")


def test_no_ollama_is_told_with_where_it_was_looked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match=r"no models here \(looked in .*\.ollama/models.*Set OLLAMA_MODELS"):
        find("ollama:x")
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "nowhere"))
    with pytest.raises(ModelNotFound, match=r"looked in [^,]*nowhere\)"):
        find("ollama:x")
    assert ollama.names() == []


def test_the_variable_is_obeyed_and_the_service_is_looked_at_last(
    shop: Ollama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shop.add("registry.ollama.ai/library/both/latest")
    service = Ollama(tmp_path / "service" / "models")
    theirs = service.add("registry.ollama.ai/library/both/latest")
    service.add("registry.ollama.ai/library/served/latest")
    assert find("ollama:both").gguf == own.resolve()
    assert find("ollama:served").gguf == theirs.resolve()
    assert list(map(str, ollama.names())) == ["ollama:both:latest", "ollama:served:latest"]
    monkeypatch.setenv("OLLAMA_MODELS", str(service.folder))
    assert find("ollama:both").gguf == theirs.resolve()


def test_folders_that_are_links_are_followed(shop: Ollama, tmp_path: Path, home: Path) -> None:
    blob = shop.add()
    moved = Path(shutil.move(shop.folder / "blobs", tmp_path / "large disk"))
    (shop.folder / "blobs").symlink_to(moved, target_is_directory=True)
    assert find("ollama:llama3.2").gguf == (moved / blob.name).resolve()


def test_newer_manifests_are_read(shop: Ollama) -> None:
    """`manifests-v2` links to a blob; a list of manifests has one for each runner."""
    weights = shop.layer("model", shop.gguf)
    inner = shop.blob(json.dumps({"layers": [weights]}).encode())
    kind = "application/vnd.ollama.manifest.list.v2+json"
    shop.manifest("ollama.com/library/new/latest", {"layers": [weights]}, "manifests-v2")
    choices = [{"runner": "mlx", "format": "safetensors", "layers": []}, {"runner": "llamacpp", **inner}]
    shop.manifest("ollama.com/library/list/latest", {"mediaType": kind, "manifests": choices}, "manifests-v2")
    inline = [{"format": "gguf", "layers": [weights]}]
    shop.manifest("ollama.com/library/inline/latest", {"mediaType": kind, "manifests": inline}, "manifests-v2")
    for name in ("new", "list", "inline"):
        assert find(f"ollama:{name}").gguf == shop.path_of(weights["digest"]).resolve()
    for damage in (choices[:1], [], None, [7]):
        shop.manifest("ollama.com/library/list/latest", {"mediaType": kind, "manifests": damage}, "manifests-v2")
        with pytest.raises(NotAModel, match="not here as GGUF, only for other runners"):
            find("ollama:list")


def test_an_older_blob_with_a_colon_in_its_name_is_found(shop: Ollama) -> None:
    blob = shop.add()
    older = blob.rename(blob.with_name(blob.name.replace("-", ":")))
    assert find("ollama:llama3.2").gguf == older.resolve()


def test_a_vision_model_is_used_without_its_projector(shop: Ollama) -> None:
    blob = shop.add("registry.ollama.ai/library/llava/latest", shop.layer("projector", b"GGUF clip"))
    assert find("ollama:llava").parts == (blob.resolve(),)


def test_an_adapter_is_refused_by_name(shop: Ollama) -> None:
    shop.add("registry.ollama.ai/library/tuned/latest", shop.layer("adapter", b"GGUF lora"))
    with pytest.raises(UnsupportedModel, match=r"ollama:tuned:latest puts an adapter \(LoRA\) over its weights"):
        find("ollama:tuned")


def test_several_weights_are_refused(shop: Ollama) -> None:
    shop.add("registry.ollama.ai/library/two/latest", shop.layer("model", b"GGUF more"))
    with pytest.raises(UnsupportedModel, match="ollama:two:latest has its weights in 2 layers"):
        find("ollama:two")


def test_a_model_without_gguf_is_told(shop: Ollama) -> None:
    shop.manifest("registry.ollama.ai/library/big/cloud", {"layers": [shop.layer("license", b"x")]})
    with pytest.raises(NotAModel, match="ollama:big:cloud has no weights here: it runs on Ollama's servers"):
        find("ollama:big:cloud")
    tensor = {**shop.layer("tensor", b"x"), "mediaType": f"{KIND}tensor; name=a; dtype=BF16"}
    shop.manifest("registry.ollama.ai/library/mlx/latest", {"layers": [tensor]})
    with pytest.raises(NotAModel, match="ollama:mlx:latest is kept as single tensors, not as GGUF"):
        find("ollama:mlx")


def test_an_embedder_is_told(shop: Ollama) -> None:
    shop.gguf = write_gguf(shop.folder / "bert.gguf", architecture="nomic-bert").read_bytes()
    shop.add("registry.ollama.ai/library/nomic-embed-text/latest")
    with pytest.raises(NotAModel, match=r"computes embeddings \(nomic-bert\)"):
        find("ollama:nomic-embed-text")
    assert [(other.name, other.kind) for other in list_in_place()] == [("ollama:nomic-embed-text:latest", "embedder")]


def test_a_missing_or_cut_blob_is_told(shop: Ollama) -> None:
    blob = shop.add()
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-100])
    with pytest.raises(BrokenModel, match="bytes, the manifest of ollama:llama3.2:latest says .* ollama pull llama3.2"):
        find("ollama:llama3.2")
    blob.unlink()
    with pytest.raises(
        BrokenModel, match=f"lacks its file .*{blob.name}. Get it again with: ollama pull llama3.2:latest"
    ):
        find("ollama:llama3.2")
    blob.with_name(f"{blob.name}-partial-0").touch()
    with pytest.raises(BrokenModel, match="it was not fetched to the end"):
        find("ollama:llama3.2")
    blob.mkdir()
    with pytest.raises(BrokenModel, match="lacks its file"):
        find("ollama:llama3.2")
    assert list_in_place() == []


def test_a_cut_blob_is_told_also_without_a_size(shop: Ollama) -> None:
    layer = shop.layer("model", shop.gguf[:-100])
    shop.manifest("registry.ollama.ai/library/cut/latest", {"layers": [{**layer, "size": None}]})
    with pytest.raises(BrokenModel, match="ends after"):
        find("ollama:cut")
    shop.manifest("registry.ollama.ai/library/no/latest", {"layers": [shop.layer("model", b"no model")]})
    with pytest.raises(NotAModel, match="not a GGUF file"):
        find("ollama:no")


@pytest.mark.parametrize(
    "digest",
    ["sha256:../../x", "sha256-" + "../" * 21 + "x", "sha256:" + "g" * 64, "sha256:" + "0" * 63, "sha256:" + "0" * 65,
     "sha512:" + "0" * 64, "/etc/passwd", "sha256:" + "0" * 63 + "/", "sha256:" + "0" * 64 + "\n", "", None, 7, ["x"]],
)  # fmt: skip
def test_a_digest_that_is_none_is_refused(shop: Ollama, digest: object) -> None:
    shop.manifest(
        "registry.ollama.ai/library/bad/latest",
        {"layers": [{"mediaType": f"{KIND}model", "digest": digest, "size": 3}]},
    )
    with pytest.raises(BrokenModel, match="which is no SHA-256 digest. Get it again with: ollama pull bad:latest"):
        find("ollama:bad")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"layers": ' + b"9" * 10_000 + b"}", "is not JSON"),
        (b"[" + b"0," * (3 << 20) + b"0]", "larger than 4,194,304 bytes"),
        (b"[]", "it is not an object"),
        (b"null", "it is not an object"),
        (b"{}", "lists no layers"),
        (b'{"layers": {}}', "lists no layers"),
        (b'{"layers": [[]]}', "lists no layers"),
        (b'{"layers": [7]}', "lists no layers"),
    ],
    ids=range(12),
)
def test_a_hostile_manifest_is_a_damaged_one(shop: Ollama, content: bytes, words: str) -> None:
    shop.manifest("registry.ollama.ai/library/bad/latest", content)
    with pytest.raises(BrokenModel, match=f"{words}.*ollama pull bad:latest"):
        find("ollama:bad")
    assert list_in_place() == []


def test_a_manifest_that_links_to_itself_is_told(shop: Ollama) -> None:
    path = shop.manifest("registry.ollama.ai/library/loop/latest", b"")
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(BrokenModel, match="cannot be read"):
        find("ollama:loop")


def test_what_is_no_manifest_is_not_listed(shop: Ollama) -> None:
    shop.add()
    for stray in ("registry.ollama.ai/library/llama3.2/.DS_Store", ".hidden/a/b/c", "registry.ollama.ai/x/y/-t"):
        shop.manifest(stray, b"{}")
    (shop.folder / "manifests" / "registry.ollama.ai" / "library" / "empty" / "folder").mkdir(parents=True)
    assert list(map(str, ollama.names())) == ["ollama:llama3.2:latest"]
    with pytest.raises(ModelNotFound, match="Ollama has no empty:folder"):
        find("ollama:empty:folder")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ollama]:
    """The folder of a service, where another user may go (pytest's own folders are closed)."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        shop = Ollama(Path(folder) / "models")
        monkeypatch.setenv("OLLAMA_MODELS", str(shop.folder))
        shop.add()
        yield shop
        for path in (shop.folder, shop.folder / "blobs"):
            path.chmod(0o755)


@pytest.mark.parametrize("closed", [".", "blobs", "manifests/registry.ollama.ai", "blob"])
def test_what_only_the_service_may_read_is_told(service: Ollama, closed: str) -> None:
    blob = find("ollama:llama3.2").gguf
    assert blob is not None
    path = blob if closed == "blob" else service.folder / closed
    path.chmod(0)
    with stranger():
        with pytest.raises(ModelNotFound, match=r"is closed to this user, .*usermod -aG ollama \$USER"):
            ollama.find_weights(OllamaName("llama3.2"))
        assert list_in_place() == []
    path.chmod(0o755)


def test_a_closed_folder_does_not_hide_an_open_one(
    service: Ollama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OLLAMA_MODELS")
    closed = service.folder.parent / "closed"
    closed.mkdir(mode=0)
    monkeypatch.setattr(ollama, "folders", lambda: [closed / "models", service.folder])
    with stranger():
        assert ollama.find_weights(OllamaName("llama3.2")).parent.name == "blobs"
        assert [other.name for other in list_in_place()] == ["ollama:llama3.2:latest"]


def test_a_pulled_one_is_listed_once_and_follows_ollama(shop: Ollama) -> None:
    old = shop.add()
    entry = pull("ollama:llama3.2")
    assert entry.name == "ollama:llama3.2:latest" and entry.in_place and entry.source == "Ollama"
    assert entry.size_bytes() >= old.stat().st_size
    listed = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)
    assert [one["name"] for one in listed] == ["ollama:llama3.2:latest"]
    shop.gguf = write_gguf(shop.folder / "newer.gguf", tensors=5).read_bytes()
    new = shop.add()
    assert new != old and old.is_file()
    assert find("ollama:llama3.2").gguf == pull("ollama:llama3.2").files.gguf == new.resolve()
    assert registry.remove("ollama:llama3.2:latest").in_place and new.is_file()


def test_list_shows_them_behind_what_was_pulled(shop: Ollama, tiny_folder: Path) -> None:
    blob = shop.add()
    shop.manifest("registry.ollama.ai/library/bad/latest", b"{")
    pull(str(tiny_folder))
    first, second = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)
    assert first["name"] == "tiny"
    assert second == {
        "name": "ollama:llama3.2:latest",
        "kind": "decoder",
        "source": "Ollama",
        "bytes": blob.stat().st_size,
        "folder": None,
        "gguf": str(blob),
        "in_place": True,
        "added": None,
        "graphs": {},
    }
    table = CliRunner().invoke(app, ["list"]).stdout
    assert table.index("tiny") < table.index("ollama:llama3.2:latest") < table.index("not pulled")
    assert "in place: Ollama" in " ".join(table.split())


def test_list_says_which_it_cannot_use_and_why(shop: Ollama) -> None:
    shop.add()
    shop.manifest("registry.ollama.ai/library/big/cloud", {"layers": [shop.layer("license", b"x")]})
    done = CliRunner().invoke(app, ["list"])
    assert done.exit_code == 0 and "ollama:llama3.2:latest" in done.stdout and "ollama:big" not in done.stdout
    [line] = done.stderr.splitlines()
    assert line.startswith("note: ollama:big:cloud has no weights here: it runs on Ollama's servers")


def test_list_says_that_a_folder_is_closed(service: Ollama) -> None:
    (service.folder / "manifests").chmod(0)
    said: list[str] = []
    with stranger():
        assert list_in_place(said.append) == []
    (service.folder / "manifests").chmod(0o755)
    [sentence] = said
    assert sentence.startswith("Ollama's models cannot be listed: ") and "usermod -aG ollama $USER" in sentence


def test_run_takes_one_at_once_and_says_if_it_must_convert_it(
    shop: Ollama, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shop.gguf = write_llama(tmp_path / "tiny.gguf").read_bytes()
    shop.add()
    command = ["run", "ollama:llama3.2", "hi", "-n", "2", "--json"]
    first, second = (CliRunner().invoke(app, command) for _ in range(2))
    assert first.exit_code == second.exit_code == 0, first.output
    assert json.loads(first.stdout)["tokens"] == json.loads(second.stdout)["tokens"]
    said = [record.message for record in caplog.records if record.name == "rekindle.engine"]
    wanted = (
        []
        if not missing_packages("llamacpp")
        else ["llama.cpp is not installed, so ollama:llama3.2:latest is converted"]
    )
    assert [sentence[: len(want)] for sentence, want in zip(said, wanted, strict=True)] == wanted


def test_shells_complete_them(shop: Ollama) -> None:
    shop.add()
    shop.add("registry.ollama.ai/library/qwen3/0.6b")
    assert complete_model("ollama:l") == ["ollama:llama3.2:latest"]
    assert complete_model("oll") == ["ollama:llama3.2:latest", "ollama:qwen3:0.6b"]


def test_a_user_without_a_home_has_no_ollama(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert ollama.names() == [] and list_in_place() == []
    with pytest.raises(ModelError, match="no models here"):
        ollama.find_weights(OllamaName("x"))


def test_nothing_is_written_to_ollamas_folder(shop: Ollama) -> None:
    shop.add()
    before = sorted((str(path), path.stat().st_mtime_ns) for path in shop.folder.rglob("*"))
    find("ollama:llama3.2")
    pull("ollama:llama3.2")
    list_in_place()
    registry.remove("ollama:llama3.2:latest")
    assert sorted((str(path), path.stat().st_mtime_ns) for path in shop.folder.rglob("*")) == before
    assert shop.folder.samefile(ollama.folders()[0])
