"""Lets the model decide whether two questions ask the same, where the rules of the guard do not know.

It reads the passages, as it would to answer, and both questions, and its first token is yes or no. How sure it must be
was measured for the model (`session/calibrate/judge`). A model that cannot tell questions apart is not asked.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from rekindle.core.reply import Reply
from rekindle.core.request import MAX_LOGPROBS, Message, Request, Sampling
from rekindle.engine.base import Engine
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder

_MODELS = 64


@dataclass(frozen=True)
class JudgeSkill:
    """How well a model tells questions apart, on labelled pairs.

    threshold   the share of yes from which its word counts; None: it is not asked
    precision   of the pairs it takes for the same at that threshold, the share that are
    recall      of the pairs that are the same, the share it takes for it
    served      number of pairs it takes for the same
    pairs       number of all pairs
    """

    threshold: float | None
    precision: float
    recall: float
    served: int
    pairs: int

    def trusts(self, reply: Reply) -> bool:
        """Whether a reply to a `judging_request` counts as a yes."""
        return self.threshold is not None and yes_share(reply) >= self.threshold


def judging_request(request: Request, asked: str, stored: str) -> Request:
    """The request that asks whether two questions are the same, over the passages of `request`."""
    wanted = (
        f"Question A: {stored.strip()}\nQuestion B: {asked.strip()}\n\n"
        "Do A and B ask for the same, so that the answer to A also answers B? Say only yes or no."
    )
    return replace(
        request,
        prompt=(*request.prompt[:-1], Message("user", wanted)),
        sampling=Sampling(),
        max_tokens=1,
        min_tokens=0,
        stop=(),
        logprobs=MAX_LOGPROBS,
        answers="off",
        drafts=(),
    )


def yes_share(reply: Reply) -> float:
    """The probability of yes among yes and no; 0 if the model would say neither."""
    shares = {"yes": 0.0, "no": 0.0}
    for one in reply.logprobs[0].top if reply.logprobs else ():
        word = one.text.decode("utf-8", "replace").strip(" .,!\n").casefold()
        if word in shares:
            shares[word] += math.exp(one.logprob)
    total = sum(shares.values())
    return shares["yes"] / total if total > 0.0 else 0.0


def recall_skill(engine: Engine) -> JudgeSkill | None:
    """What was measured for a model; None if nothing was."""
    found = _memo().recall(_name(engine))
    try:
        return None if found is None else JudgeSkill(**found)
    except TypeError:
        return None


def remember_skill(engine: Engine, skill: JudgeSkill) -> None:
    _memo().keep(_name(engine), asdict(skill))


def _memo() -> JsonMemo:
    return JsonMemo(home_folder() / "answer_judges.json", _MODELS)


def _name(engine: Engine) -> str:
    return engine.identity(engine.regime(1)).digest


def why_no_judge(skill: JudgeSkill | None) -> str | None:
    """Why a model of this skill is not asked; None if it is."""
    if skill is None:
        return "whether this model can decide that was not measured (rekindle calibrate): equal wordings only"
    return "this model cannot decide that: equal wordings only" if skill.threshold is None else None
