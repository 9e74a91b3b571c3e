"""The search over a catalog that lies: holes, collisions, rows that may not be used."""

from __future__ import annotations

from dataclasses import dataclass, field

from rekindle.core.keys import BLOCK_BYTES, Namespace, NodeKey, chain, token_bytes
from rekindle.core.kv import Span
from rekindle.index.prefix import Match, Neighbour, Spot, search

ROOT = Namespace("model").root


@dataclass
class Rows:
    """A catalog in dictionaries; counts what it is asked."""

    found: dict[NodeKey, Spot] = field(default_factory=dict)
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
            self.found[key] = Spot(extent, place)
            parent = keys[first + place - 1] if first + place else ROOT
            part = self.stored[extent][place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]
            self.children.setdefault(parent, []).append(Neighbour(Spot(extent, place), part))

    def find(self, key: NodeKey) -> Spot | None:
        self.asked += 1
        return self.found.get(key)

    def name(self, extent: int) -> str | None:
        return None if extent in self.unusable else f"extent-{extent}"

    def tokens(self, spot: Spot) -> bytes:
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
        rows.found[key] = Spot(1, -3)
    assert look(rows, tokens).length <= 32  # the first block, found among the children of the root
    for key in list(rows.found):
        rows.found[key] = Spot(1, 99)
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
