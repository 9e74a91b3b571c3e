"""Files made to keep a reader busy: each is read in a time that grows with its size, or refused with a limit named."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping

import docx
import pytest

from rekindle.core.document import Document
from rekindle.errors import UnreadableDocument
from rekindle.knowledge.read import docx as word
from rekindle.knowledge.read import html, mail, pdf
from rekindle.knowledge.read.docx import heading_levels
from rekindle.knowledge.read.file import read_bytes


def read(name: str, data: bytes | str) -> str:
    [document] = read_bytes(name, data.encode() if isinstance(data, str) else data)
    assert isinstance(document, Document)
    return document.text


def refusal(name: str, data: bytes | str) -> str:
    with pytest.raises(UnreadableDocument) as refused:
        list(read_bytes(name, data.encode() if isinstance(data, str) else data))
    return str(refused.value)


def word_file(part: str, before: str, added: str) -> bytes:
    """A Word file with `added` before the first `before` of a part."""
    document, plain, changed = docx.Document(), io.BytesIO(), io.BytesIO()
    document.add_heading("A heading")
    document.add_paragraph("Some text")
    document.save(plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(changed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            content = source.read(name)
            target.writestr(
                name, content.replace(before.encode(), (added + before).encode(), 1) if name == part else content
            )
    return changed.getvalue()


class Counted(Mapping[str, tuple[str, str]]):
    """Styles that count how often one is looked up."""

    def __init__(self, styles: dict[str, tuple[str, str]]) -> None:
        self._styles = styles
        self.lookups = 0

    def __getitem__(self, name: str) -> tuple[str, str]:
        self.lookups += 1
        return self._styles[name]

    def __contains__(self, name: object) -> bool:
        return name in self._styles

    def __iter__(self) -> Iterator[str]:
        return iter(self._styles)

    def __len__(self) -> int:
        return len(self._styles)


def test_each_style_of_a_chain_is_looked_up_once() -> None:
    count = 5000
    chain = {f"s{at}": ("own", f"s{at + 1}") for at in range(count)} | {f"s{count}": ("heading 2", "")}
    styles = Counted(chain)
    assert heading_levels(styles) == dict.fromkeys(chain, 2)
    assert styles.lookups <= len(chain)


def test_styles_in_a_circle_or_of_nothing_are_no_headings() -> None:
    circle = {"a": ("one", "b"), "b": ("two", "a"), "c": ("three", "missing"), "d": ("heading 1", "a"), "e": ("x", "d")}
    assert heading_levels(circle) == {"d": 1, "e": 1}


def test_a_word_file_with_a_chain_of_styles_is_read() -> None:
    chain = "".join(
        f'<w:style w:type="paragraph" w:styleId="s{at}"><w:name w:val="s{at}"/><w:basedOn w:val="s{at + 1}"/></w:style>'
        for at in range(10_000)
    )
    assert "Some text" in read("a.docx", word_file("word/styles.xml", "</w:styles>", chain))


def test_text_boxes_inside_one_another_are_read_once() -> None:
    depth = 60
    box = "<w:p><w:r><w:t>x</w:t></w:r>" * depth + "</w:p>" * depth
    table = f"<w:tbl><w:tr><w:tc>{box}</w:tc></w:tr></w:tbl>"
    text = read("a.docx", word_file("word/document.xml", "<w:sectPr", table))
    assert text.count("x") == depth + "Some text".count("x")


def test_a_word_file_of_too_many_elements_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word, "_MAX_ELEMENTS", 2000)
    assert "elements" in refusal("a.docx", word_file("word/document.xml", "<w:sectPr", "<w:p/>" * 3000))


@pytest.mark.parametrize("attribute", ["a%d", "a%d=1", "a%d='>'", 'a%d="1"', "a%d = x"])
@pytest.mark.parametrize("gap", [" ", "\n", "/"])
def test_a_tag_of_tens_of_thousands_of_attributes_is_refused(attribute: str, gap: str) -> None:
    if gap == "/" and attribute in ("a%d=1", "a%d = x"):
        gap = " /"  # else it is a part of the value
    page = f"<p>text</p><p {gap.join(attribute % number for number in range(40_000))}>more</p>"
    assert "attributes" in refusal("a.html", page)


@pytest.mark.parametrize(
    "page",
    [
        '<img src="data:image/png;base64,' + "ab/cd " * 50_000 + '"><p>text</p>',
        "<img src=data:image/png;base64," + "ab/cd" * 50_000 + "><p>text</p>",
        "<script>if (a<b) {" + "word / " * 50_000 + "}</script><p>text</p>",
        "<!-- <a " + "word " * 50_000 + "--><p>text</p>",
        "<textarea><a " + "word " * 50_000 + "</textarea><p>text</p>",
        "<p>text</p>" + "<p class='a b c' id=x data-y>more</p>" * 5000,
    ],
)
def test_long_values_scripts_and_comments_are_no_attributes(page: str) -> None:
    assert "text" in read("a.html", page)


@pytest.mark.parametrize("piece", ["<a ", '<a ="', "<a ='x", "<!--", "<script>", "<textarea><a ", "<", "</", "<a b='"])
def test_counting_attributes_ends_for_whatever_is_left_open(piece: str) -> None:
    page = "text " + piece * 300_000
    try:
        html._refuse_attributes(page)
    except UnreadableDocument as refused:
        assert "attributes" in str(refused)


def test_a_page_of_too_many_tags_is_refused() -> None:
    assert "1,000,000 tags" in refusal("a.html", "<p>x" * 1_000_001)


def test_a_mail_of_too_many_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "_MAX_PARTS", 100)
    head = "Subject: a\nContent-Type: multipart/mixed; boundary=b\n\n"
    assert "100 parts" in refusal("a.eml", head + "--b\n\nx\n" * 101)
    assert "x" in read("a.eml", head + "--b\n\nx\n" * 99)


def test_wrapped_lines_of_a_page_are_joined_in_one_pass() -> None:
    """A million of them: joined one after another, the text before would be copied for each."""
    lines = ["a line that ends with-", "out a break and goes on", "- an item", "", "Another."]
    assert pdf.joined("\n".join(lines)) == "a line that ends without a break and goes on\n- an item\n\nAnother."
    assert len(pdf.joined("word\n" * 1_000_000)) == 5_000_000
