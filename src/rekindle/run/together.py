"""How many tokens a step may have so that each gets the logits that it would get alone, but for the last digits.

Some engines have other kernels for larger steps, which round quantized weights in another way: a draft that is checked
in too large a step may be found right where the model alone would have written something else. For such an engine it
is measured, once for a model and a machine, and remembered.
"""

from __future__ import annotations

from itertools import cycle, islice

import numpy as np

from rekindle.config import home_folder
from rekindle.core.identity import digest_of_fields
from rekindle.engine.base import Engine, EngineSequence, Logits, Row
from rekindle.errors import OutOfMemory, StepRefused
from rekindle.remembered import Remembered

ANY = 64  # no step of a draft is larger
_SIZES = (16, 8, 4, 2)
_BEFORE = 24  # tokens of the context they stand in
_LAST_DIGITS = 1e-3
_MODELS = 64
_TEXT = "The lamp was lit at dusk, and whoever passed the house by the river could see it from the other side. "


def together(engine: Engine) -> int:
    """At most so many tokens of a context in one step; 1 if each has to be alone. `ANY`: as many as one likes."""
    if engine.capabilities.steady:
        return ANY
    memory = Remembered(home_folder() / "together.json", _MODELS)
    name = digest_of_fields("rekindle/together/1", engine.identity(engine.regime(1)).digest, engine.arithmetic)
    known = memory.recall(name)
    if isinstance(known, int) and 1 <= known <= ANY:
        return known
    found = measure(engine)
    memory.keep(name, found)
    return found


def measure(engine: Engine) -> int:
    """The largest step that gives each token what it gets alone."""
    most = _SIZES[0]
    tokens = list(islice(cycle(engine.tokenizer.encode(_TEXT)), _BEFORE + most))
    try:
        sequence = engine.open(len(tokens), engine.regime(len(tokens)))
    except (OutOfMemory, StepRefused):
        return 1
    try:
        _step(engine, sequence, tokens[:_BEFORE])
        alone = np.concatenate([_step(engine, sequence, [token]) for token in tokens[_BEFORE:]])
        for size in _SIZES:
            sequence.truncate(_BEFORE)
            found = _step(engine, sequence, tokens[_BEFORE : _BEFORE + size])
            if np.abs(found - alone[:size]).max() <= _LAST_DIGITS * max(1.0, float(np.abs(alone).max())):
                return ANY if size == most else size
    finally:
        sequence.close()
    return 1


def _step(engine: Engine, sequence: EngineSequence, tokens: list[int]) -> Logits:
    return engine.step([Row.following(sequence, tokens, logits="all")])[0]
