"""A catalog of any number of rows, without files: for measuring what the number of rows costs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.core.keys import BLOCK_BYTES, BLOCK_TOKENS, KvSpace, NodeKey, chain, token_bytes
from rekindle.store.catalog import catalog
from rekindle.store.folder import CATALOG
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore

VOCABULARY = 50_000
BLOCKS_AN_EXTENT = 32


def fill_catalog(folder: Path, kv_space: KvSpace, rows: int, prompt_tokens: int, random: Any) -> list[int]:
    """A catalog of `rows` blocks, without files. Returns the one long prompt that is in it, kept in several turns."""
    with TieredStore(folder, StoreSettings(disk_limit="1TB", memory_limit=0)) as store:
        digest = store.disk.kv_space_digest(kv_space)
    prompt = [int(token) for token in random.integers(0, VOCABULARY, prompt_tokens)]
    connection = sqlite3.connect(folder / CATALOG, isolation_level=None)
    # Filled with the speed of a fresh table: indexes afterwards, in order.
    definitions = connection.execute(
        "SELECT name, sql FROM sqlite_master WHERE type='index' AND tbl_name='blocks' AND sql IS NOT NULL"
    ).fetchall()
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute("PRAGMA cache_size=-400000")
    connection.execute("BEGIN")
    for name, _ in definitions:
        connection.execute(f"DROP INDEX {name}")
    number = catalog.add_kv_space(connection, digest, kv_space)
    for extent, run in enumerate(_runs(rows, number, kv_space.namespace.root, prompt, random), start=1):
        connection.execute(
            "INSERT INTO extents (id, name, kv_space, state, bytes, writer, depth, blocks, live, tokens, kept, used) "
            "VALUES (?,?,?,'live',1000,'bench',?,?,?,?,1,1)",
            (extent, f"{extent:016x}", number, run.depth, len(run.keys), len(run.keys), len(run.tokens) // 4),
        )
        connection.executemany(
            "INSERT INTO blocks (extent, place, kv_space, key, parent, tokens, used) VALUES (?,?,?,?,?,?,?)",
            run.rows(extent, 1.0),
        )
    for _, definition in definitions:
        connection.execute(definition)
    connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()
    return prompt


def _runs(rows: int, kv_space: int, root: NodeKey, prompt: list[int], random: Any) -> Iterator[catalog.BlockRun]:
    data = token_bytes(prompt)
    keys = chain(root, data)
    for first in range(0, len(keys), BLOCKS_AN_EXTENT):
        stop = min(first + BLOCKS_AN_EXTENT, len(keys))
        parent = keys[first - 1] if first else root
        part = data[first * BLOCK_BYTES : stop * BLOCK_BYTES]
        yield catalog.BlockRun(kv_space, first, parent, keys[first:stop], part)
    for _ in range((rows - len(keys)) // BLOCKS_AN_EXTENT):
        tokens = random.integers(0, VOCABULARY, BLOCKS_AN_EXTENT * BLOCK_TOKENS, dtype=np.uint32).tobytes()
        names = random.bytes(16 * BLOCKS_AN_EXTENT)
        drawn = [NodeKey(names[place * 16 : place * 16 + 16]) for place in range(BLOCKS_AN_EXTENT)]
        yield catalog.BlockRun(kv_space, 0, root, drawn, tokens)
