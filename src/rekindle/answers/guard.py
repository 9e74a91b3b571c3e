"""Whether the answer to an earlier question may be served for a new one that looks like it.

Embeddings tell what a question is about, not what it asks: another name, number or verb hardly moves them. So the
texts are compared as well, and a single word without a counterpart is enough to say no: measured, with one such word
tolerated, every fourth pair was two different questions.

MiniLM, cosine from 0.85   1,800 labelled pairs            re-asked (LoCoMo, QMSum)   near misses   other questions
cosine alone               precision 0.71, recall 0.73     173 of 270                 142 of 270    138 of 948 LoCoMo
with the guard             precision 0.93, recall 0.23     28 of 270                  none          none, 11 right
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rekindle.answers.question import ParsedQuestion, Word, parse_question
from rekindle.answers.words import ACTIONS, BROADER, DIRECTIONS, OPPOSITES, OWNERS, PEOPLE, word_set

_SHARED = 0.4  # of the passages: keeps 26 of 27 paraphrases, and drops a fifth of the other questions that look alike
_ALIKE = ({"what", "which"}, {"which", "who"})  # "which player" and "who"
_FREE_ORDER = word_set("is are was were and or vs versus")
_PAST = frozenset(["did", "had"])
_NOW = frozenset(["do", "does", "can", "will", "would", "should"])
_SHOWN = frozenset(["this", "these", "another", "else", "also"])

# Function words that hardly any other language has. The rules below compare English.
_ENGLISH = word_set(
    "about also and any are been but can could did do does for from had has have how into is just not of our she "
    "should some that the their these they this those to what when where which who whom whose why with would you your"
)

_Check = Callable[[ParsedQuestion, ParsedQuestion], "str | None"]


def disagreement(asked: str, stored: str) -> str | None:
    """Why the answer to `stored` must not be served for `asked`, in a few words for people; None if it may.

    Only the texts count; symmetric. Never raises.
    """
    one, other = parse_question(asked), parse_question(stored)
    if one.plain == other.plain:
        return None
    return next((reason for check in _CHECKS if (reason := check(one, other)) is not None), None)


def is_doubt(asked: str, stored: str) -> bool:
    """Whether only words are missing that may have a counterpart: then a model may decide.

    Other numbers, dates, names, opposites or directions are no doubt. In other languages only numbers are known.
    """
    one, other = parse_question(asked), parse_question(stored)
    checks = _CERTAIN if _language(one, other) is None else (_figures, _dates)
    return all(check(one, other) is None for check in checks)


def is_english(text: str) -> bool:
    """Whether a question has a function word that hardly any other language has."""
    return not _ENGLISH.isdisjoint(parse_question(text).plain)


def same_evidence(asked: Sequence[int], stored: Sequence[int]) -> bool:
    """Whether two retrievals (passage ids, the best first) found the same evidence: two of five are enough.

    Two empty retrievals are the same.
    """
    ours, theirs = {*asked}, {*stored}
    return len(ours & theirs) >= _SHARED * min(len(ours), len(theirs)) and bool(ours & theirs) == bool(ours | theirs)


def _language(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    if _ENGLISH.isdisjoint(one.plain) or _ENGLISH.isdisjoint(other.plain):
        return "not in English, where only the same words in the same order are the same question"
    return None


def _empty(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    content = one.words + other.words or one.figures | other.figures | one.dates | other.dates
    return None if content else "too little to compare"


def _negation(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    return "only one of them denies something" if one.negations != other.negations else None


def _figures(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    return _differ("other numbers", one.figures ^ other.figures)


def _dates(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    return _differ("other dates", one.dates ^ other.dates)


def _units(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    return _differ("other units", one.units ^ other.units) if one.units and other.units else None


def _opposites(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    theirs = other.stems - one.stems
    for word in sorted(one.stems - other.stems):
        for against in sorted(OPPOSITES.get(word, frozenset()) & theirs):
            return _differ("opposites", {word, against})
    return None


def _kind(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    kinds = {one.kind.name, other.kind.name}
    if len(kinds) == 2 and kinds not in _ALIKE:
        return _differ("other kinds of question", kinds)
    grains = {one.kind.grain, other.kind.grain} - {None}
    return _differ("other kinds of question", {str(grain) for grain in grains}) if len(grains) == 2 else None


def _names(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    return _differ("a name in only one", {word.text for word in _alone(one, other) if word.name})


def _words(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    return _differ("said in only one", {word.text for word in _alone(one, other)})


def _often(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    ours, theirs = (Counter(word.stem for word in each.words) for each in (one, other))
    return _differ("said more often in one", {word for word in ours.keys() & theirs if ours[word] != theirs[word]})


def _directions(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    theirs = other.directions - one.directions
    for word, near in sorted(one.directions - other.directions):
        for against in sorted(DIRECTIONS[word]):
            if (against, near) in theirs:
                return _differ("opposite directions", {word, against})
    return None


def _people(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    for groups in (PEOPLE, OWNERS, ACTIONS):
        ours, theirs = ({groups[word] for word in each.plain if word in groups} for each in (one, other))
        if ours and theirs and ours.isdisjoint(theirs):
            return _differ("somebody or something else", ours | theirs)
    return None


def _order(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    names = [[word.stem for word in each.words if word.name] for each in (one, other)]
    fixed = _FREE_ORDER.isdisjoint(one.plain) and _FREE_ORDER.isdisjoint(other.plain)
    if _swapped(one.roles, other.roles) or (fixed and _swapped(*names)):
        return "who does what to whom"
    return None


def _time(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    helpers = {next((word for word in each.plain if word in _PAST or word in _NOW), None) for each in (one, other)}
    return "only one is about the past" if helpers & _PAST and helpers & _NOW else None


def _advice(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    return "only one asks for advice" if ("should" in one.plain) != ("should" in other.plain) else None


def _shown(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    same = _SHOWN.isdisjoint(one.plain) == _SHOWN.isdisjoint(other.plain)
    return None if same else "only one points at something"


_CHECKS: tuple[_Check, ...] = (
    _language, _negation, _figures, _dates, _units, _opposites, _kind, _names, _directions, _people, _order, _words,
    _often, _time, _advice, _shown, _empty,
)  # fmt: skip


_CERTAIN: tuple[_Check, ...] = (_negation, _figures, _dates, _units, _opposites, _names, _directions, _people)


def _differ(what: str, words: set[str] | frozenset[str]) -> str | None:
    return f"{what}: {', '.join(sorted(words))}" if words else None


def _alone(one: ParsedQuestion, other: ParsedQuestion) -> list[Word]:
    """The words of either that have no counterpart in the other."""
    return _missing(one, other) + _missing(other, one)


def _missing(one: ParsedQuestion, other: ParsedQuestion) -> list[Word]:
    """The words of one that have no counterpart in the other. "Roadtrip" is one of "road trip"."""
    joined = {first + second for first, second in zip(other.plain, other.plain[1:], strict=False)}
    texts = {*other.plain}
    parts = [pair for pair in zip(one.plain, one.plain[1:], strict=False) if "".join(pair) in texts]
    known = joined | texts | {part for pair in parts for part in pair}
    return [
        word
        for word in one.words
        if word.text not in known and word.stem not in other.stems and BROADER.get(word.stem) not in other.stems
    ]


def _swapped(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether what is in both comes in another order."""
    both = {*one} & {*other}
    return [word for word in dict.fromkeys(one) if word in both] != [
        word for word in dict.fromkeys(other) if word in both
    ]
