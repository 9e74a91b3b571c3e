"""`rekindle calibrate`: what a model needs where answers may be nearly the same, measured and kept for its sessions.

budget  the share of reused passages' tokens that is recomputed under `approximate`    session/calibrate/budget
bits    how many bits the KV of each layer gets under `quantized`                      session/calibrate/bits
judge   whether the model may decide that two questions are the same (answers=direct)  session/calibrate/judge
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rekindle.cache.coders import bits_calibrated, remember_coder
from rekindle.chunks.match import calibration_of, remember_budgets
from rekindle.chunks.select import OURS
from rekindle.codec.quantizer import BitPlan
from rekindle.core.adapter import Lora
from rekindle.core.size import count_of
from rekindle.engine.base import Engine
from rekindle.engine.load import EngineOptions, load_engine
from rekindle.engine.lora_files import read_adapter
from rekindle.errors import InvalidSetting
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder
from rekindle.models.adapter_registry import RegisteredAdapter, lookup, parse
from rekindle.session.answer_judge import JudgeSkill, recall_skill
from rekindle.session.calibrate.bits import Advance, FoundBits, codes_kv, find_bits
from rekindle.session.calibrate.budget import MAX_KL, FoundBudget, find_budget
from rekindle.session.calibrate.judge import find_skill, read_pairs
from rekindle.session.calibrate.prompts import read_questions, read_texts
from rekindle.session.session import Session
from rekindle.settings import Settings
from rekindle.settings.keywords import SettingsLike

if TYPE_CHECKING:
    from typing_extensions import Unpack

PROMPTS = 24  # at most; twelve come with the package
_MODELS = 256  # whose parts are remembered
Part = Literal["budget", "bits", "judge"]
AdaptersLike = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None


@dataclass(frozen=True)
class Calibration:
    """What was found for a model, and kept. None where its engine cannot do it; `notes` say why, in sentences."""

    model: str
    budget: FoundBudget | None
    bits: FoundBits | None
    notes: tuple[str, ...]
    seconds: float
    judge: JudgeSkill | None = None

    @property
    def summary(self) -> str:
        """One sentence: what sessions of this model do from now on."""
        parts = []
        if self.budget is not None:
            share = f"recompute {self.budget.budget:.0%} of the tokens of reused passages"
            parts.append(f"{share if self.budget.reached else 'compute passages whole'} (reuse=approximate)")
        if self.bits is not None:
            kept = [self.bits.kept("whole"), self.bits.kept("difference")]
            sizes = [f"{one.bits:.1f} bits a number" for one in kept if one is not None]
            parts.append(f"keep KV with {', differences of adapters with '.join(sizes)} (reuse=quantized)")
        if self.judge is not None:
            way = "are not asked" if self.judge.threshold is None else "decide"
            parts.append(f"{way} whether questions that rules doubt are the same (answers=direct)")
        return f"From now on sessions of {self.model} {' and '.join(parts)}."

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        bits: dict[str, Any] | None = None
        if self.bits is not None:
            bits = {"tried": [asdict(one) | {"quantized": one.near} for one in self.bits.tried]}
            for name, plan in (("whole_plan", self.bits.coder.whole), ("delta_plan", self.bits.coder.delta)):
                layers = plan.layers if isinstance(plan, BitPlan) else ()
                bits[name] = [[layer.keys, layer.values] for layer in layers]
        return {
            "model": self.model,
            "budget": None if self.budget is None else asdict(self.budget),
            "bits": bits,
            "judge": None if self.judge is None else asdict(self.judge),
            "notes": list(self.notes),
            "summary": self.summary,
            "seconds": round(self.seconds, 1),
        }


def calibrate(
    model: str | os.PathLike[str] | Engine,
    *,
    max_kl: float = MAX_KL,
    adapters: AdaptersLike = None,
    data: str | os.PathLike[str] | None = None,
    prompts: int = PROMPTS,
    progress: Advance | None = None,
    **settings: Unpack[SettingsLike],
) -> Calibration:
    """Measure a model, and keep what was found for every session of it that is opened from now on.

    model      as for `Session`
    max_kl     how far the distributions of the next tokens after reused passages may be from those of the full
               computation: mean KL in nats, along 16 tokens of each answer. 0.015: about 96 of 100 are chosen alike
    adapters   your own: a name known from `rekindle adapters`, NAME=PATH, a folder that PEFT saved or one of such
               folders, or several of these: differences under adapters are measured with them
    data       a folder of your own material: `.jsonl` files with `question` and `contexts` ([{title, text}]), and
               `.txt` and `.md` files; what it lacks comes from a sample in the package
    prompts    maximum number of questions
    progress   called with a word on each part before it begins

    Takes minutes with a small model. Raises as `Session` does, `AdapterRefused` for an adapter of another model, and
    `InvalidSetting` where the engine can do neither.
    """
    if not 0.0 < max_kl < math.inf:
        raise InvalidSetting(f"max_kl={max_kl} is out of range: use a KL in nats above 0, for example {MAX_KL}.")
    if prompts < 2:
        raise InvalidSetting(f"prompts={prompts} is too few: passages of one prompt come from another. Use 2 or more.")
    loras = read_adapters(adapters)
    advance = progress or (lambda _: None)
    material = None if data is None else Path(data)
    if isinstance(model, (str, os.PathLike)):
        advance("load the model")
        engine = load_engine(os.fspath(model), EngineOptions.of(Settings.load(settings)))
        try:
            return measure(engine, loras, material, advance, max_kl=max_kl, prompts=prompts)
        finally:
            engine.close()
    return measure(model, loras, material, advance, max_kl=max_kl, prompts=prompts)


def read_adapters(given: AdaptersLike) -> list[Lora]:
    """Adapters as `calibrate` takes them. Raises `InvalidSetting` for what names none, and as `read_adapter` does."""
    several = [given] if isinstance(given, (str, os.PathLike)) else given or ()
    entries = [entry for one in several for entry in _entries(os.fspath(one))]
    return [read_adapter(entry.path, entry.scale) for entry in entries]


def _entries(text: str) -> list[RegisteredAdapter]:
    place = Path(text).expanduser()
    if place.is_dir():
        return [RegisteredAdapter(path.name, str(path)) for path in adapter_folders(place)]
    if place.is_file():
        return [RegisteredAdapter(place.name, text)]
    if "=" in text:
        return [parse(text)]
    if (entry := lookup(text)) is not None:
        return [entry]
    raise InvalidSetting(f"There is no adapter {text!r}. Give a folder that PEFT saved, or see `rekindle adapters ls`.")


def adapter_folders(folder: Path) -> tuple[Path, ...]:
    """The adapters in a folder: itself, or the folders in it. Raises `InvalidSetting` if there are none."""
    found = sorted(path.parent for path in (*folder.glob("adapter_config.json"), *folder.glob("*/adapter_config.json")))
    if not found:
        raise InvalidSetting(f"{folder} has no adapters that PEFT saved (folders with adapter_config.json).")
    return tuple(found)


def measure(
    engine: Engine,
    loras: Sequence[Lora],
    data: Path | None,
    advance: Advance,
    *,
    max_kl: float = MAX_KL,
    prompts: int = PROMPTS,
    parts: Collection[Part] = ("budget", "bits", "judge"),
) -> Calibration:
    """Measure these parts of a loaded model, and keep what was found. Raises as `calibrate` does.

    What a part found is kept as soon as it ends: an error in the next one loses none of it.
    """
    started = time.perf_counter()
    notes: list[str] = []
    if loras and not engine.capabilities.adapters:
        raise InvalidSetting(f"{engine.name} takes no adapters with this engine: leave --adapter out.")
    for lora in loras:
        engine.check_adapter(lora)  # before minutes of work
    budget = _measure_budget(engine, max_kl, data, prompts, advance, notes) if "budget" in parts else None
    bits = _measure_bits(engine, loras, data, advance, notes) if "bits" in parts else None
    judge = _measure_judge(engine, advance, notes) if "judge" in parts else None
    if budget is None and bits is None and (judge is None or (judge.threshold is None and len(parts) > 1)):
        raise InvalidSetting(" ".join(notes))
    return Calibration(engine.name, budget, bits, tuple(notes), time.perf_counter() - started, judge)


def _measure_judge(engine: Engine, advance: Advance, notes: list[str]) -> JudgeSkill | None:
    advance("questions that are the same")
    skill = find_skill(engine, read_pairs())
    if skill is None:
        notes.append(f"The pairs of questions do not fit the {engine.context_tokens} tokens of {engine.name}.")
    elif skill.threshold is None:
        notes.append(
            f"{engine.name} cannot tell questions apart (precision {skill.precision:.2f}, recall {skill.recall:.2f} of "
            f"{count_of(skill.pairs, 'pair')}): under answers=direct it is not asked."
        )
    return skill


def _measure_budget(
    engine: Engine, max_kl: float, data: Path | None, prompts: int, advance: Advance, notes: list[str]
) -> FoundBudget | None:
    if engine.capabilities.recompute == "none" or not engine.capabilities.spans:
        notes.append(f"{engine.name} cannot reuse passages of other prompts: there is no budget to find.")
        return None
    questions = read_questions(data)
    if not questions:
        notes.append(f"{data} has no .jsonl files with question and contexts: the budget is found with the sample.")
        questions = read_questions(None)
    budget = find_budget(engine, questions, max_kl, prompts, advance)
    if budget is None:
        notes.append(f"The questions do not fit the {engine.context_tokens} tokens of {engine.name}: no budget.")
        return None
    remember_budgets(engine, {budget.recompute_policy: budget.budget, OURS: budget.budget})
    _note_parts(engine, "passages")
    notes += _about_budget(engine, budget)
    return budget


def _measure_bits(
    engine: Engine, loras: Sequence[Lora], data: Path | None, advance: Advance, notes: list[str]
) -> FoundBits | None:
    if not codes_kv(engine):
        why = engine.capabilities.opaque or "this engine quantizes its KV itself"
        notes.append(f"The bits of {engine.name} stay as they are: {why}.")
        return None
    texts = read_texts(data)
    if not texts:
        notes.append(f"{data} has no texts: bits are chosen with the sample.")
        texts = read_texts(None)
    bits = find_bits(engine, texts, loras, advance)
    remember_coder(engine, bits.coder)
    _note_parts(engine, "quantized KV", *(["deltas of adapters"] if loras else []))
    notes += [
        f"Even {one.bits:.1f} bits a number change answers more than they should: prefer reuse=exact."
        for one in (bits.kept("whole"), bits.kept("difference"))
        if one is not None and not one.near
    ]
    if not loras:
        notes.append("Differences of adapters stay as they were: --adapter names some to measure with.")
    return bits


def missing_parts(session: Session) -> list[Part]:
    """What the level of reuse of a session needs, its engine can do, and nobody measured."""
    engine, settings = session.engine, session.settings
    missing: list[Part] = []
    recomputes = engine.capabilities.recompute != "none" and engine.capabilities.spans
    if settings.reuse == "approximate" and settings.recompute_budget is None and recomputes:
        missing += ["budget"] if calibration_of(engine) is None else []
    if settings.reuse == "quantized" and settings.codec == "auto" and codes_kv(engine):
        wanted = [False, True] if any(session.adapters) else [False]
        missing += [] if all(bits_calibrated(engine, settings, deltas=deltas) for deltas in wanted) else ["bits"]
    if settings.answers == "direct" and recall_skill(engine) is None:
        missing.append("judge")
    return missing


def calibrated_parts(model: str) -> list[str]:
    """What was calibrated on this machine for a model of that name: passages, quantized KV, deltas of adapters."""
    found = _parts().recall(model)
    return [str(part) for part in found] if isinstance(found, list) else []


def _note_parts(engine: Engine, *parts: str) -> None:
    _parts().keep(engine.name, sorted({*calibrated_parts(engine.name), *parts}))


def _parts() -> JsonMemo:
    return JsonMemo(home_folder() / "calibrated.json", _MODELS)


def _about_budget(engine: Engine, found: FoundBudget) -> list[str]:
    notes = []
    if engine.capabilities.recompute == "leading":
        notes.append("This engine cannot recompute chosen tokens: the first ones of each passage are.")
    if not found.reached:
        best, most = min(one.kl for one in found.tried), found.tried[-1].budget
        notes.append(
            f"Up to a budget of {most:g} the KL is {best:.4f} at best, and {found.max_kl:g} was wanted: passages are "
            "computed whole, so reuse=approximate saves nothing with this model. A larger --kl allows more."
        )
    return notes
