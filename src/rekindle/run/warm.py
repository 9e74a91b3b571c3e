"""Prompts computed before they are needed, so that they start at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rekindle.core.reply import Reuse
from rekindle.core.request import Options, PromptLike, as_prompts
from rekindle.run.knowledge import asking, quote_of

if TYPE_CHECKING:
    from rekindle.run.session import Session

Told = Callable[[int, int], None]


def warm(
    session: Session, prompts: PromptLike | Iterable[PromptLike], progress: Told | None, options: Options
) -> list[Reuse]:
    """Compute prompts and keep them; what each of them was spared. See `Session.warm`."""
    todo = as_prompts(prompts)
    return _compute(session, [(prompt, options) for prompt in todo], progress)


def warm_knowledge(session: Session, passages: int, progress: Told | None, options: Options) -> list[Reuse]:
    """The same for what questions begin with. See `Session.warm_knowledge`."""
    library = session.knowledge.library(options.get("tenant"), options.get("cache_salt"))
    quotes = [[], *([quote_of(chunk)] for chunk in library.most_retrieved(passages))]
    return _compute(session, [(asking(""), {**options, "documents": some}) for some in quotes], progress)


def _compute(session: Session, todo: Sequence[tuple[PromptLike, Options]], progress: Told | None) -> list[Reuse]:
    done = []
    for number, (prompt, options) in enumerate(todo):
        chosen: Options = {**options, "max_tokens": 0}
        done.append(session.stream(prompt, **chosen).reply.reuse)
        if progress is not None:
            progress(number + 1, len(todo))
    session.flush()
    return done
