"""The engines that the laws are held against, and what may be expected of each. What is not installed is left out.

    fake              a decoder in numpy            reuse to the token     equal to the last bit, however it is cut
    hf                a tiny llama in transformers  reuse to the token     equal up to rounding
    llamacpp          a tiny llama in llama.cpp     reuse to the token     equal up to rounding to 16 bits
    llamacpp-f32      with KV of 32 bits            reuse to the token     equal up to rounding
    llamacpp-q8       with KV of 8 bits             reuse to the token     equal up to rounding to 8 bits
    llamacpp-flash    with flash attention          reuse to the token     equal up to rounding sums to 16 bits
    llamacpp-sliding  with layers that see a window reuse to the token     equal up to rounding
    llamacpp-hybrid   with layers without attention reuse by checkpoint    equal up to rounding
    llamacpp-opaque   its KV cannot be taken apart  reuse by checkpoint    equal up to rounding to 16 bits
    onnx              a tiny llama in ONNX Runtime  reuse to the token     equal up to rounding
    onnx-f16          with KV of 16 bits            reuse to the token     equal up to rounding to 16 bits
    onnx-packed       with attention that copies KV reuse to the token     equal up to rounding

This module, and those that import it, need no torch: each engine is imported when it is made.
"""

from __future__ import annotations

import atexit
import importlib.util
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.engine.base import Engine
from rekindle.engine.fake import FakeEngine

STOP = 256  # ends a message, with every engine here


@dataclass(frozen=True)
class Kind:
    """An engine and what it promises.

    make        a new one, to be closed after use; `seed` makes another model, `context_tokens` another context; with
                llama.cpp, `dim` makes larger heads, and all its options are taken
    packages    what must be installed for it
    tolerance   how far its logits may be from those of the whole prompt in one step, as a share of the largest
    whole       only whole states are reused, where they were kept
    """

    make: Callable[..., Engine]
    packages: tuple[str, ...] = ()
    tolerance: float = 0.0
    whole: bool = False


def _fake(seed: int = 0, context_tokens: int = 4096) -> Engine:
    return FakeEngine(seed=seed, context_tokens=context_tokens)


def _hf(seed: int = 0, context_tokens: int = 512) -> Engine:
    from tests.tiny import tiny_engine

    return tiny_engine("llama", seed=seed, max_position_embeddings=context_tokens)


def _llamacpp(**options: Any) -> Callable[..., Engine]:
    def make(seed: int = 0, context_tokens: int = 512, dim: int = 32, **more: Any) -> Engine:
        from rekindle.engine.llamacpp.engine import LlamaCppEngine
        from rekindle.engine.llamacpp.options import LlamaOptions
        from tests.tiny_gguf import files_of

        files = files_of(gguf_file(seed, context_tokens, dim))
        return LlamaCppEngine(files, LlamaOptions(device="cpu", threads=1, **{**options, **more}))

    return make


def _other(architecture: str) -> Callable[..., Engine]:
    def make(seed: int = 0, context_tokens: int = 512, **options: Any) -> Engine:
        from rekindle.engine.llamacpp.engine import LlamaCppEngine
        from rekindle.engine.llamacpp.options import LlamaOptions
        from tests.tiny_gguf import files_of
        from tests.tiny_hybrids import write_gemma2, write_lfm2

        write = {"gemma2": write_gemma2, "lfm2": write_lfm2}[architecture]
        path = _folder() / f"{architecture}-{seed}-{context_tokens}.gguf"
        files = files_of(path if path.exists() else write(path, seed=seed, context=context_tokens))
        return LlamaCppEngine(files, LlamaOptions(device="cpu", threads=1, **{"kv_type": "f32", **options}))

    return make


def _onnx(**shape: str) -> Callable[..., Engine]:
    def make(seed: int = 0, context_tokens: int = 512, **options: Any) -> Engine:
        from rekindle.engine.onnx.onnx_engine import OnnxEngine
        from rekindle.engine.onnx.onnx_options import OnnxOptions
        from rekindle.models.files import ModelFiles

        folder = onnx_folder(seed, context_tokens, **shape)
        return OnnxEngine(ModelFiles("tiny", folder, onnx=folder / "model.onnx"), OnnxOptions(threads=1, **options))

    return make


@cache
def onnx_folder(seed: int = 0, context_tokens: int = 512, **shape: str) -> Path:
    """The tiny llama as a graph, written once."""
    from tests.tiny_onnx import write_onnx

    name = "-".join(("onnx", str(seed), str(context_tokens), *shape.values()))
    return write_onnx(_folder() / name, seed=seed, context=context_tokens, **shape)


def _opaque(**changes: Any) -> Engine:
    from rekindle.engine.llamacpp.state import UnknownLayout

    def refuse(*_: object) -> None:
        raise UnknownLayout("as of a llama.cpp that nobody knows yet")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rekindle.engine.llamacpp.engine.read_layout", refuse)
        return _llamacpp()(**changes)


@cache
def gguf_file(seed: int = 0, context_tokens: int = 512, dim: int = 32) -> Path:
    """The tiny llama as a file, written once."""
    from tests.tiny_gguf import write_llama

    path = _folder() / f"tiny-{seed}-{context_tokens}-{dim}.gguf"
    return write_llama(path, seed=seed, context=context_tokens, dim=dim)


@cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="rekindle-parity-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


_HF, _LLAMACPP, _ONNX = ("torch", "transformers"), ("xllamacpp", "jinja2", "gguf"), ("onnxruntime", "jinja2", "onnx")
# ARM adds products of half-precision numbers in half precision: how many there are in a step matters more.
_F16 = 2e-3 if platform.machine() in ("x86_64", "AMD64") else 2e-2

KINDS = {
    "fake": Kind(_fake),
    "hf": Kind(_hf, _HF, 2e-5),
    "llamacpp": Kind(_llamacpp(), _LLAMACPP, _F16),
    "llamacpp-f32": Kind(_llamacpp(kv_type="f32"), _LLAMACPP, 2e-5),
    "llamacpp-q8": Kind(_llamacpp(kv_type="q8_0"), _LLAMACPP, 3e-2),
    "llamacpp-flash": Kind(_llamacpp(flash_attention="on"), _LLAMACPP, 3e-2),
    "llamacpp-sliding": Kind(_other("gemma2"), _LLAMACPP, 1e-4),
    "llamacpp-hybrid": Kind(_other("lfm2"), _LLAMACPP, 1e-4, whole=True),
    "llamacpp-opaque": Kind(_opaque, _LLAMACPP, _F16, whole=True),
    "onnx": Kind(_onnx(), _ONNX, 2e-5),
    "onnx-f16": Kind(_onnx(dtype="float16"), _ONNX, 3e-2),
    "onnx-packed": Kind(_onnx(attention="packed"), _ONNX, 2e-5),
}
PRINCIPAL = ("fake", "hf", "llamacpp", "llamacpp-hybrid", "llamacpp-opaque", "onnx")
WITH_SPANS = tuple(name for name in PRINCIPAL if not KINDS[name].whole)
LLAMAS = tuple(name for name in KINDS if name.startswith("llamacpp"))


def make(kind: str, **changes: Any) -> Engine:
    """A new engine of a kind. Close it."""
    return KINDS[kind].make(**changes)


def is_installed(kind: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in KINDS[kind].packages)


def params(*kinds: str) -> list[Any]:
    """Parameters for pytest: those of the kinds that are installed."""
    return [
        pytest.param(kind, marks=[pytest.mark.llamacpp] if kind in LLAMAS else [])
        for kind in kinds
        if is_installed(kind)
    ]


def each(*kinds: str) -> pytest.MarkDecorator:
    """A law for each of these kinds."""
    return pytest.mark.parametrize("kind", params(*kinds))


def needs(kind: str) -> Any:
    """Marks for a law about one engine only."""
    skip = pytest.mark.skipif(not is_installed(kind), reason=f"{', '.join(KINDS[kind].packages)} must be installed")
    marks = [skip, pytest.mark.llamacpp] if kind in LLAMAS else [skip]

    def mark(test: Any) -> Any:
        for one in marks:
            test = one(test)
        return test

    return mark


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens two prompts share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def reused(kind: str, tokens: Sequence[int], warmed: Sequence[int]) -> int:
    """How many tokens of a prompt are reused, where all that is known is the prompt `warmed`.

    Where only whole states are: up to the end of a message, or all of it. The last token is always computed.
    """
    shared = common(tokens, warmed)
    if not KINDS[kind].whole:
        return min(shared, len(tokens) - 1)
    ends = [*(place + 1 for place, token in enumerate(warmed) if token == STOP), len(warmed)]
    return max([end for end in ends if end <= shared and end < len(tokens)], default=0)


def assert_same(kind: str, got: np.ndarray, expected: np.ndarray) -> None:
    """Logits or KV are as promised: equal, or within rounding."""
    tolerance = KINDS[kind].tolerance
    if not tolerance:
        np.testing.assert_array_equal(got, expected)
        return
    got, expected = got.astype(np.float32), expected.astype(np.float32)
    assert np.abs(got - expected).max(initial=0) <= tolerance * max(1.0, np.abs(expected).max(initial=0))
