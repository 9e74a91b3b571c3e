"""Which GGUF file of a repository is meant. A repository has one file, or one set of files, for each quantization.

ORG/NAME              the only one, else Q4_K_M, else Q4_0
ORG/NAME:Q5_K_M       that quantization, in whatever case
ORG/NAME/FILE.gguf    that file

Files are known by their names below the repository's folder. The first part of a split model stands for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from rekindle.core.model import part_names
from rekindle.errors import NotAModel

_DEFAULTS = ("Q4_K_M", "Q4_0")
_QUANT = re.compile(
    r"(?<![a-z0-9])(?:UD-)?(?:[IT]?Q\d(?:_\w+)?|BF16|F16|F32|MXFP4(?:_\w+)?)(?![a-z0-9])", re.IGNORECASE | re.ASCII
)
_NO_MODEL = re.compile(r"mmproj|^imatrix|imatrix$", re.IGNORECASE)


def model_names(names: Iterable[str]) -> list[str]:
    """Those files that stand for a model, sorted: no projector of a vision model, no importance matrix."""
    ours = (name for name in names if name.lower().endswith(".gguf"))
    return sorted({_first_part(name) for name in ours if not _NO_MODEL.search(PurePosixPath(_stem(name)).name)})


def choose(repository: str, names: Sequence[str], wanted: str | None) -> str | None:
    """The file meant by `wanted` (a quantization, a file's name, or nothing) among `names`, which are `model_names`.

    None if there is no such file; raises `NotAModel` if there are several.
    """
    if wanted is None:
        preferred = () if len(names) == 1 else _DEFAULTS
        found = next((some for quant in preferred if (some := _of_quant(names, quant))), list(names))
    elif wanted.lower().endswith(".gguf"):
        first = _first_part(wanted)
        found = [name for name in names if name == first] or [name for name in names if name.endswith(f"/{first}")]
    else:
        found = _of_quant(names, wanted)
    if len(found) > 1:
        asked = repository if wanted is None else f"{repository}:{wanted}"
        words = ", ".join(words_for(repository, name, names) for name in found)
        raise NotAModel(f"{asked} is not one model but {len(found)} GGUF files. Name one: {words}")
    return found[0] if found else None


def words_for(repository: str, name: str, names: Sequence[str]) -> str:
    """What to type for a file of the repository that has these `model_names`."""
    for quant in reversed(_QUANT.findall(_stem(name))):
        if _of_quant(names, quant) == [name]:
            return f"{repository}:{quant}"
    return f"{repository}/{name}"


def _of_quant(names: Iterable[str], quant: str) -> list[str]:
    # Q4_K is not Q4_K_M and F16 is not BF16: what stands beside it makes it another one.
    whole = re.compile(rf"(?<![a-z0-9]){re.escape(quant)}(?!\w)", re.IGNORECASE | re.ASCII)
    return [name for name in names if whole.search(_stem(name))]


def _first_part(name: str) -> str:
    return part_names(name)[0]


def _stem(name: str) -> str:
    """The name without the number of the part and the ending."""
    return re.sub(r"-00001-of-\d{5}$", "", _first_part(name)[: -len(".gguf")])
