"""Costs that do not learn what loading takes: whatever is stored is reused, however fast a tiny model computes."""

from __future__ import annotations

from typing import Any

from rekindle.cache.cost import Costs


class UnmeasuredLoads(Costs):
    def loaded(self, *_: Any) -> None: ...

    def refused(self, *_: Any) -> None: ...


class UnmeasuredCosts(UnmeasuredLoads):
    """The same for computing."""

    def computed(self, *_: Any) -> None: ...
