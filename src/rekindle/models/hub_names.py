"""Names of hub repositories and their GGUF files. A repository has one file, or one split set, for each quantization.

ORG/NAME              the only one, else Q4_K_M, else Q4_0
ORG/NAME:Q5_K_M       that quantization, in any case
ORG/NAME/FILE.gguf    that file

Files are named by their paths in the repository. The first part of a split model stands for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from rekindle.errors import NotAModel
from rekindle.models.files import part_names

HUB_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<quant>[\w.-]+)|/(?P<file>[\w./ +-]+\.gguf))?",
    re.IGNORECASE,
)
_DEFAULTS = ("Q4_K_M", "Q4_0")
_QUANT = re.compile(
    r"(?<![a-z0-9])(?:UD-)?(?:[IT]?Q\d(?:_\w+)?|BF16|F16|F32|MXFP4(?:_\w+)?)(?![a-z0-9])", re.IGNORECASE | re.ASCII
)
_NO_MODEL = re.compile(r"mmproj|^imatrix|imatrix$", re.IGNORECASE)


def is_repository(text: str) -> bool:
    """Whether this is a repository's name, `ORG/NAME`, and nothing more."""
    named = HUB_NAME.fullmatch(text)
    return named is not None and named["repository"] == text


def model_names(names: Iterable[str]) -> list[str]:
    """The files that are models, sorted: no vision projectors, no importance matrices."""
    ours = (name for name in names if name.lower().endswith(".gguf"))
    return sorted({_first_part(name) for name in ours if not _NO_MODEL.search(PurePosixPath(_stem(name)).name)})


def choose_file(repository: str, names: Sequence[str], wanted: str | None) -> str | None:
    """The file that `wanted` (a quantization, a file name or None) means among `names`, which are `model_names`.

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
        words = ", ".join(spec_for(repository, name, names) for name in found)
        raise NotAModel(f"{asked} is not one model but {len(found)} GGUF files. Name one: {words}")
    return found[0] if found else None


def spec_for(repository: str, name: str, names: Sequence[str]) -> str:
    """What to type for a file of a repository with these `model_names`."""
    for quant in reversed(_QUANT.findall(_stem(name))):
        if _of_quant(names, quant) == [name]:
            return f"{repository}:{quant}"
    return f"{repository}/{name}"


def _of_quant(names: Iterable[str], quant: str) -> list[str]:
    # Q4_K is not Q4_K_M, and F16 is not BF16.
    whole = re.compile(rf"(?<![a-z0-9]){re.escape(quant)}(?!\w)", re.IGNORECASE | re.ASCII)
    return [name for name in names if whole.search(_stem(name))]


def _first_part(name: str) -> str:
    return part_names(name)[0]


def _stem(name: str) -> str:
    """The name without part number and suffix."""
    return re.sub(r"-00001-of-\d{5}$", "", _first_part(name)[: -len(".gguf")])
