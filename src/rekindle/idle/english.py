"""English word lists for building questions: past tenses of verbs, words without content."""

from __future__ import annotations

import re

from rekindle.knowledge.segment import STOPWORDS

_PAST = """
ate:eat became:become began:begin bit:bite blew:blow bought:buy broke:break brought:bring built:build came:come
caught:catch chose:choose cut:cut did:do dealt:deal drank:drink drew:draw drove:drive fell:fall felt:feel fought:fight
flew:fly forgot:forget found:find froze:freeze gave:give got:get grew:grow heard:hear held:hold hid:hide hit:hit
kept:keep knew:know laid:lay led:lead left:leave lent:lend let:let lost:lose made:make meant:mean met:meet paid:pay
put:put ran:run read:read rode:ride rose:rise said:say sang:sing sat:sit saw:see sent:send set:set shook:shake
shot:shoot showed:show slept:sleep sold:sell spent:spend spoke:speak stood:stand stuck:stick swam:swim taught:teach
threw:throw told:tell took:take tore:tear understood:understand went:go woke:wake won:win wore:wear wrote:write
agreed:agree invited:invite completed:complete deleted:delete required:require acquired:acquire inquired:inquire
excited:excite united:unite belonged:belong hanged:hang
"""
_PRESENT = """
love like enjoy prefer play work live own have need use teach study practice practise collect run want plan hope try
make write read paint cook grow visit volunteer think believe feel know
"""
_KEEPS_ONE = """
add visit end rent start plant paint want need help talk walk work play call ask open join cook learn turn finish accept
attend print collect select report present happen offer enter order cover follow show
"""
_EMPTY = """
actually again ago ah almost already alright always another anyway anything around away back bad basically because
become before being best better big bit both cause come cool course day definitely different done down each either else
em enough er even ever every everybody everyone everything exactly far feel few fine first found full get gets getting
give go goes going gone gonna good got great guess guys haven hear hello here hey hi hmm hope huh hopefully idea instead
keep kind kinda knew know last later least less let lets like liked little ll long look looking looks lot lots made
main make makes making many may maybe mean means might mm more most much must na need needs never new nice nope nothing
now oh ok okay old once one ones only other others out over own perhaps please point pretty probably put quite re
really right said same saw say saying says see seem seems seen sense several shall since six something sometimes soon
sorry sort sounds started still stuff such super sure take taken takes taking talk talking tell thank thanks thing
things think thinking thought three through time times today together told tomorrow too took totally tried true try
trying two uh um under until up upon us use used using usually ve very wait wanna want wanted wants way ways week well
went whatever wow year years yeah yep yes yesterday yet d m don didn doesn isn wasn won couldn wouldn aren hasn photo
ma able above across after against along although among amazing awesome became began behind below between beyond
during except however inside into met must near off onto per quickly rather regards shares toward towards unless
whether while within without yours sincerely dear best
"""
_PREPOSITIONS = "about across after at before by during for from in into near of on over through to toward under with"

EMPTY = STOPWORDS | frozenset(_EMPTY.split())  # no question is about these
PREPOSITIONS = frozenset(_PREPOSITIONS.split())
PRESENT = frozenset(_PRESENT.split())
_IRREGULAR = dict(pair.split(":") for pair in _PAST.split())
_PLAIN = frozenset(_KEEPS_ONE.split())
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
