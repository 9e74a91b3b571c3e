"""`python -m tools.capacity`: what a fleet on shared tiers needs, from measured costs (docs/concepts/capacity.md).

    compute   seconds of a device a request: what is not stored is computed, what is on the node's own disk is loaded
    link      bytes a request between nodes and a tier: what other nodes computed, and what this one adds
    memory    bytes that a tier holds: what was added within the time in which it is asked for again

Prefill only: replies are decoded as without a cache. Rates, shares and machines are assumptions, and options.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

NUMBERS = Path(__file__).resolve().parent.parent / "docs" / "numbers"
RATES = (10, 1_000, 100_000)


@dataclass(frozen=True)
class MeasuredCosts:
    """A prompt of one length: seconds to compute it, to load its KV from the node's disk, and the bytes of its KV."""

    compute_seconds: float
    load_seconds: float
    kv_bytes: int

    @classmethod
    def read(cls, file: str = "prefix-NVIDIA-H200", size: str = "8192+20") -> MeasuredCosts:
        """From a file of docs/numbers."""
        found = json.loads((NUMBERS / f"{file}.json").read_text("utf-8"))["sizes"][size]
        load = found["warm_disk_ttft_s"] - found["floor_ttft_s"]
        return cls(found["cold_ttft_s"], load, found["kv_bytes"])

    @property
    def break_even_bytes(self) -> float:
        """Bytes a second above which loading a prompt is sooner than computing it."""
        return self.kv_bytes / self.compute_seconds


@dataclass(frozen=True)
class Assumptions:
    """What the model does not measure.

    reused     share of a prompt's tokens whose KV is stored
    elsewhere  share of those that another node computed: they come from a tier
    size       bytes on a tier, as a share of those in the engine: 1 for exact KV, less if it is quantized
    busy       share of its time that a device computes prompts
    link       bytes a second of a machine's network
    memory     bytes that a machine of a tier holds
    window     seconds in which KV is asked for again
    """

    reused: float = 0.8
    elsewhere: float = 0.5
    size: float = 1.0
    busy: float = 0.7
    link: float = 100e9 / 8
    memory: float = 1e12
    window: float = 3600.0


@dataclass(frozen=True)
class FleetNeed:
    """What a rate of requests needs. `tier_links` and `tier_memories`: machines of a tier, by either."""

    nodes: float
    read_bytes: float
    written_bytes: float
    stored_bytes: float
    tier_links: float
    tier_memories: float
    node_link: float  # share of a node's network

    @property
    def breaks(self) -> list[str]:
        """What exceeds one machine, by most first."""
        machines = {
            "a node's network": self.node_link,
            "the tier's network": self.tier_links,
            "the tier's memory": self.tier_memories,
            "compute": self.nodes,
        }
        return sorted((name for name, count in machines.items() if count > 1), key=lambda name: -machines[name])


def fleet_need(rate: float, costs: MeasuredCosts, given: Assumptions) -> FleetNeed:
    """What `rate` requests a second need."""
    shared, local = given.reused * given.elsewhere, given.reused * (1 - given.elsewhere)
    seconds = costs.compute_seconds * (1 - given.reused) + costs.load_seconds * local
    nodes = rate * seconds / given.busy
    read = rate * costs.kv_bytes * shared * given.size
    written = rate * costs.kv_bytes * (1 - given.reused) * given.size
    stored = written * given.window
    return FleetNeed(
        nodes=nodes,
        read_bytes=read,
        written_bytes=written,
        stored_bytes=stored,
        tier_links=(read + written) / given.link,
        tier_memories=stored / given.memory,
        node_link=(read + written) / max(1, math.ceil(nodes)) / given.link,
    )


def table(costs: MeasuredCosts, given: Assumptions) -> str:
    """The needs of each rate, as a table of a page."""
    lines = [
        "| requests a second | nodes | from the tier, GB/s | to the tier, GB/s | stored, TB "
        "| tier machines by network, by memory | breaks first |",
        "|---:|---:|---:|---:|---:|---:|---|",
    ]
    for rate in RATES:
        need = fleet_need(rate, costs, given)
        cells = (
            f"{rate:,}",
            f"{math.ceil(need.nodes):,}",
            f"{need.read_bytes / 1e9:,.1f}",
            f"{need.written_bytes / 1e9:,.1f}",
            f"{need.stored_bytes / 1e12:,.1f}",
            f"{math.ceil(need.tier_links):,}, {math.ceil(need.tier_memories):,}",
            ", then ".join(need.breaks) or "nothing",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table for these assumptions."""
    parser = argparse.ArgumentParser(description="What a fleet on shared tiers needs.")
    usual = Assumptions()
    for name in Assumptions.__dataclass_fields__:
        parser.add_argument(f"--{name}", type=float, default=getattr(usual, name))
    costs = MeasuredCosts.read()
    given = Assumptions(**vars(parser.parse_args()))
    print(table(costs, given))
    print(f"\nbreak-even: {costs.break_even_bytes * given.size / 1e9:.1f} GB/s for one request")


if __name__ == "__main__":
    main()
