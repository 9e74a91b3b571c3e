"""The tables of the catalog, as numbered migrations. Version N is what the first N of them give.

blocks     one row a block: its node, its tokens, and where its KV is (extent, place). Clustered by extent, so that a
           run of blocks is one range. An extent's live rows are always its first places: tails go before heads.
extents    one row a file, from before its first byte is written until after its last is gone.
shelves    what must be equal for KV to be interchangeable.
seen       keys met once, for admission on second use.
written    bytes written, by minute, for the write budget.
totals     the sum of all extents' bytes, kept by triggers: limits are checked at every keep.
requests   what was asked lately and what came of it, for `explain`: a bounded number, the oldest go.
variants   one row a variant of a chunk: where in a chain its KV is (a view, no copy), and what attention did in it.
           A row whose blocks went is of no use, and goes when somebody comes across it.
identities what a shelf's identity is made of, to tell in which way two models differ.
apps       one row an app that asked: its state, and the process that is watched for it.
anchors    what a difference stands on: `blocks` blocks of it, from number `at` on, are those of another extent from
           `place` on. While a row is there, those blocks are.
users      which app used an extent's blocks, up to which place. Bounded; goes with its extent.
"""

from __future__ import annotations

APPLICATION_ID = 0x524B4E44  # "RKND": tells our catalog from any other SQLite file

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE shelves (
        id INTEGER PRIMARY KEY,
        digest TEXT NOT NULL UNIQUE,
        model TEXT NOT NULL,
        identity TEXT NOT NULL,
        tenant TEXT NOT NULL,
        salt TEXT NOT NULL,
        adapter TEXT,
        codec TEXT NOT NULL,
        layout TEXT NOT NULL
    );
    CREATE TABLE extents (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL UNIQUE,
        shelf INTEGER NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('writing', 'live', 'dropping', 'quarantined')),
        bytes INTEGER NOT NULL CHECK (bytes >= 0),
        writer TEXT NOT NULL,
        digest BLOB,
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
        shelf INTEGER NOT NULL,
        key BLOB NOT NULL,
        parent BLOB NOT NULL,
        tokens BLOB NOT NULL,
        used REAL NOT NULL,
        hits INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (extent, place)
    ) WITHOUT ROWID;
    CREATE UNIQUE INDEX blocks_key ON blocks (key, shelf);
    CREATE INDEX blocks_children ON blocks (parent, shelf, tokens);
    CREATE TABLE seen (key BLOB NOT NULL, shelf INTEGER NOT NULL, at REAL NOT NULL, PRIMARY KEY (key, shelf))
        WITHOUT ROWID;
    CREATE INDEX seen_at ON seen (at);
    CREATE TABLE written (minute INTEGER PRIMARY KEY, bytes INTEGER NOT NULL);
    CREATE TABLE totals (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        bytes INTEGER NOT NULL,
        swept INTEGER NOT NULL DEFAULT 0  -- whether files of an earlier, lost catalog were looked for
    );
    INSERT INTO totals (one, bytes) VALUES (1, 0);
    CREATE TRIGGER extents_added AFTER INSERT ON extents
        BEGIN UPDATE totals SET bytes = bytes + NEW.bytes; END;
    CREATE TRIGGER extents_gone AFTER DELETE ON extents
        BEGIN UPDATE totals SET bytes = bytes - OLD.bytes; END;
    CREATE TRIGGER extents_resized AFTER UPDATE OF bytes ON extents
        BEGIN UPDATE totals SET bytes = bytes + NEW.bytes - OLD.bytes; END;
    """,
    """
    CREATE TABLE identities (digest TEXT PRIMARY KEY, fields TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE requests (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        shelf INTEGER NOT NULL,
        at REAL NOT NULL,
        tokens BLOB NOT NULL,  -- the first of the prompt
        content BLOB NOT NULL,  -- chained digests of what was asked, whatever the model makes of it
        record TEXT NOT NULL
    );
    CREATE INDEX requests_shelf ON requests (shelf);
    """,
    """
    CREATE TABLE variants (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        shelf INTEGER NOT NULL,
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
    CREATE UNIQUE INDEX variants_chunk ON variants (digest, shelf, parent, tail);
    CREATE INDEX variants_worth ON variants (shelf, frequency, used);
    """,
    """
    CREATE TABLE apps (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        tenant TEXT NOT NULL,
        name TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('foreground', 'background', 'killed')),
        since REAL NOT NULL,  -- in that state
        seen REAL NOT NULL,
        requests INTEGER NOT NULL DEFAULT 0,
        process INTEGER,  -- watched: when it ends, the app is killed
        born REAL,  -- when that process began, because numbers are used again
        UNIQUE (tenant, name)
    );
    CREATE TABLE users (
        extent INTEGER NOT NULL,
        app INTEGER NOT NULL,  -- 0: somebody who gave no name
        last INTEGER NOT NULL,
        used REAL NOT NULL,
        PRIMARY KEY (extent, app)
    ) WITHOUT ROWID;
    CREATE INDEX users_app ON users (app);
    CREATE TRIGGER extents_unused AFTER DELETE ON extents
        BEGIN DELETE FROM users WHERE extent = OLD.id; END;
    """,
    """
    ALTER TABLE extents ADD COLUMN coding TEXT NOT NULL DEFAULT 'raw';  -- exact, near: see codec/coder
    CREATE TABLE anchors (
        extent INTEGER NOT NULL,
        anchor INTEGER NOT NULL,
        at INTEGER NOT NULL,
        place INTEGER NOT NULL,
        blocks INTEGER NOT NULL,
        PRIMARY KEY (extent, at)
    ) WITHOUT ROWID;
    CREATE INDEX anchors_anchor ON anchors (anchor);
    CREATE TRIGGER extents_unanchored AFTER DELETE ON extents
        BEGIN DELETE FROM anchors WHERE extent = OLD.id; END;
    """,
)
