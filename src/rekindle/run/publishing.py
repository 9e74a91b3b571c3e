"""What a session publishes: prompts whose KV is in the engine, for an origin to hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rekindle.core.request import Request
from rekindle.errors import InvalidSetting
from rekindle.origin.names import Model
from rekindle.origin.publish import Source
from rekindle.origin.slices import RAW, Level, level_named
from rekindle.run.coders import near_coder
from rekindle.run.knowledge import asking, quote_of
from rekindle.run.prompt import encode_prompt
from rekindle.run.session import Session


@contextmanager
def computed(session: Session, request: Request) -> Iterator[Source]:
    """A prompt whose KV is in the engine, computed or loaded, exactly: never quantized, never mended.

    One that quotes passages ends with the last of them: whatever is asked about them goes on from there, and a passage
    that was published alone is found wherever it stands.

    Raises as `Session.generate` does, and `InvalidSetting` for an engine whose KV cannot be taken apart.
    """
    if (why := session.engine.capabilities.opaque) is not None:
        raise InvalidSetting(f"KV of this model cannot be published: {why}.")
    session.stay(None)  # until all of it was taken out
    with session.adapters.use(request.adapter) as adapter:
        exact = replace(request, adapter=adapter, reuse="off" if request.reuse == "off" else "exact", max_tokens=0)
        prompt = encode_prompt(session.engine, exact)
        tokens = prompt.tokens if prompt.outline is None else prompt.tokens[: prompt.outline.question]
        cache = session.cache
        known = cache.lookup(exact, tokens, lambda: False)
        filled = cache.fill(known, cache.plan(known), len(tokens), lambda: False)
        try:
            context, shelf = filled.context, known.shelf
            assert context.near_tokens == 0 and context.exact_tokens >= len(tokens), "not what computing gives"
            whose = Model(shelf.namespace.identity, shelf.layout, shelf.adapter)
            yield Source(whose, tokens, context.sequence.export, shelf.namespace.tenant, session.engine.name)
        finally:
            cache.keep(filled.context)


def levels_of(text: str, session: Session) -> list[Level]:
    """The levels that a list of names means. Raises `InvalidSetting`."""
    engine, found = session.engine, []
    for name in (part.strip() for part in text.split(",") if part.strip()):
        coder = near_coder(engine, session.settings) if name == "near" else None
        if name != "near":
            found.append(level_named(name, engine.layout))
        elif coder is not None and coder.whole is not None:
            found.append(Level("near", coder.whole))
        else:  # its KV is not quantized: by the engine already, or because somebody said so
            found.append(level_named(RAW, engine.layout))
    return list({level.name: level for level in found}.values())


def beginnings(session: Session, passages: int) -> list[Request]:
    """What questions about documents begin with: the system prompt, and so many passages, each alone behind it; those
    that came first most are the first, and then those that nobody asked for yet."""
    chunks = session.knowledge.library(None, None).most_retrieved(passages, others=True)
    quotes = [[], *([quote_of(chunk)] for chunk in chunks)]
    return [Request.of(asking(""), documents=some, max_tokens=0) for some in quotes]
