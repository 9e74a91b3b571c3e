"""The functions of llama.cpp that this engine calls, by ctypes: no compiler, and no other package's wrapper.

The library is the first of these that is there:

    the one that the setting llama_library names    your own build, for CUDA, Metal, Vulkan
    the wheel xllamacpp                             brought by rekindle-llm[llamacpp]
    the one inside llama-cpp-python

A process loads one. Its structs say nothing about their version, so two things are checked before anything is computed:
that ggml is of a version that is known here, and that the library's own defaults are found where the structs have them.
Fields that a later version has at the end keep those defaults: structs are passed with room behind them.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

from rekindle.errors import EngineMissing, InvalidSetting

KNOWN_VERSIONS = ("0.25", "0.26")  # of ggml
TESTED = "xllamacpp 2026.10.11549 and llama-cpp-python 0.3.36"
DEFAULT_SEED = 0xFFFFFFFF  # means a random one
PARTIAL_ONLY = 1  # of a state: windows and recurrent parts, not the KV of other attention layers
ATTR_UNKNOWN, ATTR_CONTROL, ATTR_USER_DEFINED = 1 << 0, 1 << 3, 1 << 4
ATTR_LSTRIP, ATTR_RSTRIP = 1 << 7, 1 << 8  # includes the whitespace before it, after it

Token = c_int32
ProgressCallback = CFUNCTYPE(c_bool, c_float, c_void_p)
LogCallback = CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
_SILENT = LogCallback(lambda *_: None)
AbortCallback = CFUNCTYPE(c_bool, c_void_p)
_SPINS = "GOMP_SPINCOUNT"
_Pointer = c_void_p  # of a model, context, vocabulary, memory, sampler, adapter
_Room = c_uint8 * 256  # behind a struct: for fields that a later version has at its end


def _fields(*runs: tuple[Any, str]) -> list[tuple[str, Any]]:
    """The fields of a struct in order, as runs of one type."""
    return [(name, kind) for kind, names in runs for name in names.split()]


class ModelParams(Structure):
    _fields_ = _fields(
        (c_void_p, "devices tensor_buft_overrides"),
        (c_int32, "n_gpu_layers split_mode load_mode lazy_mode main_gpu"),
        (c_void_p, "tensor_split"),
        (ProgressCallback, "progress_callback"),
        (c_void_p, "progress_callback_user_data kv_overrides"),
        (c_bool, "vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp"),
        (_Room, "room"),
    )


_CONTEXT_FIELDS = _fields(
    (c_uint32, "n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_outputs_max_per_seq"),
    (c_int32, "n_threads n_threads_batch ctx_type rope_scaling_type pooling_type attention_type flash_attn_type"),
    (c_float, "rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow"),
    (c_uint32, "yarn_orig_ctx"),
    (c_float, "defrag_thold"),
    (c_void_p, "cb_eval cb_eval_user_data"),
    (c_int32, "type_k type_v"),
    (c_uint64, "reserved"),  # since 0.26
    (c_void_p, "abort_callback abort_callback_data"),
    (c_bool, "embeddings offload_kqv no_perf op_offload swa_full kv_unified"),
    (c_void_p, "samplers"),
    (c_size_t, "n_samplers"),
    (c_void_p, "ctx_other"),
    (_Room, "room"),
)


class NewContextParams(Structure):
    """Since ggml 0.26."""

    _fields_ = _CONTEXT_FIELDS


class OldContextParams(Structure):
    """Of ggml 0.25."""

    _fields_ = [field for field in _CONTEXT_FIELDS if field[0] != "reserved"]


class LlamaBatch(Structure):
    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(Token)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


class TokenData(Structure):
    _fields_ = [("id", Token), ("logit", c_float), ("p", c_float)]


class TokenDataArray(Structure):
    _fields_ = [("data", POINTER(TokenData)), ("size", c_size_t), ("selected", c_int64), ("sorted", c_bool)]


class SamplerChainParams(Structure):
    _fields_ = [("no_perf", c_bool)]


_Text, _Tokens, _Bytes = c_char_p, POINTER(Token), POINTER(c_uint8)
_OF_A_POINTER: dict[Any, str] = {  # by what they return
    None: "adapter_lora_free free model_free sampler_free",
    _Pointer: "get_memory model_get_vocab",
    c_bool: "memory_can_shift model_has_decoder model_has_encoder model_is_diffusion model_is_hybrid "
    "model_is_recurrent vocab_get_add_bos",
    c_int32: "model_n_ctx_train model_n_embd model_n_head model_n_head_kv model_n_layer model_n_swa vocab_n_tokens "
    "vocab_bos vocab_eos vocab_eot",
    c_uint64: "model_n_params",
}
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_commit": (c_char_p, ()),
    "ggml_version": (c_char_p, ()),
    "llama_adapter_lora_init": (_Pointer, (_Pointer, _Text)),
    "llama_batch_get_one": (LlamaBatch, (_Tokens, c_int32)),
    "llama_decode": (c_int32, (_Pointer, LlamaBatch)),
    "llama_detokenize": (c_int32, (_Pointer, _Tokens, c_int32, _Text, c_int32, c_bool, c_bool)),
    "llama_get_logits_ith": (POINTER(c_float), (_Pointer, c_int32)),
    "llama_log_set": (None, (LogCallback, c_void_p)),
    "llama_memory_seq_add": (None, (_Pointer, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_seq_cp": (None, (_Pointer, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_seq_pos_min": (c_int32, (_Pointer, c_int32)),
    "llama_memory_seq_rm": (c_bool, (_Pointer, c_int32, c_int32, c_int32)),
    "llama_model_default_params": (ModelParams, ()),
    "llama_model_load_from_file": (_Pointer, (_Text, ModelParams)),
    "llama_model_meta_val_str": (c_int32, (_Pointer, _Text, _Text, c_size_t)),
    "llama_print_system_info": (c_char_p, ()),
    "llama_sampler_accept": (None, (_Pointer, Token)),
    "llama_sampler_apply": (None, (_Pointer, POINTER(TokenDataArray))),
    "llama_sampler_chain_add": (None, (_Pointer, _Pointer)),
    "llama_sampler_chain_default_params": (SamplerChainParams, ()),
    "llama_sampler_chain_init": (_Pointer, (SamplerChainParams,)),
    "llama_sampler_init_dist": (_Pointer, (c_uint32,)),
    "llama_sampler_init_greedy": (_Pointer, ()),
    "llama_sampler_init_min_p": (_Pointer, (c_float, c_size_t)),
    "llama_sampler_init_penalties": (_Pointer, (c_int32, c_int32, c_float, c_float, c_float)),
    "llama_sampler_init_temp": (_Pointer, (c_float,)),
    "llama_sampler_init_top_k": (_Pointer, (c_int32,)),
    "llama_sampler_init_top_p": (_Pointer, (c_float, c_size_t)),
    "llama_set_abort_callback": (None, (_Pointer, AbortCallback, c_void_p)),
    "llama_set_adapters_lora": (c_int32, (_Pointer, POINTER(_Pointer), c_size_t, POINTER(c_float))),
    "llama_state_seq_get_data": (c_size_t, (_Pointer, _Bytes, c_size_t, c_int32)),
    "llama_state_seq_get_data_ext": (c_size_t, (_Pointer, _Bytes, c_size_t, c_int32, c_uint32)),
    "llama_state_seq_get_size": (c_size_t, (_Pointer, c_int32)),
    "llama_state_seq_get_size_ext": (c_size_t, (_Pointer, c_int32, c_uint32)),
    "llama_state_seq_set_data": (c_size_t, (_Pointer, _Bytes, c_size_t, c_int32)),
    "llama_supports_gpu_offload": (c_bool, ()),
    "llama_synchronize": (None, (_Pointer,)),
    "llama_token_to_piece": (c_int32, (_Pointer, Token, _Text, c_int32, c_int32, c_bool)),
    "llama_tokenize": (c_int32, (_Pointer, _Text, c_int32, _Tokens, c_int32, c_bool, c_bool)),
    "llama_vocab_get_attr": (c_int32, (_Pointer, Token)),
    "llama_vocab_get_text": (c_char_p, (_Pointer, Token)),
    "llama_vocab_is_eog": (c_bool, (_Pointer, Token)),
    **{f"llama_{name}": (kind, (_Pointer,)) for kind, names in _OF_A_POINTER.items() for name in names.split()},
}
# What every build says by default. A struct with one field more or less says something else at one of these places.
_MODEL_DEFAULTS = {
    "n_gpu_layers": -1, "split_mode": 1, "main_gpu": 0, "kv_overrides": None, "vocab_only": False,
    "check_tensors": False, "use_extra_bufts": True, "no_host": False, "no_alloc": False,
}  # fmt: skip
_CONTEXT_DEFAULTS = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "rope_scaling_type": -1, "pooling_type": -1,
    "attention_type": -1, "flash_attn_type": -1, "yarn_ext_factor": -1.0, "yarn_attn_factor": -1.0,
    "yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0, "defrag_thold": -1.0, "type_k": 1, "type_v": 1,
    "embeddings": False, "offload_kqv": True, "no_perf": True, "op_offload": True, "swa_full": True,
    "kv_unified": False, "samplers": None, "n_samplers": 0, "ctx_other": None,
}  # fmt: skip


class LlamaLibrary:
    """The loaded library, with its functions as attributes. The first use of one loads it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.path: Path | None = None
        self.name = ""  # with its version

    def __getattr__(self, name: str) -> Any:
        """Only for what is not there: the library is not loaded yet."""
        if name not in _FUNCTIONS and name not in ("llama_context_default_params", "llama_init_from_model"):
            raise AttributeError(name)
        self.load()
        return self.__dict__[name]

    def load(self, named: str | None = None) -> None:
        """Load the library, once. Raises `EngineMissing`, and `InvalidSetting` for another one than is loaded."""
        with self._lock:
            if named is not None and not Path(named).is_file():
                raise InvalidSetting(
                    f"llama_library={named!r}: there is no such file. Name libllama.so (.dylib, .dll) itself."
                )
            if self.path is None:
                path, name, functions = _first_usable(_candidates(named))
                self.__dict__.update(functions)
                self.path, self.name = path, name
            elif named is not None and not self.path.samefile(named):
                raise InvalidSetting(
                    f"llama_library={named!r}: this process has loaded {self.path} already. Start another one for it."
                )


llama = LlamaLibrary()


def _candidates(named: str | None) -> Iterator[tuple[Path, str]]:
    """The libraries there are, best first, each with its name and version."""
    if named is not None:
        yield Path(named), Path(named).name
        return
    kinds = {"win32": (".pyd", ".dll"), "darwin": (".so", ".dylib")}.get(sys.platform, (".so",))
    for package, project, folder, start in (
        ("xllamacpp", "xllamacpp", ".", "xllamacpp"),
        ("llama_cpp", "llama-cpp-python", "lib", ("libllama", "llama")),
    ):
        found = importlib.util.find_spec(package)
        for place in (found and found.submodule_search_locations) or ():
            inside = Path(place) / folder
            for path in sorted(inside.iterdir()) if inside.is_dir() else ():
                if path.name.startswith(start) and path.suffix in kinds:
                    yield path, f"{project} {importlib.metadata.version(project)}"
                    break


def _first_usable(candidates: Iterator[tuple[Path, str]]) -> tuple[Path, str, dict[str, Any]]:
    """The first library that passes its checks, with its name and functions. Raises `EngineMissing`."""
    refusals = []
    for path, name in candidates:
        try:
            functions = _bind(path)
        except EngineMissing as refusal:
            refusals.append(refusal)
            continue
        version, commit = functions["ggml_version"]().decode(), functions["ggml_commit"]().decode()
        return path, f"{name}, ggml {version}{'' if commit == 'unknown' else f' ({commit})'}", functions
    if refusals:
        raise refusals[0]
    raise EngineMissing(
        "The llama.cpp engine needs its library. Install it with: pip install 'rekindle-llm[llamacpp,knowledge]', "
        "or name your own build with llama_library."
    )


def _bind(path: Path) -> dict[str, Any]:
    """The functions of a library, checked. Raises `EngineMissing`."""
    try:
        find = _open(path)
        names = (*_FUNCTIONS, "llama_context_default_params", "llama_init_from_model")
        functions = {name: find(name) for name in names}
    except (OSError, AttributeError) as error:
        raise EngineMissing(f"{path} cannot be used as llama.cpp's library ({error}). Tested: {TESTED}.") from error
    for name, (result, arguments) in _FUNCTIONS.items():
        functions[name].restype, functions[name].argtypes = result, arguments
    version = functions["ggml_version"]().decode()
    if version.rpartition(".")[0] not in KNOWN_VERSIONS:
        raise EngineMissing(
            f"{path} is llama.cpp with ggml {version}, which is not known here: its structs may differ. Known are ggml "
            f"{' and '.join(f'{known}.x' for known in KNOWN_VERSIONS)}; tested: {TESTED}."
        )
    params = _context_params(functions["llama_context_default_params"])
    if params is None or not _structs_fit(functions):
        raise EngineMissing(f"{path} (ggml {version}) has other structs than known here. Tested: {TESTED}.")
    functions["llama_init_from_model"].restype = _Pointer
    functions["llama_init_from_model"].argtypes = (_Pointer, params)
    _load_backends(find, functions["llama_log_set"], path.resolve().parent)
    return functions


def _open(path: Path) -> Callable[[str], Any]:
    """What finds a function of a library by its name, or raises `AttributeError`."""
    with _short_spins():
        library = ctypes.CDLL(str(path))
    names = ("ggml.dll", "ggml-base.dll") if sys.platform == "win32" else ()  # elsewhere they are searched with it
    others = [ctypes.CDLL(str(path.parent / name)) for name in names if (path.parent / name).is_file()]
    return lambda name: getattr(next((one for one in others if hasattr(one, name)), library), name)


@contextmanager
def _short_spins() -> Iterator[None]:
    """Let threads of GNU's OpenMP that wait for others spin for about 15 us, then sleep, unless the user chose.

    It reads this from the environment when it is loaded. By default they spin for milliseconds: beside another busy
    process, whose time that is, each token took ten times as long. Alone, the short spin makes no difference.
    """
    chosen = _SPINS in os.environ or "OMP_WAIT_POLICY" in os.environ
    if not chosen:
        os.environ[_SPINS] = "6000" if platform.machine() in ("aarch64", "arm64") else "500"  # x86 pauses for longer
    try:
        yield
    finally:
        if not chosen:
            del os.environ[_SPINS]


def _load_backends(find: Callable[[str], Any], set_log: Any, folder: Path) -> None:
    """Load the backends of a build that has them as libraries of their own (GGML_BACKEND_DL), from its folder."""
    try:
        count, load_all = find("ggml_backend_dev_count"), find("ggml_backend_load_all_from_path")
    except AttributeError:
        return
    count.restype, count.argtypes = c_size_t, ()
    load_all.restype, load_all.argtypes = None, (_Text,)
    if not count():
        set_log(_SILENT, None)
        load_all(os.fsencode(folder))
        if not count():
            raise EngineMissing(f"llama.cpp finds no backend in {folder}. Put libggml-cpu.so and its others there.")


def _context_params(default_params: Any) -> type[Structure] | None:
    """The struct of a context's parameters that this library has, which the function returns from now on."""
    for params in (NewContextParams, OldContextParams):
        default_params.restype = params
        if _has(default_params(), _CONTEXT_DEFAULTS):
            return params
    return None


def _structs_fit(functions: dict[str, Any]) -> bool:
    fits = _has(functions["llama_model_default_params"](), _MODEL_DEFAULTS)
    tokens = (Token * 3)(1, 2, 3)
    batch = functions["llama_batch_get_one"](tokens, 3)
    fits = fits and batch.n_tokens == 3 and list(batch.token[:3]) == [1, 2, 3]
    fits = fits and not (batch.embd or batch.pos or batch.n_seq_id or batch.seq_id or batch.logits)
    candidates = (TokenData * 3)(TokenData(0, 1.0, 0.0), TokenData(1, 3.0, 0.0), TokenData(2, 2.0, 0.0))
    array = TokenDataArray(candidates, 3, -1, False)
    sampler = functions["llama_sampler_init_greedy"]()
    functions["llama_sampler_apply"](sampler, ctypes.byref(array))
    functions["llama_sampler_free"](sampler)
    return fits and array.selected == 1 and array.data[1].id == 1


def _has(params: Structure, defaults: dict[str, Any]) -> bool:
    return all(getattr(params, name) == value for name, value in defaults.items())
