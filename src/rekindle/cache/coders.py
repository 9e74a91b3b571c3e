"""How the KV of a model is quantized, remembered between runs."""

from __future__ import annotations

from rekindle.codec.coder import EXACT, Coder
from rekindle.codec.quantized import PRESETS
from rekindle.codec.quantizer import BitPlan
from rekindle.engine.base import Engine
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder
from rekindle.settings import Settings

WHOLE_BITS, DELTA_BITS = 6.0, 2.7  # a number, for a model that was not calibrated
_MODELS = 64  # whose coder is remembered


def quantized_coder(engine: Engine, settings: Settings) -> Coder | None:
    """How KV is coded under the level `quantized`, as the settings say; None: as it is."""
    layers = len(engine.layout.layers)
    if engine.layout.dtype == "uint8":  # the engine quantizes it: no step could be smaller
        return None if settings.codec == "raw" else EXACT
    best = recall_coder(engine) or default_coder(layers)
    if settings.codec == "auto":
        return best
    bits = PRESETS.get(settings.codec)
    return None if bits is None else Coder(BitPlan.uniform(layers, bits), best.delta)


def recall_coder(engine: Engine) -> Coder | None:
    """The coder that was calibrated for a model; None if none was, or what was kept is damaged or for other layers."""
    text = _coders().recall(_model(engine))
    try:
        coder = Coder.from_json(text) if isinstance(text, str) else None
    except (ValueError, OverflowError):
        return None
    return coder if coder is not None and _fits(coder, len(engine.layout.layers)) else None


def bits_calibrated(engine: Engine, settings: Settings, *, deltas: bool) -> bool:
    """Whether the bits of quantized KV, or of quantized deltas, were measured for this model."""
    known, usual = recall_coder(engine), default_coder(len(engine.layout.layers))
    if known is None or deltas:
        return known is not None and known.delta != usual.delta
    return settings.codec == "auto" and known.whole != usual.whole


def remember_coder(engine: Engine, coder: Coder) -> None:
    """Keep a coder for later runs. Raises `ValueError` for one that is made for another number of layers."""
    if not _fits(coder, len(engine.layout.layers)):
        raise ValueError(f"this coder is not for the {len(engine.layout.layers)} layers of {engine.name}")
    _coders().keep(_model(engine), coder.to_json())


def default_coder(layers: int) -> Coder:
    """A coder for any model with `layers` layers: the same bits everywhere, more than a calibrated model needs."""
    return Coder(BitPlan.uniform(layers, WHOLE_BITS), BitPlan.uniform(layers, DELTA_BITS))


def _fits(coder: Coder, layers: int) -> bool:
    plans = [plan for plan in (coder.whole, coder.delta) if isinstance(plan, BitPlan)]
    return all(len(plan.layers) == layers for plan in plans)


def _coders() -> JsonMemo:
    return JsonMemo(home_folder() / "coders.json", _MODELS)


def _model(engine: Engine) -> str:
    return engine.identity(engine.regime(1)).digest
