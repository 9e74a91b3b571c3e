"""The chunk cache of a session: passages that are known from other prompts, and those that are kept for later ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rekindle.config import home_folder
from rekindle.core.app import Asker
from rekindle.core.chunk import ChunkDigest, Outline, Variant, chunk_digest
from rekindle.core.keys import Shelf, token_bytes
from rekindle.core.kv import Kv, Span
from rekindle.core.plan import Plan
from rekindle.core.reply import ChunkReuse
from rekindle.core.request import Request
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from rekindle.remembered import Remembered
from rekindle.reuse.cost import Costs
from rekindle.reuse.mending import OURS, Picked, mender_of, pick
from rekindle.run.context import Context
from rekindle.run.keep import Guard, Job
from rekindle.run.prefill import Filled
from rekindle.run.scoring import Scoring, unscored
from rekindle.settings import Settings
from rekindle.store.tiered import TieredStore
from rekindle.store.variants import KnownVariant

_MODELS = 64  # whose calibration is remembered
_PASS_TOKENS = 4  # times what the engine takes at once: the most that one pass of a mended prompt computes


@dataclass(frozen=True, eq=False)
class Passages:
    """The chunks of one prompt: where they stand, what they are, and the variant of each that would be reused."""

    outline: Outline
    digests: tuple[ChunkDigest, ...]  # the head's first
    picked: tuple[Picked, ...] = ()

    @classmethod
    def of(cls, outline: Outline, tokens: Sequence[int]) -> Passages:
        """The chunks of a prompt, of which nothing is known yet."""
        spans = (Span(0, outline.head), *outline.chunks)
        return cls(outline, tuple(chunk_digest(tokens[span.start : span.stop]) for span in spans))

    def mended(self, plan: Plan) -> tuple[Picked, ...]:
        """Those that the plan mends, in order."""
        spans = plan.mend.spans if plan.mend is not None else ()
        return tuple(chunk for chunk in self.picked if chunk.span in spans)

    def report(self, plan: Plan, anew: Sequence[int], before: Sequence[ChunkReuse] = ()) -> tuple[ChunkReuse, ...]:
        """Where the KV of each chunk came from; `before` is what the context that was gone on from had.

        The same tokens may have been other passages then: what was mended stays so, whatever it is called now.
        """
        mended = {chunk.span: chunk for chunk in self.mended(plan)}
        stale = [chunk for chunk in before if chunk.source == "mended"]
        told: list[ChunkReuse] = []
        for number, span in self.outline.numbered:
            stood = [chunk for chunk in stale if _share(chunk, span)]
            if span in mended:
                told.append(_mended(number, mended[span], anew))
            elif stood:
                own = tuple(position for chunk in stood for position in chunk.anew if position in span)
                whole = replace(stood[0], number=number, start=span.start, stop=span.stop)
                told.append(replace(whole, recomputed=len(own), anew=own))
            else:
                after = any(chunk.source == "mended" and chunk.start < span.start for chunk in (*told, *before))
                told.append(ChunkReuse(number, span.start, span.stop, "computed" if after else "exact"))
        hidden = [rest for chunk in stale for rest in _uncovered(chunk, self.outline.chunks)]
        return tuple(sorted((*told, *hidden), key=lambda chunk: chunk.start))

    def note_use(
        self, store: TieredStore, costs: Costs, filled: Filled, cold_seconds: float, asker: Asker | None
    ) -> None:
        """Count the variants that were used, by whom and what that saved, and learn what bringing them took."""
        plan, tiers = filled.plan, {load.tier for load in filled.plan.loads} - {"engine"}
        size_bytes = 0
        for chunk in self.mended(plan):
            assert isinstance(chunk.known, KnownVariant)
            share = len(chunk.span) / plan.tokens
            store.variants.used(chunk.known, chunk.overhead or 0.0, cold_seconds * share * 1e3)
            store.used_by(asker, chunk.known.pieces)
            size_bytes += chunk.known.size_bytes
            tiers.add(chunk.known.tier)
        if len(tiers) == 1:
            tokens = sum(len(chunk.span) for chunk in self.mended(plan))
            prefix = 0 if plan.in_engine else plan.reused
            costs.loaded(tiers.pop(), size_bytes * (tokens + prefix) // tokens, filled.load_seconds)


def _share(chunk: ChunkReuse, span: Span) -> bool:
    """Whether they have tokens in common."""
    return chunk.start < span.stop and chunk.stop > span.start


def _uncovered(chunk: ChunkReuse, spans: Sequence[Span]) -> list[ChunkReuse]:
    """The parts of a mended passage that are no passage any more."""
    rests, place = [], chunk.start
    for span in (*spans, Span(chunk.stop, chunk.stop)):
        if span.stop <= place or place >= chunk.stop:
            continue
        if (stop := min(span.start, chunk.stop)) > place:
            own = tuple(position for position in chunk.anew if place <= position < stop)
            rests.append(replace(chunk, number=None, start=place, stop=stop, recomputed=len(own), anew=own))
        place = span.stop
    if place < chunk.stop:
        own = tuple(position for position in chunk.anew if position >= place)
        rests.append(replace(chunk, number=None, start=place, recomputed=len(own), anew=own))
    return rests


def _mended(number: int, chunk: Picked, anew: Sequence[int]) -> ChunkReuse:
    assert chunk.known is not None
    start, stop = bisect_left(anew, chunk.span.start), bisect_left(anew, chunk.span.stop)
    own = tuple(anew[start:stop])
    scores = (chunk.impact, chunk.overlap, chunk.disorder, chunk.overhead, chunk.known.variant.drift)
    return ChunkReuse(number, chunk.span.start, chunk.span.stop, "mended", len(own), own, *scores)


class Chunks:
    """What a session knows about mending. `budget` of a model that was calibrated comes from there."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        """Raises `InvalidSetting`."""
        self._engine = engine
        self._settings = settings
        if settings.deterministic and settings.reuse == "approximate":
            raise InvalidSetting("reuse='approximate' and deterministic exclude each other: leave one of them out.")
        self.mender = mender_of(settings.mender, settings.mend_budget, calibration_of(engine, settings.mender))
        if engine.capabilities.mends == "leading" and self.mender.choice not in ("leading", "nothing"):
            share = None if self.mender.choice == "published" else self.mender.budget  # an alpha is no share
            self.mender = replace(mender_of("leading", share), calibrated=self.mender.calibrated)
        self.most_tokens = _PASS_TOKENS * engine.prefill_tokens

    def allowed(self, request: Request) -> bool:
        """Whether a request may be answered from mended KV."""
        level = self._settings.reuse if request.reuse is None else request.reuse
        able = self._engine.capabilities.mends != "none" and self._engine.capabilities.spans
        return level == "approximate" and able and not self._settings.deterministic

    def find(self, store: TieredStore, shelf: Shelf, tokens: Sequence[int], passages: Passages) -> Passages:
        """Look the chunks up. Changes nothing."""
        spans = passages.outline.chunks
        wanted = {
            digest: token_bytes(tokens[span.start : span.stop])
            for digest, span in zip(passages.digests[1:], spans, strict=True)
        }
        found = store.variants.find(shelf, wanted)
        return replace(passages, picked=pick(passages.outline, passages.digests, found, self.mender))

    def scoring(self, passages: Passages, tokens: int) -> Scoring | None:
        """What collects the scores of chunks while they are computed; None where the engine tells nothing."""
        layers = len(self._engine.layout.layers)
        return Scoring(passages.outline, tokens, layers) if self._engine.capabilities.probes else None


class Watched:
    """A prompt whose chunks may be worth keeping, until its context is given back."""

    def __init__(self, passages: Passages, plan: Plan, scoring: Scoring | None) -> None:
        self._passages = passages
        self._plan = plan
        self._scoring = scoring

    def jobs(self, context: Context, guard: Guard | None) -> list[Job]:
        """What is to be kept of the chunks, once the prompt itself was offered."""
        exact, loose = [], []
        first = context.exact_tokens
        mended = [chunk for chunk in context.mended if chunk.source == "mended"]
        for number, span in enumerate(self._passages.outline.chunks, start=1):
            stale = sum(other.stop - other.start for other in mended if other.stop <= span.start)
            variant = self._variant(number, span, stale / span.start)
            if variant is not None and span.stop <= first:
                exact.append(variant)
            elif variant is not None and span.stop <= len(context.tokens):
                loose.append(variant)
        tokens = context.tokens[:first]
        jobs: list[Job] = [KeepVariants(context.shelf, tokens, exact, guard)] if exact else []
        for variant in loose:
            chunk = context.tokens[variant.span.start : variant.span.stop]
            kv = context.sequence.export(variant.span)
            jobs.append(KeepLoose(context.shelf, chunk, kv, variant, guard, context.asker))
        return jobs

    def _variant(self, number: int, span: Span, drift: float) -> Variant | None:
        """The variant that stands here; None if it comes from another prompt, or is one already."""
        mend, outline, digests = self._plan.mend, self._passages.outline, self._passages.digests
        if mend is not None and span in mend.spans:
            return None
        scored = None if self._scoring is None else self._scoring.variant(number, digests, drift)
        listed = any(chunk.span == span and chunk.known is not None for chunk in self._passages.picked)
        if scored is not None or (span.stop <= self._plan.reused and listed):
            return scored
        return unscored(outline, number, digests, drift)


class _Guarded:
    """A job that is done only if a guard allows it, and undone if the guard changes its mind meanwhile."""

    def __init__(self, guard: Guard | None) -> None:
        self._guard = guard

    def do(self, store: TieredStore) -> str:
        """Do it, if it is still allowed."""
        if self._guard is not None and not self._guard.allows:
            return "barred"
        outcome = self._do(store)
        if self._guard is not None:
            self._guard.kept(store)
        return outcome

    def _do(self, store: TieredStore) -> str:
        raise NotImplementedError

    def detached_bytes(self) -> int:
        """Next to nothing."""
        return 0


class KeepVariants(_Guarded):
    """Notes where the chunks of a prompt are that was kept a moment ago. A job for the keeper."""

    def __init__(self, shelf: Shelf, tokens: Sequence[int], variants: Sequence[Variant], guard: Guard | None) -> None:
        super().__init__(guard)
        self._shelf, self._tokens, self._variants = shelf, tokens, variants

    def _do(self, store: TieredStore) -> str:
        store.variants.keep(self._shelf, self._tokens, self._variants)
        return "noted"


class KeepLoose(_Guarded):
    """Keeps a chunk that was computed behind mended ones, where only mending finds it. A job for the keeper."""

    def __init__(
        self,
        shelf: Shelf,
        tokens: Sequence[int],
        kv: Kv,
        variant: Variant,
        guard: Guard | None,
        asker: Asker | None = None,
    ) -> None:
        super().__init__(guard)
        self._shelf, self._tokens, self._kv, self._variant, self._asker = shelf, tokens, kv, variant, asker

    def _do(self, store: TieredStore) -> str:
        return store.variants.keep_loose(self._shelf, self._tokens, self._kv, self._variant, self._asker).outcome

    def detached_bytes(self) -> int:
        """The size of its copy."""
        return len(self._kv.span) * self._kv.layout.token_bytes


def calibration_of(engine: Engine, mender: str = OURS) -> float | None:
    """The budget that was calibrated for a model; None if it was not."""
    known = _calibrations().recall(engine.identity(engine.regime(1)).digest)
    budget = known.get(mender) if isinstance(known, dict) else None
    return float(budget) if isinstance(budget, (int, float)) and budget >= 0.0 else None


def calibrate(engine: Engine, budgets: Mapping[str, float]) -> None:
    """Remember budgets for a model, by the mender they are for."""
    model = engine.identity(engine.regime(1)).digest
    known = _calibrations().recall(model)
    _calibrations().keep(model, {**(known if isinstance(known, dict) else {}), **budgets})


def _calibrations() -> Remembered:
    return Remembered(home_folder() / "mending.json", _MODELS)
