"""Questions extracted from a document's own words, without a model, so they cost next to nothing.

A document is read as an e-mail (it begins with headers), a dialogue (its lines begin with names) or prose. Sentences
about what somebody did become questions, by simple patterns for English; in a dialogue, the speaker's name replaces
"I". So do the title, and phrases that are frequent in the document and rare elsewhere. The chosen questions are spread
over the document, so that all its passages have some.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from rekindle.knowledge.segment import STOPWORDS, read_word_lists, split_sentences

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


_MAX_SENTENCE_CHARACTERS = 600  # of a sentence
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
    if len(sentence) > _MAX_SENTENCE_CHARACTERS:
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


_MAX_CHARACTERS = 40_000  # of a document that are read
_LONGEST_LINE = 500  # characters of a title and of a header
_LONGEST_WORD = 40
_LONGEST_PHRASE = 3  # words
_GROUP = 3  # speakers: from here on it is a meeting, where questions are about topics rather than persons
_FACT_COUNTS = 1.3  # the score of a fact question; a phrase has at most 1, less if it is common
_CROWDED = 0.5  # score factor for each question chosen nearby
_REPEATED = 0.6  # score factor for each question chosen of the same kind

_HEADER = re.compile(r"^([A-Za-z][A-Za-z-]{1,24}):[ \t]*(.*)$")
_TURN = re.compile(r"^([A-Z][\w.'-]*(?: [A-Z(][\w.')-]*){0,3})[ \t]?: +(?=\S)")
_WORD = re.compile(r"[A-Za-z][\w]*(?:['’-][A-Za-z]\w*)*|\d[\d.,:]*|[^\w\s]")
_COUNTED = re.compile(  # numbers, dates and labels in titles
    r"\S*\d\S*|\b(?:am|pm|on|at|session|meeting|turns?|part|page|chapter|section|re|fwd?|january|february|march|april"
    r"|may|june|july|august|september|october|november|december)\b",
    re.IGNORECASE,
)
_SHORTENED = re.compile(r"(?:n|\b\w+)['’](?:t|ve|re|ll|d|m)$|^(?:he|she|it|that|there|what|who|let|here)['’]s$")
_FILLER = re.compile(r"\b(?:um+|uh+|er+m?|mm+|hmm+|mm-hmm|you know|i mean)\b,?\s*|\b(\w+)\s+(?=\1\b)", re.IGNORECASE)
_BRACKETS = re.compile(r"\[[^\]]{0,200}\]")
_ADDRESS = re.compile(r"[\w.+-]+@[\w.-]+")
_HEADERS = frozenset({"from", "to", "cc", "bcc", "date", "subject", "sent", "reply-to", "message-id"})


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one person said; prose has no speaker."""

    speaker: str | None
    text: str


@dataclass(frozen=True, slots=True)
class _Candidate:
    text: str
    place: float  # 0 at the beginning of the document, 1 at its end
    worth: float
    kind: str


def extract_questions(title: str, text: str, max_count: int, frequencies: Mapping[str, int] | None = None) -> list[str]:
    """At most `max_count` questions that a document may answer, the best first. Deterministic.

    `frequencies` has the document frequency of lower-case words.
    """
    title, text = title[:_LONGEST_LINE], text[:_MAX_CHARACTERS]
    headers, body = _headers(text)
    turns = _turns(body)
    speakers = list(dict.fromkeys(turn.speaker for turn in turns if turn.speaker))
    found = [*_of_mail(title, headers, body), *_of_title(title if not headers else "", bool(speakers))]
    writer = _person(headers.get("from", ""))
    found += _of_facts(turns, speakers, writer or None)
    teller = f"did {writer} write" if writer else f"does {_plain(title) or 'it'} say"
    found += _of_phrases(turns, len(speakers), teller, frequencies or {})
    return _chosen(found, max_count)


def topic_words(text: str) -> set[str]:
    """The lower-case words of a text that a question can be about."""
    return {word for word in map(str.lower, _WORD.findall(text)) if _says_something(word)}


def _headers(text: str) -> tuple[dict[str, str], str]:
    """The headers of an e-mail by lower-case name, and its body; no headers if it is no e-mail."""
    lines = text.lstrip().splitlines()
    headers: dict[str, str] = {}
    read = 0
    for line in lines:
        found = _HEADER.match(line)
        if found is None and not (line[:1] in (" ", "\t") and headers and line.strip()):
            break
        if found is not None:
            headers.setdefault(found[1].lower(), found[2][:_LONGEST_LINE].strip())
        read += 1
    if len(_HEADERS & headers.keys()) < 2 or "from" not in headers:
        return {}, text
    return headers, "\n".join(lines[read:])


def _turns(body: str) -> list[_Turn]:
    """The turns of a dialogue; else the paragraphs, without speakers."""
    lines = [line.strip() for line in body.splitlines()]
    names = Counter(found[1] for line in lines if (found := _TURN.match(line)))
    filled = sum(bool(line) for line in lines)
    if len(names) >= 2 and sum(names.values()) >= max(3, filled / 2):
        turns: list[_Turn] = []
        for line in filter(None, lines):
            found = _TURN.match(line)
            if found is not None:
                turns.append(_Turn(found[1], line[found.end() :]))
            elif turns:
                turns[-1] = _Turn(turns[-1].speaker, f"{turns[-1].text} {line}")
        return turns
    return [_Turn(None, " ".join(group)) for filled, group in groupby(lines, bool) if filled]


def _of_mail(title: str, headers: Mapping[str, str], body: str) -> Iterator[_Candidate]:
    if not headers:
        return
    sender = _person(headers["from"]) or "somebody"
    reader = next(iter(_people(headers.get("to", ""))), "")
    about = _plain(headers.get("subject", "") or title)
    topic = f" about {about}" if about else ""
    to = f" to {reader}" if reader else ""
    yield _Candidate(f"What did {sender} write{to}{topic}?", 0.0, 1.3, "mail")
    yield _Candidate(f"Who sent the email{topic}?", 0.0, 1.1, "mail")
    if re.search(r"\b(?:please|could you|would you|can you|need you to|let me know)\b", body, re.IGNORECASE):
        yield _Candidate(f"What is requested in the email{topic}?", 0.5, 1.0, "mail")
    if re.search(r"\battach", body, re.IGNORECASE):
        yield _Candidate(f"What is attached to the email{topic}?", 0.5, 1.0, "mail")
    yield _Candidate(f"When did {sender} write{topic}?", 0.0, 0.8, "mail")
    named = dict.fromkeys(name for header in ("from", "to", "cc") for name in _people(headers.get(header, "")))
    for name in list(named)[:6]:
        yield _Candidate(f"What is the email address of {name}?", 0.0, 0.9, "address")


def _of_title(title: str, talk: bool) -> Iterator[_Candidate]:
    about = _plain(title)
    if any(_says_something(word.lower()) for word in _WORD.findall(about)):
        yield _Candidate(f"What was said about {about}?" if talk else f"What is {about} about?", 0.0, 1.2, "title")


def _of_facts(turns: Sequence[_Turn], speakers: Sequence[str], writer: str | None) -> Iterator[_Candidate]:
    counts = _FACT_COUNTS if len(speakers) < _GROUP else _FACT_COUNTS / 2
    names = {word for name in (*speakers, writer or "") for word in name.lower().split()}
    for place, turn, sentence in _sentences(turns):
        who = turn.speaker or writer
        other = next((name for name in speakers if name != who), None) if len(speakers) == 2 else None
        for rank, question in enumerate(questions_of(sentence, who, other)):
            known = sum(map(_says_something, set(re.findall(r"[a-z]+", question.lower())) - names))
            worth = counts * (1 - 0.25 * rank) * min(1.0, 0.3 + 0.2 * known)
            yield _Candidate(question, place, worth, question.split()[0])


def _of_phrases(
    turns: Sequence[_Turn], speakers: int, teller: str, frequencies: Mapping[str, int]
) -> Iterator[_Candidate]:
    """Questions about phrases that are frequent here and rare elsewhere."""
    worth = _worths(turns, frequencies)
    first: dict[tuple[str, ...], tuple[float, str | None, str]] = {}
    totals: Counter[tuple[str, ...]] = Counter()
    for place, turn, sentence in _sentences(turns):
        for phrase in _phrases(sentence):
            key = tuple(word.lower() for word in phrase)
            first.setdefault(key, (place, turn.speaker, " ".join(phrase)))
            totals[key] += 1
    best = max(worth.values(), default=1.0) or 1.0
    scores = {
        key: sum(worth.get(word, 0.0) for word in key) / len(key) ** 0.5 / best * min(1.0, 0.6 + 0.2 * totals[key])
        for key in first
    }
    if speakers >= _GROUP:
        leading = sorted(scores, key=lambda key: (-scores[key] * totals[key], key))[:2]
        topics = " and ".join(first[key][2] for key in sorted(leading, key=lambda key: first[key][0]))
        if topics:
            yield _Candidate(f"Summarize the discussion about {topics}.", 0.5, 1.2, "whole")
    for key, (place, speaker, text) in first.items():
        who = teller if speaker is None else f"did {speaker} {'think' if speakers >= _GROUP else 'say'}"
        if speakers >= _GROUP and totals[key] > 1:
            who = "did the group discuss"
        yield _Candidate(f"What {who} about {text}?", place, min(1.2, scores[key]), "phrase")


def _worths(turns: Sequence[_Turn], frequencies: Mapping[str, int]) -> dict[str, float]:
    counts = Counter(
        word for turn in turns for word in map(str.lower, _WORD.findall(turn.text)) if _says_something(word)
    )
    documents = max(frequencies.values(), default=0) + 1
    return {
        word: (1 + math.log(count)) * math.log(1 + documents / (1 + frequencies.get(word, 0)))
        if frequencies
        else (1 + math.log(count)) * min(1.0, len(word) / 8)
        for word, count in counts.items()
    }


def _phrases(sentence: str) -> Iterator[tuple[str, ...]]:
    """Runs of content words, cut to their last words."""
    run: list[str] = []
    for word in (*_WORD.findall(_BRACKETS.sub(" . ", sentence)), "."):
        if _says_something(word.lower()):
            run.append(word)
            continue
        if run:
            yield tuple(run[-_LONGEST_PHRASE:])
        run = []


def _sentences(turns: Sequence[_Turn]) -> Iterator[tuple[float, _Turn, str]]:
    """The sentences with their relative positions."""
    length = sum(len(turn.text) for turn in turns) or 1
    before = 0
    for turn in turns:
        for part in split_sentences(_spoken(turn.text) if turn.speaker else " ".join(turn.text.split())):
            yield min(1.0, before / length), turn, part.text
            before += len(part.text)


def _spoken(text: str) -> str:
    """Speech without fillers: hesitations, repeated words, remarks in brackets."""
    return " ".join(_FILLER.sub("", _BRACKETS.sub(" ", text)).split())


def _chosen(found: Sequence[_Candidate], max_count: int) -> list[str]:
    """The best questions; each choice lowers the scores of those nearby or of the same kind."""
    left = {candidate.text.lower(): candidate for candidate in reversed(found)}
    waiting = list(reversed(left.values()))
    near: Counter[int] = Counter()
    kinds: Counter[str] = Counter()
    taken: list[str] = []
    parts = max(1, min(max_count, 8))

    def part_of(candidate: _Candidate) -> int:
        return min(parts - 1, int(candidate.place * parts))

    def worth(candidate: _Candidate) -> float:
        return float(candidate.worth * _CROWDED ** near[part_of(candidate)] * _REPEATED ** kinds[candidate.kind])

    while waiting and len(taken) < max_count:
        best = max(waiting, key=worth)  # the first of equal ones
        waiting.remove(best)
        near[part_of(best)] += 1
        kinds[best.kind] += 1
        taken.append(best.text)
    return taken


def _says_something(word: str) -> bool:
    return 2 < len(word) <= _LONGEST_WORD and word[0].isalpha() and word not in EMPTY and not _SHORTENED.search(word)


def _plain(title: str) -> str:
    """A title without numbers and dates."""
    return " ".join(re.sub(r"[^\w'&-]+", " ", _COUNTED.sub(" ", title)).split()).strip("-' ")


def _people(header: str) -> list[str]:
    """The names in a header, in order."""
    parts = re.split(r"(?<=>)\s*[,;]\s*|(?<=[a-z])\s*[,;]\s*(?=[\w.+-]+@)|;\s*", header)
    return [name for part in parts if (name := _person(part))]


def _person(part: str) -> str:
    """The person that a part of a header names: from the address if possible, else the displayed name."""
    address = _ADDRESS.search(part)
    pieces = re.split(r"[._+-]", address.group().split("@")[0]) if address else []
    if len(pieces) > 1 and all(piece.isalpha() for piece in pieces) and len(pieces[-1]) > 1:
        return " ".join(piece.capitalize() for piece in pieces)
    shown = re.sub(r"<.*|\(.*?\)|[\w.+-]*@.*", "", part).strip(" \"',")
    last, comma, first = shown.partition(", ")
    return f"{first} {last}" if comma and " " not in last else shown or "".join(pieces[:1]).capitalize()
