"""The largest step in which each token gets the logits that it would get alone, up to rounding.

Some engines use other kernels for larger steps, which round quantized weights differently: a draft that is verified in
too large a step may be accepted where the model alone would have written something else. For such an engine the limit
is measured once for a model and a machine, and remembered.
"""

from __future__ import annotations

import logging
from itertools import cycle, islice

import numpy as np

from rekindle.core.identity import digest_of_fields
from rekindle.engine.base import Engine, EngineSequence, Logits, Row
from rekindle.errors import OutOfMemory, StepRefused
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder

log = logging.getLogger("rekindle.engine")

ANY = 64  # no draft is verified in larger steps
_SIZES = (16, 8, 4, 2)
_BEFORE = 24  # tokens of context
_LAST_DIGITS = 1e-3
_MODELS = 64
_TEXT = "The lamp was lit at dusk, and people on the road by the river could see it from the other side. "


def max_exact_step(engine: Engine) -> int:
    """The largest step, 1 if each token must be computed alone; `ANY` if there is no limit."""
    if engine.capabilities.steady:
        return ANY
    memory = JsonMemo(home_folder() / "step_width.json", _MODELS)
    name = digest_of_fields("rekindle/step_width/1", engine.identity(engine.regime(1)).digest, engine.arithmetic)
    known = memory.recall(name)
    if isinstance(known, int) and 1 <= known <= ANY:
        return known
    found = measure_step_width(engine)
    if found == 1:  # said once for a model and a machine
        log.warning(
            "Drafts are not used with %s: here it rounds differently if several tokens share a step.", engine.name
        )
    memory.keep(name, found)
    return found


def measure_step_width(engine: Engine) -> int:
    """Measure the largest step in which each token gets the logits it gets alone."""
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
