"""Questions that a model generates: the prompts, parsing its reply, and filtering the questions.

They are generated from abstracts of documents and from earlier questions. Everything here is a pure function of its
arguments, so later questions cannot leak into a prediction.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rekindle.core.grammar import Grammar
from rekindle.core.request import Message
from rekindle.knowledge.retrieve import Floats
from rekindle.knowledge.segment import STOPWORDS, character_pairs

Origin = Literal["abstract", "history"]

SAME_QUESTION = 0.92  # cosine from which two questions count as the same
_FEWEST_WORDS, _MAX_WORDS = 3, 30
_MAX_CHARACTERS = 240
_FOUND = 0.5  # share of a question's words that must occur in its passages
_FAR = 0.25  # cosine below which a passage is unrelated to a question
_MARKS = "?？؟"  # that end a question
_FEWEST_LETTERS = 5  # of a question in a script without spaces
_MIN_PAIRS = 0.15  # share of a question's pairs of letters that must occur, in a script without spaces
_BEGINNING = 4  # letters of a word that are compared: its ending depends on its place
_MAX_READ = 20_000  # characters of a reply; a longer one is no list of questions

_ASKING = frozenset(  # words of questions that answering texts do not contain
    """
    discuss discussed discussing discussion discussions conclusion group team meeting opinion opinions thoughts mention
    mentioned describe described suggest suggested recommend decide decided reaction type specific requested email
    sender recipient received sent
    """.split()  # noqa: SIM905
)
_WORD = re.compile(r"\w+(?:['’]\w+)*")
_POSSESSIVE = re.compile(r"['’]s?$")
_MARKUP = re.compile(r"\*{1,3}|__|`+|^#{1,6}\s+|^>\s*|</?[a-z]{1,8}>")
_LABEL = re.compile(
    r"^(?:[-•–—*+·]\s+|\(?\d{1,3}\s*[.):\]-]\s*|\[\d{1,3}\]\s*|\(?[a-hA-H][.)]\s+"
    r"|(?:q|question|query|frage|user|follow-up)\s*(?:no\.? ?)?#?\d{0,3}\s*[:.)-]\s*)",
    re.IGNORECASE,
)
_ANSWER = re.compile(
    r"^[-•*\s]*(?:\d{1,3}[.)]\s*)?(?:a\s*\d{0,3}\s*:|(?:answer|response|reply|note|hint)\s*\d{0,3}\s*[:)])",
    re.IGNORECASE,
)
_ASKS = re.compile(
    r"(?:what|when|where|who|whom|whose|which|why|how|did|does|do|is|are|was|were|has|have|had|can|could|will|would"
    r"|should|may|might|summarize|summarise|describe|explain|list|tell|compare)(?:'s|'re|’s|’re)?\s",
    re.IGNORECASE,
)
_SAID_FIRST = re.compile(rf".{{0,200}}[.!:)]\s+[\"“]?(?={_ASKS.pattern})", re.IGNORECASE)
_PLACEHOLDER = re.compile(
    r"\b(?:you|your|yours|yourself)\b|"
    r"\b(?:X{2,}|Y{3,}|N{2,}|TBD|lorem|placeholder)\b|\b(?:the|this) (?:user|assistant|ai|passage|text|abstract|"
    r"notes?|summary|prompt|question|list)s?\b|[\[<{_]{1,3}\s*\w*\s*[\]>}_]{1,3}|\.{3}|…",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class PredictedQuestion:
    """A question that may be asked. It can quote its documents, so it is removed with any of them."""

    text: str
    origin: Origin
    documents: tuple[int, ...]


def summary_prompt(passages: Sequence[str], max_words: int = 40) -> tuple[Message, ...]:
    """The chat that asks for an abstract of passages."""
    text = "\n\n".join(passage.strip() for passage in passages)
    about = "who took part, and what it was about. Use its language."
    wanted = f"Tell me in at most {max_words} words what happened in it: {about}"
    return (Message("user", f"Here is a text.\n\n{text}\n\n{wanted}"),)


def merging_prompt(abstracts: Sequence[str], max_words: int = 40) -> tuple[Message, ...]:
    """The chat that asks for one abstract in place of several."""
    wanted = f"Tell me in at most {max_words} words what all of this is about, in the language of the notes."
    return (Message("user", f"Here are notes.\n\n{_listed(abstracts)}\n\n{wanted}"),)


def prompt_for_questions(general: Sequence[str], details: Sequence[str], count: int) -> tuple[Message, ...]:
    """The chat that asks for `count` questions: about whole documents, and about their parts."""
    kinds = []
    if general:
        kinds.append("some general ones (what it is about, who took part, what was decided)")
    if details:
        kinds.append("detailed ones (who, when, where, why, how many)")
    wanted = (
        f"Write {count} questions that I may ask about my documents: {' and '.join(kinds)}. Use the names and topics "
        "of the notes, and their language. One question a line, numbered: 1. ...?"
    )
    return (Message("user", f"Here are notes about my documents.\n\n{_listed((*general, *details))}\n\n{wanted}"),)


def judging_message(question: str) -> str:
    """What a model is asked about a predicted question, behind the passages that were found for it."""
    return f"{question}\n\nDo the passages answer this question? Say only yes or no."


def yes_no_grammar() -> Grammar:
    return Grammar.regex("(yes|no)")


def _listed(texts: Sequence[str]) -> str:
    return "\n".join(f"- {' '.join(text.split())}" for text in texts)


def prompt_from_history(questions: Sequence[str], count: int) -> tuple[Message, ...]:
    """The chat that asks for `count` questions that may follow earlier ones."""
    wanted = f"Write {count} other questions that I could ask next, about the same people and things, in the same way."
    return (Message("user", f"I asked these questions about my documents:\n{_listed(questions)}\n\n{wanted}"),)


def summary_grammar() -> Grammar:
    """Constrains an abstract to plain sentences on one line: small models otherwise continue the dialogue they read."""
    return Grammar.regex(r"[^\s:?!a-z\"'*#(-][^\n:?!]{20,240}[.。।]")


def list_grammar(count: int) -> Grammar:
    """Constrains a reply to a numbered list of `count` questions, and nothing else: `1. ...?`."""
    lines = (rf"{number}\. [^\n{_MARKS}]{{4,160}}[{_MARKS}]" for number in range(1, count + 1))
    return Grammar.regex(r"\n".join(lines))


def parse_questions(text: str, max_count: int) -> list[str]:
    """At most `max_count` questions of a reply, in order, without duplicates, each with its question mark.

    Small models write untidy lists: numbers, bullets, quotes and labels are removed, and so are answers, headings,
    overlong lines, and a truncated last line.
    """
    text = text[:_MAX_READ].replace("\r", "\n").replace("？", "?").replace("؟", "?")
    whole = text.rstrip().endswith(("?", ".", "!", '"', "”", "*", ")"))
    pieces = [piece for line in text.splitlines() for piece in _pieces(line)]
    found: dict[str, str] = {}
    for number, piece in enumerate(pieces):
        if number == len(pieces) - 1 and not whole and not piece.endswith("?"):
            break  # cut off in the middle
        question = _question(piece)
        if question is not None and len(found) < max_count:
            found.setdefault(_same(question), question)
    return list(found.values())


def _pieces(line: str) -> list[str]:
    """The possible questions on a line, separated by ";", a number or a question mark."""
    cleaned = _MARKUP.sub("", line.strip())
    parts = re.split(r"(?<=\?)(?!\?)[\"'”’)\]]*[;,.]?\s*|;\s+|\s+(?=\(?\d{1,2}[.)]\s+[A-Z\"“])", cleaned)
    return [part.strip() for part in parts if part.strip()]


def _question(piece: str) -> str | None:
    """A piece as a question, or None."""
    if _ANSWER.match(piece):
        return None
    text = " ".join(piece.split())
    while (bare := _LABEL.sub("", text).strip(" \"'“”‘’`*_|>,[{(")) != text:  # "1. Q: ..." has two of them
        text = bare
    if not _ASKS.match(text) and (said := _SAID_FIRST.match(text)):
        text = text[said.end() :]
    if not _has_length(text):
        return None
    if not text.endswith("?"):
        text = text.rstrip(" .!,:;…-")
        if not _ASKS.match(text):
            return None
        text += "?"
    text = re.sub(r"\s*\?+$", "?", text)
    return text[0].upper() + text[1:] if (text[0].isalpha() or text[0] == "¿") and "?" not in text[:-1] else None


def _has_length(text: str) -> bool:
    """Whether a text has the length of a question. Some languages say all of it in two words, or without spaces."""
    words = len(text.split())
    fewest = _FEWEST_WORDS if text.isascii() else 2
    enough = len(text) >= _FEWEST_LETTERS if character_pairs(text) else words >= fewest
    return enough and len(text) <= _MAX_CHARACTERS and words <= _MAX_WORDS


def _same(question: str) -> str:
    return " ".join(re.findall(r"\w+", question.casefold()))


def pick_novel(
    candidates: Sequence[PredictedQuestion],
    vectors: Floats,
    known: Floats,
    max_count: int,
    limit: float = SAME_QUESTION,
) -> list[int]:
    """Indices of at most `max_count` candidates that are new, in order.

    vectors  [candidates, dimensions], of unit length
    known    [questions, dimensions], of unit length: questions that need no prediction
    """
    if len(candidates) != len(vectors):
        raise ValueError(f"{len(candidates)} candidates have {len(vectors)} vectors")
    kept: list[int] = []
    texts: set[str] = set()
    against = known.reshape(-1, vectors.shape[1]) if len(vectors) else known
    for number, candidate in enumerate(candidates):
        if len(kept) >= max_count:
            break
        same = _same(candidate.text)
        if same in texts or _nearest(vectors[number], against) >= limit:
            continue
        if _nearest(vectors[number], vectors[kept]) >= limit:
            continue
        texts.add(same)
        kept.append(number)
    return kept


def _nearest(vector: Floats, others: Floats) -> float:
    return float((others @ vector).max()) if len(others) else -1.0


def is_answerable(question: str, passages: Sequence[tuple[str, float]]) -> bool:
    """Whether the passages retrieved for a question, as (text, cosine), are likely to answer it, in any language.

    They must contain the beginnings of half of its longer words and of all its names; where no spaces separate words,
    some of its pairs of letters. Nobody asks questions with a blank, or about "the user" or "this text".
    """
    if not passages or _PLACEHOLDER.search(question):
        return False
    text = " ".join(passage for passage, _ in passages).casefold()
    if pairs := set(character_pairs(question.casefold())):
        return len(pairs & set(character_pairs(text))) >= _MIN_PAIRS * len(pairs)
    known = {word[:_BEGINNING] for word in _WORD.findall(text)}
    spoken = [word for word in _WORD.findall(question)[1:] if word.casefold() not in STOPWORDS]
    words = [word for word in spoken if _is_name(word) or len(word) >= _BEGINNING]
    words = [word for word in words if word.casefold() not in _ASKING] or words
    missing = [word for word in words if _POSSESSIVE.sub("", word).casefold()[:_BEGINNING] not in known]
    if any(map(_is_name, missing)):
        return False
    found = len(words) - len(missing)
    nearest = max(cosine for _, cosine in passages)
    return bool(words) and found >= _FOUND * len(words) and (nearest >= _FAR or found == len(words) > 1)


def _is_name(word: str) -> bool:
    """Whether a word inside of a question is a name or a number; in German, any noun."""
    return word[0].isupper() or word[0].isdigit()
