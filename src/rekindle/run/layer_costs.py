"""How long a layer takes with this model on this machine: learned from steps that streamed, remembered between runs.

While a session runs, steps are only noted. When it ends, two models are fitted to them, the published network and a
roofline, and the one that errs less on steps that it has not seen is kept for the next one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from rekindle.config import home_folder
from rekindle.core.cells import Cells
from rekindle.engine.base import Engine
from rekindle.remembered import Remembered
from rekindle.reuse.latency import Floats, Sample, best_model, cell_seconds, model_from
from rekindle.run.costs import machine_and_model

_MOST_MODELS = 64  # pairs of machine and model
_MOST_SAMPLES, _LEAST_SAMPLES = 400, 25
_NEWS = 0.2  # the share of samples that must be new for another fit


class LayerCosts:
    """Used from several threads."""

    def __init__(self, engine: Engine) -> None:
        """What earlier runs found."""
        self._name = machine_and_model(engine)
        known = _remembered().recall(self._name)
        known = known if isinstance(known, dict) else {}
        self.model = model_from(known.get("model"))
        self._samples = deque(_samples(known.get("samples")), maxlen=_MOST_SAMPLES)
        self._new = 0
        self._lock = threading.Lock()

    def learn(self, samples: Iterable[Sample]) -> None:
        """So long did layers take."""
        with self._lock:
            told = [sample for sample in samples if sample.seconds > 0]
            self._samples.extend(told)
            self._new += len(told)

    def seconds(self, cells: Cells) -> Floats | None:
        """[chunks, layers] how long each cell takes; None while nobody knows."""
        return None if self.model is None else cell_seconds(self.model, cells)

    def close(self) -> None:
        """Fit, and remember it for the next run, if there is enough news."""
        with self._lock:
            samples, new = list(self._samples), self._new
            self._new = 0
        if len(samples) < _LEAST_SAMPLES or new < _NEWS * len(samples):
            return
        self.model = best_model(samples).model
        told = [[sample.tokens, sample.context, sample.seconds] for sample in samples]
        _remembered().keep(self._name, {"model": self.model.as_json(), "samples": told})


def _samples(remembered: object) -> list[Sample]:
    found = []
    for entry in remembered if isinstance(remembered, list) else []:
        if isinstance(entry, list) and len(entry) == 3 and all(isinstance(n, int | float) for n in entry):
            tokens, context, seconds = entry
            if tokens > 0 and context >= 0 and seconds > 0:
                found.append(Sample(int(tokens), int(context), float(seconds)))
    return found


def _remembered() -> Remembered:
    return Remembered(home_folder() / "layers.json", _MOST_MODELS)
