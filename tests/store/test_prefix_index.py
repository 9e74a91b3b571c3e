"""The search over a catalog that lies: holes, collisions, rows that may not be used."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from rekindle.core.keys import BLOCK_BYTES, BLOCK_TOKENS, Namespace, NodeKey, chain, token_bytes, token_ids
from rekindle.core.kv import Span
from rekindle.store.prefix_index import BlockRef, Match, Neighbour, following, search

ROOT = Namespace("model").root


@dataclass
class Rows:
    """A catalog in dictionaries; counts what it is asked."""

    found: dict[NodeKey, BlockRef] = field(default_factory=dict)
    stored: dict[int, bytes] = field(default_factory=dict)
    unusable: set[int] = field(default_factory=set)
    children: dict[NodeKey, list[Neighbour]] = field(default_factory=dict)
    asked: int = 0

    def keep(self, extent: int, tokens: list[int], first: int = 0) -> None:
        """List the blocks of a prompt from number `first` on."""
        data = token_bytes(tokens)
        keys = chain(ROOT, data)
        self.stored[extent] = data[first * BLOCK_BYTES :]
        for place, key in enumerate(keys[first:]):
            self.found[key] = BlockRef(extent, place)
            parent = keys[first + place - 1] if first + place else ROOT
            part = self.stored[extent][place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]
            self.children.setdefault(parent, []).append(Neighbour(BlockRef(extent, place), part))

    def find(self, key: NodeKey) -> BlockRef | None:
        self.asked += 1
        return self.found.get(key)

    def name(self, extent: int) -> str | None:
        return None if extent in self.unusable else f"extent-{extent}"

    def tokens(self, spot: BlockRef) -> bytes:
        return self.stored[spot.extent][: (spot.place + 1) * BLOCK_BYTES]

    def neighbours(self, parent: NodeKey, tokens: bytes) -> list[Neighbour]:
        ordered = sorted(self.children.get(parent, []), key=lambda neighbour: neighbour.tokens)
        below = [neighbour for neighbour in ordered if neighbour.tokens <= tokens][-1:]
        return below + [neighbour for neighbour in ordered if neighbour.tokens > tokens][:1]


def look(rows: Rows, tokens: list[int]) -> Match:
    return search(rows, ROOT, token_bytes(tokens))


def test_a_chain_over_several_extents_is_tiled_in_order() -> None:
    rows, tokens = Rows(), list(range(200))
    rows.keep(1, tokens[:64])
    rows.keep(2, tokens[:128], first=2)
    rows.keep(3, tokens[:140], first=4)
    match = look(rows, tokens)
    assert [(piece.extent, piece.first, piece.span) for piece in match.pieces] == [
        (1, 0, Span(0, 64)),
        (2, 0, Span(64, 128)),
        (3, 0, Span(128, 140)),
    ]
    assert match.gap() == Span(128, 200)


def test_a_search_asks_for_as_many_keys_as_a_binary_search_does() -> None:
    rows, tokens = Rows(), list(range(8000))
    rows.keep(1, tokens)
    assert look(rows, tokens).length == 8000
    assert rows.asked <= 9


def test_a_hole_in_a_chain_ends_it() -> None:
    rows, tokens = Rows(), list(range(320))
    rows.keep(1, tokens[:128])
    rows.keep(2, tokens, first=5)  # block 4 is nowhere
    assert look(rows, tokens).length == 128


def test_what_may_not_be_used_ends_a_chain_and_what_hangs_on_it() -> None:
    rows, tokens = Rows(), list(range(320))
    rows.keep(1, tokens[:128])
    rows.keep(2, tokens[:256], first=4)
    rows.keep(3, tokens, first=8)
    rows.unusable = {2}
    assert look(rows, tokens).length == 128
    rows.unusable = {1}
    assert look(rows, tokens).length == 0


def test_a_collision_of_keys_is_found_out_by_the_tokens() -> None:
    rows, tokens = Rows(), list(range(64))
    rows.keep(1, tokens)
    rows.stored[1] = token_bytes([7] * 64)  # the same keys, other tokens
    rows.children = {}
    assert look(rows, tokens).length == 0


def test_places_that_cannot_be_are_no_reason_to_hang() -> None:
    rows, tokens = Rows(), list(range(320))
    rows.keep(1, tokens)
    for key in list(rows.found):
        rows.found[key] = BlockRef(1, -3)
    assert look(rows, tokens).length <= 32  # the first block, found among the children of the root
    for key in list(rows.found):
        rows.found[key] = BlockRef(1, 99)
    assert look(rows, tokens).length <= 32  # the first block, found among the children of the root


def test_inside_a_block_the_longest_shared_beginning_counts() -> None:
    rows = Rows()
    rows.keep(1, [1, 2, 3, 4, 5])
    rows.keep(2, [1, 2, 9])
    rows.keep(3, [1, 2, 3, 4, 8, 8])
    match = look(rows, [1, 2, 3, 4, 7, 7, 7])
    assert match.length == 4 and match.pieces[0].extent in (1, 3)
    assert look(rows, [1, 2, 3, 4, 5]).gap() is None
    assert look(rows, [5]).pieces == () and look(rows, []).gap() is None


# -- what follows a prompt


def after(rows: Rows, tokens: list[int], max_count: int = 1000) -> list[int]:
    match = look(rows, tokens)
    assert match.length == len(tokens)
    return list(token_ids(following(rows, match, max_count)))


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("total", [101, 128, 150, 160])
def test_what_came_after_a_prompt_is_told_up_to_a_limit(count: int, total: int) -> None:
    rows, tokens = Rows(), list(range(total))
    rows.keep(1, tokens)
    assert after(rows, tokens[:count]) == tokens[count:]
    for max_count in (0, 1, 31, 32, 40):
        assert after(rows, tokens[:count], max_count) == tokens[count : count + max_count]


def test_nothing_follows_what_was_never_followed() -> None:
    rows, tokens = Rows(), list(range(64))
    rows.keep(1, tokens)
    assert after(rows, tokens) == []
    rows.keep(2, [*tokens[:50], 900])  # beside it, not behind
    assert after(rows, tokens) == [] and after(rows, [*tokens[:50], 900]) == []


def test_of_several_that_follow_one_is_told_whole() -> None:
    rows, tokens = Rows(), list(range(40))
    ways = [[*tokens, *range(start, start + 50)] for start in (300, 100, 200)]
    for number, way in enumerate(ways):
        rows.keep(number, way)
    assert after(rows, tokens) in [way[40:] for way in ways]
    assert after(rows, [*tokens, 100]) == ways[1][41:]


def test_the_longest_of_those_that_go_on_alike_is_told() -> None:
    """A reply that was cut off after some tokens, and the whole one: in whatever order they came."""
    tokens = list(range(90))
    for kept in ([45, 90], [90, 45], [42, 50, 60, 90], [64, 70, 90]):
        rows = Rows()
        for number, count in enumerate(kept):
            rows.keep(number, tokens[:count])
        for count in (32, 40, 42):
            assert after(rows, tokens[:count]) == tokens[count:]


def test_a_prompt_inside_a_block_is_followed_by_what_begins_like_it_only() -> None:
    rows = Rows()
    rows.keep(1, [5, 6, 7, 8])
    rows.keep(2, [5, 6, 9])
    assert after(rows, [5, 6, 7]) == [8] and after(rows, [5, 6]) in ([7, 8], [9])


@pytest.mark.parametrize("seed", range(20))
def test_what_follows_is_always_something_that_was_kept(seed: int) -> None:
    rng = random.Random(seed)
    rows = Rows()
    chats: list[list[int]] = []
    for number in range(8):
        old = rng.choice(chats) if chats and rng.random() < 0.8 else []
        chat = [*old[: rng.randrange(len(old) + 1)], *(rng.randrange(4) for _ in range(rng.randrange(1, 90)))]
        rows.keep(number, chat)
        chats.append(chat)
    for chat in chats:
        prompt = chat[: rng.randrange(1, len(chat) + 1)]
        told = after(rows, prompt)
        assert any(other[: len(prompt) + len(told)] == [*prompt, *told] for other in chats)
        assert told or any(other[: len(prompt)] == prompt for other in chats)


@pytest.mark.parametrize("lie", [b"", b"\1", b"\1\0\0\0\2", token_bytes(list(range(32, 32 + BLOCK_TOKENS + 3)))])
def test_children_that_cannot_be_are_no_reason_to_fail(lie: bytes) -> None:
    rows, tokens = Rows(), list(range(32))
    rows.keep(1, tokens)
    match = look(rows, tokens)
    rows.children[match.keys[-1]] = [Neighbour(BlockRef(1, 1), lie)]
    told = following(rows, match, 1000)
    assert len(told) % 4 == 0 and lie.startswith(told)


def test_a_chain_that_hangs_on_itself_ends_at_the_limit() -> None:
    rows, tokens = Rows(), list(range(32))
    rows.keep(1, tokens)
    match = look(rows, tokens)

    def again(parent: NodeKey, given: bytes) -> list[Neighbour]:
        return [Neighbour(BlockRef(1, 0), token_bytes(tokens))]

    rows.neighbours = again  # type: ignore[method-assign]
    assert len(following(rows, match, 1000)) == 4 * 1000
