"""Costs that never learn: whatever is stored is reused, however fast a tiny model computes."""

from __future__ import annotations

from typing import Any

from rekindle.cache.cost import Costs


class UnmeasuredCosts(Costs):
    def computed(self, *_: Any) -> None: ...

    def loaded(self, *_: Any) -> None: ...

    def refused(self, *_: Any) -> None: ...
