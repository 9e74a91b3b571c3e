"""What a session publishes: prompts whose KV is in the engine, for an origin to hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from rekindle.answers.ask_terms import asking
from rekindle.cache.coders import quantized_coder
from rekindle.cache.context import Context
from rekindle.chunks.scores import ChunkScorer, unscored
from rekindle.core.cells import CHUNK_TOKENS
from rekindle.core.chunk import PromptLayout, Variant, chunk_digest
from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.core.plan import RAW
from rekindle.core.request import Request
from rekindle.engine.base import Engine, HeldKv, Row
from rekindle.errors import InvalidSetting
from rekindle.remote.index import KvModel
from rekindle.remote.publish.publisher import PublishSource
from rekindle.remote.slices import Level, decode, encode, level_named
from rekindle.session.calibrate.kv_trial import Trial
from rekindle.session.library import quote_of
from rekindle.session.prompt import encode_prompt
from rekindle.session.session import Session

_MEASURED_TOKENS = 4 * CHUNK_TOKENS  # of a context, for the KL of its levels


@contextmanager
def computed(session: Session, request: Request) -> Iterator[PublishSource]:
    """A prompt whose KV is in the engine, computed or loaded, exactly: never quantized, never from other prompts.

    One that quotes passages ends with the last of them: every question about them continues from there, and its first
    passage is found anywhere in a prompt.

    Raises as `Session.generate` does, and `InvalidSetting` for an engine whose KV cannot be taken apart.
    """
    if (why := session.engine.capabilities.opaque) is not None:
        raise InvalidSetting(f"KV of this model cannot be published: {why}.")
    session.stay(None)  # until all of it was taken out
    with session.adapters.use(request.adapter) as adapter:
        exact = replace(request, adapter=adapter, reuse="off" if request.reuse == "off" else "exact", max_tokens=0)
        prompt = encode_prompt(session.engine, exact)
        tokens = prompt.tokens if prompt.prompt_layout is None else prompt.tokens[: prompt.prompt_layout.question]
        with session.cache.prepare(exact, tokens, lambda: False) as prefill:
            prefill.run(len(tokens), lambda: False)
            context, kv_space = prefill.context, prefill.lookup.kv_space
            assert context.quantized_tokens == 0 and context.exact_tokens >= len(tokens), "not what computing gives"
            model = KvModel.of(session.engine, len(tokens), kv_space.adapter)
            passage = None
            if prompt.prompt_layout is not None:
                passage = partial(_score, session.engine, context, tokens, prompt.prompt_layout)
            tenant, name = kv_space.namespace.tenant, session.engine.name
            measure = partial(level_kl, session.engine, tokens, context.sequence.export, kv_space.adapter)
            yield PublishSource(model, tokens, context.sequence.export, tenant, name, passage, measure)


def level_kl(
    engine: Engine,
    tokens: Sequence[int],
    export: Callable[[Span], Kv],
    adapter: str | None,
    levels: Sequence[Level],
) -> dict[str, float]:
    """The mean KL of what follows the beginning of a context in each level to what follows it in exact KV."""
    known = min(_MEASURED_TOKENS, len(tokens)) * 3 // 4
    kv, forced = export(Span(0, known)), tokens[known:_MEASURED_TOKENS]
    with Trial(engine, tokens[:known], forced, adapter, kv) as trial:
        return {level.name: trial.near(_read_back(level, kv)).mean_kl for level in levels}


def _read_back(level: Level, kv: Kv) -> list[LayerKv]:
    """KV as clients decode it."""
    coded = (encode(level, kv.layout, number, layer) for number, layer in enumerate(kv.layers))
    return [decode(data, kv.layout, number, len(kv.span)) for number, data in enumerate(coded)]


def _score(engine: Engine, context: Context, tokens: Sequence[int], prompt_layout: PromptLayout) -> Variant:
    """The first passage of a prompt with its attention: computed once more, after the KV of what is before it."""
    span, head = prompt_layout.chunks[0], prompt_layout.head
    alone = PromptLayout(head, (span,))
    digests = chunk_digest(tokens[:head]), chunk_digest(tokens[span.start : span.stop])
    if not engine.capabilities.probes:
        return unscored(alone, 1, digests, 0.0)
    scorer = ChunkScorer(alone, span.stop, len(engine.layout.layers))
    with closing(engine.open(span.stop, engine.regime(len(tokens)), context.kv_space.adapter)) as own:
        feeds = (HeldKv(context.sequence.export(Span(0, span.start))),)
        positions = np.arange(span.start, span.stop, dtype=np.int64)
        row = Row(own, tokens[span.start : span.stop], positions, "none", feeds, probe=scorer.probe, replay=False)
        engine.step([row])
    return scorer.variant(1, digests) or unscored(alone, 1, digests, 0.0)


def levels_of(text: str, session: Session) -> list[Level]:
    """The levels that a list of names means. Raises `InvalidSetting`."""
    engine, found = session.engine, []
    for name in (part.strip() for part in text.split(",") if part.strip()):
        coder = quantized_coder(engine, session.settings) if name == "quantized" else None
        if name != "quantized":
            found.append(level_named(name, engine.layout))
        elif coder is not None and coder.whole is not None:
            found.append(Level("quantized", coder.whole))
        else:  # its KV is not quantized: by the engine already, or because somebody said so
            found.append(level_named(RAW, engine.layout))
    return list({level.name: level for level in found}.values())


def beginnings(session: Session, passages: int) -> list[Request]:
    """What questions about documents begin with: the system prompt, and passages, each alone behind it; those
    retrieved most often come first, then those never retrieved."""
    chunks = session.knowledge.library(None, None).top_retrieved(passages, others=True)
    quotes = [[], *([quote_of(chunk)] for chunk in chunks)]
    return [Request.of(asking(""), documents=some, max_tokens=0) for some in quotes]
