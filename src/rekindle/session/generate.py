"""Decoding one reply, token by token.

A `Generation` says what to compute next (`row`) and takes the logits (`take`); rows of several may share a step.
With a draft, a row also has the tokens expected next; those the model would not have written are dropped (`decode`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from rekindle.cache.context import Context
from rekindle.core.kv import KvType, Span
from rekindle.core.reply import FinishReason, Reply, Reuse, SampledToken, TextPiece, Timings, TokenLogprob, Usage
from rekindle.core.request import Message, Request
from rekindle.engine.base import Engine, EngineSequence, Logits, Row
from rekindle.engine.sample import penalized
from rekindle.errors import Cancelled, InvalidSampling
from rekindle.session.draft import Drafts
from rekindle.session.prompt import PromptTokens
from rekindle.text.constraint import Constraint
from rekindle.text.detokenize import Detokenizer, StopChecker
from rekindle.text.reasoning import reply_markers

_CONTEXT_TOKENS = 8  # of a text that is continued, for the detokenizer
# Two logits that are nearer to each other may change places, if tokens are computed together and not one by one.
_CLOSE: dict[KvType, float] = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.25, "uint8": 0.25}


class Generation:
    """The state of one reply being decoded."""

    def __init__(
        self,
        engine: Engine,
        request: Request,
        prompt: PromptTokens,
        constraint: Constraint | None = None,
        *,
        started: float,
    ) -> None:
        """`constraint` is what the request's grammar allows."""
        self._engine = engine
        self._request = request
        self._prompt = prompt
        self._constraint = constraint
        self._started = started
        _check_bias(request, engine.tokenizer.vocabulary_size)
        self._sampler = engine.sampler(request.sampling, prompt.tokens)
        chat = isinstance(request.prompt, tuple) and isinstance(request.prompt[0], Message)
        context = () if chat and request.continued_text is None else prompt.tokens[-_CONTEXT_TOKENS:]
        self._detokenizer = Detokenizer(engine.tokenizer, context, reply_markers(engine.tokenizer) if chat else None)
        self._watch = StopChecker(request.stop)
        self._limit = min(request.max_tokens, engine.context_tokens - len(prompt.tokens))
        self._tokens: list[int] = []
        self._pieces: list[str] = []
        self._drawn: list[SampledToken] = []
        self._reported = 0  # number of tokens that came with a piece of text
        self._first_at = self._last_at = started
        self.drafts: Drafts | None = None
        self.finish_reason: FinishReason | None = None

    @property
    def capacity(self) -> int:
        """How many positions its sequence needs. The last token drawn is never computed."""
        return len(self._prompt.tokens) + max(0, self._limit - 1)

    @property
    def context(self) -> tuple[int, ...]:
        """Prompt and reply so far."""
        return (*self._prompt.tokens, *self._tokens)

    def row(self, sequence: EngineSequence, guess: Sequence[int] = ()) -> Row:
        """The next row to compute: the token drawn last, and those that are expected to follow it."""
        return Row.following(sequence, [*self._tokens[-1:], *guess], logits="all" if guess else "last")

    def guess(self) -> Sequence[int]:
        """The tokens expected next; none without a draft that continues the reply and pays."""
        if self.drafts is None:
            return ()
        room = self._limit - len(self._tokens) - 1  # the last token drawn is never computed
        found = self.drafts.guess(self._tokens)[: max(0, room)]
        return found if self.drafts.pays(len(found), len(self._prompt.tokens) + len(self._tokens) - 1) else ()

    def is_certain(self, logits: NDArray[np.float32]) -> bool:
        """Whether the token that is drawn here would be the same, were the logits off in their last digits.

        They are, where several tokens are computed in one step. A random draw is as good either way.
        """
        sampling = self._request.sampling
        if not sampling.greedy:
            return True
        allowed = self._allowed(logits)
        if sampling.repetition_penalty != 1.0:
            allowed = penalized(allowed, set(self.context), sampling.repetition_penalty)
        first, second = np.partition(allowed, -2)[-2:][::-1]
        return bool(first - second > _CLOSE[self._engine.layout.dtype])

    def take(self, logits: Logits) -> TextPiece:
        """Draw the next token from logits `[1, vocabulary]`; the text it adds, which may be none."""
        if self._limit == 0:
            self._note_time()
            return self._finish("length")
        if self._constraint is not None and self._constraint.finished:  # a grammar of nothing
            self._note_time()
            return self._finish("stop")
        token = self._sampler.draw(self._allowed(logits[-1]))
        self._note_time()
        self._tokens.append(token)
        if token in self._engine.tokenizer.stop_ids:
            return self._finish("stop")
        if self._request.logprobs is not None:
            self._drawn.append(self._likelihoods(logits[-1], token, self._request.logprobs))
        text = self._watch.add(self._detokenizer.add(token))
        if self._watch.found is not None:
            self.finish_reason = "stop"
        elif self._is_complete(token):
            return self._finish("stop", text)
        elif len(self._tokens) >= self._limit:
            return self._finish("length", text)
        return self._piece(text)

    def cut(self) -> TextPiece:
        """End the reply where it is, because its time is up; the text that was held back."""
        return self._finish("timeout")

    def reply(self, reuse: Reuse) -> Reply:
        """The finished reply; `reuse` tells what its prompt was spared."""
        assert self.finish_reason is not None, "a reply exists once the generation is finished"
        trial_seconds = 0.0 if self.drafts is None else self.drafts.trial_seconds  # not the reply's: once a model
        decoding, after_first = self._last_at - self._first_at - trial_seconds, len(self._tokens) - 1
        return Reply(
            text="".join(self._pieces),
            tokens=tuple(self._tokens),
            finish_reason=self.finish_reason,
            usage=Usage(
                len(self._prompt.tokens),
                len(self._tokens),
                self._prompt.dropped_messages,
                reuse.reused,
                len(self._prompt.quoted),
                0 if self.drafts is None else self.drafts.taken,
                0 if self.drafts is None else self.drafts.refused,
            ),
            timings=Timings(
                first_token_seconds=self._first_at - self._started,
                decode_seconds=decoding,
                tokens_per_second=after_first / decoding if after_first > 0 and decoding > 0 else None,
            ),
            reuse=reuse,
            logprobs=tuple(self._drawn),
            stopped_by=self._watch.found,
        )

    def _allowed(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits of what may come next; the others are -inf."""
        logits = self._biased(logits)
        return self._without_stops(logits) if self._constraint is None else self._constraint.mask(logits)

    def _biased(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits as the request changes them: by token, and by what the reply has so far."""
        sampling = self._request.sampling
        if not sampling.biased:
            return logits
        changed: NDArray[np.float32] = logits.copy()
        for token, bias in sampling.logit_bias:
            changed[token] += bias
        seen, counts = np.unique(np.array(self._tokens, dtype=np.int64), return_counts=True)
        changed[seen] -= (sampling.presence_penalty + sampling.frequency_penalty * counts).astype(np.float32)
        return changed

    def _is_complete(self, token: int) -> bool:
        """Whether the grammar allows nothing after this token."""
        if self._constraint is None:
            return False
        self._constraint.accept(token)
        return self._constraint.finished

    def _without_stops(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits, with no way to end the reply before its minimal length."""
        if len(self._tokens) >= self._request.min_tokens:
            return logits
        open_ended: NDArray[np.float32] = logits.copy()
        open_ended[list(self._engine.tokenizer.stop_ids)] = -np.inf
        return open_ended

    def _finish(self, reason: FinishReason, text: str = "") -> TextPiece:
        """End the reply; what was held back for a stop string or a character's rest comes out now."""
        text += self._watch.add(self._detokenizer.finish(cut=reason != "stop"))
        self.finish_reason = "stop" if self._watch.found is not None else reason
        return self._piece(text + self._watch.finish())

    def _piece(self, text: str) -> TextPiece:
        """A piece of text, with the tokens that were drawn since the last one that had any."""
        self._pieces.append(text)
        if not text:
            return TextPiece(text)
        stops = self._engine.tokenizer.stop_ids
        tokens = tuple(token for token in self._tokens[self._reported :] if token not in stops)
        drawn = tuple(self._drawn[self._reported :])
        self._reported += len(tokens)
        return TextPiece(text, drawn, tokens)

    def _likelihoods(self, logits: NDArray[np.float32], token: int, count: int) -> SampledToken:
        highest = float(logits.max())
        total = highest + math.log(float(np.exp(logits - highest, dtype=np.float64).sum()))
        top = np.argpartition(logits, -count)[-count:] if count else np.empty(0, np.int64)
        ordered = top[np.argsort(-logits[top], kind="stable")]

        pieces = self._engine.tokenizer.pieces()

        def likelihood(one: int) -> TokenLogprob:
            return TokenLogprob(one, pieces[one], float(logits[one]) - total)

        return SampledToken(likelihood(token), tuple(likelihood(int(other)) for other in ordered))

    def _note_time(self) -> None:
        self._last_at = time.perf_counter()
        if not self._tokens:
            self._first_at = self._last_at


def _check_bias(request: Request, vocabulary_size: int) -> None:
    """Raises `InvalidSampling` for a token that the model does not have."""
    last = max((token for token, _ in request.sampling.logit_bias), default=0)
    if last >= vocabulary_size:
        raise InvalidSampling(f"logit_bias has token {last:,}; this model has tokens 0 to {vocabulary_size - 1:,}.")


def decode(
    engine: Engine,
    generation: Generation,
    context: Context,
    cancelled: Callable[[], bool],
    time_is_up: Callable[[], bool] = lambda: False,
) -> Iterator[TextPiece]:
    """The text that follows the first token, in pieces, until the reply is finished, or cut, or its context is void.

    A context is void once it grew past a length where the model's rotary embedding changes. Raises `Cancelled` within
    a token of being asked to stop. However it ends, the context knows what it holds.
    """
    sequence = context.sequence
    alone = False  # the next token is computed without a guess: it was too close to call
    try:
        while generation.finish_reason is None and engine.regime(len(generation.context)) == sequence.regime:
            if cancelled():
                raise Cancelled("The request was cancelled.")
            if time_is_up():
                yield from filter(None, [generation.cut()])
                break
            guess = () if alone else generation.guess()
            if guess and engine.regime(len(generation.context) + len(guess)) != sequence.regime:
                guess = ()
            span, started = Span(sequence.length, sequence.length + 1 + len(guess)), time.perf_counter()
            (logits,) = engine.step([generation.row(sequence, guess)], cancelled)
            if generation.drafts is not None:
                generation.drafts.stepped(span, time.perf_counter() - started)
            pieces, alone = _check(generation, sequence, guess, logits)
            yield from filter(None, pieces)
    finally:
        context.tokens = generation.context[: sequence.length]


def _check(
    generation: Generation, sequence: EngineSequence, guess: Sequence[int], logits: Logits
) -> tuple[list[TextPiece], bool]:
    """Draw tokens as long as they are the guessed ones, and one more; drop the rest.

    Also tells whether the next token was too close to call: then it is to be computed alone, as without a guess.
    """
    if not guess:
        return [generation.take(logits)], False
    pieces: list[TextPiece] = []
    right, unclear = 0, False
    for place, expected in enumerate((*guess, None)):
        if not generation.is_certain(logits[place]):
            unclear = True
            break
        pieces.append(generation.take(logits[place : place + 1]))
        drawn = generation.context[-1]
        right += drawn == expected
        if drawn != expected or generation.finish_reason is not None:
            break
    assert generation.drafts is not None
    generation.drafts.checked(len(guess), right)
    sequence.truncate(min(sequence.length, len(generation.context) - 1))
    return pieces, unclear
