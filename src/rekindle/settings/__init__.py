"""Every setting, once: name, type, default, meaning and group.

    given         arguments and flags        memory_limit="1GB", --memory-limit 1GB
    environment   REKINDLE_ and the name     REKINDLE_MEMORY_LIMIT=1GB
    file          the user's rekindle.toml   memory_limit = "1GB"
    default       the one below

The upper beats the lower. `rekindle --config FILE` and `REKINDLE_CONFIG` name a file in place of the user's own. A file
in the current folder is not read: it may be anybody's, as in a repository that was cloned.

A name that is unknown, or a value of the wrong type, is refused in all of them; a name of an earlier version (`GONE`)
is ignored with a warning. What a text may say (a size, a policy, a device) is checked by the part that uses it.

To add a setting, declare it here and run `make reference`: its variable, its key in files, its flag, its row in the
reference and its keyword argument (`rekindle.settings.keywords`) follow from the declaration.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rekindle.errors import InvalidSetting, nearest
from rekindle.settings.file import SettingsFile, users_file
from rekindle.settings.setting import PREFIX, Setting, a_path, a_size, a_time, expand, setting, settings_of, tier_order

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("rekindle.settings")

GROUPS = {
    "model": "Model",
    "cache": "Cache",
    "chunks": "Chunk reuse",
    "library": "Documents",
    "answers": "Answers",
    "remote": "Remote KV",
    "retention": "What the cache keeps",
    "serving": "Several requests",
    "server": "Server",
    "idle": "Idle work",
    "commands": "Commands",
}
API_KEYS_VARIABLE = f"{PREFIX}API_KEYS"  # keys are secrets: never in `rekindle.toml`, so they are no setting
(_model, _cache, _chunks, _library, _answers, _remote, _retention, _serving, _server, _idle, _commands) = (
    partial(setting, group) for group in GROUPS
)
ADMIN_KEY_VARIABLE = f"{PREFIX}ADMIN_KEY"
API_KEY_VARIABLE = f"{PREFIX}API_KEY"  # that commands send
_OTHER_VARIABLES = (f"{PREFIX}HOME", f"{PREFIX}CONFIG", API_KEYS_VARIABLE, ADMIN_KEY_VARIABLE, API_KEY_VARIABLE)


class _Loadable:
    @classmethod
    def load(
        cls,
        given: Mapping[str, object] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        file: Path | None = None,
    ) -> Self:
        """Collect the settings from everywhere.

        given        by name; None counts as not given, "none" is the value None
        environment  in place of the process's `REKINDLE_*` variables; an empty value counts as not given
        file         in place of the one that `REKINDLE_CONFIG` names, else the user's own

        Raises `InvalidSetting` for unknown names, wrong values and files that cannot be read, also where a stronger
        source overrules them. Paths in a file are relative to its folder; `~` is the user's home everywhere.
        """
        own = {name: SETTINGS[name] for name in cls.__annotations__}
        variables = os.environ if environment is None else environment
        if file is None and (chosen := variables.get(f"{PREFIX}CONFIG")):
            file = Path(expand(chosen) or chosen)
        file = users_file() if file is None else file
        values = {} if file is None else _from_file(file)
        values |= _from_environment(variables)
        return cls(**{n: value for n, value in values.items() if n in own} | _from_arguments(given or {}, own))


@dataclass(frozen=True)
class Settings(_Loadable):
    """What can be chosen about a session. Make one with `Settings.load`: the constructor takes its values unchecked."""

    engine: Literal["auto", "hf", "llamacpp", "onnx"] = _model(
        "auto",
        "The engine: hf (Hugging Face transformers), llamacpp (llama.cpp), onnx (ONNX Runtime), auto (onnx for ONNX "
        "graphs, llamacpp for GGUF files and models of Ollama, hf for the rest; the other one of these two if that is "
        "not installed).",
    )
    device: str = _model(
        "auto",
        "Where the model runs: auto, cpu, cuda, cuda:1, mps; for llamacpp auto, cpu, gpu; for onnx auto (CPU) or an "
        "execution provider that `rekindle doctor` lists.",
    )
    dtype: str = _model(
        "auto",
        "hf: the dtype of weights and KV: auto, float32, bfloat16, float16; onnx: the precision of the graph: auto, "
        "float32, float16, int4.",
    )
    context: int | None = _model(
        None,
        "Maximum number of tokens of context; none: all that the model has, as far as their KV fits half of the memory "
        "that is free when it is loaded.",
    )
    threads: int | None = _model(None, "llamacpp, onnx: number of threads; none: one per core.")
    gpu_layers: int | None = _model(None, "llamacpp: number of layers on the GPU; none: all, if there is one.")
    llama_library: str | None = _model(
        None,
        "llamacpp: your own build of llama.cpp's library (libllama.so), for CUDA, Metal or Vulkan; none: the one that "
        "came with rekindle-llm[llamacpp].",
        kind=a_path("a file"),
    )
    flash_attention: Literal["auto", "on", "off"] = _model(
        "auto",
        "llamacpp: flash attention: on, off, auto (on for GPUs and quantized KV; off for CPUs, where a few tokens "
        "after many are slower with it).",
    )
    kv_type: str = _model("f16", "llamacpp: the dtype of KV: f16, f32, bf16, q8_0, q5_1, q5_0, q4_1, q4_0.")
    kv_tokens: int | None = _model(
        None,
        "llamacpp: number of tokens that its KV buffer holds, for all contexts together; none: one context and 4096.",
    )
    swa_full: bool = _model(
        True,
        "llamacpp: of layers with a sliding window, keep the KV of all tokens, which is then reused by the token; "
        "false: only that in the window, which takes less memory and is reused by checkpoint.",
    )
    batch_tokens: int = _model(2048, "llamacpp, onnx: maximum number of tokens in a batch.")
    micro_batch_tokens: int = _model(512, "llamacpp: maximum number of tokens computed at once.")
    adapter: str | None = _model(
        None,
        "The LoRA adapter that the model answers with: a name known from `rekindle adapters`, NAME=PATH, or "
        "NAME=PATH,scale=0.5; none: the model alone.",
    )
    deterministic: bool = _model(
        False, "Cut cold and warm prefills into the same pieces, so that their logits are bit-equal."
    )
    keep_reply_tokens: bool = _model(
        False, "In chats, use the tokens that the model generated for its replies, with thoughts and tool calls."
    )
    cache: str | None = _cache(
        None,
        "The folder of the cache; none: the user's own cache folder; off: no cache at all.",
        kind=a_path("a folder, or off"),
    )
    reuse: Literal["exact", "quantized", "approximate", "off"] = _cache(
        "exact",
        "What may be reused: exact (same tokens, same bits), quantized (KV kept with fewer bits: nearly the same), "
        "approximate (also text of other prompts, wherever it is, partly recomputed), off (compute everything, keep "
        "nothing). Every reply says what was really done.",
    )
    codec: Literal["auto", "raw", "q8", "q5", "q4", "q3"] = _cache(
        "auto",
        "How KV is coded on disk: auto (KV of an adapter as a difference from the base model's, without loss; under "
        "quantized all of it, with the bits that were calibrated for the model), raw (never), q8, q5, q4, q3 "
        "(under quantized: about this many bits a number).",
    )
    memory_limit: str = _cache(
        "5%", "How much KV is held in memory: bytes, 512MB, or 10% of all memory.", kind=a_size("512MB, 10%")
    )
    disk_limit: str = _cache(
        "10%",
        "How much the cache takes on disk: bytes, 20GB, or 10% of what is free or already the cache's.",
        kind=a_size("20GB, 10%"),
    )
    tiers: str = _cache(
        "memory > disk",
        "Where KV is kept, the nearest first: memory > disk, and behind them shared tiers, which several servers use: "
        "redis, s3. Each has its limit: memory_limit, disk_limit, redis_limit, s3_limit.",
        kind=tier_order("memory > disk", "memory > disk > redis", "memory > disk > s3", "memory > disk > redis > s3"),
    )
    redis: str = _cache(
        "redis://127.0.0.1:6379/0",
        "tiers: the address of a Redis or Valkey server: redis://HOST:PORT/DATABASE, or rediss:// with TLS.",
    )
    redis_limit: str = _cache(
        "1GB",
        "How much of the server's memory the cache takes; what was not used for longest leaves. The server's own limit "
        "holds as well.",
        kind=a_size("1GB"),
    )
    s3: str | None = _cache(
        None,
        "tiers: the bucket: s3://BUCKET/PREFIX. Keys, region and endpoint are those of the environment: "
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL.",
    )
    s3_limit: str = _cache(
        "100GB", "How much the cache takes in the bucket; what was written first leaves.", kind=a_size("100GB")
    )
    tier_secret: str | None = _cache(
        None,
        "The file with the secret that KV on shared tiers is encrypted with; all servers that share KV need the same. "
        "Make one: rekindle origin key --secret FILE.",
        kind=a_path("a file"),
    )
    tenant: str = _cache("local", "Whose KV it is: tenants never share any.")
    cache_salt: str = _cache("", "KV is shared only where this text is the same.")
    recompute_budget: float | None = _chunks(
        None,
        "The share that is recomputed under approximate of the tokens of passages whose context has changed; none: "
        "what was calibrated, else a safe share.",
    )
    library: str | None = _library(
        None,
        "The folder of ingested documents; none: beside the cache if its folder is named (DIR-library), else "
        "`knowledge` in the user's folder of data.",
        kind=a_path("a folder"),
    )
    library_limit: str | None = _library(
        "10GB",
        "How much all ingested documents may take on disk: bytes, 10GB, or 10% of what is free or already theirs; "
        "beyond it nothing is added. none: no limit.",
        kind=a_size("10GB, 10%"),
    )
    embedder: str = _library(
        "minilm", "The model that makes vectors of documents and questions: a name, a folder or an ONNX graph."
    )
    answers: Literal["auto", "off", "verified", "direct"] = _answers(
        "auto",
        "Whether earlier answers help with new ones: off, verified (as drafts that the model checks: the text is what "
        "it would have written anyway), direct (the stored answer to nearly the same question is given at once; the "
        "reply says so). auto: verified for greedy questions about documents, else off. Questions and answers are "
        "kept with the documents, unless it is off.",
    )
    similarity_threshold: float = _answers(
        0.85,
        "answers=direct: how near a question must be to an earlier one (cosine); besides, nothing in the two may "
        "differ that matters (see the guard).",
    )
    answers_limit: str = _answers(
        "100MB", "How much stored questions and answers take on disk: bytes, or 100MB.", kind=a_size("100MB")
    )
    origin: str | None = _remote(
        None,
        "The address of an origin: KV of long prompts that others published is fetched from there, if that is faster "
        "than computing all of it. Under exact only what lost nothing (level raw). See `rekindle origin`.",
    )
    origin_keys: str | None = _remote(
        None, "The public keys of trusted publishers, or the files with them, with commas between."
    )
    origin_token: str | None = _remote(None, "The file with the token that the origin asks for.", kind=a_path("a file"))
    origin_secret: str | None = _remote(
        None,
        "The file with the secret that published KV is encrypted with; the origin does not have it.",
        kind=a_path("a file"),
    )
    kl_budget: float = _remote(
        0.01,
        "How far quantized KV from an origin may move what the model says: the mean KL of the next tokens, in nats, "
        "expected of all that comes for a prompt. Of the levels that are published, the smallest within it are taken, "
        "by the bandwidth of the moment.",
    )
    local_tenants: str = _remote(
        "", "Tenants, with commas between, whose prompts are never published nor looked for at an origin; *: all."
    )
    policy: str = _retention(
        "lru",
        "What is evicted first: lru (what only killed apps used, then what was not used for longest), utility (by what "
        "reuse saves, how likely it is, and the state of the apps that ask).",
    )
    ttl: str | None = _retention(
        None, "KV older than this is not served: 90s, 30m, 12h, 7d; none: of any age.", kind=a_time("12h, 7d")
    )
    killed_ttl: str | None = _retention(
        "60s",
        "When KV that only killed apps used is evicted, after the last was killed, if more than half of the disk limit "
        "is used; none: when space is needed.",
        kind=a_time("30s, 5m"),
    )
    admission: Literal["always", "second-use"] = _retention(
        "always",
        "What is kept: always (everything, while the write budget lasts), second-use (only what was seen before).",
    )
    write_budget: str | None = _retention(
        "40GB",
        "Maximum written within any 24 hours, to spare the disk; none: no limit.",
        kind=a_size("40GB"),
    )
    key_file: str | None = _retention(
        None,
        "A file with 16 to 64 secret bytes: digests are keyed, and KV that others wrote is never served.",
        kind=a_path("a file"),
    )
    parallel: int | None = _serving(
        None,
        "Number of requests answered at the same time, sharing the engine's steps; none: 8 in the server, else those "
        "of several threads take turns.",
    )
    keep_alive: str | None = _serving(
        None,
        "Free the model after this long without a request (30s, 5m), and load it again for the next; its KV stays "
        "warm. none: never; 5m for a model that a command left in the background.",
        kind=a_time("30s, 5m"),
    )
    adapter_memory: str = _serving(
        "10%",
        "How much memory loaded LoRA adapters take: bytes, 1GB, or 10% of the memory of the model's device (llamacpp: "
        "of all memory). They are loaded when a request needs them; the least recently used leave for others.",
        kind=a_size("1GB, 10%"),
    )


@dataclass(frozen=True)
class ServerSettings(_Loadable):
    """What can be chosen about `rekindle serve` beside its session. The server checks the values."""

    host: str = _server("127.0.0.1", "The address to listen on.")
    port: int = _server(8377, "The port to listen on; 0 takes a free one.")
    api_key_file: str | None = _server(
        None,
        f"A file with API keys as --api-key takes them, one a line. Also the variable {API_KEYS_VARIABLE}.",
        kind=a_path("a file"),
    )
    allow_unauthenticated: bool = _server(False, "Let others in without a key.")
    allowed_hosts: tuple[str, ...] = _server(
        (),
        "Names in the Host header that are answered, with commas between, * for any; empty: those of this machine on "
        "loopback or without a key, else any. The flag may be given several times.",
    )
    cors_origin: tuple[str, ...] = _server(
        (),
        "Origins whose web pages may send requests and read replies, with commas between, * for any. The flag may be "
        "given several times.",
    )
    page: bool = _server(
        True, "A page for people at /: what was reused, and why not more. Where keys are set, it takes the operator's."
    )
    alias: tuple[str, ...] = _server(
        (),
        "Further names of models, with commas between: 'claude-*=MODEL', or '*=MODEL' for all that nobody knows, where "
        "MODEL is a name of /v1/models, also the embedder's. The flag may be given several times.",
    )
    model_memory: str | None = _server(
        None,
        "How much memory the loaded models take together, with the KV buffers of llama.cpp: bytes, 12GB, or 80% of the "
        "memory of their device. A model is loaded when a request names it; others that no request uses leave for it, "
        "the least recently used first. none: 80% where several models are served, no limit for one.",
        kind=a_size("12GB, 80%"),
    )
    canonical: Literal["off", "default", "full"] = _server(
        "default",
        "Which parts of a prompt that change from request to request are dropped: default, those that no model should "
        "read, as a client's version and session in a system message; full: tools and the keys of their schemas are "
        "sorted too; off: nothing is dropped.",
    )
    queue: int = _server(64, "Maximum number of waiting requests; more are refused with 429.")
    max_connections: int = _server(  # many systems allow a process 1024 files, and the cache needs some
        256, "Maximum number of open connections, silent ones included; more are refused with 503."
    )
    max_body: str = _server("8MB", "The largest body that is read.", kind=a_size("8MB"))
    max_reply: int | None = _server(None, "The longest reply, in tokens; none: as long as the context.")
    default_reply: int = _server(
        8192, "The longest reply, in tokens, to a request that does not say how long it may be."
    )
    log_format: Literal["text", "json"] = _server(
        "text", "How the log is written: lines for people, or an object of JSON in each line."
    )
    timeout: str = _server(
        "10m",
        "The longest a request may take, waiting included; a reply that is being written then ends with what it has.",
        kind=a_time("30s, 10m"),
    )
    client_timeout: str = _server(
        "30s",
        "How long a client may take to send its request, or to say something on an open connection.",
        kind=a_time("30s, 10m"),
    )
    stop_timeout: str = _server("15s", "How long replies may go on after a signal to stop.", kind=a_time("15s, 1m"))
    idle: bool = _server(False, "Work ahead while there are no requests, as `rekindle idle` does.")
    quiet: str = _server("30s", "With idle: start after this long without a request.", kind=a_time("30s, 5m"))
    on_battery: bool = _idle(False, "Also work without mains.")
    idle_load: float = _idle(0.5, "Stop while others keep this share of the cores busy.")
    idle_stride: int = _idle(5, "Questions predicted at a time.")
    idle_rounds: int = _idle(1, "How often, from each source, when something is new.")
    idle_per_hit: str = _idle(
        "10m",
        "Predict more while a predicted question that is used costs at most this much work.",
        kind=a_time("10m, 1h"),
    )
    idle_sources: tuple[str, ...] = _idle(
        ("abstract", "history"), "What questions are predicted from, with commas between."
    )
    idle_settle: str = _idle("60s", "Summarize documents once none was added for this long.", kind=a_time("60s, 5m"))
    idle_passages: int | None = _idle(None, "Passages to prefill; none: all that fit.")
    idle_seconds: str | None = _idle(
        None, "Compute time for each library since the start; none: any.", kind=a_time("10m, 1h")
    )
    idle_calibrate: str | None = _idle(
        None,
        "Calibrate the model for its level of reuse if nobody did, for at most this long; the next start "
        "uses what was found. none: never.",
        kind=a_time("10m, 1h"),
    )


@dataclass(frozen=True)
class CommandSettings(_Loadable):
    """What can be chosen about the commands themselves."""

    daemon: bool = _commands(
        True,
        "Keep the model loaded in the background after a command, for the next one; it leaves after keep_alive, 5m by "
        "default.",
    )


# Settings of earlier versions: each has no effect, and where it is given, the sentence says once what replaces it.
GONE: Mapping[str, str] = {
    "idle_tflop": "idle_tflop is gone and has no effect: idle_seconds limits idle work.",
    "idle_joules": "idle_joules is gone and has no effect: idle_seconds limits idle work.",
}

SETTINGS: Mapping[str, Setting] = settings_of(Settings) | settings_of(ServerSettings) | settings_of(CommandSettings)


@cache
def warn_once(sentence: str) -> None:
    """Log a warning, once a process."""
    log.warning("%s", sentence)


def names_in(*groups: str) -> list[str]:
    """The settings of these groups."""
    return [one.name for one in SETTINGS.values() if one.group in groups]


_OF_A_REQUEST = ("adapter", "deterministic", "keep_reply_tokens")
ENGINE_SETTINGS = tuple(name for name in names_in("model") if name not in _OF_A_REQUEST)


def _from_arguments(given: Mapping[str, object], own: Mapping[str, Setting]) -> dict[str, Any]:
    _refuse_unknown(given, own, "argument")
    return {n: own[n].parse(v, f"The argument {n}") for n, v in given.items() if v is not None and n in own}


def _from_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    given = {name: text for name, text in variables.items() if name.startswith(PREFIX) and text}
    known = {one.variable: one for one in SETTINGS.values()}
    _refuse_unknown(given, {*known, *_OTHER_VARIABLES}, "variable")
    return {known[v].name: known[v].parse(text, f"The variable {v}") for v, text in given.items() if v in known}


def _from_file(path: Path) -> dict[str, Any]:
    found = SettingsFile.read(path)
    _refuse_unknown(found.values, SETTINGS, f"key in {path}:")
    folder = path.absolute().parent
    known = {name: value for name, value in found.values.items() if name in SETTINGS}
    return {name: SETTINGS[name].parse(value, f"{name} in {path}", folder) for name, value in known.items()}


def _refuse_unknown(given: Mapping[str, object], known: Iterable[str], what: str) -> None:
    for name, value in given.items():
        if (gone := name.removeprefix(PREFIX).lower()) in GONE:
            if value is not None:
                warn_once(GONE[gone])
        elif name not in known:
            raise InvalidSetting(f"Unknown {what} {name[:80]!r}.{nearest(name[:80], known)}")
