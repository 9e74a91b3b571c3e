"""Recent requests and their reuse, so that a miss can be explained later.

Rows are bounded in number and size and are part of the catalog: they count against its limit, belong to a KV space, and
are removed with it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rekindle.core.identity import Identity
from rekindle.core.keys import KvSpace, token_bytes
from rekindle.core.scope import Scope
from rekindle.store.catalog import catalog
from rekindle.store.disk import DiskStore

MAX_TOKENS = 2048  # of a prompt are stored
MAX_ROWS = 256
_MAX_READ = 64  # for one explanation
_ROW_BYTES = 4096  # estimate beside tokens and record: pages that are not full


@dataclass(frozen=True)
class PastRequest:
    """A past request: the first tokens of its prompt, and its record."""

    id: int
    at: float
    tokens: bytes
    content: bytes
    record: Mapping[str, Any]


@dataclass(frozen=True)
class OtherSpaceRequest:
    """A past request in another KV space, and that KV space."""

    asked: PastRequest
    kv_space: Mapping[str, Any]  # model, identity, tenant, salt, adapter, codec
    identity: Mapping[str, str]  # the fields of its identity; empty if they were not recorded


def note(
    disk: DiskStore,
    kv_space: KvSpace,
    identity: Identity,
    tokens: Sequence[int],
    content: bytes,
    record: Mapping[str, Any],
    *,
    present: Callable[[], bool] | None = None,
) -> None:
    """Record a request; the oldest are removed for it. Not recorded without space, or if what it quotes is not
    `present`.

    Raises as the catalog does.
    """
    text = json.dumps(record, ensure_ascii=False)
    row = token_bytes(tokens[:MAX_TOKENS]), content, text
    size_bytes = sum(map(len, row)) + _ROW_BYTES
    with disk.database.writing() as connection:
        if present is not None and not present():
            return
        (count,) = connection.execute("SELECT count(*) FROM requests").fetchone()
        used = disk.room.used_bytes(connection)
        if used + size_bytes > disk.room.limit_bytes(used):
            # Deleted rows leave pages to write to: the file does not grow.
            if count == 0:
                return
            _forget_oldest(connection, max(1, count // 4))
        elif count >= MAX_ROWS:
            _forget_oldest(connection, count - MAX_ROWS + 1)
        number = catalog.add_kv_space(connection, disk.kv_space_digest(kv_space), kv_space)
        connection.execute(
            "INSERT OR IGNORE INTO identities VALUES (?,?)", (identity.digest, json.dumps(asdict(identity)))
        )
        connection.execute(
            "INSERT INTO requests (kv_space, at, tokens, content, record) VALUES (?,?,?,?,?)",
            (number, disk.clock(), *row),
        )


def recent(disk: DiskStore, kv_space: KvSpace, max_count: int = _MAX_READ) -> list[PastRequest]:
    """The last requests in a KV space, newest first."""
    with disk.database.reading() as connection:
        number = catalog.kv_space_id(connection, disk.kv_space_digest(kv_space))
        rows = connection.execute(
            "SELECT id, at, tokens, content, record FROM requests WHERE kv_space=? ORDER BY id DESC LIMIT ?",
            (number, max_count),
        ).fetchall()
    return [_asked(row) for row in rows]


def on_other_kv_spaces(disk: DiskStore, kv_space: KvSpace, *, own: bool) -> list[OtherSpaceRequest]:
    """The last requests in other KV spaces, newest first; `own`: only in those of the same tenant and salt."""
    columns = ("model", "identity", "tenant", "salt", "adapter", "codec")
    with disk.database.reading() as connection:
        number = catalog.kv_space_id(connection, disk.kv_space_digest(kv_space))
        rows = connection.execute(
            f"SELECT r.id, r.at, r.tokens, r.content, r.record, i.fields, {', '.join(f's.{c}' for c in columns)} "
            "FROM requests r JOIN kv_spaces s ON s.id=r.kv_space LEFT JOIN identities i ON i.digest=s.identity "
            "WHERE r.kv_space IS NOT ? AND (NOT ? OR (s.tenant=? AND s.salt=?)) ORDER BY r.id DESC LIMIT ?",
            (number, own, kv_space.namespace.tenant, kv_space.namespace.salt, _MAX_READ),
        ).fetchall()
    return [
        OtherSpaceRequest(
            _asked(row[:5]), dict(zip(columns, row[6:], strict=True)), json.loads(row[5]) if row[5] else {}
        )
        for row in rows
    ]


def last(disk: DiskStore, max_count: int = 1, scope: Scope | None = None) -> list[PastRequest]:
    """The last requests of a scope, or of all, newest first."""
    tenant, salt = (None, None) if scope is None else (scope.tenant, scope.salt)
    with disk.database.reading() as connection:
        rows = connection.execute(
            "SELECT r.id, r.at, r.tokens, r.content, r.record FROM requests r JOIN kv_spaces s ON s.id=r.kv_space "
            "WHERE :tenant IS NULL OR (s.tenant=:tenant AND s.salt=:salt) ORDER BY r.id DESC LIMIT :count",
            {"tenant": tenant, "salt": salt, "count": max_count},
        ).fetchall()
    return [_asked(row) for row in rows]


def _forget_oldest(connection: sqlite3.Connection, count: int) -> None:
    connection.execute("DELETE FROM requests WHERE id IN (SELECT id FROM requests ORDER BY id LIMIT ?)", (count,))


def _asked(row: Sequence[Any]) -> PastRequest:
    return PastRequest(row[0], row[1], row[2], row[3], json.loads(row[4]))
