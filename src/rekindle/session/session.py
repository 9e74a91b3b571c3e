"""A model ready to answer: the life of a request.

request   what people write becomes a `Request`               core/request
retrieve  passages for a question about documents             session/library, session/ask
answers   earlier answers: given, or checked as drafts        session/answers, session/draft
tokens    the model's own template, within its context        session/prompt
lookup    what is stored of the prompt                        cache/prefix_cache
plan      what to load and what to compute                    cache/planner
prefill   KV into a context, loading while computing          cache/prefill
decode    tokens to text, cancellable at every one            session/generate
commit    new KV, in the background                           cache/writer
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.answers.ask_terms import asking
from rekindle.apps import Apps
from rekindle.cache.checkpoint_kv import CheckpointKv
from rekindle.cache.coders import quantized_coder
from rekindle.cache.explain import Explanation, Prompt
from rekindle.cache.lookup import CacheLookup
from rekindle.cache.open_store import open_store
from rekindle.cache.prefill import IsCancelled
from rekindle.cache.prefix_cache import Prefetch, PrefixCache
from rekindle.cache.stored_kv import StoredKv
from rekindle.chunks.prefill import ChunkPrefill
from rekindle.core.reply import Answer, Reply, Reuse, TextPiece
from rekindle.core.request import Message, MessageLike, Options, PromptLike, Request, as_messages, as_prompts
from rekindle.core.scope import scope_of
from rekindle.core.size import parse_duration
from rekindle.engine.base import Engine
from rekindle.engine.batching import BatchingEngine
from rekindle.engine.fairness import FairShare
from rekindle.engine.load import EngineOptions, kind_of, load_engine
from rekindle.engine.lora_manager import LoraManager
from rekindle.engine.reloadable import ReloadableEngine
from rekindle.errors import Closed, InvalidSetting
from rekindle.knowledge.ingest import IngestResult
from rekindle.knowledge.retrieve import Retrieval
from rekindle.models.download import Progress
from rekindle.session.answer_judge import judging_request, recall_skill, why_no_judge
from rekindle.session.answers import Answers
from rekindle.session.ask import (
    AnswerStream,
    AskOptions,
    Evidence,
    Prepared,
    find_for_documents,
    find_stored,
    most_passages,
    sources_of,
    with_stored_reply,
)
from rekindle.session.draft import drafts_for
from rekindle.session.generate import Generation, decode
from rekindle.session.keep_alive import KeepAlive
from rekindle.session.library import Forgotten, Knowledge, purging, quote_of
from rekindle.session.model_memo import AnsweringModel, ModelMemo
from rekindle.session.prompt import EncodedPrompts, PromptTokens, WrittenReplies, encode_prompt
from rekindle.session.reply_stream import AsyncReplyStream, OnPlanned, ReplyStream
from rekindle.session.session_group import SessionGroup
from rekindle.settings import Settings
from rekindle.settings.keywords import SettingsLike
from rekindle.text.constraint import Constraint, GrammarBackend
from rekindle.text.fill_in import OtherFile, fill_in_prompt
from rekindle.text.reasoning import parse_reply
from rekindle.text.tools.styles import call_grammar, call_openers, detect_style

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class Session:
    """One loaded model. May be used from several threads and inside a running event loop.

        with Session("smollm2") as session:
            print(session.chat("What is a cache?"))

    model      a name (smollm2), a folder, a .gguf file, ORG/NAME on the hub, or an engine already loaded
    settings   cache="...", reuse="exact", memory_limit="5%", disk_limit="10%", deterministic=False, device="auto",
               ...: see `rekindle.settings`. What is not given comes from the environment and `rekindle.toml`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Engine = "smollm2",
        *,
        progress: Progress | None = None,
        group: SessionGroup | None = None,
        memo: ModelMemo | None = None,
        **settings: Unpack[SettingsLike],
    ) -> None:
        """Load the model, pulling it first if it must be, and open the cache. Sessions of a group share memory.

        `memo` is for an engine that was loaded by name: then its answers are found before it is loaded again.

        Raises `ModelError`, `EngineMissing`, `InvalidSetting`, and `CacheUnusable` for a folder that was named.
        """
        self.settings = Settings.load(settings)
        self.shares = FairShare()  # among apps, where requests share steps
        parallel, stays = self.settings.parallel, self.settings.keep_alive
        if parallel is not None and parallel < 1:
            raise InvalidSetting(f"parallel={parallel} makes no sense. Use 1 or more, or leave it out.")
        stays_seconds = None if stays is None else parse_duration(stays, "keep_alive")
        self._owns_engine = isinstance(model, (str, os.PathLike))
        self._resting: ReloadableEngine | None = None
        self._group = group
        self.model = os.fspath(model) if isinstance(model, (str, os.PathLike)) else model.name
        memo = ModelMemo(self.model, self.settings) if self._owns_engine else memo
        loaded = self._load(model, progress)
        self.engine_kind = kind_of(self._resting.inner if self._resting else loaded)
        self._engine: Engine | None = self._sharing(loaded)
        self._grammars: GrammarBackend | None = None
        self.adapters = LoraManager(self._engine, self.settings.adapter, self.settings.adapter_memory)
        self._written = WrittenReplies(self.settings, self.adapters)
        self._encoded = EncodedPrompts()
        self.cache = open_cache(self._engine, self.settings, self.adapters)
        # What another session kept in the user's own folder goes, too, if this one keeps nothing.
        purge = purging(self.settings) if self.cache.store is None else self.cache.purge
        self.knowledge = Knowledge(self.settings, purge) if group is None else group.knowledge
        made_of = (self.settings, self.knowledge, self.adapters.digest, self._answering, memo)
        self.answers = Answers(*made_of, passages=lambda: most_passages(self.engine))
        self._alive = KeepAlive(stays_seconds, self._rest)
        # A program that ends without closing its sessions still keeps what they computed.
        self._finalizer = weakref.finalize(self, self.cache.close)
        if group is not None:
            group.add(self)

    def _load(self, model: str | os.PathLike[str] | Engine, progress: Progress | None) -> Engine:
        stays = self.settings.keep_alive is None
        if isinstance(model, (str, os.PathLike)):
            if stays and self.settings.parallel is None and self._group is None:
                return self._load_engine(progress)
            self._resting = ReloadableEngine(functools.partial(self._load_engine, progress))
            return self._resting
        if not stays:
            raise InvalidSetting("keep_alive is for a model given by name: an engine that was given stays loaded.")
        return model

    def _load_engine(self, progress: Progress | None) -> Engine:
        options = EngineOptions.of(self.settings)
        if self._resting is not None:  # again: the context is as long as it was, whatever is free now
            options = options.with_context(self._resting.context_tokens)
        load = functools.partial(load_engine, self.model, options, progress)
        return load() if self._group is None else self._group.load(self, load)

    def _sharing(self, engine: Engine) -> Engine:
        """The engine, whose steps the requests share, if several are answered at the same time."""
        parallel = self.settings.parallel
        if parallel is None:
            return engine
        return BatchingEngine(engine, self.shares, together=not self.settings.deterministic and parallel > 1)

    def _answering(self) -> AnsweringModel:
        """What the answers of this model depend on."""
        engine = self.engine
        identity = engine.identity(engine.regime(1))
        embedder, passages = self.knowledge.embedder().digest, most_passages(engine)
        return AnsweringModel(engine.name, identity.digest, identity.tokenizer, embedder, passages)

    def _rest(self) -> None:
        """Let the model go until the next request; what it computed is kept first."""
        assert self._resting is not None
        if self.cache.rest():
            self.adapters.unload_unused()
            self._resting.rest()

    def leave(self) -> bool:
        """Free the model now, unless it is used, and the memory of its KV, which stays on disk. Whether it is free."""
        self._alive.rest()
        if self.resting and self.cache.store is not None:
            self.cache.store.memory.forget(self.cache.store.memory.names())
        return self.resting

    def stay(self, seconds: float | None) -> bool:
        """Free the model after `seconds` without a request, from now on; None: never. False if it cannot be freed.

        That is possible for a model given by name, with `keep_alive` or `parallel`.
        """
        if self._resting is None:
            return False
        self._alive.stay(seconds)
        return True

    def staying(self) -> AbstractContextManager[None]:
        """The model stays loaded inside the block."""
        return self._alive.use()

    @contextmanager
    def awake(self, cancelled: IsCancelled | None = None) -> Iterator[None]:
        """The model is loaded inside the block. Raises `Cancelled`, and as loading it does."""
        if self._group is not None:
            self._group.wait(self, cancelled)
        with self._alive.use():
            if self._resting is not None:
                self._resting.wake(cancelled)
            yield

    @property
    def resting(self) -> bool:
        """Whether the model is out of memory now, until the next request."""
        return self._resting is not None and self._resting.resting

    @property
    def left(self) -> bool:
        """Whether the model left the memory that it shares with others: loading it may cost another model its place."""
        return self._group is not None and self.resting

    @property
    def rests_in(self) -> float | None:
        """Seconds until the model is freed; None while it is used, or if it stays for ever."""
        return self._alive.seconds_left

    @property
    def last_used(self) -> float:
        """When the last request ended, by `time.monotonic`."""
        return self._alive.last_used

    @property
    def engine(self) -> Engine:
        """The engine underneath. Raises `Closed` after `close`."""
        if self._engine is None:
            raise Closed("The session was closed. Make a new one.")
        return self._engine

    @property
    def apps(self) -> Apps:
        """The apps that asked, and their states: `apps.ls()`, `apps.set("mail", "killed")`."""
        disk = None if self.cache.store is None else self.cache.store.disk
        return Apps(disk, scope_of(self.settings, None, None), lambda *_: self.cache.free_killed())

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Reply:
        """Continue a plain text or a list of token ids.

        Raises `InvalidPrompt`, `InvalidSampling`, `InvalidSetting` or `ContextOverflow`.
        """
        return self.stream(prompt, **options).reply

    def fill_in(self, prefix: str, suffix: str, **options: Unpack[Options]) -> Reply:
        """Write what goes between two texts, with a model that has tokens for that; raises as `generate` does."""
        return self.generate(self.fill_in_prompt(prefix, suffix), **options)

    def fill_in_prompt(self, prefix: str, suffix: str, files: Sequence[OtherFile] = ()) -> list[int]:
        """The tokens of a prompt whose reply goes between two texts. Raises `InvalidPrompt` and `ContextOverflow`."""
        with self._alive.use():
            engine = self.engine
            return fill_in_prompt(engine.tokenizer, prefix, suffix, files, token_limit=engine.context_tokens)

    def chat(self, messages: str | Sequence[MessageLike], **options: Unpack[Options]) -> Reply:
        """Answer a chat: a list of `{"role": ..., "content": ...}`, or the text of a single user message.

        A last message of the assistant is continued: the reply is what follows its text.

        `overflow="drop-oldest"` lets the oldest messages go when the chat outgrows the context; system messages and
        the last message always stay. Raises as `generate` does.
        """
        return self.stream(as_messages(messages), **options).reply

    def stream(self, prompt: PromptLike, **options: Unpack[Options]) -> ReplyStream:
        """The same, piece by piece: text and token ids are continued, messages are answered."""
        started, request = time.perf_counter(), Request.of(prompt, **options)
        prepared = self.prepare_with_documents(request)
        return self.answer(request) if prepared is None else self._stream_prepared(prepared, started)

    def _stream_prepared(self, prepared: Prepared, started: float) -> AnswerStream:
        return AnswerStream(
            prepared, lambda stop, note: self._answer(prepared.request, stop, note), started, self.answers.keep
        )

    def answer(
        self,
        request: Request,
        cancelled: threading.Event | None = None,
        planned: OnPlanned | None = None,
        time_is_up: threading.Event | None = None,
    ) -> ReplyStream:
        """The same for a `Request`. `planned` is called with its prefill and reuse, before anything is computed.

        Setting `cancelled` stops it within a token; setting `time_is_up` ends the reply with what it has.
        """
        return ReplyStream(lambda stop, note: self._answer(request, stop, note, time_is_up), cancelled, planned)

    def ask(self, question: str, **options: Unpack[AskOptions]) -> Answer:
        """Answer a question from the documents that were ingested, with sources.

        top_k         number of passages to quote, if they fit; by default those that are relevant to the question,
                      at most 5, 3 for models below 3 billion parameters, 2 below 400 million
        retrieval     how they are found: fused (by words and by meaning), weighted, bm25, embedding
        instructions  in place of the system message

        The other options are those of `chat`. Raises `NothingKnown` if nothing was ingested, and as `chat` does.
        """
        return self.ask_stream(question, **options).answer

    def ask_stream(self, question: str, **options: Unpack[AskOptions]) -> AnswerStream:
        """The same, piece by piece; its `sources` are there before the first."""
        started = time.perf_counter()
        return self._stream_prepared(self.prepare(question, **options), started)

    def prepare(self, question: str, **options: Unpack[AskOptions]) -> Prepared:
        """Find the passages for a question, and the request that asks it: for `answer`."""
        chosen: dict[str, Any] = {**options}
        if chosen.pop("documents", None):
            raise InvalidSetting("ask() finds its documents itself. Give yours to chat(), or ingest them.")
        top_k, retrieval = chosen.pop("top_k", None), chosen.pop("retrieval", "fused")
        instructions, messages = chosen.pop("instructions", None), chosen.pop("messages", None)
        request = Request.of(messages or asking(question, instructions), **chosen)
        return self.prepare_request(question, request, top_k, retrieval)

    def prepare_request(
        self, question: str, request: Request, top_k: int | None = None, retrieval: Retrieval = "fused"
    ) -> Prepared:
        """The same for a chat that was built before. Earlier answers take part if the question is its last message."""
        prepared = find_stored(self.knowledge, self.answers, question, request, top_k, retrieval)
        prepared = self._judged(prepared)
        if prepared.stored_reply is not None:  # a model that rests goes on resting
            return prepared
        request = self.answers.drafting(prepared.request, prepared.consulted)
        with self._alive.use():
            prompt = encode_prompt(self.engine, request)
        self._keep_encoded(request, prompt)
        sources = sources_of(prepared.retrieved, prompt)
        return replace(prepared, request=request, sources=sources, prompt_tokens=len(prompt.tokens))

    def prepare_with_documents(self, request: Request) -> Prepared | None:
        """The same for a chat with documents of its own; None if earlier answers may have no part in it."""
        last = request.prompt[-1] if request.quotes else None
        if not isinstance(last, Message) or self.answers.chat_way(request) == "off":
            return None
        prepared = self._judged(find_for_documents(self.answers, last.content, request))
        if prepared.stored_reply is not None:
            return prepared
        return replace(prepared, request=self.answers.drafting(prepared.request, prepared.consulted))

    def _judged(self, prepared: Prepared) -> Prepared:
        """The same with the stored answer that rules doubt, if the model decides that it answers the question."""
        consulted = prepared.consulted
        doubted = None if consulted is None else consulted.found.doubted
        if consulted is None or doubted is None:
            return prepared
        with self._alive.use():
            skill = recall_skill(self.engine)
        if (why_not := why_no_judge(skill)) is not None:
            found = replace(consulted.found, refused=f"{consulted.found.refused}; {why_not}")
            return replace(prepared, consulted=replace(consulted, found=found))
        asking_it = judging_request(prepared.request, prepared.question, doubted.entry.question)
        if skill is None or not skill.trusts(self.answer(asking_it).reply):
            return prepared
        return with_stored_reply(prepared, self.answers.give(consulted, doubted, prepared.request))

    def ingest(self, paths: str | Path | Sequence[str | Path] = (), **choices: Any) -> IngestResult:
        """Put files, folders, patterns or given documents into the library. See `Knowledge.ingest`."""
        return self.knowledge.ingest(paths, **choices)

    def forget(self, *names: str, **choices: Any) -> Forgotten:
        """Remove documents and everything that was computed from them. See `Knowledge.forget`."""
        return self.knowledge.forget(*names, **choices)

    async def aask(self, question: str, **options: Unpack[AskOptions]) -> Answer:
        """`ask` for coroutines."""
        stream = await asyncio.to_thread(lambda: self.ask_stream(question, **options))
        answer = await AsyncReplyStream(stream).reply()
        assert isinstance(answer, Answer)
        return answer

    async def agenerate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Reply:
        """`generate` for coroutines: the event loop stays free, cancelling the task stops the model."""
        return await self.astream(prompt, **options).reply()

    async def achat(self, messages: str | Sequence[MessageLike], **options: Unpack[Options]) -> Reply:
        """`chat` for coroutines."""
        return await self.astream(as_messages(messages), **options).reply()

    def astream(self, prompt: PromptLike, **options: Unpack[Options]) -> AsyncReplyStream:
        """`stream` for coroutines: `async for piece in session.astream(...)`."""
        return AsyncReplyStream(self.stream(prompt, **options))

    def warm(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        *,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[Options],
    ) -> list[Reuse]:
        """Compute prompts now and store their KV, so that they start fast later. What is stored already costs nothing.

        One prompt, or several: texts, lists of messages, lists of token ids. Returns when all of it is kept.
        Raises as `generate` does.
        """
        return self._warm([(prompt, options) for prompt in as_prompts(prompts)], progress)

    def warm_knowledge(
        self, passages: int = 8, *, progress: Callable[[int, int], None] | None = None, **options: Unpack[Options]
    ) -> list[Reuse]:
        """The same for what questions begin with: the system prompt of `ask`, the passages that came first most."""
        library = self.knowledge.library(options.get("tenant"), options.get("cache_salt"))
        quotes = [[], *([quote_of(chunk)] for chunk in library.top_retrieved(passages))]
        return self._warm([(asking(""), {**options, "documents": some}) for some in quotes], progress)

    def _warm(
        self, prompts: Sequence[tuple[PromptLike, Options]], progress: Callable[[int, int], None] | None
    ) -> list[Reuse]:
        done = []
        for number, (prompt, options) in enumerate(prompts):
            chosen: Options = {**options, "max_tokens": 0}
            done.append(self.stream(prompt, **chosen).reply.reuse)
            if progress is not None:
                progress(number + 1, len(prompts))
        self.flush()
        return done

    def prefetch(self, request: Request, cancelled: IsCancelled | None = None) -> Prefetch:
        """For a request that waits for its turn: start to fetch what an origin has of its prompt, and bring what is on
        disk to memory, until it is there or `cancelled`. `close` what is returned once the request has begun."""
        with self._alive.use():
            settled = replace(request, adapter=self.adapters.resolve(request.adapter))
            prompt = encode_prompt(self.engine, settled, self._written, cancelled)
            self._keep_encoded(request, prompt)
            evidence = self._evidence(settled, prompt)
            stops = cancelled or (lambda: False)
            return self.cache.prefetch(settled, prompt.tokens, stops, evidence, prompt.prompt_layout)

    def _keep_encoded(self, request: Request, prompt: PromptTokens) -> None:
        """A prompt is tokenized once, unless a reply that is written meanwhile may change how."""
        if request.quotes or not self.settings.keep_reply_tokens:
            self._encoded.put(request, prompt)

    def flush(self, timeout_seconds: float = 60.0) -> bool:
        """Wait until everything computed so far is on disk; False if that takes longer."""
        return self.answers.flush(timeout_seconds) and self.cache.flush(timeout_seconds)

    def _answer(
        self,
        request: Request,
        cancelled: IsCancelled,
        planned: OnPlanned,
        time_is_up: threading.Event | None = None,
    ) -> Generator[TextPiece, None, Reply]:
        with self.awake(cancelled), self.adapters.use(request.adapter, cancelled) as adapter, ExitStack() as opened:
            settled = replace(request, adapter=adapter, answers=self.answers.chat_way(request))
            encoded = self._encoded.take(request)
            return (yield from self._reply(settled, encoded, cancelled, planned, time_is_up, opened))

    def _reply(
        self,
        request: Request,
        encoded: PromptTokens | None,
        cancelled: IsCancelled,
        planned: OnPlanned,
        time_is_up: threading.Event | None,
        opened: ExitStack,
    ) -> Generator[TextPiece, None, Reply]:
        started = time.perf_counter()
        engine, cache = self.engine, self.cache
        prompt = encoded or encode_prompt(engine, request, self._written, cancelled)
        constraint = self._constraint(request, cancelled, opened)
        generation = Generation(engine, request, prompt, constraint, started=started)
        may_draft = engine.capabilities.spans and not self.settings.deterministic
        evidence = self._evidence(request, prompt)
        reuse: Reuse | None = None
        while generation.finish_reason is None:  # once; again where a longer context needs other KV
            prompt_layout = prompt.prompt_layout if reuse is None else None  # the report of the first time stays true
            with cache.prepare(request, generation.context, cancelled, evidence, prompt_layout) as prefill:
                if may_draft and generation.drafts is None:
                    generation.drafts = drafts_for(request, prefill.lookup, engine, cache.costs)
                if reuse is None:
                    planned(prefill, replace(prefill.reuse, replayed_replies=prompt.replayed_replies))
                text = generation.take(prefill.run(generation.capacity, cancelled))
                if reuse is None:
                    reuse = replace(prefill.reuse, replayed_replies=prompt.replayed_replies)
                    if evidence is not None:
                        cache.offer(evidence)
                    prefill.note(self._prompt(request, prefill.lookup), reuse, time.perf_counter() - started)
                prefill.commit_prompt()
                if text:
                    yield text
                ends = (lambda: False) if time_is_up is None else time_is_up.is_set
                yield from decode(engine, generation, prefill.context, cancelled, ends)
        assert reuse is not None
        reply = parse_reply(generation.reply(reuse), request, engine.tokenizer)
        self._written.note(engine, prompt, request, reply)
        return reply

    def _evidence(self, request: Request, prompt: PromptTokens) -> Evidence | None:
        """The passages of a library that stand in the prompt; None if there are none."""
        if all(request.quotes[used.index].chunk is None for used in prompt.quoted):
            return None
        library = self.knowledge.library(request.tenant, request.cache_salt)
        tokenizer = self.engine.identity(self.engine.regime(len(prompt.tokens))).tokenizer
        return Evidence.of(library, tokenizer, request, prompt)

    def _constraint(self, request: Request, cancelled: IsCancelled, opened: ExitStack) -> Constraint | None:
        """What the reply must obey; None if anything goes.

        A call goes before the form of the reply: a model that must call, calls, and one that may call chooses. Without
        a form a model that may call is free, also with strict tools: it may answer in words.
        """
        choice, tokenizer, form = request.tool_choice, self.engine.tokenizer, request.grammar
        if form is None and not choice.forces:
            return None
        style = detect_style(tokenizer.template)
        calls = call_grammar(style, request.tools, choice, parallel=request.parallel_tool_calls)
        if calls is not None and choice.forces:
            form, calls = calls, None
        assert form is not None, "a choice that forces has tools"
        self._grammars = self._grammars or GrammarBackend(tokenizer, self.settings.parallel or 2)
        openers = () if calls is None else call_openers(style, tokenizer)
        return opened.enter_context(self._grammars.start(form, cancelled, calls, openers))

    def explain(self, prompt: PromptLike, **options: Unpack[Options]) -> Explanation:
        """Where the KV of a prompt would come from and why not more of it, without running it.

        Names the first token that differs from a stored prompt, and text that changes from request to request.
        """
        return self.explain_request(Request.of(prompt, **options))

    def explain_request(self, request: Request) -> Explanation:
        """The same for a request that was built before."""
        with self._alive.use():
            prompt = encode_prompt(self.engine, request, self._written)
            with self.cache.peek(request, prompt.tokens, prompt.prompt_layout) as prefill:
                return prefill.explain(self._prompt(request, prefill.lookup))

    def _prompt(self, request: Request, lookup: CacheLookup) -> Prompt:
        identity = self.engine.identity(self.engine.regime(len(lookup.tokens)))
        asked, quotes = request.prompt, bool(request.quotes)
        return Prompt(lookup.kv_space, identity, self.engine.name, lookup.tokens, asked, quotes)

    def close(self) -> None:
        """Keep what is waiting, within a bounded time, and free the model, unless it was given. Idempotent."""
        self._alive.close()
        self._finalizer()
        self.answers.close()
        if self._group is None:
            self.knowledge.close()
        else:
            self._group.remove(self)
        if self._grammars is not None:
            self._grammars.close()
        engine, self._engine = self._engine, None
        if engine is not None and self._owns_engine:
            engine.close()
        elif engine is not None:
            with suppress(Closed):  # by its owner
                self.adapters.unload_unused()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session {self._engine.name if self._engine else 'closed'}>"


def open_cache(engine: Engine, settings: Settings, adapters: LoraManager) -> PrefixCache:
    """Raises `InvalidSetting`, and `CacheUnusable` for a folder that was named."""
    can = engine.capabilities
    store = open_store(settings, share=1.0 if can.crowded else 0.5, quantized=quantized_coder(engine, settings))
    kv = (StoredKv if can.spans else CheckpointKv)(engine, settings, store)
    chunks = ChunkPrefill(kv, settings)
    if settings.origin is None:
        return PrefixCache(kv, settings, adapters, chunks)
    from rekindle.remote.remote_kv import RemoteKv  # what checks signatures is not always installed

    return PrefixCache(kv, settings, adapters, chunks, RemoteKv(chunks, settings))
