"""Questions that a sentence about what somebody did answers.

Simple patterns for English: a sentence that matches none gives no question. In a dialogue, the speaker's name replaces
"I".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from rekindle.idle.questions.english import PREPOSITIONS, PRESENT, base_of_past, base_of_present

_MAX_CHARACTERS = 600  # of a sentence
_MAX_WORDS = 14  # after the verb: longer sentences are several thoughts
_DAYS = "monday|tuesday|wednesday|thursday|friday|saturday|sunday"
_MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
_SPANS = "day|night|week|weekend|month|year|spring|summer|autumn|fall|winter|semester|quarter|morning|evening"
_COUNT = r"(?:\d+|a|an|a few|a couple of|two|three|four|five|six|seven|eight|nine|ten)"
_DATE = rf"(?:\d{{1,2}}(?:st|nd|rd|th)?(?: of)? (?:{_MONTHS})|(?:{_MONTHS}) \d{{1,2}}(?:st|nd|rd|th)?)"
_TIME = re.compile(
    rf"\b(?:yesterday|today|tonight|tomorrow|recently|(?:the other|one) (?:{_SPANS})"
    rf"|(?:last|next|this|this past) (?:{_SPANS}|{_DAYS}|{_MONTHS}|mon|tue|wed|thu|fri|sat|sun)(?: (?:morning|night))?"
    rf"|{_COUNT} (?:{_SPANS})s? ago"
    rf"|(?:in|since|by|until|during|before|after) (?:early |late |mid-)?(?:the )?"
    rf"(?:(?:{_MONTHS})\b(?: of)?(?:,? \d{{4}})?|\d{{4}}|{_SPANS})"
    rf"|(?:on|by|until|before|after) (?:the )?(?:(?:{_DAYS})(?: (?:morning|evening))?|{_DATE})(?:,? \d{{4}})?"
    r"|at \d{1,2}(?::\d\d)?(?: ?[ap]\.?m\b\.?)?)(?![\w-])",
    re.IGNORECASE,
)
_TIME_FIRST = re.compile(rf"(?:{_TIME.pattern}),?\s+", re.IGNORECASE)
_LENGTH = re.compile(rf"\bfor (?:about |almost |over )?{_COUNT} (?:minute|hour|day|week|month|year)s?\b", re.IGNORECASE)
_PLACE = re.compile(r"\b(in|at|to|from|near) (?:the )?[A-Z][\w'&.-]*(?: (?:of |the )?[A-Z][\w'&.-]*)*")
_NUMBER = re.compile(
    r"(?:\d[\d,.]*|two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|thirty|forty|fifty|hundred)"
    r" ((?:[a-z-]+ )?[a-z]{2,}s)\b",
    re.IGNORECASE,
)
_CLAUSE = re.compile(
    r"\s(?:-+|–|—)\s|[;:()\[\]!?…]|\.\.+|,\s+(?:and|but|so|which|who|where|though|since|as|because|while|it|that|then|I)\b"
    r"|\s(?:but|because|so that|so|which|although|though|while|and (?:I|we|it|he|she|they|then|also|now|was|is))\b"
)
_REASON = re.compile(r",?\s(?:because|since|so that|in order to)\b")
_OPENING = re.compile(
    r"^(?:(?:so|and|but|well|oh|yeah|yes|yep|ok|okay|hey|wow|um|uh|also|actually|anyway|basically|then|now|"
    r"thanks|right|plus|by the way|you know|i mean|i think)[,!.]?\s+)+",
    re.IGNORECASE,
)
_ADVERBS = frozenset(
    """
    just also really recently finally even actually always already still now often usually never ever only both
    currently soon initially originally eventually immediately
    """.split()  # noqa: SIM905
)
_NOT_NAMES = frozenset(
    """
    I We You He She It They This That These Those There Here What When Where Who Why How If As At In On For From To
    You've You're I've I'm That's It's He's She's We've We're They're There's Last Next Every One Please My Our Your His
    Her Their Its And But So Also Then Yes No Not All Some Any Each Most Both After Before While Because Since During
    Thanks Thank Hi Hello Dear Regards
    """.split()  # noqa: SIM905
)
_VERB = (
    r"was|were|is|are|has|have|will|had|\w+ed|went|came|took|made|gave|found|began|grew|met|sold|bought|won|lost|left|ran"
    r"|held|sent|built|chose|paid|wrote|spent"
)
_SUBJECT = re.compile(
    r"^(?P<self>I|We|we)(?P<short>'ve|'m|'re|'ll|'d)?\s+"
    rf"|^(?P<thing>(?:[Tt]he|[Oo]ur|[Mm]y|[Aa]n?) (?:[\w'-]+ ){{1,4}}?)(?=(?:{_VERB})\b)"
    r"|^(?P<name>(?:Dr\. |Mr\. |Mrs\. |Ms\. )?[A-Z][\w'&-]*(?: (?:of |and |de |van )?[A-Z][\w'&-]*){0,4})\s+"
)


@dataclass(frozen=True, slots=True)
class _Fact:
    subject: str
    help: str  # the auxiliary that a question begins with: did, is, has
    verb: str  # the verb after the subject
    rest: str  # without the time
    time: bool
    place: str  # the preposition of the place
    where: str  # the place


def questions_of(sentence: str, speaker: str | None = None, other: str | None = None) -> list[str]:
    """Questions that a sentence answers, the most certain first. `other` is the speaker's partner."""
    if len(sentence) > _MAX_CHARACTERS:
        return []
    text = _OPENING.sub("", sentence.replace("’", "'").strip())
    lead = _TIME_FIRST.match(text)
    if lead:  # "Last week I went there": move the time to the end
        text = f"{text[lead.end() :].rstrip('.! ')} {lead.group().strip(' ,')}"
    found = _SUBJECT.match(text)
    if found is None:
        return []
    subject = _subject(found, speaker)
    if subject is None:
        return []
    reason = bool(_REASON.search(text))
    plural = " and " in subject
    fact = _fact(subject, plural, (found["short"] or "") if found["self"] else "", text[found.end() :], found["self"])
    if fact is None:
        return []
    if speaker is not None:
        fact = _turned(fact, other)
    return _asked(fact, reason)


def _subject(found: re.Match[str], speaker: str | None) -> str | None:
    if found["self"]:
        return speaker
    if found["name"]:
        name = found["name"]
        return None if _NOT_NAMES.intersection(name.split()) else name
    thing = str(found["thing"]).strip()
    first, _, others = thing.partition(" ")
    if first.lower() in ("my", "our"):
        return f"{speaker}'s {others}" if speaker else f"{first.lower()} {others}"
    return f"the {others}" if first.lower() == "the" else f"{first.lower()} {others}"


def _fact(subject: str, plural: bool, short: str, text: str, itself: str | None) -> _Fact | None:
    words = text.split()
    while words and words[0].lower().strip(",") in _ADVERBS:
        words.pop(0)
    if not words:
        return None
    helped = _helped(short, words, plural, bool(itself))
    if helped is None:
        return None
    help, verb, words = helped
    rest = " ".join(words)
    time = bool(_TIME.search(rest)) or bool(_LENGTH.search(rest))
    cut = _CLAUSE.search(" " + rest)
    rest = rest[: max(0, cut.start() - 1)] if cut else rest
    place = _PLACE.search(_TIME.sub("", rest))
    rest = re.sub(r"\s+", " ", _LENGTH.sub("", _TIME.sub("", rest))).strip(" ,.!?\"'")
    if len(rest.split()) > _MAX_WORDS:
        return None
    preposition, where = (place.group(1), place.group()) if place else ("", "")
    return _Fact(subject, help, verb, rest, time, preposition, where)


def _helped(short: str, words: list[str], plural: bool, itself: bool) -> tuple[str, str, list[str]] | None:
    """The auxiliary that a question begins with, the verb after its subject, and the remaining words."""
    first = words[0].strip(",.").lower()
    be = "are" if plural else "is"
    if short in ("'m", "'re") or first in ("am", "is", "are"):
        return be if first != "are" else "are", "", words if short else words[1:]
    if first in ("was", "were"):
        return "were" if plural else first, "", words[1:]
    if short == "'ve" or (first in ("have", "has", "had") and _participle(words)):
        after = words if short else words[1:]
        return "had" if first == "had" else "have" if plural else "has", "", after
    if short == "'ll" or first == "will":
        return "will", "", words if short else words[1:]
    past = base_of_past(first) or ("have" if first == "had" else None)
    if past is not None and not short:
        return "did", past, words[1:]
    base = first if itself and first in PRESENT else base_of_present(first)
    return None if base is None or short else ("do" if plural else "does", base, words[1:])


def _participle(words: list[str]) -> bool:
    return len(words) > 1 and (words[1] in ("been", "done", "gone", "had") or words[1].endswith(("ed", "en", "ing")))


def _turned(fact: _Fact, other: str | None) -> _Fact:
    """The fact in the third person: "my" becomes "their"."""
    instead = {"my": "their", "our": "their", "me": "them", "us": "them", "myself": "themselves", "mine": "theirs",
               "i": "they", "we": "they", "i'm": "they're", "you": other or "you",
               "your": f"{other}'s" if other else "your"}  # fmt: skip
    rest = " ".join(instead.get(word.lower(), word) for word in fact.rest.split())
    return replace(fact, rest=rest)


def _asked(fact: _Fact, reason: bool) -> list[str]:
    whole = _joined(fact.help, fact.subject, fact.verb, fact.rest)
    if not fact.rest:
        return []
    asked = []
    if fact.time:
        asked.append(f"When {whole}?")
    if fact.where and fact.where in fact.rest:
        without = _joined(fact.help, fact.subject, fact.verb, fact.rest.replace(fact.where, ""))
        end = {"to": " to", "from": " from"}.get(fact.place, "")
        asked.append(f"Where {without}{end}?")
    number = _NUMBER.search(fact.rest)
    if number and fact.help == "did":
        others = _joined(fact.help, fact.subject, fact.verb, fact.rest.replace(number.group(), ""))
        asked.append(f"How many {number.group(1)} {others}?")
    if reason:
        asked.append(f"Why {whole}?")
    if fact.help == "did" and not fact.time:
        asked.append(f"When {whole}?")
    asked.extend(_openly(fact, whole))
    return asked


def _openly(fact: _Fact, whole: str) -> list[str]:
    """Open questions that leave out the answer."""
    first = fact.rest.split()[0].lower()
    if fact.help in ("is", "are", "was", "were"):
        if first.endswith("ing"):
            return [f"What {fact.help} {fact.subject} {first}?"]
        who = "Who" if fact.subject[0].isupper() and first in ("a", "an", "the", "our", "their") else "What"
        return [f"{who} {fact.help} {fact.subject}?"] if not first.endswith("ed") else []
    if fact.help in ("has", "have", "will", "had"):
        return [f"What {whole}?" if fact.rest.endswith(tuple(PREPOSITIONS)) else f"When {whole}?"]
    if first in PREPOSITIONS and first not in ("in", "at", "on", "by") and not fact.rest.startswith(fact.where or " "):
        return [f"What {fact.help} {fact.subject} {fact.verb} {first}?"]
    return [f"What {fact.help} {fact.subject} {fact.verb}?"] if fact.help != "did" else []


def _joined(*parts: str) -> str:
    return " ".join(" ".join(parts).split()).rstrip(" ,.")
