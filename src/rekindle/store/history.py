"""What was asked lately, and what came of it: so that a miss can be explained after it happened.

Rows are bounded in number and size and live in the catalog: they count against its limit, belong to a shelf as KV
does, and go with it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rekindle.core.identity import Identity
from rekindle.core.keys import Shelf, token_bytes
from rekindle.store import catalog
from rekindle.store.disk import DiskStore

MOST_TOKENS = 2048  # of a prompt are remembered
_MOST_ROWS = 256
_ROW_BYTES = 4096  # beside tokens and record: pages that are not full


@dataclass(frozen=True)
class Asked:
    """A request of the past. `tokens` are the first of its prompt, `record` what was noted about it."""

    id: int
    at: float
    tokens: bytes
    content: bytes
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Elsewhere:
    """A request on another shelf, and what that shelf is."""

    asked: Asked
    shelf: Mapping[str, Any]  # model, identity, tenant, salt, adapter, codec
    identity: Mapping[str, str]  # the fields of its identity; empty if they were never noted


def note(
    disk: DiskStore, shelf: Shelf, identity: Identity, tokens: Sequence[int], content: bytes, record: Mapping[str, Any]
) -> None:
    """Remember a request. The oldest go for it; without room it is not remembered. Raises as the catalog does."""
    text = json.dumps(record, ensure_ascii=False)
    row = token_bytes(tokens[:MOST_TOKENS]), content, text
    size_bytes = sum(map(len, row)) + _ROW_BYTES
    with disk.database.writing() as connection:
        number = catalog.add_shelf(connection, disk.shelf_digest(shelf), shelf)
        connection.execute(
            "INSERT OR IGNORE INTO identities VALUES (?,?)", (identity.digest, json.dumps(asdict(identity)))
        )
        (count,) = connection.execute("SELECT count(*) FROM requests").fetchone()
        used = disk.room.used_bytes(connection)
        if used + size_bytes > disk.room.limit_bytes(used):
            # What is deleted leaves pages to write to: the file does not grow.
            if count == 0:
                return
            _forget_oldest(connection, max(1, count // 4))
        elif count >= _MOST_ROWS:
            _forget_oldest(connection, count - _MOST_ROWS + 1)
        connection.execute(
            "INSERT INTO requests (shelf, at, tokens, content, record) VALUES (?,?,?,?,?)",
            (number, disk.clock(), *row),
        )


def recent(disk: DiskStore, shelf: Shelf, most: int = 64) -> list[Asked]:
    """The last requests on a shelf, newest first."""
    with disk.database.reading() as connection:
        number = catalog.shelf_id(connection, disk.shelf_digest(shelf))
        rows = connection.execute(
            "SELECT id, at, tokens, content, record FROM requests WHERE shelf=? ORDER BY id DESC LIMIT ?",
            (number, most),
        ).fetchall()
    return [_asked(row) for row in rows]


def elsewhere(disk: DiskStore, shelf: Shelf, most: int = 64) -> list[Elsewhere]:
    """The last requests on other shelves, newest first."""
    columns = ("model", "identity", "tenant", "salt", "adapter", "codec")
    with disk.database.reading() as connection:
        number = catalog.shelf_id(connection, disk.shelf_digest(shelf))
        rows = connection.execute(
            f"SELECT r.id, r.at, r.tokens, r.content, r.record, i.fields, {', '.join(f's.{c}' for c in columns)} "
            "FROM requests r JOIN shelves s ON s.id=r.shelf LEFT JOIN identities i ON i.digest=s.identity "
            "WHERE r.shelf IS NOT ? ORDER BY r.id DESC LIMIT ?",
            (number, most),
        ).fetchall()
    return [
        Elsewhere(_asked(row[:5]), dict(zip(columns, row[6:], strict=True)), json.loads(row[5]) if row[5] else {})
        for row in rows
    ]


def last(disk: DiskStore, most: int = 1, tenant: str | None = None) -> list[Asked]:
    """The last requests of a tenant, or of all, newest first."""
    with disk.database.reading() as connection:
        rows = connection.execute(
            "SELECT r.id, r.at, r.tokens, r.content, r.record FROM requests r JOIN shelves s ON s.id=r.shelf "
            "WHERE ?1 IS NULL OR s.tenant=?1 ORDER BY r.id DESC LIMIT ?2",
            (tenant, most),
        ).fetchall()
    return [_asked(row) for row in rows]


def forget_all(disk: DiskStore) -> None:
    """Forget every request."""
    with disk.database.writing() as connection:
        connection.execute("DELETE FROM requests")
        connection.execute("DELETE FROM identities")


def _forget_oldest(connection: sqlite3.Connection, count: int) -> None:
    connection.execute("DELETE FROM requests WHERE id IN (SELECT id FROM requests ORDER BY id LIMIT ?)", (count,))


def _asked(row: Sequence[Any]) -> Asked:
    return Asked(row[0], row[1], row[2], row[3], json.loads(row[4]))
