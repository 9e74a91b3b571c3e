"""The tree of PerCache's QKV cache: the longest path, the limit, what goes first, and requests through it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.adapters.modes import folder_bytes
from benchmarks.baselines.qkv_engine import Qkv, QkvReuse
from benchmarks.baselines.qkv_tree import QkvTree, answer
from rekindle.engine.base import Row
from rekindle.engine.hf.engine import HfEngine
from rekindle.errors import InvalidSetting
from tests.tiny import tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")

SYSTEM, A, B, C = [1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11, 12]
ROOMY = 1 << 20


def qkv_of(*segments: list[int]) -> Qkv:
    """Two layers of Q, K and V that tell of which tokens they are."""
    tokens = torch.tensor([token for segment in segments for token in segment], dtype=torch.float32)
    return Qkv(tuple(tuple(tokens[:, None].repeat(1, w) + 100 * layer for w in (8, 4, 4)) for layer in range(2)))


def equal(one: Qkv | None, other: Qkv) -> bool:
    if one is None or one.tokens != other.tokens:
        return False
    return all(
        torch.equal(a, b) for x, y in zip(one.layers, other.layers, strict=True) for a, b in zip(x, y, strict=True)
    )


def put(tree: QkvTree, *segments: list[int]) -> int:
    return tree.put(segments, qkv_of(*segments))


def one_node(folder: Path, *segments: list[int]) -> int:
    """Bytes of the nodes of a path."""
    return put(QkvTree(folder / f"size-{len(list(folder.iterdir()))}", ROOMY), *segments)


def test_the_longest_known_path_is_found(tmp_path: Path) -> None:
    tree = QkvTree(tmp_path / "tree", ROOMY)
    assert tree.match([SYSTEM, A]) is None
    assert put(tree, SYSTEM, A, B) == tree.used_bytes == folder_bytes(tmp_path / "tree")
    assert equal(tree.match([SYSTEM, A, B]), qkv_of(SYSTEM, A, B))
    assert equal(tree.match([SYSTEM, A, C]), qkv_of(SYSTEM, A))
    assert equal(tree.match([SYSTEM, B, A]), qkv_of(SYSTEM))  # a passage is known behind what it stood behind
    assert tree.match([A, B]) is None
    assert tree.match([SYSTEM[:2]]) is None  # a part of a passage is not that passage
    assert (tree.asked, tree.hits) == (2 + 3 + 3 + 3 + 2 + 1, 3 + 2 + 1)


def test_paths_share_their_beginning(tmp_path: Path) -> None:
    tree = QkvTree(tmp_path / "tree", ROOMY)
    put(tree, SYSTEM, A, B)
    before = tree.used_bytes
    assert put(tree, SYSTEM, A, C) == tree.used_bytes - before
    assert len(tree) == len(list((tmp_path / "tree").iterdir())) == 4  # one file a node
    assert put(tree, SYSTEM, A, C) == 0
    assert equal(tree.match([SYSTEM, A, C]), qkv_of(SYSTEM, A, C))


def test_what_follows_the_segments_is_not_kept(tmp_path: Path) -> None:
    tree = QkvTree(tmp_path / "tree", ROOMY)
    tree.put([SYSTEM, [], A], qkv_of(SYSTEM, A, C))
    assert equal(tree.match([SYSTEM, A, C]), qkv_of(SYSTEM, A))
    with pytest.raises(ValueError):
        tree.put([SYSTEM, A], qkv_of(SYSTEM))


def test_the_leaf_that_was_retrieved_least_goes_first(tmp_path: Path) -> None:
    limit = one_node(tmp_path, SYSTEM, A) + one_node(tmp_path, [8, 9, 10, 11])
    tree = QkvTree(tmp_path / "tree", limit)
    put(tree, SYSTEM, A)
    put(tree, SYSTEM, [21, 22, 23, 24])
    for _ in range(3):
        tree.match([SYSTEM, A])
    put(tree, SYSTEM, [31, 32, 33, 34])  # the second goes, though it came later than the first
    assert tree.evicted == 1
    assert equal(tree.match([SYSTEM, [21, 22, 23, 24]]), qkv_of(SYSTEM))
    assert equal(tree.match([SYSTEM, A]), qkv_of(SYSTEM, A))
    assert equal(tree.match([SYSTEM, [31, 32, 33, 34]]), qkv_of(SYSTEM, [31, 32, 33, 34]))


def test_of_equals_the_one_not_used_for_longest_goes(tmp_path: Path) -> None:
    first, second, third = [21, 22], [31, 32], [41, 42]
    tree = QkvTree(tmp_path / "tree", one_node(tmp_path, SYSTEM, first) + one_node(tmp_path, second))
    put(tree, SYSTEM, first)
    put(tree, SYSTEM, second)
    put(tree, SYSTEM, first)  # a use, but no retrieval
    put(tree, SYSTEM, third)
    assert equal(tree.match([SYSTEM, second]), qkv_of(SYSTEM))
    assert equal(tree.match([SYSTEM, first]), qkv_of(SYSTEM, first))


def test_what_others_stand_on_stays(tmp_path: Path) -> None:
    tree = QkvTree(tmp_path / "tree", one_node(tmp_path, SYSTEM, A, B))
    put(tree, SYSTEM, A, B)
    put(tree, SYSTEM, [21, 22])  # as large as the leaf
    assert tree.evicted == 1
    assert equal(tree.match([SYSTEM, A, B]), qkv_of(SYSTEM, A))
    assert equal(tree.match([SYSTEM, [21, 22]]), qkv_of(SYSTEM, [21, 22]))


def test_a_path_too_long_for_the_limit_is_kept_as_far_as_it_fits(tmp_path: Path) -> None:
    tree = QkvTree(tmp_path / "tree", one_node(tmp_path, SYSTEM, A))
    put(tree, SYSTEM, A, B)
    assert equal(tree.match([SYSTEM, A, B]), qkv_of(SYSTEM, A))
    nothing = QkvTree(tmp_path / "nothing", 10)
    assert put(nothing, SYSTEM, A) == nothing.used_bytes == 0
    # What cannot fit makes nobody else go.
    assert put(tree, list(range(200))) == tree.evicted == 0
    assert equal(tree.match([SYSTEM, A]), qkv_of(SYSTEM, A))


def test_the_limit_is_never_exceeded(tmp_path: Path) -> None:
    draw = random.Random(4)
    limit = 6 * one_node(tmp_path, A)
    tree = QkvTree(tmp_path / "tree", limit)
    passages = [[number] * draw.randint(1, 12) for number in range(1, 9)]
    for _ in range(300):
        path = [SYSTEM, *draw.sample(passages, draw.randint(0, 3))]
        found = tree.match(path)
        if found is not None:
            assert equal(found, qkv_of(*path).slice(0, found.tokens))
        put(tree, *path)
        assert tree.used_bytes == folder_bytes(tmp_path / "tree") <= limit
    assert tree.evicted > 50
    assert tree.hits > 50


@pytest.mark.parametrize("damage", ["cut", "lost", "other", "header"])
def test_a_file_that_is_not_whole_is_a_miss(tmp_path: Path, damage: str) -> None:
    tree = QkvTree(tmp_path / "tree", ROOMY)
    put(tree, SYSTEM, A, B)
    files = sorted((tmp_path / "tree").iterdir())  # in the order they were written
    whole = files[1].read_bytes()
    if damage == "lost":
        files[1].unlink()
    else:
        files[1].write_bytes({"cut": whole[:-5], "other": b"", "header": b"\xff" * len(whole)}[damage])
    assert equal(tree.match([SYSTEM, A, B]), qkv_of(SYSTEM))
    assert len(tree) == 1
    assert tree.used_bytes == folder_bytes(tmp_path / "tree") == files[0].stat().st_size
    put(tree, SYSTEM, A, B)
    assert equal(tree.match([SYSTEM, A, B]), qkv_of(SYSTEM, A, B))


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    put(QkvTree(tmp_path / "tree", ROOMY), SYSTEM)
    with pytest.raises(InvalidSetting):
        QkvTree(tmp_path / "tree", ROOMY)


# Requests through the tree, with a model.

TEXTS = {
    "system": "You answer from the notes below.\n",
    "boats": "The red boat leaves at nine and the blue one at",  # ends within a sentence, without a space
    "ten": " ten. Both come back at noon.",
    "dusk": "dusk, if the wind is fair.",
}


@pytest.fixture(scope="module", params=["llama", "qwen3", "phi3"])
def engine(request: pytest.FixtureRequest) -> HfEngine:
    return tiny_engine(request.param)


def logits_of(engine: HfEngine, tokens: list[int]) -> np.ndarray:
    with engine.open(len(tokens), engine.regime(len(tokens))) as sequence:
        (logits,) = engine.step([Row.following(sequence, tokens)])
    return logits


def test_a_shared_passage_has_the_same_tokens_whatever_follows(engine: HfEngine, tmp_path: Path) -> None:
    """The source gives up tokens where passages meet (its appendix B.2). Here nothing has to be given up."""
    encode = engine.tokenizer.encode
    system, boats, ten, dusk = (encode(TEXTS[name]) for name in ("system", "boats", "ten", "dusk"))
    question = encode("When does the blue boat leave?")
    reuse, tree = QkvReuse(engine), QkvTree(tmp_path / "tree", 1 << 24)
    answer(reuse, tree, [system, boats, ten], question, 1)
    known = tree.match([system, boats, dusk])
    assert known is not None
    assert known.tokens == len(system) + len(boats)  # to the last token of the shared passage
    prompt = [*system, *boats, *dusk, *question]
    with engine.open(len(prompt), engine.regime(len(prompt))) as sequence:
        logits, _ = reuse.prefill(sequence, prompt, known)
    expected = logits_of(engine, prompt)
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()


def test_answers_are_those_of_plain_computing(engine: HfEngine, tmp_path: Path) -> None:
    encode = engine.tokenizer.encode
    parts = {name: encode(text) for name, text in TEXTS.items()}
    paths = [("boats", "ten"), ("boats", "dusk"), ("boats", "ten"), ("dusk", "boats"), ("boats",), ("dusk", "boats")]
    known = [0, 2, 3, 1, 2, 3]  # segments, with the system prompt
    reuse, tree = QkvReuse(engine), QkvTree(tmp_path / "tree", 1 << 24)
    for number, (path, expected) in enumerate(zip(paths, known, strict=True)):
        segments = [parts["system"], *(parts[name] for name in path)]
        question = encode(f"Question {number}?")
        got = answer(reuse, tree, segments, question, 10)
        plain = answer(reuse, None, segments, question, 10)
        assert got.tokens == plain.tokens
        assert len(got.tokens) == 10
        assert got.known_tokens == sum(map(len, segments[:expected]))
        assert got.prompt_tokens == sum(map(len, segments)) + len(question)
        assert plain.known_tokens == 0
        assert got.load_seconds <= got.first_token_seconds <= got.seconds
