"""A question taken apart for the guard: the kind of answer it wants, and its content words.

When did Anna buy her second car in May 2021?
kind when     words Anna (a name), buy, car     figures 2, 2021     dates may
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rekindle.answers.words import (
    DAYS,
    DIRECTIONS,
    LIGHT,
    MONTHS,
    NEGATIONS,
    NUMBERS,
    ORDINALS,
    PHRASES,
    SCALES,
    UNITS,
    UNSURE_MONTHS,
    stem,
    word_set,
)
from rekindle.knowledge.segment import STOPWORDS

_BREAKS = frozenset(',.;:?!()…–—"“”')
_CURRENCIES = frozenset("$€£¥₹%")
_MARK = r"!-/:-@\[-`{-~\u060c\u061b\u061f\u2000-\u206f\u3000-\u303f\uff01-\uff0f¿¡«»"
_TOKEN = re.compile(
    r"[$€£¥₹%]|\d+(?:[.,:]\d+)*\w*|(?:[^\W\d_]\.){1,8}[^\W\d_]\b\.?"
    rf"|[^\s{_MARK}]+(?:['’`][^\s{_MARK}]+)*[+#]*|[,.;:?!()…–—\"“”]"
)
_SHORT = re.compile(r"(?:n['’`]t|['’`](?:s|re|m|ll|d|ve))$", re.IGNORECASE)
_LONG = {"s": "is", "re": "are", "m": "am", "ll": "will", "d": "would", "ve": "have"}
_ACCENT = re.compile("([A-Za-z])[\u0300-\u036f]+")
_FIGURE = re.compile(r"\d+(?:[.,:]\d+)*")
_MAX_DIGITS = 12  # what is longer is no amount, but the number of something
_AFTER_FIGURE = frozenset(["", "st", "nd", "rd", "th", *SCALES, *UNITS])

_HELPERS = word_set("is are was were am be do does did has have had can could will would should shall may might must")
_ACTING = word_set("do does did will would can could should")  # the one who acts comes next
_BEING = word_set("is are was were been be")
_SIDES = frozenset(["and", "or", "vs", "versus"])  # what stands on either side may change places
_PARTICLES = frozenset(after for _, after in PHRASES)
_NEVER_NAMES = LIGHT - {"us", "may"}

_ASKING = word_set("what which who whom whose when where why how")
_OPENINGS = word_set("know tell me remind explain say so and guess recall")
_BEFORE_ASKING = word_set("in on at for with to by from since after until about")
_KINDS = {
    **dict.fromkeys(word_set("time date day year month week weekend weekday hour season decade century"), "when"),
    **dict.fromkeys(word_set("place location city country town state street address village venue continent"), "where"),
    **dict.fromkeys(("number", "amount"), "how many"),
    **dict.fromkeys(("way", "method"), "how"),
    "person": "who",
    "reason": "why",
    "purpose": "why",
}
_VAGUE = word_set("time date place location person number amount reason purpose way method")
_LINKS = word_set("the a an is was are were best easiest main exact only")
_AFTER_NOUN = word_set("of for that why behind to when where")
_LENGTHS = word_set("second minute hour day week month year")


@dataclass(frozen=True)
class Word:
    """A content word: in lower case, its stem, and whether it is a name."""

    text: str
    stem: str
    name: bool


@dataclass(frozen=True)
class QuestionKind:
    """The kind of answer that is asked for, and its granularity (year, city) where the question says so."""

    name: str  # when, where, who, why, how, how many, how much, how long, how often, what, which, yes or no
    grain: str | None = None
    used: frozenset[int] = frozenset()  # the positions of the words that say so


@dataclass(frozen=True)
class ParsedQuestion:
    """The parts of a question that can be compared."""

    kind: QuestionKind
    negations: int
    figures: frozenset[str]
    dates: frozenset[str]
    units: frozenset[str]
    words: tuple[Word, ...]
    plain: tuple[str, ...]  # every word, in lower case
    stems: frozenset[str]  # of every word
    directions: frozenset[tuple[str, str]]  # a preposition of direction ("to"), with the stem of a neighbour
    roles: tuple[str, ...]  # who does what to whom: stems in order; empty where the order means nothing


@lru_cache(maxsize=256)  # a new question is compared with several
def parse_question(text: str) -> ParsedQuestion:
    """Parse a question. Never raises."""
    tokens = _merged(_tokens(text))
    plain = [token.lower() for token in tokens]
    kind = _kind(plain)
    names = _names(tokens)
    dates = {at: date for at in range(len(plain)) if (date := _date(plain, at, names[at])) is not None}
    figures = _figures(plain)
    units = {at: UNITS[word] for at, word in enumerate(plain) if word in UNITS and _counted(plain, at, figures)}
    spoken = kind.used | dates.keys() | figures.keys() | units.keys()
    words = (Word(word, stem(word), names[at]) for at, word in enumerate(plain) if at not in spoken)
    everything = tuple(word for word in plain if word not in _BREAKS)
    return ParsedQuestion(
        kind,
        _negations(everything),
        frozenset(figures.values()),
        frozenset(dates.values()),
        frozenset(units.values()),
        tuple(word for word in words if word.name or _says(word.text)),
        everything,
        frozenset(map(stem, everything)),
        _directions(everything),
        _roles(everything),
    )


def _tokens(text: str) -> list[str]:
    """Words, figures and breaks, in order. "isn't" and "what's" are two words each; a possessive 's is dropped."""
    found: list[str] = []
    for token in _TOKEN.findall(_folded(text)):
        short = _SHORT.search(token)
        if short is None or short.start() == 0:
            dotted = len(token) > 1 and not token[0].isdigit()
            found.append(token.replace(".", "") if dotted else token)
            continue
        before, ending = token[: short.start()], short.group().lower()
        if ending.startswith("n"):
            found += [{"ca": "can", "wo": "will", "sha": "shall"}.get(before.lower(), before), "not"]
        elif ending[1:] == "s" and before.lower() not in _ASKING | {"it", "that", "there", "he", "she"}:
            found.append(before)
        else:
            found += [before, _LONG[ending[1:]]]
    return found


def _folded(text: str) -> str:
    """Without accents on Latin letters, which people leave out when typing."""
    text = unicodedata.normalize("NFKC", text)
    return text if text.isascii() else _ACCENT.sub(r"\1", unicodedata.normalize("NFD", text))


def _merged(tokens: Sequence[str]) -> list[str]:
    """The tokens with phrasal verbs replaced by one word: "signed up" by "join"."""
    found: list[str] = []
    at = 0
    while at < len(tokens):
        after = tokens[at + 1].lower() if at + 1 < len(tokens) else ""
        phrase = PHRASES.get((stem(tokens[at].lower()), after)) if after in _PARTICLES else None
        found.append(tokens[at] if phrase is None else phrase)
        at += 1 if phrase is None else 2
    return found


def _names(tokens: Sequence[str]) -> list[bool]:
    """Which words are names: capitalized but not at the start of a sentence, or in quotes.

    In a text all in capitals, capitals mean nothing.
    """
    letters = [token for token in tokens if token[0].isalpha()]
    shouted = len(letters) > 1 and all(token.isupper() for token in letters)
    found: list[bool] = []
    start, quoted = True, False
    for token in tokens:
        if token in {'"', "“", "”"}:
            quoted = token != "”" and not quoted
        small = token.lower()
        capital = token[0].isalpha() and token != small and token != "I" and not shouted
        inner = token[1:] != small[1:]
        named = capital and (inner or not start) and small not in _NEVER_NAMES
        found.append(named or (quoted and token[0].isalpha() and _says(small)))
        start = token in {".", "?", "!", ":", "…", '"', "“"} or (start and token in _BREAKS)
    return found


def _says(word: str) -> bool:
    return not (word in _BREAKS or word in LIGHT or word in NEGATIONS or word in _HELPERS)


def _negations(plain: Sequence[str]) -> int:
    """The number of negations. "or not" is none."""
    return sum(word in NEGATIONS and plain[max(at - 1, 0)] != "or" for at, word in enumerate(plain))


def _date(plain: Sequence[str], at: int, name: bool) -> str | None:
    word = plain[at]
    if word in DAYS:
        return DAYS[word]
    if word not in MONTHS:
        return None
    before = plain[at - 1] if at else ""
    after = plain[at + 1] if at + 1 < len(plain) else ""
    sure = word not in UNSURE_MONTHS or before in {"in", "of", "since", "until", "last", "next"}
    return MONTHS[word] if sure or name or before[:1].isdigit() or after[:1].isdigit() else None


def _figures(plain: Sequence[str]) -> dict[int, str]:
    """Numbers, position -> value: as digits, as words ("twenty five"), and as ordinals ("second", "2nd")."""
    found: dict[int, str] = {}
    at = 0
    while at < len(plain):
        value, stop = _number(plain, at)
        if value is not None:
            found |= dict.fromkeys(range(at, stop), value)
        at = stop
    return found


def _number(plain: Sequence[str], at: int) -> tuple[str | None, int]:
    """The number that begins at a position, and where it ends."""
    word = plain[at]
    if word in ORDINALS:  # "the first" is more than a number: the others count on
        return "first" if word == "first" else str(ORDINALS[word]), at + 1
    figure = _FIGURE.match(word)
    if figure is not None:
        rest, text = word[figure.end() :], figure.group().replace(",", "")
        if rest not in _AFTER_FIGURE or ":" in text or text.count(".") > 1 or len(text) > _MAX_DIGITS:
            return word, at + 1
        return _scaled(plain, at + 1, float(text) * SCALES.get(rest, 1))
    after = plain[at + 1] if at + 1 < len(plain) else ""
    if word not in NUMBERS or (word == "one" and after not in UNITS and after not in SCALES):
        return None, at + 1
    value, at = float(NUMBERS[word]), at + 1
    if value >= 20 and 0 < NUMBERS.get(after, 0) < 10:
        value, at = value + NUMBERS[after], at + 1
    return _scaled(plain, at, value)


def _scaled(plain: Sequence[str], at: int, value: float) -> tuple[str, int]:
    while at < len(plain) and plain[at] in SCALES:
        value, at = value * SCALES[plain[at]], at + 1
    return f"{value:.12g}", at


def _counted(plain: Sequence[str], at: int, figures: Mapping[int, str]) -> bool:
    """Whether a unit is next to a number."""
    return at - 1 in figures or (at not in figures and at + 1 in figures) or plain[at] in _CURRENCIES


def _directions(plain: Sequence[str]) -> frozenset[tuple[str, str]]:
    """Prepositions of direction, each with the nearest content words before and after it."""
    found: set[tuple[str, str]] = set()
    before: str | None = None
    waiting: set[str] = set()
    for word in plain:
        if word in DIRECTIONS:
            found |= {(word, before)} if before is not None else set()
            waiting.add(word)
        elif word not in LIGHT:
            before = stem(word)
            found |= {(each, before) for each in waiting}
            waiting = set()
    return frozenset(found)


def _roles(plain: Sequence[str]) -> tuple[str, ...]:
    """What follows the auxiliary verb: who acts, the action, and on whom.

    After "is" or "was" the order is free ("was written by"), except in a comparison.
    """
    start = next((at for at, word in enumerate(plain) if word in _ACTING), None)
    if start is None and "than" not in plain and not _BEING.isdisjoint(plain):
        return ()
    found: list[str] = []
    sides = False
    for word in plain[0 if start is None else start + 1 :]:
        if word in STOPWORDS or word in _HELPERS or word in MONTHS or word[0].isdigit():
            sides = word in _SIDES
            continue
        found.append(stem(word))
        if sides:
            found[-2:] = sorted(found[-2:])
        sides = False
    return tuple(found)


def _kind(plain: Sequence[str]) -> QuestionKind:
    at = _asking(plain)
    if at is None:
        return QuestionKind("yes or no") if plain and plain[0] in _HELPERS else _noun(plain, 0, "what")
    word = plain[at]
    after = plain[at + 1] if at + 1 < len(plain) else ""
    if word == "how":
        return _how(plain, at, after)
    if word in {"what", "which"}:
        if after in {"made", "makes"}:
            return QuestionKind("why", None, frozenset([at + 1]))
        if "reason" in plain[at:] or "reasons" in plain[at:]:
            return QuestionKind("why")
        return _noun(plain, at + 1, "what" if after in _HELPERS else "which")
    return QuestionKind({"whom": "who", "whose": "who"}.get(word, word))


def _asking(plain: Sequence[str]) -> int | None:
    """The position of the question word. "When he was ill, who helped?" asks who; "Is he there when it rains?" none."""
    found = [at for at, word in enumerate(plain) if word in _ASKING]
    heads = [at for at in found if _begins(plain, at)]
    if not found or (plain[0] in _HELPERS and not heads):
        return None
    if plain[0] in {"when", "where", "while", "if"} and "," in plain:
        later = [at for at in heads if at > plain.index(",")]
        return later[0] if later else found[0]
    return (heads or found)[0]


def _begins(plain: Sequence[str], at: int) -> bool:
    """Whether a word begins the actual question: after a break, a preposition or a polite opening."""
    if at == 0 or plain[at - 1] in _BREAKS:
        return True
    if plain[at - 1] in _BEFORE_ASKING:
        return at == 1
    polite = plain[0] in _HELPERS or plain[0] in {"please", "tell", "remind", "explain", "any"}
    return polite and plain[at - 1] in _OPENINGS


def _how(plain: Sequence[str], at: int, after: str) -> QuestionKind:
    counted = UNITS.get(plain[at + 2], "") if at + 2 < len(plain) else ""
    if after == "many" and counted in _LENGTHS:
        return QuestionKind("how long", counted, frozenset([at + 2]))
    if after in {"many", "much", "long", "often"}:
        return QuestionKind(f"how {after}", None, frozenset([at + 1]))
    if after in {"frequently", "regularly"}:
        return QuestionKind("how often", None, frozenset([at + 1]))
    return QuestionKind("why") if after == "come" else QuestionKind("how")


def _noun(plain: Sequence[str], start: int, otherwise: str) -> QuestionKind:
    """The kind that a noun implies: "what year", "which city", "what is the best way to", "date of"."""
    at = start
    while at < len(plain) and at < start + 4 and plain[at] in _LINKS:
        at += 1
    noun = _singular(plain[at]) if at < len(plain) else ""
    after = plain[at + 1] if at + 1 < len(plain) else ""
    if noun in _KINDS and ((at == start and start > 0) or after in _AFTER_NOUN):
        grain = None if noun in _VAGUE else "city" if noun == "town" else noun
        return QuestionKind(_KINDS[noun], grain, frozenset(range(start, at + 1)))
    return QuestionKind(otherwise)


def _singular(word: str) -> str:
    return word[:-3] + "y" if word.endswith("ies") else word.removesuffix("s")
