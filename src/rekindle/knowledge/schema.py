"""The tables of a library, as numbered migrations. One file a tenant and salt, so that nobody's counts shape anybody
else's ranking, and what is forgotten is in one place.

about      what holds for all of it: whose it is, which embedder its vectors are of, how often it changed
files      files that were read, with their digests: what did not change is not read again
documents  one row a document; several may come from one file
chunks     its passages in order, each with its vector (half precision) and how often it was retrieved
searched   what the words of a passage are looked for in: its title and headings, its text
words      the index of those words (FTS5, porter stems); it holds no second copy of the text
tokens     a passage as a tokenizer cut it, noted before any KV of it is kept: by these its KV is found again
leaving    passages that were removed, until no KV of them is left
"""

from __future__ import annotations

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE files (
        path TEXT PRIMARY KEY,
        digest TEXT NOT NULL,
        splitting TEXT NOT NULL,
        read REAL NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE documents (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL UNIQUE,
        source TEXT NOT NULL UNIQUE,
        file TEXT,
        title TEXT NOT NULL,
        app TEXT,
        digest TEXT NOT NULL,
        splitting TEXT NOT NULL,
        characters INTEGER NOT NULL,
        added REAL NOT NULL
    );
    CREATE INDEX documents_file ON documents (file);
    CREATE TABLE chunks (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        document INTEGER NOT NULL,
        place INTEGER NOT NULL,
        heading TEXT NOT NULL,
        text TEXT NOT NULL,
        digest BLOB NOT NULL,
        vector BLOB,
        retrieved INTEGER NOT NULL DEFAULT 0,
        first INTEGER NOT NULL DEFAULT 0  -- how often it was the first passage of a prompt
    );
    CREATE INDEX chunks_document ON chunks (document, place);
    CREATE INDEX chunks_digest ON chunks (digest);
    CREATE INDEX chunks_bare ON chunks (id) WHERE vector IS NULL;
    CREATE INDEX chunks_embedded ON chunks (id) WHERE vector IS NOT NULL;
    CREATE INDEX chunks_retrieved ON chunks (first, retrieved) WHERE retrieved > 0;
    CREATE VIEW searched AS
        SELECT c.id AS id, d.title || char(10) || c.heading AS title, c.text AS body
        FROM chunks c JOIN documents d ON d.id = c.document;
    CREATE VIRTUAL TABLE words USING fts5(
        title, body, content='searched', content_rowid='id', tokenize='porter unicode61 remove_diacritics 2'
    );
    CREATE TABLE tokens (
        chunk INTEGER NOT NULL,
        tokenizer TEXT NOT NULL,
        tokens BLOB NOT NULL,
        PRIMARY KEY (chunk, tokenizer)
    ) WITHOUT ROWID;
    CREATE TABLE leaving (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        chunk INTEGER NOT NULL,
        text TEXT NOT NULL,
        tokenizer TEXT,
        tokens BLOB
    );
    """,
)
