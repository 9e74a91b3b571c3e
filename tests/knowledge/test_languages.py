"""Documents and questions in other languages than English: found by words, also where no spaces separate them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rekindle.answers.guard import disagreement
from rekindle.core.document import Document, Passage, Section
from rekindle.engine.embedding.embedder import Embedder, Embeddings
from rekindle.knowledge.library import Library
from rekindle.knowledge.retrieve import Retriever
from rekindle.knowledge.rows import SplitDocument
from rekindle.knowledge.segment import character_pairs
from rekindle.session.library import Knowledge
from rekindle.settings import Settings

# Written for this: three notes a language, and questions in other words than the notes, with the note that answers.
NOTES = {
    "German": (
        "Die Probe des Chors beginnt am Dienstag um acht Uhr in der alten Kirche.",
        "Das Paket liegt beim Nachbarn im zweiten Stock und muss bis Freitag abgeholt werden.",
        "Der Zug nach Lindau fährt von Gleis vier, die Fahrkarte kostet neunzehn Euro.",
    ),
    "Spanish": (
        "El ensayo del coro empieza el martes a las ocho en la iglesia vieja.",
        "El paquete está en casa del vecino del segundo piso y hay que recogerlo antes del viernes.",
        "El tren a Toledo sale de la vía cuatro y el billete cuesta diecinueve euros.",
    ),
    "Chinese": (
        "合唱团星期二晚上八点在老教堂排练。",
        "包裹放在二楼的邻居家里，星期五以前要去取。",
        "去苏州的火车从四号站台出发，车票十九元。",
    ),
    "Arabic": (
        "تبدأ بروفة الجوقة يوم الثلاثاء في الثامنة في الكنيسة القديمة.",
        "الطرد عند الجار في الطابق الثاني ويجب استلامه قبل الجمعة.",
        "ينطلق القطار إلى طنجة من الرصيف الرابع وثمن التذكرة تسعة عشر درهما.",
    ),
}
QUESTIONS = {
    "German": ("Wann beginnt die Probe?", "Wo liegt mein Paket?", "Was kostet die Fahrkarte nach Lindau?"),
    "Spanish": ("¿Cuándo empieza el ensayo?", "¿Dónde está el paquete?", "¿Cuánto cuesta el billete a Toledo?"),
    "Chinese": ("排练几点开始？", "我的包裹在哪里？", "去苏州的车票多少钱？"),
    "Arabic": ("متى تبدأ بروفة الجوقة؟", "أين الطرد؟", "كم ثمن التذكرة إلى طنجة؟"),
}


def split(texts: Sequence[str]) -> list[SplitDocument]:
    return [
        SplitDocument(Document(f"note {number}", "note", (Section(text),)), [Passage(text)], [None], "as given")
        for number, text in enumerate(texts)
    ]


def never() -> Embedder:
    raise AssertionError("BM25 needs no vectors")


def found(library: Library, question: str) -> list[str]:
    return [hit.chunk.passage.text for hit in Retriever(library, never).retrieve(question, 3, "bm25").hits]


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with closing(Library(tmp_path)) as library:
        yield library


@pytest.mark.parametrize("language", NOTES)
def test_the_passage_that_answers_is_found_first(library: Library, language: str) -> None:
    library.put(split([text for texts in NOTES.values() for text in texts]), None)
    for question, text in zip(QUESTIONS[language], NOTES[language], strict=True):
        assert found(library, question)[0] == text, question


def test_what_was_removed_or_replaced_is_not_found(library: Library) -> None:
    library.put(split(NOTES["Chinese"]), None)
    library.put(split(["合唱团今年不排练了。"]), None)  # note 0 has another text now
    assert found(library, "在老教堂排练")[0] == "合唱团今年不排练了。"
    library.remove([entry.id for entry in library.entries()])
    with library.reading() as connection:
        assert connection.execute("SELECT count(*) FROM pairs WHERE pairs MATCH '\"合唱\"'").fetchone() == (0,)
    library.purge_removed(library.removed_passages())
    assert "合唱".encode() not in library.path.read_bytes()


def test_a_library_from_before_is_indexed_when_it_is_opened(tmp_path: Path) -> None:
    with closing(Library(tmp_path)) as library:
        library.put(split(NOTES["Chinese"]), None)
        with library.writing() as connection:
            connection.execute("INSERT INTO pairs (pairs) VALUES ('delete-all')")
            connection.execute("DELETE FROM about WHERE name='pairs'")
        assert not found(library, "包裹")
    with closing(Library(tmp_path)) as library:
        assert found(library, "包裹") == [NOTES["Chinese"][1]]


def test_a_salvaged_library_finds_them_too(tmp_path: Path) -> None:
    with closing(Library(tmp_path)) as library:
        library.put(split(NOTES["Chinese"]), None)
        path = library.path
    with path.open("r+b") as file:
        file.write(bytes(100))
    with closing(Library(tmp_path)) as library:
        assert found(library, "包裹") == [NOTES["Chinese"][1]]


def test_letters_are_paired_within_a_run() -> None:
    assert character_pairs("会议，三点。A会 ไทย 字") == ["会议", "三点", "会", "ไท", "ทย", "字"]
    assert character_pairs("plain words") == []


@pytest.mark.parametrize(
    ("asked", "stored"),
    [
        ("Wann findet die Probe statt?", "Wann ist die Probe?"),
        ("¿Quién llamó a Ana?", "¿A quién llamó Ana?"),
        ("谁打电话给安娜？", "安娜打电话给谁？"),
        ("متى الاجتماع؟", "متى كان الاجتماع؟"),
    ],
)
def test_the_guard_serves_equal_wording_only_where_its_rules_do_not_apply(asked: str, stored: str) -> None:
    assert "not in English" in str(disagreement(asked, stored))
    assert disagreement(asked, asked.rstrip("？?؟") + " ") is None


@pytest.mark.parametrize(("language", "foreign"), [("Arabic", True), ("German", False)])
def test_it_is_said_when_the_embedder_does_not_know_the_language(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, language: str, foreign: bool
) -> None:
    """With an embedder whose tokenizer knows Latin letters by the four, and all others one by one."""
    knowledge = Knowledge(Settings(library=str(tmp_path)), lambda *_, **__: None)
    knowledge._embedder = SimpleNamespace(  # type: ignore[assignment]
        digest="a", dimensions=4, embed=_embed, embed_passages=_embed, count_tokens=len
    )
    with closing(knowledge):
        done = knowledge.ingest(documents=[{"text": text} for text in NOTES[language]])
    assert done.is_foreign is foreign
    assert ("does not know the language" in caplog.text) is foreign


def _embed(texts: Sequence[str]) -> Embeddings:
    tokens = sum(1 if ord(letter) > 0x24F else 0.25 for text in texts for letter in text)
    return Embeddings(np.full((len(texts), 4), 0.5, np.float32), int(tokens), 0)
