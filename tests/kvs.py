"""KV for tests of the store; the bench uses the same."""

from dataclasses import dataclass

from benchmarks.synthetic import KV_SPACE, SMALL, keep, load, make_kv
from rekindle.core.keys import KvSpace
from rekindle.store.catalog.variant_rows import nonprefix_kv_spaces
from rekindle.store.tiered import TieredStore
from rekindle.store.variants import spaces_of

__all__ = ["KV_SPACE", "SMALL", "VariantCounts", "keep", "load", "make_kv", "variant_counts"]


@dataclass(frozen=True)
class VariantCounts:
    """The number of listed chunks, of their variants, and of variants that are non-prefix KV."""

    chunks: int = 0
    variants: int = 0
    nonprefix: int = 0


def variant_counts(store: TieredStore, kv_space: KvSpace | None = None) -> VariantCounts:
    """The counts of a KV space, or of all."""
    with store.disk.database.reading() as connection:
        own = None if kv_space is None else {space.number for space in spaces_of(store.disk, connection, kv_space)}
        apart = nonprefix_kv_spaces(connection)
        found = connection.execute("SELECT digest, kv_space FROM variants").fetchall()
    listed = [(digest, space) for digest, space in found if own is None or space in own]
    return VariantCounts(len({row[0] for row in listed}), len(listed), sum(row[1] in apart for row in listed))
