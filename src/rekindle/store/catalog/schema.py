"""The tables of the catalog, as numbered migrations. Version N is what the first N of them give. What a migration
selects is a sentence for people: it is logged, once.

blocks        one row per block: its node, its tokens, and where its KV is (extent, place). Clustered by extent, so that
              a run of blocks is one range. An extent's live rows are always its first places: tails go before heads.
extents       one row per file, from before its first byte is written until after the file is removed.
delta_bases   the base of a delta: `blocks` blocks of it, from number `at` on, are those of the extent `base` from
              `place` on. While a row exists, those blocks do.
kv_spaces     what must be equal for KV to be interchangeable. Unreferenced ones are removed.
identities    the fields of a KV space's identity, to say how two models differ.
variants      one row per variant of a chunk: where in a chain its KV is (a view, no copy), and its attention scores.
              A row whose blocks were removed is useless, and is removed when it is met.
fingerprints  where the grams of stored text lie (store/text_index), one place for each key of a KV space: the position
              behind the gram in its chain, and by how much it was computed elsewhere. Bounded; the oldest go.
requests      recent requests and their reuse, for `explain`: a bounded number, the oldest go.
apps          one row per app that sent requests: its state, the process it is tied to, and a digest of its salt.
app_uses      which app used an extent's blocks, up to which place. Bounded; removed with the extent.
seen_keys     keys met once, for admission on second use.
bytes_written bytes written, by minute, and writes that the budget refused.
totals        the sum of all extents' bytes, kept by triggers: limits are checked at every keep.
clock         the latest time that was believed, and since when the clock has been odd: see store/evict.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

APPLICATION_ID = 0x524B4E44  # "RKND": tells our catalog from any other SQLite file


def is_of_another_program(header: bytes) -> bool:
    """Whether a file that begins like that is an SQLite file without our number."""
    return header[:16] == b"SQLite format 3\0" and header[68:72] != APPLICATION_ID.to_bytes(4, "big")


MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE kv_spaces (  -- AUTOINCREMENT: the number of a removed one is never used again
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        digest TEXT NOT NULL UNIQUE,
        model TEXT NOT NULL,
        identity TEXT NOT NULL,
        tenant TEXT NOT NULL,
        salt TEXT NOT NULL,
        adapter TEXT,
        codec TEXT NOT NULL,
        layout TEXT NOT NULL
    );
    CREATE TABLE identities (digest TEXT PRIMARY KEY, fields TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE extents (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL UNIQUE,
        kv_space INTEGER NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('writing', 'live', 'dropping', 'quarantined')),
        bytes INTEGER NOT NULL CHECK (bytes >= 0),
        writer TEXT NOT NULL,
        digest BLOB,
        coding TEXT NOT NULL DEFAULT 'raw',  -- raw, exact, near: see codec/coder
        depth INTEGER NOT NULL DEFAULT 0,
        blocks INTEGER NOT NULL DEFAULT 0,
        live INTEGER NOT NULL DEFAULT 0,
        tokens INTEGER NOT NULL DEFAULT 0,
        pinned INTEGER NOT NULL DEFAULT 0,  -- 1: by name; 2: something pinned hangs on it
        kept REAL NOT NULL DEFAULT 0,
        used REAL NOT NULL DEFAULT 0,
        hits INTEGER NOT NULL DEFAULT 0,
        saved_ms REAL NOT NULL DEFAULT 0,
        reason TEXT
    );
    CREATE INDEX extents_not_live ON extents (state) WHERE state <> 'live';
    CREATE INDEX extents_kept ON extents (kept);
    CREATE TABLE blocks (
        extent INTEGER NOT NULL,
        place INTEGER NOT NULL,
        kv_space INTEGER NOT NULL,
        key BLOB NOT NULL,
        parent BLOB NOT NULL,
        tokens BLOB NOT NULL,
        used REAL NOT NULL,
        hits INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (extent, place)
    ) WITHOUT ROWID;
    CREATE UNIQUE INDEX blocks_key ON blocks (key, kv_space);
    CREATE INDEX blocks_children ON blocks (parent, kv_space, tokens);
    CREATE TABLE delta_bases (
        extent INTEGER NOT NULL,
        base INTEGER NOT NULL,
        at INTEGER NOT NULL,
        place INTEGER NOT NULL,
        blocks INTEGER NOT NULL,
        PRIMARY KEY (extent, at)
    ) WITHOUT ROWID;
    CREATE INDEX delta_bases_base ON delta_bases (base);
    CREATE TABLE variants (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        kv_space INTEGER NOT NULL,
        digest BLOB NOT NULL,  -- of the chunk
        parent BLOB NOT NULL,  -- the node that the last block it needs hangs on
        tail BLOB NOT NULL,  -- the tokens of that block, up to the chunk's end
        start INTEGER NOT NULL,
        stop INTEGER NOT NULL,
        outside BLOB NOT NULL,
        received BLOB NOT NULL,
        intra REAL NOT NULL,
        earlier BLOB NOT NULL,
        drift REAL NOT NULL,
        seal BLOB NOT NULL,  -- the digest of all above
        frequency REAL NOT NULL DEFAULT 0,
        used REAL NOT NULL
    );
    CREATE UNIQUE INDEX variants_chunk ON variants (digest, kv_space, parent, tail);
    CREATE INDEX variants_worth ON variants (kv_space, frequency, used);
    CREATE TABLE requests (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        kv_space INTEGER NOT NULL,
        at REAL NOT NULL,
        tokens BLOB NOT NULL,  -- the first of the prompt
        content BLOB NOT NULL,  -- chained digests of the messages, whatever the model makes of them
        record TEXT NOT NULL
    );
    CREATE INDEX requests_kv_space ON requests (kv_space);
    CREATE TABLE apps (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        tenant TEXT NOT NULL,
        salt_digest TEXT NOT NULL,  -- empty for no salt
        name TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('foreground', 'background', 'killed')),
        since REAL NOT NULL,  -- in that state
        seen REAL NOT NULL,
        requests INTEGER NOT NULL DEFAULT 0,
        process INTEGER,  -- watched: when it ends, the app is killed
        born REAL,  -- when that process began, because numbers are used again
        UNIQUE (tenant, salt_digest, name)
    );
    CREATE TABLE app_uses (
        extent INTEGER NOT NULL,
        app INTEGER NOT NULL,  -- 0: somebody who gave no name
        last INTEGER NOT NULL,
        used REAL NOT NULL,
        PRIMARY KEY (extent, app)
    ) WITHOUT ROWID;
    CREATE INDEX app_uses_app ON app_uses (app);
    CREATE TABLE seen_keys (key BLOB NOT NULL, kv_space INTEGER NOT NULL, at REAL NOT NULL, PRIMARY KEY (key, kv_space))
        WITHOUT ROWID;
    CREATE INDEX seen_keys_at ON seen_keys (at);
    CREATE TABLE bytes_written (minute INTEGER PRIMARY KEY, bytes INTEGER NOT NULL);
    CREATE TABLE totals (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        bytes INTEGER NOT NULL,
        swept INTEGER NOT NULL DEFAULT 0,  -- whether files of an earlier, lost catalog were looked for
        cleared REAL NOT NULL DEFAULT 0  -- when everything was removed
    );
    INSERT INTO totals (one, bytes) VALUES (1, 0);
    CREATE TABLE clock (one INTEGER PRIMARY KEY CHECK (one = 1), latest REAL NOT NULL, odd_since REAL);
    CREATE TRIGGER extents_added AFTER INSERT ON extents
        BEGIN UPDATE totals SET bytes = bytes + NEW.bytes; END;
    CREATE TRIGGER extents_resized AFTER UPDATE OF bytes ON extents
        BEGIN UPDATE totals SET bytes = bytes + NEW.bytes - OLD.bytes; END;
    CREATE TRIGGER extents_removed AFTER DELETE ON extents BEGIN
        UPDATE totals SET bytes = bytes - OLD.bytes;
        DELETE FROM app_uses WHERE extent = OLD.id;
        DELETE FROM delta_bases WHERE extent = OLD.id;
    END;
    """,
    """
    ALTER TABLE bytes_written ADD COLUMN spent INTEGER;
    ALTER TABLE bytes_written ADD COLUMN refused INTEGER NOT NULL DEFAULT 0;
    """,
    """
    CREATE TABLE fingerprints (
        id INTEGER PRIMARY KEY,
        kv_space INTEGER NOT NULL,
        key INTEGER NOT NULL,
        parent BLOB NOT NULL,  -- the node above the block that has the last token of the gram
        stop INTEGER NOT NULL,
        moved INTEGER NOT NULL,  -- where it was computed, less where it is in its chain: 0, but for non-prefix KV
        drift REAL NOT NULL,
        seal BLOB NOT NULL  -- of all above
    );
    CREATE UNIQUE INDEX fingerprints_key ON fingerprints (key, kv_space);
    """,
    """
    SELECT 'the write budget is what may be written within any 24 hours now, and what is not written no longer adds '
        || 'up. Set a larger write_budget if a day needs more' FROM bytes_written WHERE spent IS NOT NULL LIMIT 1;
    CREATE TABLE written (minute INTEGER PRIMARY KEY, bytes INTEGER NOT NULL, refused INTEGER NOT NULL DEFAULT 0);
    INSERT INTO written SELECT minute, bytes, refused FROM bytes_written;
    DROP TABLE bytes_written;  -- SQLite before 3.35 cannot drop a column
    ALTER TABLE written RENAME TO bytes_written;
    """,
)


def statements(script: str) -> Iterator[str]:
    """The statements of a script, one by one: `executescript` would end the transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
