"""A model from a GGUF file and a context to compute in, with the log and the errors of the library."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rekindle.engine.base import choose_context
from rekindle.engine.llamacpp.c_api import AbortCallback, LogCallback, ProgressCallback, llama
from rekindle.engine.llamacpp.options import KV_BITS, KV_TYPES, MAX_SEQUENCES, PLAIN_KV_TYPES, LlamaOptions
from rekindle.errors import BrokenModel, Closed, InvalidSetting, OutOfMemory, UnsupportedModel
from rekindle.machine import usable_cores

log = logging.getLogger("rekindle.llamacpp")

_ROUND_TOKENS = 256  # llama.cpp computes over cells in steps of this
_USUAL_TOKENS = 8192  # others leave memory for a context of these, not for a longer one
_SPARE_TOKENS = 4096  # of the buffer, beside one full context
_FLASH = {"auto": -1, "off": 0, "on": 1}
_ERROR, _CONTINUED = 4, 5  # levels of ggml's log


class LoadedModel:
    """The weights and the vocabulary."""

    def __init__(self, path: Path, options: LlamaOptions, progress: Callable[[float], None] | None = None) -> None:
        """Raises `BrokenModel`, `UnsupportedModel` or `OutOfMemory`."""
        said = capture_log()
        said.clear()
        self._unused = threading.Condition()  # notified when nobody uses it any more
        self._users = 0
        parameters = llama.llama_model_default_params()
        self.on_gpu = options.device != "cpu" and options.gpu_layers != 0 and llama.llama_supports_gpu_offload()
        if options.wants_gpu and not self.on_gpu:
            raise InvalidSetting(
                f"device={options.device!r}: this build of llama.cpp has no GPU. Use device='cpu', or name one that "
                "has with llama_library."
            )
        parameters.n_gpu_layers = (-1 if options.gpu_layers is None else options.gpu_layers) if self.on_gpu else 0
        listener = _ProgressListener(progress)
        parameters.progress_callback = listener.callback
        self._pointer = llama.llama_model_load_from_file(os.fsencode(path), parameters)
        if not self._pointer:
            raise listener.error or _load_error(path, said)
        self.vocab = llama.llama_model_get_vocab(self._pointer)

    @property
    def pointer(self) -> Any:
        """For the library's functions."""
        return self._pointer

    @property
    def has_decoder(self) -> bool:
        """Whether it generates text token by token."""
        other = llama.llama_model_has_encoder(self._pointer) or llama.llama_model_is_diffusion(self._pointer)
        return bool(llama.llama_model_has_decoder(self._pointer)) and not other

    @property
    def trained_tokens(self) -> int:
        """The longest context it was trained for."""
        return int(llama.llama_model_n_ctx_train(self._pointer))

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return int(llama.llama_model_n_params(self._pointer))

    @property
    def attention(self) -> int:
        """About the size of a token's queries in all layers."""
        return int(llama.llama_model_n_layer(self._pointer) * llama.llama_model_n_embd(self._pointer))

    @property
    def window(self) -> int:
        """Tokens that its layers with a sliding window see; 0 if it has none."""
        return int(llama.llama_model_n_swa(self._pointer))

    @property
    def original_tokens(self) -> int | None:
        """The length past which its rotary embedding has other frequencies, if any."""
        original = self.metadata(f"{self.architecture}.rope.scaling.original_context_length")
        return None if original is None else int(original)

    def metadata(self, key: str) -> str | None:
        """A metadata value of the file, as text."""
        needed = llama.llama_model_meta_val_str(self._pointer, key.encode(), None, 0)
        if needed < 0:
            return None
        buffer = ctypes.create_string_buffer(needed + 1)
        llama.llama_model_meta_val_str(self._pointer, key.encode(), buffer, needed + 1)
        return buffer.value.decode("utf-8", errors="replace")

    def kv_token_bytes(self, options: LlamaOptions) -> int:
        """About the bytes that a context takes for each token: its KV, and without flash attention the scores of the
        tokens that are computed at once, which are allocated for the whole context."""
        heads = max(1, llama.llama_model_n_head(self._pointer))
        dim = int(self.metadata(f"{self.architecture}.attention.key_length") or 0)
        dim = dim or llama.llama_model_n_embd(self._pointer) // heads
        layers, kv_heads = llama.llama_model_n_layer(self._pointer), llama.llama_model_n_head_kv(self._pointer)
        kv = int(2 * layers * max(1, kv_heads) * dim * KV_BITS[options.kv_type] / 8)
        scores = 4 * heads * options.micro_batch_tokens
        return kv + (scores if _choose_flash(options, on_gpu=self.on_gpu) == "off" else 0)

    def usual_context_bytes(self, options: LlamaOptions) -> int:
        """What other models leave memory for: the wanted context, else one of the usual length."""
        tokens = options.context_tokens or min(self.trained_tokens, _USUAL_TOKENS)
        return (tokens + min(tokens, _SPARE_TOKENS)) * self.kv_token_bytes(options)

    @property
    def architecture(self) -> str | None:
        """The family, as llama.cpp names it."""
        return self.metadata("general.architecture")

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Keep it loaded inside the block, for any number of threads. Raises `Closed` if it was closed."""
        with self._unused:
            if self._pointer is None:
                raise Closed("The engine was closed. Load the model again.")
            self._users += 1
        try:
            yield
        finally:
            with self._unused:
                self._users -= 1
                self._unused.notify_all()

    def close(self) -> None:
        """Free it, once nobody uses it any more. Idempotent."""
        with self._unused:
            pointer, self._pointer = self._pointer, None
            self._unused.wait_for(lambda: not self._users)
            if pointer:
                llama.llama_model_free(pointer)


class _ProgressListener:
    """Reports the progress of a load. An exception of the callback ends the load and is raised by it."""

    def __init__(self, progress: Callable[[float], None] | None) -> None:
        self.error: BaseException | None = None
        self._progress = progress
        self.callback = ProgressCallback(self._report)

    def _report(self, share: float, _: Any) -> bool:
        try:
            if self._progress is not None:
                self._progress(share)
        except BaseException as error:  # noqa: BLE001  (raised again when the library has returned)
            self.error = error
        return self.error is None


class LoadedContext:
    """A context with one KV buffer of `cells` tokens for all sequences. Not thread-safe."""

    def __init__(self, model: LoadedModel, options: LlamaOptions, free_bytes: int = 0) -> None:
        """A context whose length nobody chose takes a part of the free memory, and is halved until it fits.

        Raises `OutOfMemory` or `InvalidSetting`.
        """
        token_bytes = model.kv_token_bytes(options)
        self.tokens = choose_context(options.context_tokens, model.trained_tokens, token_bytes, free_bytes)
        while not (pointer := self._make(model, options)):
            if options.context_tokens is not None or self.tokens <= _ROUND_TOKENS:
                raise OutOfMemory(
                    f"llama.cpp makes no context of {self.cells:,} tokens ({_tell(capture_log())}). Use a shorter "
                    "context, kv_type='q8_0', or a smaller kv_tokens."
                )
            self.tokens //= 2
        self._pointer = pointer
        self.memory_bytes = self.cells * token_bytes
        self.memory = llama.llama_get_memory(self._pointer)
        self._abort = ctypes.create_string_buffer(2)  # a C string: empty or not
        llama.llama_set_abort_callback(self._pointer, _is_not_empty(), ctypes.addressof(self._abort))

    def _make(self, model: LoadedModel, options: LlamaOptions) -> Any:
        capture_log().clear()
        wanted = options.kv_tokens or self.tokens + min(self.tokens, _SPARE_TOKENS)
        self.cells = _rounded(max(wanted, self.tokens))
        held = self.cells + _ROUND_TOKENS  # some spare: rotating moved keys computes a token
        original = model.original_tokens
        if original is not None and self.tokens <= original:
            held = min(held, original)
            self.cells = min(self.cells, max(self.tokens, held - 1))
        # Longrope has other frequencies past its original length; llama.cpp chooses them by the size of the buffer.
        self.regime = "plain" if original is None else "long" if held > original else "short"
        self.window = model.window if options.swa_full else 0
        # With a window, what a computation added is protected after it: no more than llama.cpp computes at once.
        longest = min(options.batch_tokens, options.micro_batch_tokens) if self.window else options.batch_tokens
        self.batch_tokens = min(longest, self.cells)
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = held
        parameters.n_seq_max = (options.sequences + 1) * (2 if self.window else 1)  # one spare; see `KvBuffer`
        if parameters.n_seq_max > MAX_SEQUENCES + 1:
            raise InvalidSetting(
                f"sequences={options.sequences} is more than llama.cpp takes of a model with a sliding window. Use up "
                f"to {MAX_SEQUENCES // 2}, or swa_full=False."
            )
        parameters.n_batch = max(self.batch_tokens, parameters.n_seq_max)  # at least a token of each
        parameters.n_ubatch = min(options.micro_batch_tokens, parameters.n_batch)
        parameters.kv_unified = True
        parameters.swa_full = options.swa_full
        threads = options.threads or usable_cores()
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.type_k = parameters.type_v = KV_TYPES[options.kv_type]
        self.flash_attention = _choose_flash(options, on_gpu=model.on_gpu)
        parameters.flash_attn_type = _FLASH[self.flash_attention]
        parameters.no_perf = True
        self.threads = threads
        return llama.llama_init_from_model(model.pointer, parameters)

    @property
    def pointer(self) -> Any:
        """For the library's functions."""
        return self._pointer

    def abort(self, wanted: bool) -> None:
        """Abort the running computation and all later ones, until called with False. Thread-safe."""
        self._abort[0] = b"\x01" if wanted else b"\x00"

    def close(self) -> None:
        """Free it. Idempotent."""
        pointer, self._pointer = self._pointer, None
        if pointer:
            llama.llama_free(pointer)


def version() -> str:
    """The library, with its version."""
    llama.load()
    return llama.name


def build() -> str:
    """Instruction sets and GPUs that the library was built for."""
    capture_log()
    text: bytes = llama.llama_print_system_info()
    return " ".join(text.decode("utf-8", errors="replace").replace(" = 1", "").split())


@cache
def capture_log() -> deque[str]:
    """Send the library's log to Python's; returns its last errors, for messages."""
    said: deque[str] = deque(maxlen=8)

    def listen(level: int, text: bytes, _: Any) -> None:
        line = text.decode("utf-8", errors="replace").strip()
        if not line or level == _CONTINUED:
            return
        if level == _ERROR:
            said.append(line)
        log.debug("%s", line)

    listener = LogCallback(listen)
    llama.llama_log_set(listener, ctypes.c_void_p(0))
    _FOREVER.append(listener)
    return said


_FOREVER: list[Any] = []  # callbacks must live as long as the library


@cache
def _is_not_empty() -> Any:
    """A C function that tells whether a string is empty: called between operations, without the GIL."""
    library = ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)
    return ctypes.cast(library.strlen, AbortCallback)


def _choose_flash(options: LlamaOptions, *, on_gpu: bool) -> Literal["auto", "on", "off"]:
    """On a CPU off if possible: a few tokens after many take up to four times longer with it, replies twice."""
    if options.flash_attention != "auto":
        return options.flash_attention
    if options.kv_type not in PLAIN_KV_TYPES:
        return "on"
    return "auto" if on_gpu else "off"


def _rounded(tokens: int) -> int:
    return -(-tokens // _ROUND_TOKENS) * _ROUND_TOKENS


def _load_error(path: Path, said: deque[str]) -> Exception:
    words = _tell(said)
    if "unknown model architecture" in words:
        return UnsupportedModel(
            f"{path} is of a kind this llama.cpp does not know ({words}; {version()}). A later rekindle brings a later "
            "one."
        )
    if "alloc" in words or "memory" in words:
        return OutOfMemory(f"{path} does not fit into memory ({words}). Use a smaller model or fewer gpu_layers.")
    return BrokenModel(
        f"llama.cpp cannot load {path} ({words}). Get the file again; if it is newer than {version()}, update rekindle."
    )


def _tell(said: deque[str]) -> str:
    return "; ".join(line.partition(": ")[2] or line for line in list(said)[:2]) or "it does not say why"
