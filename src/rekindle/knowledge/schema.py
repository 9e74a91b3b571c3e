"""The tables of a library, as numbered migrations. One file per tenant and salt, so that no tenant's counts shape
another's ranking, and everything that must be forgotten is in one place.

about      key and value: tenant, salt, the embedder of the vectors, change counters
files      files that were read, with their digests: unchanged files are not read again
documents  one row per document; several may come from one file
chunks     the passages of a document in order, each with its vector (half precision) and retrieval counts
searched   a view of what the word index covers: title and headings, text
words      the word index over it (FTS5, porter stems); it holds no second copy of the text
pairs      the same for scripts without spaces: neighbouring letters in place of words; without any text
tokens     the token ids of a passage, recorded before any KV of it is kept: its KV is found again by them
leaving    removed passages, until no KV of them is left
answers    questions, asked or predicted, with their answers if there are any: see `answers/bank`
grounds    the documents that a question or its answer may quote: it goes when one of them is forgotten
abstracts  a document's summary in a sentence or two; `part_abstracts` those of its parts, `merged_abstracts` what was
           merged of several, by a digest of them ('library': of all)
work       idle work: what was done, and its seconds; flop and joules are of earlier versions (SQLite before 3.35 cannot
           drop columns)
terms      how applications ask: the system prompt and options of users' questions, see `answers/ask_terms`
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
    """
    CREATE TABLE answers (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        question TEXT NOT NULL,
        terms TEXT NOT NULL,  -- a digest of what else its answer depends on: the model, how passages are found
        origin TEXT NOT NULL,  -- user, abstract, history, passage
        vector BLOB,
        top_k INTEGER NOT NULL,
        retrieval TEXT NOT NULL,
        evidence BLOB NOT NULL,  -- the ids of the passages, the best first
        generation INTEGER NOT NULL,  -- of the library, when the evidence was last seen to be that
        state TEXT NOT NULL,  -- open (no answer yet), fresh, stale (the evidence changed)
        text TEXT,
        tokens BLOB,
        tokenizer TEXT,
        finish TEXT,
        seconds REAL NOT NULL DEFAULT 0,  -- what answering took
        made REAL NOT NULL,
        asked REAL,  -- when a user last asked it
        uses INTEGER NOT NULL DEFAULT 0,
        used REAL NOT NULL,
        saved REAL NOT NULL DEFAULT 0,  -- seconds
        size INTEGER NOT NULL,
        UNIQUE (question, terms)
    );
    CREATE INDEX answers_state ON answers (state, origin);
    CREATE INDEX answers_asked ON answers (asked) WHERE asked IS NOT NULL;
    CREATE TABLE grounds (
        answer INTEGER NOT NULL,
        document INTEGER NOT NULL,
        PRIMARY KEY (answer, document)
    ) WITHOUT ROWID;
    CREATE INDEX grounds_document ON grounds (document);
    CREATE TABLE abstracts (document INTEGER PRIMARY KEY, text TEXT NOT NULL, made REAL NOT NULL);
    CREATE TABLE work (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        at REAL NOT NULL,
        action TEXT NOT NULL,
        answer INTEGER,
        seconds REAL NOT NULL,
        tokens INTEGER NOT NULL,
        flop REAL,
        joules REAL
    );
    """,
    """
    CREATE TABLE terms (
        digest TEXT PRIMARY KEY,  -- as in answers.terms
        content TEXT NOT NULL,
        uses INTEGER NOT NULL,
        used REAL NOT NULL
    ) WITHOUT ROWID;
    CREATE VIRTUAL TABLE pairs USING fts5(body, content='');
    """,
    """
    DELETE FROM abstracts;  -- those of before read parts of a document only
    CREATE TABLE part_abstracts (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        document INTEGER NOT NULL,
        place INTEGER NOT NULL,
        text TEXT NOT NULL,
        UNIQUE (document, place)
    );
    CREATE TABLE merged_abstracts (inputs TEXT PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID;
    """,
    """
    ALTER TABLE work ADD COLUMN uses INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE work ADD COLUMN saved REAL NOT NULL DEFAULT 0;  -- of the answer, before; unknown for earlier versions
    UPDATE work SET (uses, saved) = (SELECT a.uses, a.saved FROM answers a WHERE a.id=work.answer)
        WHERE answer IN (SELECT id FROM answers);
    """,
    """
    UPDATE answers SET origin='abstract' WHERE origin='passage';  -- made of documents by patterns, which is gone
    """,
)
