"""llama.cpp without us: its own prompt cache in memory, saved slots, and the two caches of llama-cpp-python.

Those of llama-cpp-python take part if the engine runs on its library (`REKINDLE_LLAMA_LIBRARY`): a state of one version
is no state of another.

All with the same weights, threads, batch sizes and attention as ours. What is measured is the way from token ids to the
first token. The prefixes' KV comes from our engine, byte for byte: nobody has to compute it again to take part.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.base import folder_bytes, seconds_of
from benchmarks.prefix.floor import Floor, Run
from benchmarks.prefix.rivals import Rivals
from rekindle.engine.base import Engine
from rekindle.engine.llamacpp.c_api import Token, llama
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.engine.llamacpp.loaded_model import LoadedContext
from rekindle.engine.llamacpp.sequence import LlamaSequence
from rekindle.engine.llamacpp.state import Bytes

_CONTEXT_TOKENS = 2048
_POINTER = ctypes.POINTER(ctypes.c_uint8)
_TOKENS = ctypes.POINTER(Token)
_MORE = {  # functions that the engine does not call
    "llama_sampler_sample": (Token, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)),
    "llama_state_seq_save_file": (
        ctypes.c_size_t,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, _TOKENS, ctypes.c_size_t),
    ),
    "llama_state_seq_load_file": (
        ctypes.c_size_t,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, _TOKENS, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)),
    ),
}


@cache
def _more() -> Any:
    library = ctypes.CDLL(str(llama.path))
    for name, (result, arguments) in _MORE.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def _llama_cpp_python() -> Any:
    """llama-cpp-python, if its library is the one in use, else None."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or llama.path is None or not llama.path.is_relative_to(Path(str(found.origin)).parent):
        return None
    return importlib.import_module("llama_cpp")


class Alone:
    """llama.cpp by hand: one context, one sequence."""

    def __init__(self, engine: LlamaCppEngine) -> None:
        options = replace(engine.options, context_tokens=_CONTEXT_TOKENS, kv_tokens=_CONTEXT_TOKENS, sequences=1)
        self._context = LoadedContext(engine.loaded_model, options)
        self._sampler = llama.llama_sampler_init_greedy()

    def take(self, state: Bytes) -> None:
        """Become what a state says."""
        self.clear(0)
        llama.llama_state_seq_set_data(self._context.pointer, state.ctypes.data_as(_POINTER), len(state), 0)

    def clear(self, start: int) -> None:
        """Forget everything from a position on."""
        llama.llama_memory_seq_rm(self._context.memory, 0, start, -1)

    def compute(self, tokens: list[int]) -> int:
        """The token that follows."""
        ids = (Token * len(tokens))(*tokens)
        for start in range(0, len(tokens), self._context.batch_tokens):
            count = min(self._context.batch_tokens, len(tokens) - start)
            pointer = ctypes.cast(ctypes.addressof(ids) + 4 * start, _TOKENS)
            if llama.llama_decode(self._context.pointer, llama.llama_batch_get_one(pointer, count)):
                raise RuntimeError("llama.cpp alone does not compute")
        return int(_more().llama_sampler_sample(self._sampler, self._context.pointer, -1))

    def save(self, path: Path, tokens: list[int]) -> None:
        """Save the slot to a file."""
        ids = (Token * len(tokens))(*tokens)
        _more().llama_state_seq_save_file(self._context.pointer, os.fsencode(path), 0, ids, len(tokens))

    def load(self, path: Path) -> None:
        """Restore the slot from a file."""
        ids, count = (Token * _CONTEXT_TOKENS)(), ctypes.c_size_t(0)
        read = _more().llama_state_seq_load_file(
            self._context.pointer, os.fsencode(path), 0, ids, _CONTEXT_TOKENS, ctypes.byref(count)
        )
        if not read:
            raise RuntimeError(f"llama.cpp does not restore {path}")

    def close(self) -> None:
        """Free the context."""
        llama.llama_sampler_free(self._sampler)
        self._context.close()


class Bindings:
    """llama-cpp-python as its documentation shows it, with one of its caches."""

    def __init__(self, engine: LlamaCppEngine, cache: Any) -> None:
        options, path = engine.options, engine.files.gguf
        with _silent():
            self._llama = _llama_cpp_python().Llama(
                str(path),
                n_ctx=_CONTEXT_TOKENS,
                n_batch=options.batch_tokens,
                n_ubatch=options.micro_batch_tokens,
                n_threads=engine.threads,
                n_threads_batch=engine.threads,
                n_gpu_layers=-1 if engine.device == "gpu" else 0,
                flash_attn=engine.flash_attention == "on",
                verbose=False,
            )
        self._llama.set_cache(cache)

    def keep(self, prefix: list[int], state: Bytes) -> None:
        """Have a prefix in the cache, as after a request of it."""
        model = self._llama
        model.reset()
        self._clear()
        llama.llama_state_seq_set_data(model._ctx.ctx, state.ctypes.data_as(_POINTER), len(state), 0)
        model.input_ids[: len(prefix)] = prefix
        model.n_tokens = len(prefix)
        with _silent():
            model.cache[tuple(prefix)] = model.save_state()

    def _clear(self) -> None:
        llama.llama_memory_seq_rm(llama.llama_get_memory(self._llama._ctx.ctx), -1, -1, -1)

    def run(self, tokens: list[int]) -> float:
        """Seconds to the first token of a prompt, after other requests came between."""
        self._llama.reset()
        self._clear()
        with _silent():
            started = time.perf_counter()
            stream = self._llama.create_completion(tokens, max_tokens=2, temperature=0.0, stream=True)
            next(iter(stream))
            seconds = time.perf_counter() - started
            for _ in stream:  # to its end: only then it keeps what it took out of its cache
                pass
        return seconds

    def close(self) -> None:
        """Free the model."""
        self._llama.close()


class LlamaRivals(Rivals):
    """llama.cpp alone, and llama-cpp-python with its caches."""

    titles: ClassVar = {
        "llamacpp_cold": "llama.cpp alone, cold",
        "llamacpp_memory": "llama.cpp alone, in memory",
        "ram_cache": "llama-cpp-python's RAM cache",
        "slot_restore": "slot restored by hand, new process",
        "disk_cache": "llama-cpp-python's disk cache, new process",
    }

    def __init__(self, engine: Engine, folder: Path) -> None:
        assert isinstance(engine, LlamaCppEngine)
        self._folder = folder
        self._cold, self._warm = Alone(engine), Alone(engine)
        bindings = _llama_cpp_python()
        self._ram = bindings and Bindings(engine, bindings.LlamaRAMCache())
        self._disk = _disk_cache(engine, folder)
        self._slots: dict[int, int] = {}  # tokens of each saved slot, by the number of its prefix

    def prepare(self, number: int, prefix: list[int], floor: Floor) -> dict[str, Run]:
        """All begin with the KV of the floor's sequence."""
        sequence = floor.sequence
        assert isinstance(sequence, LlamaSequence) and sequence.number is not None
        state = sequence.cells.whole_state_of(sequence.number)
        self._warm.take(state)
        self._warm.save(_slot(self._folder, number), prefix)
        self._slots[number] = len(prefix)
        for bindings in filter(None, (self._ram, self._disk)):
            bindings.keep(prefix, state)

        def in_memory(ending: list[int]) -> float:
            self._warm.clear(len(prefix))
            return seconds_of(lambda: self._warm.compute(ending))

        ram = {"ram_cache": lambda ending: self._ram.run(prefix + ending)} if self._ram else {}
        return {"llamacpp_memory": in_memory, **ram}

    def cold(self) -> dict[str, Run]:
        """llama.cpp alone, from nothing."""

        def run(tokens: list[int]) -> float:
            self._cold.clear(0)
            return seconds_of(lambda: self._cold.compute(tokens))

        return {"llamacpp_cold": run}

    def reply(self, tokens: list[int], count: int) -> list[int] | None:
        """What llama.cpp alone answers: what it last computed were these tokens."""
        self._cold.clear(0)
        found = [self._cold.compute(tokens)]
        while len(found) < count:
            found.append(self._cold.compute(found[-1:]))
        return found

    def restart(self) -> dict[str, Any]:
        """Where the slots and the disk cache are."""
        return {"folder": str(self._folder), "prefixes": self._slots}

    def sizes(self) -> dict[str, float]:
        """Of the slots, and of the disk cache."""
        tokens = sum(self._slots.values())
        slots = sum(_slot(self._folder, number).stat().st_size for number in self._slots)
        sizes = {"slot_bytes_per_token": slots / tokens}
        if self._disk:
            sizes["disk_cache_bytes_per_token"] = folder_bytes(self._folder / "disk-cache") / tokens
        return sizes

    def close(self) -> None:
        """Free contexts and models."""
        for rival in filter(None, (self._cold, self._warm, self._ram, self._disk)):
            rival.close()


class Restarted:
    """The rivals that survive their process."""

    def __init__(self, engine: Engine, task: dict[str, Any]) -> None:
        assert isinstance(engine, LlamaCppEngine)
        self._folder = Path(task["folder"])
        self._alone = Alone(engine)
        self._disk = _disk_cache(engine, self._folder)
        self._prefixes = {int(number): tokens for number, tokens in task["prefixes"].items()}

    def prepare(self, number: int) -> dict[str, Run]:
        """For prompts of one prefix, which come whole: these find, or are given, how much of them is stored."""
        known, path = self._prefixes[number], _slot(self._folder, number)

        def slot(tokens: list[int]) -> float:
            self._alone.clear(0)
            started = time.perf_counter()
            self._alone.load(path)
            self._alone.compute(tokens[known:])
            return time.perf_counter() - started

        return {"slot_restore": slot, **({"disk_cache": self._disk.run} if self._disk else {})}


def _disk_cache(engine: LlamaCppEngine, folder: Path) -> Bindings | None:
    bindings = _llama_cpp_python()
    return bindings and Bindings(engine, bindings.LlamaDiskCache(str(folder / "disk-cache")))


def _slot(folder: Path, number: int) -> Path:
    return folder / f"slot-{number}.bin"


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """The bindings print what they do."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
