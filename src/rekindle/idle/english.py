"""English word lists for building questions: past tenses of verbs, words without content."""

from __future__ import annotations

import re
from pathlib import Path

from rekindle.knowledge.segment import STOPWORDS, read_word_lists

_LISTS = read_word_lists(Path(__file__).with_name("english.txt"))

_PREPOSITIONS = "about across after at before by during for from in into near of on over through to toward under with"

EMPTY = STOPWORDS | frozenset(_LISTS["content_free"].split())  # no question is about these
PREPOSITIONS = frozenset(_PREPOSITIONS.split())
PRESENT = frozenset(_LISTS["present"].split())
_IRREGULAR = dict(pair.split(":") for pair in _LISTS["past"].split())
_PLAIN = frozenset(_LISTS["keep_single_consonant"].split())
_DOUBLED = re.compile(r"([bdgmnprt])\1$")


def base_of_past(word: str) -> str | None:
    """The verb of a simple past ("moved": "move"); None if the word is none that is known."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if (
        not word.endswith("ed")
        or word.endswith("eed")
        or len(word) < 4
        or not word.isalpha()
        or not re.search("[aeiouy]", word[:-2])
    ):
        return None
    stem = word[:-2]
    if word.endswith("ied") and len(word) > 4:
        return word[:-3] + "y"
    if stem in _PLAIN:
        return stem
    if _DOUBLED.search(stem) and len(stem) > 3:
        return stem[:-1]
    return stem + "e" if _drops_e(stem) else stem


def _drops_e(stem: str) -> bool:
    """Whether a stem lost its final e: "mov", "danc", "creat", but not "look" or "clean"."""
    if re.search(r"(?:[cgsuvz]|[^aeiou]l|[^aeiou][iu]r|[aeiou]th|rg|[^e]dg)$", stem):
        return not stem.endswith(("ss", "ing", "ong", "ll", "rl"))
    if re.search(r"(?:[^aeiou]|^)[aiou][bdgklmnprt]$", stem):  # one vowel and one consonant: "hopped" would double it
        return len(re.findall("[aeiouy]+", stem)) == 1 or stem.endswith(
            ("at", "id", "in", "ut", "ir", "ar", "or", "ik")
        )
    return stem.endswith(("eat", "uat", "iat")) and stem not in ("treat", "heat", "seat", "repeat", "defeat", "cheat")


def base_of_present(word: str) -> str | None:
    """The verb of a third person ("lives": "live"); None if the word is none that is known."""
    if word == "has":
        return "have"
    for end, instead in (("ies", "y"), ("es", ""), ("s", "")):
        if word.endswith(end) and word[: -len(end)] + instead in PRESENT:
            return word[: -len(end)] + instead
    return None
