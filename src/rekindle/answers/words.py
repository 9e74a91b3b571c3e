"""English word lists for the guard: stems, irregular forms, synonyms, opposites, numbers and units.

`words.txt` has the long lists: everyday words, few on purpose, since a word that is not listed is compared by its stem.
A slash separates words of one group; of a phrase, the last is its meaning.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from rekindle.knowledge.segment import STOPWORDS, read_word_lists

_LISTS = read_word_lists(Path(__file__).with_name("words.txt"))


def _groups(text: str) -> dict[str, str]:
    """Each word -> the first word of its group."""
    groups = [group.split("/") for group in text.split()]
    return {word: group[0] for group in groups for word in group}


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


NEGATIONS = word_set("not no non never none nobody nothing nowhere neither nor cannot without unable lack except")

# Words that carry no content: politeness, auxiliary verbs, fillers.
LIGHT = (STOPWORDS | word_set(_LISTS["content_free"])) - NEGATIONS

_IRREGULAR = _groups(_LISTS["irregular"])

# Only words that rarely mean anything else in a question.
_SAME = _groups(_LISTS["synonyms"])


MONTHS = _groups(
    "january/jan february/feb march april/apr may june/jun july/jul august/aug september/sep/sept october/oct "
    "november/nov december/dec"
)
UNSURE_MONTHS = frozenset(["may", "march"])  # also an auxiliary verb, and a way to walk
DAYS = _groups(
    "monday tuesday/tue/tues wednesday thursday/thu/thurs friday/fri saturday sunday weekend weekday today yesterday "
    "tomorrow tonight midnight noon"
)

_ONES = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen
"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
NUMBERS = {
    **{word: value for value, word in enumerate(_ONES.split())},
    **{word: 10 * value for value, word in enumerate(_TENS.split(), start=2)},
    "dozen": 12,
    "twice": 2,
    "couple": 2,
    "pair": 2,
    "thrice": 3,
}
SCALES = {
    "hundred": 100,
    "thousand": 1000,
    "k": 1000,
    "lakh": 10**5,
    "million": 10**6,
    "crore": 10**7,
    "billion": 10**9,
}
ORDINALS = {word: value for value, word in enumerate(_ORDINALS.split(), start=1)}

UNITS = _groups(_LISTS["units"])

DIRECTIONS = {
    "to": frozenset(["from"]),
    "from": frozenset(["to"]),
    "by": frozenset(["about", "for", "against"]),
    "about": frozenset(["by"]),
    "for": frozenset(["by", "against"]),
    "against": frozenset(["by", "for"]),
}
PEOPLE = _groups("he/him/his/himself she/her/hers/herself")
OWNERS = _groups("my/mine/our/ours your/yours")
# Verbs without content of their own: they may be missing in one question, but must not differ.
ACTIONS = _groups(_LISTS["actions"])

_VOWELS = frozenset("aeiouy")
_SHORTEST = 3  # letters that must be left without the ending


def _cut(word: str) -> str:
    """A word without its ending."""
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > _SHORTEST:
        word = word[:-2] if word.endswith(("sses", "xes", "ches", "shes", "zes")) else word[:-1]
    for ending in ("ing", "ed"):
        left = word[: -len(ending)]
        if word.endswith(ending) and len(left) >= _SHORTEST and _VOWELS & set(left):
            if word.endswith("ied"):
                return left[:-1] + "y"
            return left[:-1] if left[-1] == left[-2] and left[-1] not in "ls" else left
    if word.endswith("ness") and len(word) > 6:
        word = word[:-4]
    if word.endswith("ly") and len(word) > 5:
        word = word[:-2]
    return word


def _bare(word: str) -> str:
    """Without a last `e`, which endings take away, and a last `y` as `i` ("easy", "easily")."""
    if word.endswith("y") and len(word) > _SHORTEST:
        return word[:-1] + "i"
    return word[:-1] if word.endswith("e") and len(word) > _SHORTEST else word


@lru_cache(maxsize=8192)
def stem(word: str) -> str:
    """The common stem of a word's forms; synonyms share one stem."""
    base = _IRREGULAR.get(word, word)
    if base == word and base not in _SAME:
        cut = _cut(word)
        known = (form for form in (cut, cut + "e", cut.removesuffix("i") + "y") if form in _SAME or form in _IRREGULAR)
        base = next(known, cut)
        base = _IRREGULAR.get(base, base)
    return _bare(_SAME.get(base, base))


def _opposites() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for pair in _LISTS["opposites"].split():
        one, other = map(stem, pair.split("/"))
        found.setdefault(one, set()).add(other)
        found.setdefault(other, set()).add(one)
    return {word: frozenset(others) for word, others in found.items()}


OPPOSITES = _opposites()
# A word that may stand for another: "get" for "buy", but not "sell" for "buy".
BROADER = {
    stem(word): stem(broad)
    for broad, words in (("get", "buy adopt obtain earn"), ("make", "bake cook create"), ("go", "visit travel"))
    for word in words.split()
}
PHRASES = {(stem(verb), after): word for verb, after, word in (line.split("/") for line in _LISTS["phrases"].split())}
