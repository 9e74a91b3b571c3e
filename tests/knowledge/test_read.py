"""Files to documents: what is read, and what is refused."""

from __future__ import annotations

import base64
import builtins
import csv
import io
import json
import os
import sys
import threading
import tracemalloc
import zipfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import docx
import pytest

from rekindle.core.document import Document
from rekindle.errors import ExtraMissing, UnreadableDocument
from rekindle.knowledge.read import clean_text as text
from rekindle.knowledge.read import docx as word
from rekindle.knowledge.read import records
from rekindle.knowledge.read.clean_text import ReadProblem
from rekindle.knowledge.read.file import KINDS, FileText, kind_of, read_bytes, read_file, read_file_text
from tests.knowledge import files

pytestmark = pytest.mark.thorough


def one(name: str, data: bytes | str) -> Document:
    [document] = read_bytes(name, data.encode() if isinstance(data, str) else data)
    assert isinstance(document, Document)
    return document


def told(document: Document) -> str:
    return "\n".join(section.text for section in document.sections)


def outline(document: Document) -> list[tuple[tuple[str, ...], str]]:
    return [(section.headings, section.text.strip()) for section in document.sections]


def refusal(name: str, data: bytes | str) -> str:
    with pytest.raises(UnreadableDocument) as refused:
        list(read_bytes(name, data.encode() if isinstance(data, str) else data))
    assert str(refused.value).startswith(name + " ")
    return str(refused.value)


def word_file(build: Callable[[Any], None]) -> bytes:
    document = docx.Document()
    build(document)
    result = io.BytesIO()
    document.save(result)
    return result.getvalue()


# Any file.


def test_the_source_is_the_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("Hello.")
    monkeypatch.chdir(tmp_path)
    [document] = read_file(Path("a.txt"))
    assert document.source == str(tmp_path / "a.txt")


def test_a_name_tells_the_kind_whatever_its_case() -> None:
    assert kind_of(Path("A.PDF")) == "pdf"
    assert kind_of(Path("a.png")) is None
    assert set(KINDS.values()) == {"txt", "md", "html", "pdf", "eml", "mbox", "docx", "json", "jsonl", "csv"}


def test_a_file_of_an_unknown_kind_is_read_as_text(tmp_path: Path) -> None:
    (tmp_path / "notes.org").write_text("* a note")
    [document] = read_file(tmp_path / "notes.org")
    assert told(document) == "* a note"


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html", "a.pdf", "a.eml", "a.mbox", "a.docx", "a.json", "a.csv"])
@pytest.mark.parametrize("data", [b"", b" \n\t\n"])
def test_a_file_without_text_is_refused(name: str, data: bytes) -> None:
    refusal(name, data)


def test_an_empty_file_is_called_empty() -> None:
    for name in ("a.txt", "a.md", "a.html", "a.eml", "a.mbox", "a.json", "a.jsonl", "a.csv"):
        assert "is empty" in refusal(name, b"\n")


@pytest.mark.parametrize("suffix", sorted(set(KINDS) - {".mbox", ".jsonl", ".ndjson"}))
def test_a_file_over_the_limit_is_refused_and_told_what_to_do(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"x" * 2001)
    with pytest.raises(UnreadableDocument, match="larger than .* cut it into smaller files"):
        list(read_file(path, max_bytes=2000))


def test_a_missing_file_a_folder_and_a_pipe_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    for path, reason in (
        (tmp_path / "no.txt", "There is no file"),
        (tmp_path, "not a file"),
        (tmp_path / "a.txt", "not a file"),
    ):
        with pytest.raises(UnreadableDocument, match=reason):
            list(read_file(path))


def test_a_document_with_too_much_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_CHARACTERS", 1000)
    assert "characters of text" in refusal("a.txt", "word " * 300)
    assert "characters of text" in refusal("a.csv", "name\n" + "word\n" * 150)


# Text.


def test_a_first_line_that_stands_alone_is_the_title() -> None:
    assert one("a.txt", "The title\n\nSome text.").title == "The title"
    assert one("a.rst", "=====\nTitle\n=====\nSome text.").title == "Title"
    assert one("a.txt", "Not a title.\n\nSome text.").title == "a"
    assert one("a.txt", "runs on\nand on.").title == "a"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_unicode_is_decoded_with_and_without_a_mark(encoding: str) -> None:
    assert told(one("a.txt", "Grüße, 世界 🌍".encode(encoding))) == "Grüße, 世界 🌍"


@pytest.mark.parametrize(
    ("encoding", "sentence"),
    [
        ("cp1252", "Le café est très bon, déjà vu à Genève. “L'été”, la forêt était belle."),
        ("latin-1", "Grüße aus München, schöne Straße"),
        ("latin-1", "café"),
        ("cp1250", "Příliš žluťoučký kůň úpěl ďábelské ódy"),
        ("cp1251", "Привет, мир. Это обычный русский текст для проверки."),
        ("koi8_r", "Привет, мир. Это обычный русский текст для проверки."),
        ("cp932", "これは日本語のテキストです。今日は天気がいいですね。"),
        ("gb18030", "这是一个中文文本文件，今天天气很好。"),
    ],
)
def test_old_encodings_are_recognized(encoding: str, sentence: str) -> None:
    assert told(one("a.txt", sentence.encode(encoding))) == sentence


def test_a_broken_byte_does_not_make_utf8_something_else() -> None:
    data = "äöü und noch mehr Wörter mit Zeichen wie é, ß, ø, å, ñ".encode()
    assert told(one("a.txt", data[:1] + data[2:])).startswith("�öü und noch mehr Wörter")
    assert told(one("a.txt", data + "ñ".encode()[:1])).startswith("äöü und")


@pytest.mark.parametrize("data", [b"\x7fELF\x02\x01\x01\0\0\0\0", bytes(range(256)) * 50, b"\x01\x02\x03\x04" * 9])
def test_binary_is_refused_as_text(data: bytes) -> None:
    assert "is binary, not text" in refusal("a.txt", data)


def test_random_bytes_are_refused_as_any_kind() -> None:
    noise = bytes((at * 7919 + at // 256 * 104729) % 256 for at in range(20_000))
    for suffix in sorted(KINDS):
        refusal(f"a{suffix}", noise)


def test_controls_are_removed_and_characters_left_as_they_are() -> None:
    document = one("a.txt", "a\x07b\tc\r\nd\re\x1b[31mred\x1b[0m e\u0301" + "x" * 2000 + "\0")
    assert told(document) == "ab\tc\nd\nered e\u0301" + "x" * 2000


# Markdown.


def test_headings_nest_and_those_in_code_are_none() -> None:
    document = one(
        "a.md",
        "before\n\n# One #\ntext\n```sh\n# comment\n```\n~~~\n## no\n```\n~~~\n### `Deep` [link](u)\nmore\n"
        "Two\n===\nend\n\nsub\n---\nlast\n",
    )
    assert document.title == "One"
    assert outline(document) == [
        ((), "before"),
        (("One",), "text\n```sh\n# comment\n```\n~~~\n## no\n```\n~~~"),
        (("One", "Deep link"), "more\nTwo\n===\nend"),  # underlined, but in the middle of a paragraph
        (("One", "sub"), "last"),
    ]


def test_a_heading_over_nothing_is_text_itself() -> None:
    assert outline(one("a.md", "# Plan\n## First\n## Second\n### Third\nwhy\n# End")) == [
        (("Plan",), "First"),
        (("Plan", "Second", "Third"), "why"),
        ((), "End"),
    ]


def test_front_matter_gives_the_title_and_is_no_text() -> None:
    document = one("a.md", "---\ntitle: 'The front'\ntags: [a]\n---\n# Head\ntext")
    assert (document.title, told(document)) == ("The front", "text")
    assert told(one("a.md", "---\njust text\n---\nmore")).startswith("---\njust text")


def test_underlines_below_lists_rules_and_tables_make_no_headings() -> None:
    document = one("a.md", "- item\n---\ntext\n\n---\n\n| a |\n|---|\n")
    assert [section.headings for section in document.sections] == [()]


# HTML.


def test_a_page_is_read_as_it_is_seen() -> None:
    document = one(
        "a.html",
        """<title>The page</title><style>p{}</style><nav>Menu</nav><p hidden>no</p><p style="display: none">no</p>
        <h1>Top</h1><p>A <b>bold</b>
        word.<br>Next<script>no()</script></p><ul><li>one<li>two</ul><h2>Sub</h2><div>in</div><div>out</div>
        <table><tr><th>n</th><th>v</th></tr><tr><td><p>a</p></td><td><p>1</p></td></tr></table>
        <pre>x
  y</pre><footer>foot</footer><aside>ad</aside><noscript>no</noscript><template>no</template>""",
    )
    assert document.title == "The page"
    assert outline(document) == [
        (("Top",), "A bold word.\nNext\n\n- one\n- two"),
        (("Top", "Sub"), "in\nout\nn | v\na | 1\n\nx\n  y"),
    ]


def test_a_page_that_is_all_menu_is_read_all_the_same() -> None:
    assert told(one("a.html", "<body style='visibility:hidden'><nav>Menu</nav></body>")) == "Menu"


def test_tables_that_lay_out_a_page_do_not_join_its_lines() -> None:
    markup = "<table><tr><td>left</td><td><table><tr><td>a</td><td>b</td></tr></table>after</td></tr></table>"
    assert [line for line in told(one("a.html", markup)).split("\n") if line] == ["left |", "a | b", "after"]


@pytest.mark.parametrize("declared", ["utf-8", "iso-8859-1", "utf-16", "no-such", "punycode"])
@pytest.mark.parametrize("real", ["utf-8", "cp1252"])
def test_a_wrong_charset_declaration_does_no_harm(declared: str, real: str) -> None:
    body = "<p>Le café est très bon, déjà vu à Genève; la forêt était belle.</p>"
    document = one("a.html", f"<meta charset='{declared}'>{body}".encode(real))
    assert "déjà vu à Genève" in told(document)


def test_a_right_charset_declaration_is_followed() -> None:
    assert told(one("a.html", "<meta charset=cp1257><p>Ąžuolas</p>".encode("cp1257"))) == "Ąžuolas"


@pytest.mark.parametrize(
    "markup",
    [
        "<div>" * 100_000 + "text",
        "<span>" * 50_000 + "<p>text</p>" * 50_000,
        "".join(f"<b id={at}><p>" for at in range(4000)),
    ],
)
def test_elements_too_deep_are_refused(markup: str) -> None:
    assert "inside one another" in refusal("a.html", markup)


def test_deep_pages_and_unclosed_lists_are_read() -> None:
    assert told(one("a.html", "<div>" * 5000 + "text")) == "text"
    assert told(one("a.html", "<ul>" + "<li>x" * 50_000)).count("x") == 50_000


def test_entities_are_never_expanded_by_declaration() -> None:
    bomb = '<!DOCTYPE html [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><p>&b; &lt;b&gt; &#0;&#7;</p>'
    assert told(one("a.xhtml", bomb)).endswith("<b> �")


# PDF.


def test_pages_are_sections_and_broken_lines_are_joined() -> None:
    document = one(
        "a.pdf",
        files.pdf(
            [
                ["A Title Of It", "This sentence is broken", "in the middle, and hy-", "phenated. The semi-", "Final."],
                ["Two."],
            ]
        ),
    )
    assert document.title == "A Title Of It"
    assert [section.text for section in document.sections] == [
        "A Title Of It\nThis sentence is broken in the middle, and hyphenated. The semi-Final.",
        "Two.",
    ]


def test_a_pdf_is_titled_by_its_metadata_unless_they_say_nothing() -> None:
    assert one("a.pdf", files.pdf([["Text."]], title="From the metadata")).title == "From the metadata"
    assert one("a.pdf", files.pdf([["Text here"]], title="Untitled")).title == "Text here"


def test_an_encrypted_pdf_is_refused_as_such() -> None:
    assert "is encrypted" in refusal("a.pdf", files.pdf([["secret"]], encrypted=True))


def test_a_pdf_of_pictures_is_told_to_run_ocr() -> None:
    assert "has no text, only pictures; run OCR first" in refusal("a.pdf", files.pdf([[], []]))


def test_a_pdf_cut_at_any_place_is_read_or_refused() -> None:
    whole = files.pdf([["one"], ["two"]])
    for stop in range(0, len(whole), 37):
        try:
            found = list(read_bytes("a.pdf", whole[:stop]))
        except UnreadableDocument:
            continue
        assert isinstance(found[0], Document)


def test_a_damaged_page_is_left_out_and_told() -> None:
    whole = files.pdf([["one"], ["two"]])
    found = list(read_bytes("a.pdf", whole.replace(b"[5 0 R 7 0 R]", b"[5 0 R 1 0 R]")))
    assert told(found[0]) == "one"
    assert found[1] == ReadProblem("a.pdf", "a.pdf has damaged pages, which were left out: 2.")


def test_pdfs_are_read_by_many_threads() -> None:
    data = files.pdf([[f"page {number}"] for number in range(20)])
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(told(one("a.pdf", data)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and len(set(results)) == 1


# E-mail.

PLAIN = b"Content-Type: text/plain; charset=utf-8\n\nHello Bob,\n\n> quoted\nbye\n"
HTML = b"Content-Type: text/html; charset=utf-8\n\n<h1>Hello</h1><p>in <b>HTML</b></p>\n"


def test_a_mail_is_its_text_under_its_headers() -> None:
    document = one("a.eml", files.mail(PLAIN, headers="Subject: =?utf-8?q?Gr=C3=BC=C3=9Fe?= an\n dich\nX-Other: no\n"))
    assert document.title == "Grüße an dich"
    assert document.headers == (
        "From: Ann <ann@example.org>\nTo: Bob <bob@example.org>\nDate: Mon, 1 Jan 2024 10:00:00 +0000\n"
        "Subject: Grüße an dich"
    )
    assert told(document) == "Hello Bob,\n\n> quoted\nbye"


def test_plain_text_is_preferred_and_html_taken_where_it_is_empty() -> None:
    assert "quoted" in told(one("a.eml", files.mail(PLAIN, HTML, kind="alternative")))
    empty = b"Content-Type: text/plain\n\n \n"
    assert told(one("a.eml", files.mail(empty, HTML, kind="alternative"))) == "Hello\nin HTML"


def test_attachments_are_named_and_never_read() -> None:
    notes = b'Content-Type: text/plain\nContent-Disposition: attachment; filename="n.txt"\n\nsecret\n'
    document = one("a.eml", files.mail(PLAIN, files.attached("a.pdf", b"x"), notes))
    assert told(document).endswith("bye\n\nAttachments: a.pdf, n.txt")
    assert "secret" not in told(document)


def test_ten_megabytes_of_base64_take_no_memory_of_their_own() -> None:
    data = files.mail(PLAIN, files.attached("big.bin", b"\x5a" * 10_000_000), PLAIN)
    tracemalloc.start()
    document = one("a.eml", data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert told(document).count("bye") == 2
    assert peak < 4_000_000


def test_a_long_text_in_base64_is_read_whole() -> None:
    part = b"Content-Type: text/plain; charset=utf-8\nContent-Transfer-Encoding: base64\n\n"
    document = one("a.eml", files.mail(part + base64.encodebytes(b"word " * 100_000)))
    assert told(document).count("word") == 100_000


@pytest.mark.parametrize("levels", [100, 5000])
def test_a_mail_nested_too_deeply_is_refused(levels: int) -> None:
    nested = "".join(f"Content-Type: multipart/mixed; boundary=b{level}\n\n--b{level}\n" for level in range(levels))
    assert "inside one another" in refusal("a.eml", f"From: a@b\n{nested}Content-Type: text/plain\n\nx\n")


def test_malformed_headers_do_not_stop_a_mail() -> None:
    document = one(
        "a.eml",
        b"From: \xe9t\xe9@x <\nTo: " + b"a@b, " * 20_000 + b"\nSubject: =?x-none?b?!!?= =?utf-8?q?=ff?= \xe4\n"
        b"Date: yesterday\nContent-Type: text/plain; charset=x-none\n\nbody\n",
    )
    assert told(document) == "body"
    assert all(len(line) <= 200 for line in document.headers.split("\n"))


def test_endless_headers_of_parts_are_cut_and_the_text_is_read() -> None:
    for header in (b"a=b;" * 100_000, b"a=b;\n " * 100_000):
        data = b"Content-Type: text/plain; charset=cp1251; " + header + b"\n\n" + "Привет".encode("cp1251")
        assert told(one("a.eml", data)) == "Привет"


MAILBOX = (
    b"From ann@example.org Mon Jan  1 10:00:00 2024\nMessage-ID: <m1@x>\nSubject: one\n\nfirst\n>From here\n"
    b"From here it goes on\n\n"
    b"From bob@example.org Mon Jan  1 11:00:00 2024\nSubject: two\n\nsecond\n\n"
    b"From bob@example.org Mon Jan  1 12:00:00 2024\nMessage-ID: <m1@x>\nSubject: three\n\nthird\n"
)


def test_a_mailbox_gives_each_message_by_a_name_of_its_own() -> None:
    found = list(read_bytes("a.mbox", MAILBOX))
    assert [document.source for document in found] == ["a.mbox#m1@x", "a.mbox#2", "a.mbox#m1@x~3"]
    assert told(found[0]) == "first\nFrom here\nFrom here it goes on"


def test_a_broken_message_is_a_problem_and_the_next_is_read() -> None:
    nested = "".join(f"Content-Type: multipart/mixed; boundary=b{level}\n\n--b{level}\n" for level in range(3000))
    first = b"From a@b Mon Jan  1 10:00:00 2024\n" + nested.encode() + b"\n\n"
    found = list(read_bytes("a.mbox", first + MAILBOX))
    assert isinstance(found[0], ReadProblem) and found[0].source == "a.mbox#1"
    assert [document.title for document in found[1:]] == ["one", "two", "three"]


def test_a_mailbox_is_read_message_by_message(tmp_path: Path) -> None:
    path = tmp_path / "a.mbox"
    path.write_bytes(b"".join(MAILBOX.replace(b"m1@x", b"m%d@x" % at) + b"\n" for at in range(20_000)))
    tracemalloc.start()
    found = list(islice(read_file(path, max_bytes=1000), 3))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 3 and peak < 1_000_000


# Word.


def test_a_word_file_gives_headings_lists_and_rows() -> None:
    def build(document: Any) -> None:
        document.add_heading("Chapter", 1)
        document.add_paragraph("Some ").add_run("text").bold = True
        document.add_paragraph("point", style="List Bullet")
        document.add_heading("Part", 2)
        table = document.add_table(2, 2)
        for row, values in zip(table.rows, (("n", "v"), ("a", "1")), strict=True):
            for cell, value in zip(row.cells, values, strict=True):
                cell.text = value

    document = one("a.docx", word_file(build))
    assert document.title == "Chapter"
    assert outline(document) == [(("Chapter",), "Some text\n- point"), (("Chapter", "Part"), "n | v\na | 1")]


def test_a_zip_bomb_is_refused_before_it_is_unpacked() -> None:
    package = word_file(lambda document: document.add_paragraph("x"))
    bomb = files.repacked(package, "word/document.xml", b" " * (word.MAX_UNPACKED_BYTES + 1))
    tracemalloc.start()
    assert "zip bomb" in refusal("a.docx", bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


def test_a_zip_bomb_that_lies_about_its_size_is_not_unpacked_either() -> None:
    package = word_file(lambda document: document.add_paragraph("x"))
    bomb = files.repacked(package, "word/document.xml", b" " * 50_000_000)
    tracemalloc.start()
    refusal("a.docx", files.understated(bomb, "word/document.xml", 1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


def test_what_is_no_word_file_is_refused() -> None:
    assert "is damaged, or not a Word file" in refusal("a.docx", b"plain text")
    assert "encrypted" in refusal("a.docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600))
    package = word_file(lambda document: document.add_paragraph("x"))
    refusal("a.docx", package[: len(package) // 2])
    for broken in (b"<a>", b"", b"<a/>"):
        for member in ("word/document.xml", "[Content_Types].xml", "_rels/.rels", "word/styles.xml"):
            try:
                list(read_bytes("a.docx", files.repacked(package, member, broken)))
            except UnreadableDocument:
                continue


def test_entities_of_a_word_file_are_never_resolved(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("SECRET")
    package = word_file(lambda document: document.add_paragraph("before HERE after"))
    xml = zipfile.ZipFile(io.BytesIO(package)).read("word/document.xml")
    for entity in (f'<!ENTITY e SYSTEM "file://{tmp_path}/secret">', '<!ENTITY e "SECRET">'):
        head, _, rest = xml.partition(b"?>")
        changed = head + b"?><!DOCTYPE d [" + entity.encode() + b"]>" + rest.replace(b"HERE", b"&e;")
        try:
            document = one("a.docx", files.repacked(package, "word/document.xml", changed))
        except UnreadableDocument:
            continue
        assert "SECRET" not in told(document)


# JSON.


def test_records_with_text_become_documents_named_by_their_ids() -> None:
    found = list(
        read_bytes(
            "a.json",
            json.dumps(
                [
                    {"id": 7, "title": "Seven", "text": "The text."},
                    {"doc_id": "x", "body": " ".join(["word"] * 30)},
                    {"id": 7, "content": ["one", "two"]},
                    "bare text",
                ]
            ).encode(),
        )
    )
    assert [document.source for document in found] == ["a.json#7", "a.json#x", "a.json#7~3", "a.json#4"]
    assert [document.title for document in found[:2]] == ["Seven", " ".join(["word"] * 10) + "…"]
    assert [told(document) for document in found[2:]] == ["one\ntwo", "bare text"]


def test_other_records_become_lines_of_keys_and_values() -> None:
    document = one(
        "a.json", '{"name": "N", "a": {"b": 1.50, "c": [1, "x"]}, "l": [{"k": true}, null], "big": 1' + "0" * 50 + "}"
    )
    assert (document.source, document.title) == ("a.json", "N")
    assert told(document) == "name: N\na.b: 1.50\na.c: 1, x\nl.0.k: true\nbig: 1" + "0" * 50


@pytest.mark.parametrize("data", ["[" * 200_000, '{"a":' * 500 + "1" + "}" * 500, "{broken", '{"a": 1} x'])
def test_json_that_is_broken_or_too_deep_is_refused(data: str) -> None:
    refusal("a.json", data)


def test_json_may_escape_what_is_no_character() -> None:
    assert told(one("a.json", r'{"text": "a\u0000b\ud800c"}')) == "ab\ufffdc"


def test_a_broken_line_is_a_problem_and_the_others_are_read() -> None:
    found = list(read_bytes("a.jsonl", b'{"text": "one"}\n\n{broken\n{"text": ""}\n{"text": "two", "_id": "t"}'))
    assert [item.source for item in found] == ["a.jsonl#1", "a.jsonl#3", "a.jsonl#4", "a.jsonl#t"]
    assert [type(item) for item in found] == [Document, ReadProblem, ReadProblem, Document]
    assert found[1].reason.startswith("a.jsonl#3 is not JSON: ")


def test_many_broken_lines_are_counted_and_no_json_lines_are_refused() -> None:
    found = list(read_bytes("a.jsonl", b'{"text": "one"}\n' + b"{\n" * 500))
    assert len(found) == 1 + records.MAX_PROBLEMS + 1
    assert "400 more" in found[-1].reason
    assert "is not JSON lines" in refusal("a.jsonl", "some\ntext\n" * 50)


def test_a_line_too_long_is_a_problem_and_the_next_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 1000)
    found = list(read_bytes("a.jsonl", b'{"text": "' + b"x" * 5000 + b'"}\n{"text": "two"}\n'))
    assert isinstance(found[0], ReadProblem) and found[0].source == "a.jsonl#1"
    assert told(found[1]) == "two"


def test_json_lines_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "some words of text"}\n' * 200_000)
    tracemalloc.start()
    found = list(islice(read_file(path, max_bytes=1000), 3))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 3 and peak < 1_000_000


# Tables.


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_table_gives_its_columns_and_a_line_for_each_row(delimiter: str) -> None:
    rows = [["name", "note", "age"], ["Ann", "likes, tea; and\nmilk", "30"], ["Bob", "", "41"]]
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter).writerows(rows)
    document = one("people.csv", file.getvalue())
    assert (document.title, document.headers) == ("people", "Columns: name, note, age")
    assert told(document) == "name: Ann, note: likes, tea; and milk, age: 30\nname: Bob, age: 41"


def test_a_table_without_names_keeps_its_first_row() -> None:
    document = one("a.tsv", "Ann\t30\nBob\t41\n")
    assert (document.headers, told(document)) == ("", "Ann, 30\nBob, 41")


def test_a_cell_of_ten_megabytes_is_read() -> None:
    document = one("a.csv", 'id,text\n1,"' + "word " * 2_000_000 + '"\n')
    assert len(told(document)) > 9_900_000


def test_long_names_of_columns_do_not_multiply_the_text() -> None:
    document = one("a.csv", "x" * 10_000 + ",b\n" + "1,2\n" * 1000)
    assert len(told(document)) < 100 * 1000
    assert "columns" in refusal("a.csv", ",".join("abc" for _ in range(5000)))


# Without the extra.

PARSERS = ("selectolax", "pypdfium2", "docx", "lxml", "charset_normalizer")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """As installed without the parsers."""
    real = builtins.__import__

    def refusing(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] in PARSERS:
            raise ImportError(name)
        return real(name, *rest, **more)

    for name in list(sys.modules):
        if name.partition(".")[0] in PARSERS:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refusing)


@pytest.mark.usefixtures("bare")
def test_plain_kinds_need_no_extra() -> None:
    assert told(one("a.txt", "café".encode("latin-1"))) == "café"
    assert told(one("a.md", "# a\nb")) == "b"
    assert told(one("a.json", '{"text": "b"}')) == "b"
    assert told(one("a.csv", "a,b\nx,y")) == "a: x, b: y"
    assert "bye" in told(one("a.eml", files.mail(PLAIN, HTML, kind="alternative")))
    assert len(list(read_bytes("a.mbox", MAILBOX))) == 3


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("name", "data"), [("a.html", b"<p>x"), ("a.pdf", b"%PDF"), ("a.docx", b"PK"), ("a.eml", HTML)]
)
def test_a_missing_parser_is_told_with_the_command_that_brings_it(name: str, data: bytes) -> None:
    with pytest.raises(ExtraMissing, match=r'pip install "rekindle-llm\[knowledge\]"'):
        list(read_bytes(name, data))


@pytest.mark.usefixtures("bare")
def test_one_mail_in_html_does_not_stop_a_mailbox() -> None:
    first = b"From a@b Mon Jan  1 10:00:00 2024\n" + HTML + b"\n"
    found = list(read_bytes("a.mbox", first + MAILBOX))
    assert isinstance(found[0], ReadProblem) and "pip install" in found[0].reason
    assert len(found) == 4


def test_the_text_of_a_file_is_what_it_says_or_its_source(tmp_path: Path) -> None:
    def read(name: str, data: bytes) -> FileText:
        (tmp_path / name).write_bytes(data)
        return read_file_text(tmp_path / name)

    assert read("a.md", b"# Lamp\n\n* wick\n") == FileText("# Lamp\n\n* wick\n")
    assert read("a.py", b"def f():\n\treturn 1\n").text == "def f():\n\treturn 1\n"
    assert read("a.jsonl", b'{"text": "x"}\n').text == '{"text": "x"}\n'
    html = b"<h1>Log</h1><h2>May</h2><p>Mist.</p><h2>June</h2><p>Sun.</p>"
    assert read("a.html", html).text == "Log\nMay\nMist.\n\nJune\nSun."
    mail = b"From: a@b\nSubject: lamp\n\nIt burns.\n"
    assert read("a.eml", mail).text == "From: a@b\nSubject: lamp\n\nIt burns."
    with pytest.raises(UnreadableDocument, match=r"a\.bin is binary, not text"):
        read("a.bin", bytes(100))
    with pytest.raises(UnreadableDocument, match=r"a\.txt is empty: it holds no text\."):
        read("a.txt", b"\n")
    with pytest.raises(UnreadableDocument, match=r"a\.mbox#1 is empty: it holds no text\."):
        read("a.mbox", b"From a@b Mon Jan  1 11:00:00 2026\n\n\n")
    with pytest.raises(UnreadableDocument, match=r"There is no file"):
        read_file_text(tmp_path / "gone")
    with pytest.raises(UnreadableDocument, match=r"is a folder, not a file"):
        read_file_text(tmp_path)
