"""Publishing: what is in the folder, who may put it there, and what happens when several do at once."""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle.chunks.scores import unscored
from rekindle.codec.cipher import SALT_BYTES, Secret, read_secret
from rekindle.core.cells import Cell
from rekindle.core.chunk import PromptLayout, chunk_digest
from rekindle.core.keys import token_bytes
from rekindle.core.kv import Kv, Span
from rekindle.errors import EntryNotFound, InvalidSetting
from rekindle.remote.client import Origin
from rekindle.remote.index import MAX_ENTRIES, SERVED, ContextNames, Index, IndexEntry, KvModel, listed_depths
from rekindle.remote.ladder import LevelLimit
from rekindle.remote.manifest import Manifest, SignedManifest, canonical
from rekindle.remote.publish.folder import OriginFolder
from rekindle.remote.publish.publisher import Publisher, PublishSource
from rekindle.remote.publish.serve import OriginServer, OriginSettings
from rekindle.remote.signing import SigningKey, TrustedKeys, make_secret, make_signing_key, read_public
from rekindle.remote.slices import Level, decode, encode, largest_bytes, level_named
from tests.remote.conftest import Place
from tests.remote.places import LAYOUT, MODEL, TOKENS, cells_of, fetch_all, find, publish, random_kv, synthetic


def names_in(folder: Path) -> set[str]:
    """All files that a web server could serve."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in files} - {".lock"}


# ---- names


def test_all_files_of_a_folder_are_of_the_format(place: Place) -> None:
    names = names_in(place.folder)
    assert len(names) == 1 + 1 + 3 + 3 + 1  # models, the model, three depths, manifest, tokens, two levels
    assert all(SERVED.fullmatch(name) for name in names)


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=600), shared=st.integers(0, 600))
@settings(max_examples=50)
def test_prompts_share_as_many_digests_as_they_share_chunks(tokens: list[int], shared: int) -> None:
    names, other = ContextNames(), [*tokens[:shared], *(token ^ 1 for token in tokens[shared:])]
    mine, theirs = names.chain(MODEL, tokens), names.chain(MODEL, other)
    common = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))
    assert common == (len(mine) if shared >= len(tokens) else shared // 128)
    assert len(set(mine)) == len(mine) == -(-len(tokens) // 128)


def test_digests_depend_on_everything_that_kv_depends_on() -> None:
    layouts = replace(LAYOUT, layers=LAYOUT.layers[:2]), replace(LAYOUT, dtype="uint8")
    models = [MODEL, replace(MODEL, weights="ab" * 16), replace(MODEL, adapter="cd" * 16)]
    models += [replace(MODEL, layout=layout) for layout in layouts]
    secrets = (None, Secret.new(), Secret.new())
    found = {ContextNames(secret).chain(model, TOKENS)[0] for model in models for secret in secrets}
    assert len(found) == len(models) * len(secrets)


def test_digests_are_the_same_for_every_dtype_device_and_engine_but_names_of_contexts_are_not() -> None:
    names, other = ContextNames(), replace(MODEL, exact="ab" * 16, layout=replace(LAYOUT, dtype="bfloat16"))
    assert names.chain(other, TOKENS) == names.chain(MODEL, TOKENS)
    last = names.chain(MODEL, TOKENS)[-1]
    assert names.context(last, MODEL.exact, "key") != names.context(last, other.exact, "key")


@given(chunks=st.integers(1, 10_000))
def test_a_prompt_looks_where_contexts_are_listed(chunks: int) -> None:
    found = listed_depths(chunks)
    assert found[0] == 1 and found[-1] <= chunks < 2 * found[-1]
    assert set(found) <= set(listed_depths(2 * chunks))


# ---- slices


@given(tokens=st.integers(1, 128), name=st.sampled_from(["raw", "q8", "q5", "q4", "q3", "q2"]))
@settings(max_examples=60)
def test_slices_are_independent_and_never_larger_than_is_allowed(tokens: int, name: str) -> None:
    level, kv = level_named(name, LAYOUT), random_kv(LAYOUT, tokens)
    for layer, one in enumerate(kv):
        data = encode(level, LAYOUT, layer, one)
        assert len(data) <= largest_bytes(LAYOUT, layer, tokens)
        got = decode(data, LAYOUT, layer, tokens)
        assert got.keys.shape == one.keys.shape and got.values.shape == one.values.shape
        for other in {1, tokens + 1, 128} - {tokens}:
            if name != "raw" or other > tokens:
                with pytest.raises(ValueError):
                    decode(data, LAYOUT, layer, other)
        with pytest.raises(ValueError):
            decode(data, LAYOUT, 0 if layer == 2 else 2, tokens)  # of another shape


@given(data=st.binary(max_size=200), magic=st.sampled_from([b"", b"RKr1", b"RKq1"]))
def test_bytes_that_are_no_slice_are_refused(data: bytes, magic: bytes) -> None:
    with pytest.raises(ValueError):
        decode(magic + data, LAYOUT, 0, 128)


def test_levels_have_names_that_are_known() -> None:
    with pytest.raises(InvalidSetting, match="Did you mean 'q5'"):
        level_named("q55", LAYOUT)
    with pytest.raises(InvalidSetting, match="quantizes KV itself"):
        level_named("q5", replace(LAYOUT, dtype="uint8"))
    with pytest.raises(InvalidSetting, match="not the name"):
        Level("../q5", None)


# ---- manifests


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data(), value=_JSON)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_manifest_with_another_value_is_refused_or_still_says_what_it_says(
    data: st.DataObject, value: object, place: Place
) -> None:
    """Whoever has the key may sign anything: it must not make a client stumble."""
    signed = SignedManifest.from_bytes((place.files / "manifest").read_bytes())
    fields = json.loads(signed.peek(place.secret).to_bytes())
    inner = data.draw(st.sampled_from([fields, fields["token_file"], *fields["levels"]]))
    inner[data.draw(st.sampled_from(sorted(inner)))] = value
    body = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    try:
        manifest = Manifest.from_bytes(body)
    except ValueError:
        return
    assert manifest.to_bytes() == body
    assert manifest.title.isprintable() and int(manifest.levels[0].sizes.max()) < 1 << 20


@given(value=_JSON, entry=_JSON)
def test_an_index_of_anything_is_refused_or_is_one(value: object, entry: object) -> None:
    for fields in (value, {"format": "rekindle-index/1", "full": False, "contexts": [entry]}):
        try:
            index = Index.from_bytes(json.dumps(fields).encode())
        except ValueError:
            continue
        assert all(len(one.context) == 32 for one in index.entries)


def test_what_a_terminal_would_obey_does_not_get_into_a_title(tmp_path: Path) -> None:
    key = SigningKey.new()
    context = publish(tmp_path, key, "q2", replace(synthetic(), title="tiny\x1b[2Jmodel\n")).context
    signed = OriginFolder(tmp_path).manifest(context)
    assert signed is not None and signed.peek(None).title == "tiny[2Jmodel"


# ---- publishing


def test_levels_stand_side_by_side_and_what_is_there_is_not_written_again(place: Place) -> None:
    before = {name: (place.folder / name).stat().st_mtime_ns for name in names_in(place.folder) if name.endswith(".kv")}
    more = publish(place.folder, place.key, "q8,q4", secret=place.secret)
    assert more.context == place.context
    assert [(level.name, level.new) for level in more.levels] == [("raw", False), ("q8", True), ("q4", False)]
    after = {name: (place.folder / name).stat().st_mtime_ns for name in names_in(place.folder) if name.endswith(".kv")}
    assert before.items() <= after.items() and len(after) == 3


def test_a_level_that_was_lost_or_damaged_in_size_is_written_again(place: Place) -> None:
    for file in place.files.glob("*.kv"):
        file.write_bytes(file.read_bytes()[:-1])
    again = publish(place.folder, place.key, "raw,q4", secret=place.secret)
    assert all(level.new for level in again.levels)
    assert len(list(place.files.iterdir())) == 4
    with OriginServer(place.folder, OriginSettings(port=0)).running() as url:
        origin = Origin(url, [place.key.public], secret=place.secret)
        found = find(origin)
        assert found is not None and len(fetch_all(origin, found, "q4")) == len(cells_of(found))
        origin.close()


def test_publishers_do_not_overwrite_each_other(place: Place) -> None:
    other = SigningKey.new()
    assert publish(place.folder, other, "q5", secret=place.secret).context != place.context
    with OriginServer(place.folder, OriginSettings(port=0)).running() as url:
        for key, levels in ((place.key, ("raw", "q4")), (other, ("q5",))):
            origin = Origin(url, [key.public], secret=place.secret)
            found = find(origin)
            assert found is not None and found.levels == levels
            origin.close()


def test_a_tenant_that_is_local_is_never_published(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, SigningKey.new(), local_only={"alice", "bob"})
    with pytest.raises(InvalidSetting, match="'alice' is marked local"):
        publisher.publish(synthetic(tenant="alice"), [level_named("raw", LAYOUT)])
    assert names_in(tmp_path) == set()
    assert publisher.publish(synthetic(tenant="carol"), [level_named("raw", LAYOUT)]).tokens == 700


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "origin", SigningKey.new())
    raw = level_named("raw", LAYOUT)
    with pytest.raises(InvalidSetting, match="has 127 tokens"):
        publisher.publish(synthetic(tokens=TOKENS[:127]), [raw])
    for levels in ([], [raw, raw]):
        with pytest.raises(InvalidSetting, match="levels"):
            publisher.publish(synthetic(), levels)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidSetting, match="cannot be used"):
        Publisher(tmp_path / "file", SigningKey.new())


def test_what_fails_leaves_nothing_that_can_be_found(tmp_path: Path) -> None:
    class Lost(Exception):
        pass

    source, done = synthetic(), list[Span]()

    def export(span: Span) -> Kv:
        done.append(span)
        if len(done) == 4:
            raise Lost
        return source.export(span)

    with pytest.raises(Lost):
        publish(tmp_path, SigningKey.new(), "raw,q5", replace(source, export=export))
    assert names_in(tmp_path) == set()


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = SigningKey.new()
    write, left = os.write, [20_000]

    def full(handle: int, data: bytes) -> int:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return write(handle, data)

    monkeypatch.setattr("rekindle.remote.publish.folder.os.write", full)
    with pytest.raises(InvalidSetting, match="No space left"):
        publish(tmp_path, key)
    monkeypatch.undo()
    assert names_in(tmp_path) == set()
    assert publish(tmp_path, key).tokens == 700


def test_files_can_be_read_by_a_web_server_and_are_never_half_written(place: Place) -> None:
    for name in names_in(place.folder):
        assert stat.S_IMODE((place.folder / name).stat().st_mode) == 0o644 & ~_umask()
    assert not list((place.folder / ".parts").iterdir())


def _publish_some(folder: Path, pem: str, numbers: range) -> None:
    key = SigningKey.read(Path(pem))
    for number in numbers:
        publish(folder, key, ("raw", "q5", "q3")[number % 3], synthetic(tokens=(*TOKENS[:256], *([number // 3] * 128))))


def test_publishers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    """Levels of the same contexts, and contexts that begin alike, from several processes."""
    key = make_signing_key(tmp_path / "key")
    folder, context = tmp_path / "origin", multiprocessing.get_context("spawn")
    works = [
        context.Process(target=_publish_some, args=(folder, str(tmp_path / "key"), range(start, 18, 3)))
        for start in range(3)
    ]
    for work in works:
        work.start()
    for work in works:
        work.join()
        assert work.exitcode == 0
    listed = OriginFolder(folder).contexts()
    assert len(listed) == 6
    for one in listed:
        assert one.manifest is not None
        manifest = one.manifest.open(TrustedKeys([key.public]), None)
        assert [level.name for level in manifest.levels] == ["raw", "q5", "q3"]
    names = ContextNames()
    index = OriginFolder(folder).index(names.lookup(names.chain(MODEL, TOKENS[:128])[0]))
    assert {entry.context for entry in index.entries} == {one.context for one in listed}


# ---- passages


def passage_source() -> PublishSource:
    """A context whose tokens 40 to 300 are a passage."""
    layout = PromptLayout(30, (Span(40, 300),))
    digests = chunk_digest(TOKENS[:30]), chunk_digest(TOKENS[40:300])
    return replace(synthetic(tokens=TOKENS[:300]), passage=lambda: unscored(layout, 1, digests, 0.0))


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_passage_is_found_by_its_own_tokens_and_no_more_once_it_is_removed(encrypted: bool, tmp_path: Path) -> None:
    key, secret = SigningKey.new(), Secret.new() if encrypted else None
    context = publish(tmp_path, key, "raw", passage_source(), secret).context
    publish(tmp_path, key, "q4", replace(passage_source(), passage=pytest.fail), secret)  # scored once
    body, head = TOKENS[40:300], chunk_digest(TOKENS[:30])
    with OriginServer(tmp_path, OriginSettings(port=0)).running() as url:
        origin, stranger = Origin(url, [key.public], secret=secret), Origin(url, [SigningKey.new().public])
        found = origin.find_passage(body, MODEL, LevelLimit().allows, head)
        assert found is not None and found.manifest.passage is not None and found.head == head
        assert found.manifest.passage.span == Span(40, 300) and found.levels == ("raw", "q4")
        assert origin.find_passage(body[:-1], MODEL, LevelLimit().allows, head) is None
        assert origin.find_passage(body, replace(MODEL, weights="cc" * 16), LevelLimit().allows, head) is None
        assert stranger.find_passage(body, MODEL, LevelLimit().allows, head) is None
        OriginFolder(tmp_path).remove(context)
        assert origin.find_passage(body, MODEL, LevelLimit().allows, head) is None
        origin.close()
        stranger.close()
    assert names_in(tmp_path) == set()


def test_scores_of_a_passage_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    key = SigningKey.new()
    context = publish(tmp_path, key, "raw", passage_source()).context
    signed = OriginFolder(tmp_path).manifest(context)
    assert signed is not None
    fields = json.loads(signed.body)
    assert Manifest.from_bytes(canonical(fields)).passage is not None
    nan = base64.b64encode(np.full(260, np.nan, "<f2").tobytes()).decode()
    changes: list[dict[str, object]] = [
        {"start": 0}, {"start": 300}, {"stop": 301}, {"stop": 40}, {"intra": -1.0}, {"intra": 1}, {"mass": "much"},
        {"head": "zz"}, {"head_tokens": 41}, {"name": "AA=="}, {"outside": "AA=="}, {"received": nan},
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(ValueError):
            Manifest.from_bytes(canonical({**fields, "passage": {**fields["passage"], **change}}))


# ---- removing


def test_what_is_removed_is_found_no_more_and_the_rest_is(place: Place) -> None:
    other = publish(place.folder, place.key, "q5", synthetic(tokens=TOKENS[:300]), place.secret).context
    folder = OriginFolder(place.folder)
    with pytest.raises(EntryNotFound, match="no context begins"):
        folder.remove("zz")
    with pytest.raises(EntryNotFound):
        folder.remove("")
    assert folder.remove(place.context[:10]) == place.context
    assert not place.files.exists() and [one.context for one in folder.contexts()] == [other]
    with OriginServer(place.folder, OriginSettings(port=0)).running() as url:
        origin = Origin(url, [place.key.public], secret=place.secret)
        found = find(origin)
        assert found is not None and found.manifest.context == other and found.tokens == 300
        origin.close()
    folder.remove(other)
    assert names_in(place.folder) == set()


def test_a_damaged_context_can_be_removed_too(place: Place) -> None:
    (place.files / "manifest").write_bytes(b"damaged")
    (listed,) = OriginFolder(place.folder).contexts()
    assert listed.manifest is None
    OriginFolder(place.folder).remove(place.context)
    assert names_in(place.folder) == set()


def test_an_index_holds_the_newest_and_says_when_there_were_more() -> None:
    index = Index()
    for number in range(MAX_ENTRIES + 3):
        index = index.adding(IndexEntry(f"{number:032x}", "ab" * 16, b"\1\2"))
        assert index.full == (number >= MAX_ENTRIES)
    assert [int(entry.context, 16) for entry in index.entries[:2]] == [MAX_ENTRIES + 2, MAX_ENTRIES + 1]
    assert Index.from_bytes(index.to_bytes()) == index
    again = index.adding(index.entries[5])
    assert len(again.entries) == MAX_ENTRIES and again.entries[0] == index.entries[5]


# ---- encryption


def test_an_origin_sees_neither_tokens_nor_text_nor_kv_nor_equal_slices(tmp_path: Path) -> None:
    """Equal KV in every chunk and layer: nobody without the secret can tell."""
    secret, key = Secret.new(), SigningKey.new()
    layout = replace(LAYOUT, layers=(LAYOUT.layers[0],) * 3)
    model = KvModel("unmistakable-identity", "unmistakable-weights", layout)
    equal = random_kv(layout, 128)[0]
    source = synthetic(model, [7] * 640)
    same = replace(source, export=lambda span: Kv(span, layout, (equal,) * 3), title="unmistakable-title")
    publish(tmp_path / "plain", key, "raw,q4", same)
    publish(tmp_path / "sealed", key, "raw,q4", same, secret)
    told = {"plain": b"", "sealed": b""}
    for name in told:
        folder = tmp_path / name
        told[name] = b"".join((folder / file).read_bytes() for file in sorted(names_in(folder)))
        told[name] += " ".join(names_in(folder)).encode()
    slices = [encode(level_named(name, layout), layout, 0, equal) for name in ("raw", "q4")]
    telling = [b"unmistakable-identity", b"unmistakable-weights", b"unmistakable-title", token_bytes([7] * 4), *slices]
    for text in (*telling, slices[0][30:60]):
        assert text in told["plain"] and text not in told["sealed"]
    # Who guesses the text cannot ask for it either.
    plain_names, sealed_names = names_in(tmp_path / "plain"), names_in(tmp_path / "sealed")
    assert not plain_names & sealed_names
    (context,) = OriginFolder(tmp_path / "sealed").contexts()
    assert context.manifest is not None
    manifest = context.manifest.open(TrustedKeys([key.public]), secret)
    cells = [Cell(chunk, layer) for chunk in range(5) for layer in range(3)]
    for level in manifest.levels:
        data = (tmp_path / "sealed" / "contexts" / context.context / level.file).read_bytes()
        parts = [data[level.place(cell).start : level.place(cell).stop] for cell in cells]
        assert len(set(parts)) == len(parts) == 15
        assert len({part[-16:] for part in parts}) == 15


def test_publishing_twice_never_uses_a_key_and_a_number_twice(tmp_path: Path) -> None:
    secret, key, salts = Secret.new(), SigningKey.new(), set()
    for number in range(3):
        context = publish(tmp_path / str(number), key, "raw,q4", secret=secret).context
        signed = SignedManifest.from_bytes((tmp_path / str(number) / "contexts" / context / "manifest").read_bytes())
        manifest = signed.open(TrustedKeys([key.public]), secret)
        salts |= {signed.header.salt, manifest.token_file.salt, *(level.salt for level in manifest.levels)}
    assert len(salts) == 3 * 4 and all(salt is not None and len(salt) == SALT_BYTES for salt in salts)


def test_another_secret_finds_nothing(place: Place) -> None:
    with OriginServer(place.folder, OriginSettings(port=0)).running() as url:
        for secret in {None, Secret.new()} - {place.secret}:
            origin = Origin(url, [place.key.public], secret=secret)
            assert find(origin) is None
            origin.close()


# ---- key files


def test_keys_are_for_their_owner_and_never_overwritten(tmp_path: Path) -> None:
    key, secret = make_signing_key(tmp_path / "key"), make_secret(tmp_path / "secret")
    for name, mode in (("key", 0o600), ("secret", 0o600), ("key.pub", 0o644 & ~_umask())):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
    assert SigningKey.read(tmp_path / "key").public == key.public == read_public(str(tmp_path / "key.pub"))
    assert read_public(key.public.upper()) == key.public
    assert read_secret(tmp_path / "secret") == secret
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for make, name in (
        (make_signing_key, "key"),
        (make_secret, "secret"),
        (make_secret, "key"),
        (make_secret, "key.pub"),
    ):
        with pytest.raises(InvalidSetting, match="already exists"):
            make(tmp_path / name)
    (tmp_path / "key").rename(tmp_path / "old")
    with pytest.raises(InvalidSetting, match="already exists"):
        make_signing_key(tmp_path / "key")  # beside the public key of another
    assert not (tmp_path / "key").exists()
    assert all(path.read_bytes() == data for path, data in before.items() if path.name != "key")


def test_files_that_hold_no_key_are_refused(tmp_path: Path) -> None:
    make_signing_key(tmp_path / "key")
    make_secret(tmp_path / "secret")
    (tmp_path / "empty").write_bytes(b"")
    for wrong in ("secret", "empty", "key.pub", "missing"):
        with pytest.raises(InvalidSetting):
            SigningKey.read(tmp_path / wrong)
    for wrong in ("key", "empty", "missing"):
        with pytest.raises(InvalidSetting):
            read_secret(tmp_path / wrong)
        with pytest.raises(InvalidSetting):
            read_public(str(tmp_path / wrong))
    with pytest.raises(InvalidSetting):
        TrustedKeys(["no key"])
    with pytest.raises(InvalidSetting):
        Secret(b"short")


def test_a_secret_does_not_show_in_messages() -> None:
    secret = Secret.new()
    assert secret.key.hex() not in repr(secret) and str(secret.key) not in repr(secret)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ---- other people's files


def test_what_is_no_file_of_an_origin_is_never_removed(tmp_path: Path) -> None:
    place, outside = OriginFolder(tmp_path / "origin", create=True), tmp_path / "outside"
    context, ours = "a" * 32, f"{'b' * 64}.kv"
    folder = place.path / "contexts" / context
    (outside / "photos").mkdir(parents=True)
    (outside / "photos" / ours).write_bytes(b"a photo")
    (folder / "more").mkdir(parents=True)
    for path in (folder / "notes.txt", folder / f"{ours}.bak", place.path / ".parts" / "notes.txt", folder / ours):
        path.write_bytes(b"somebody's")
    (folder / f"{'c' * 64}.kv").symlink_to(outside / "photos" / ours)
    (place.path / ".parts" / ("d" * 32)).write_bytes(b"of a publisher that died")
    for path in (place.path / ".parts").iterdir():
        os.utime(path, (0, 0))
    place.keep_only(context, frozenset())
    place.sweep()
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["notes.txt", f"{ours}.bak", "more", f"{'c' * 64}.kv"]
    )
    assert [path.name for path in (place.path / ".parts").iterdir()] == ["notes.txt"]
    assert (outside / "photos" / ours).read_bytes() == b"a photo"
