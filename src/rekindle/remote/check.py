"""What a client would find at its origin and why not more, a line each: `rekindle origin check`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rekindle.cache.lookup import CacheLookup
from rekindle.core.plan import RAW, Plan
from rekindle.core.size import count_of
from rekindle.remote.connection import OriginFailed
from rekindle.remote.index import MAX_ENTRIES, IndexEntry, KvModel
from rekindle.remote.ladder import LevelLimit
from rekindle.remote.manifest import Manifest
from rekindle.remote.pairing import ModelPairing
from rekindle.remote.remote_kv import FIND_SECONDS, RemoteKv

_READ = 8  # manifests: the newest


def check_origin(remote: RemoteKv, lookup: CacheLookup, plan: Plan | None) -> Iterator[tuple[str, str]]:
    """Each thing that must fit, and whether it does, until one does not. With a `plan`, what the prompt finds."""
    origin, model = remote.origin, remote.model_of(lookup)
    try:
        listed = origin.contexts(model, FIND_SECONDS)
        trusted = [entry for entry in listed if origin.trusts(entry)]
        yield "origin", f"{origin.url} answers"
        yield "key", _key(listed, trusted)
        if not trusted:
            alike = {one.title for one in origin.models(FIND_SECONDS) if one.model.widths == model.widths}
            if alike:
                yield (
                    "model",
                    f"{', '.join(sorted(alike))} has its shape. The same in other files? `rekindle origin pair`",
                )
            return
        found = [origin.manifest(entry, model, FIND_SECONDS) for entry in trusted[:_READ]]
        manifests = [manifest for manifest in found if manifest is not None]
        yield "model", _model(model, manifests, remote.pairing_of(lookup))
        yield "levels", _levels(manifests, remote.limit_of(lookup))
        yield "contexts", _contexts(manifests, len(trusted), full=len(listed) == MAX_ENTRIES)
        if plan is not None:
            yield "prompt", str(remote.find(lookup, plan))
            if (obstacle := remote.look(lookup, plan)) is not None and obstacle.miss == "quick":
                yield "request", str(obstacle)
    except OriginFailed as error:
        yield "origin", str(error)


def _key(listed: Sequence[IndexEntry], trusted: Sequence[IndexEntry]) -> str:
    names = ", ".join(sorted({entry.key[:8] for entry in trusted or listed}))
    if trusted:
        return f"trusted: {names}"
    if listed:
        return f"what is there for this model is signed by {names}, which you did not name"
    return "nothing is there for this model: other weights, another adapter or another secret"


def _model(model: KvModel, manifests: Sequence[Manifest], pairing: ModelPairing | None) -> str:
    if pairing is not None:
        return f"paired with {pairing}"
    if any(manifest.model == model for manifest in manifests):
        return "matches"
    return "the same weights, another dtype, device or engine: only quantized KV fits"


def _levels(manifests: Sequence[Manifest], limit: LevelLimit) -> str:
    """The levels of all contexts, with their KL: the worst, or what was measured here."""
    kls: dict[str, list[float | None]] = {}
    for manifest in manifests:
        for level in manifest.levels:
            kl = level.kl if limit.measured is None else limit.measured.get(level.name)
            kls.setdefault(level.name, []).append(0.0 if level.name == RAW else kl)
    about = [f"{name} ({_kl(found)})" if name != RAW else name for name, found in kls.items()]
    allowed = "only raw: reuse" if limit.kl_budget is None else f"a KL of {limit.kl_budget:g} in all: reuse, kl_budget"
    return f"{', '.join(about)}; your settings allow {allowed}"


def _kl(found: Sequence[float | None]) -> str:
    measured = [kl for kl in found if kl is not None]
    return f"KL {max(measured):.4f}" if len(measured) == len(found) else "KL not measured: publish it again"


def _contexts(manifests: Sequence[Manifest], count: int, *, full: bool) -> str:
    longest = max((manifest.tokens for manifest in manifests), default=0)
    more = " or more" if full else ""
    return f"{count_of(count, 'context')}{more} for this model, of up to {count_of(longest, 'token')}"
