"""What things cost with this model on this machine, remembered between runs."""

from __future__ import annotations

import os
import platform

from rekindle.config import home_folder
from rekindle.core.identity import digest_of_fields
from rekindle.engine.base import Engine
from rekindle.remembered import Remembered
from rekindle.reuse.cost import Costs

_MOST = 64  # pairs of machine and model


def recall_costs(engine: Engine) -> Costs:
    """What was measured in earlier runs."""
    return Costs(_remembered().recall(machine_and_model(engine)))


def remember_costs(engine: Engine, costs: Costs) -> None:
    """Keep what was measured for later runs."""
    _remembered().keep(machine_and_model(engine), costs.as_json())


def _remembered() -> Remembered:
    return Remembered(home_folder() / "costs.json", _MOST)


def machine_and_model(engine: Engine) -> str:
    """Under which name what was measured is remembered."""
    identity = engine.identity(engine.regime(1)).digest
    return digest_of_fields(platform.node(), platform.machine(), str(os.cpu_count()), engine.device, identity)
