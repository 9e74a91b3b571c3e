"""Why not more was reused, in words."""

from __future__ import annotations

import pytest

from rekindle.cache.miss_reason import MissEvidence, reason_of


@pytest.mark.parametrize(
    ("evidence", "kind", "sentence"),
    [
        (MissEvidence(3000, 2240, goes_on=True), "differs",
         "An earlier prompt shares the first 2,240 tokens, then differs."),
        (MissEvidence(3000, 1, goes_on=True), "differs", "An earlier prompt shares the first token, then differs."),
        (MissEvidence(30, 0, goes_on=True), "differs",
         "An earlier prompt looks like this one, but differs from the first token on."),
        (MissEvidence(30, 0), "new", "No earlier prompt begins like this one."),
        (MissEvidence(30, 8), "ends", "Everything the cache has of this prompt is reused; the rest is new."),
        (MissEvidence(30, 8, asked=20), "gone",
         "An earlier prompt shares 12 more tokens, but that KV is not in the cache: evicted, removed, or never kept."),
        (MissEvidence(30, 8, asked=10, asked_age=9.0, ttl_seconds=5.0), "expired",
         "2 more tokens had been kept, but the ttl has expired."),
        (MissEvidence(30, 0, elsewhere=(2, ("adapter", "tenant"), "tiny")), "elsewhere",
         "This was asked with another adapter and tenant (tiny); KV is not shared between them."),
    ],
)  # fmt: skip
def test_a_reason_is_said_as_an_engineer_would(evidence: MissEvidence, kind: str, sentence: str) -> None:
    reason = reason_of(evidence)
    assert (reason.kind, reason.sentence) == (kind, sentence)
