"""Every error that Rekindle raises on purpose. Each sentence says what to do.

RekindleError
|-- ModelError              a model cannot be found, fetched, read or driven
|   |-- ModelNotFound       no such name, folder or file
|   |-- DownloadFailed      network, server or index refused
|   |-- DigestMismatch      the file that came is not the file that was pinned
|   |-- NoSpace             the disk is too full for it
|   |-- OutOfMemory         the device's memory is too small for it
|   |-- NotAModel           the files are there, but are something else
|   |-- BrokenModel         it is a model, but damaged or incomplete
|   |-- UnsupportedModel    a sound model of a kind this engine cannot drive
|   |-- AdapterNotFound     no adapter of that name is loaded
|   `-- AdapterRefused      a LoRA adapter that cannot be read, or not be put on this model
|-- CacheError              the cache cannot be used, or what was asked of it
|   |-- CacheUnusable       the folder or its catalog cannot be opened
|   |-- KvLost              KV that was found could not be read: compute it instead
|   |-- EntryNotFound       no entry of that name
|   `-- PinRefused          what is pinned would take more of the limit than it may
|-- KnowledgeError          documents cannot be read, kept or found
|   |-- UnreadableDocument  a file that holds no text that can be read: damaged, encrypted, too large, or no document
|   |-- DocumentNotFound    no document of that name
|   |-- NothingKnown        nothing was ingested yet
|   |-- LibraryFull         the libraries have reached `library_limit`
|   |-- BrokenBackup        a backup of a library that is damaged, incomplete or something else
|   `-- KnowledgeUnusable   the library cannot be opened or written
|-- ExtraMissing            the extra that brings a parser or an adapter is not installed
|-- EngineMissing           the extra that brings the engine is not installed
|-- InvalidSetting          an option has a value that makes no sense (also a ValueError)
|-- RequestError            the request itself cannot be served (also a ValueError)
|   |-- InvalidPrompt       empty, not text, or no chat template
|   |-- InvalidSampling     a sampling value out of its range
|   |-- InvalidGrammar      a grammar or schema that is wrong, too large or not supported
|   `-- ContextOverflow     longer than the model's context
|-- DaemonFailed            the background process of the commands cannot be started, or died
|-- StepRefused             a row that breaks the engine's contract: a bug in the caller
|-- Closed                  the session or sequence was closed
`-- Cancelled               the caller asked to stop
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class RekindleError(Exception):
    """Root of all errors raised on purpose."""


class ModelError(RekindleError):
    """A model cannot be found, fetched, read or driven."""


class ModelNotFound(ModelError):
    """No such name, folder or file."""


class DownloadFailed(ModelError):
    """The network, the server or the index refused."""


class DigestMismatch(ModelError):
    """The file that came is not the file that was pinned."""


class NoSpace(ModelError):
    """The disk is too full for the model."""


class OutOfMemory(ModelError):
    """The device's memory is too small for the model."""


class NotAModel(ModelError):
    """The files are there, but they are something else."""


class BrokenModel(ModelError):
    """A model whose files are damaged or incomplete."""


class UnsupportedModel(ModelError):
    """A sound model of a kind that this engine cannot drive."""


class AdapterNotFound(ModelError):
    """No adapter of that name is loaded, nor known to this machine."""


class AdapterRefused(ModelError):
    """A LoRA adapter that is damaged, of a kind that is not supported, or made for another model."""


class CacheError(RekindleError):
    """The cache cannot be used, or what was asked of it."""


class CacheUnusable(CacheError):
    """The cache folder or its catalog cannot be opened."""


class KvLost(CacheError):
    """KV that was found could not be read: compute it instead."""


class EntryNotFound(CacheError):
    """The cache has no entry of that name."""


class PinRefused(CacheError):
    """What is pinned would take more of the cache's limit than it may."""


class KnowledgeError(RekindleError):
    """Documents cannot be read, kept or found."""


class UnreadableDocument(KnowledgeError):
    """A file holds no text that can be read: it is damaged, encrypted, too large, or no document."""


class DocumentNotFound(KnowledgeError):
    """The library has no document of that name."""


class NothingKnown(KnowledgeError):
    """Nothing was ingested yet."""


class LibraryFull(KnowledgeError):
    """The libraries have reached `library_limit`."""


class BrokenBackup(KnowledgeError):
    """A backup of a library that is damaged, incomplete or something else."""


class KnowledgeUnusable(KnowledgeError):
    """The library cannot be opened or written."""


class ExtraMissing(RekindleError):
    """The extra that brings a parser or an adapter is not installed."""


class EngineMissing(RekindleError):
    """The extra that brings the engine is not installed, or the engine's library cannot be used."""


class InvalidSetting(RekindleError, ValueError):
    """An option has a value that makes no sense here."""


class RequestError(RekindleError, ValueError):
    """The request itself cannot be served."""


class InvalidPrompt(RequestError):
    """The prompt is empty, is not text, or needs a chat template the model lacks."""


class InvalidSampling(RequestError):
    """A sampling value is out of its range."""


class InvalidGrammar(RequestError):
    """A grammar or JSON schema is wrong, too large or not supported."""


class ContextOverflow(RequestError):
    """The prompt is longer than the model's context."""

    def __init__(
        self, prompt_tokens: int, context_tokens: int, advice: str, *, counted: bool = True, longest: int = 0
    ) -> None:
        """`counted`: whether the tokens were counted; else `prompt_tokens` is a lower bound, from the length.
        `longest`: the context that the model was made for, if the setting `context` may be raised to it.
        """
        number = f"{prompt_tokens:,}" if counted else f"at least {prompt_tokens:,}"
        holds = f"the model's context holds {context_tokens:,}"
        if longest > context_tokens:
            holds = f"the context is limited to {context_tokens:,}"
            advice = f"{advice} Or raise --context: the model takes up to {longest:,}."
        super().__init__(f"The prompt has {number} tokens, {holds}. {advice}")
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class DaemonFailed(RekindleError):
    """The background process of the commands cannot be started, or it died."""


class StepRefused(RekindleError):
    """A row, or what its selector chose, breaks the engine's contract: a bug in the caller."""


class Closed(RekindleError):
    """The session or sequence was closed before."""


class Cancelled(RekindleError):
    """The caller asked to stop; what was being computed is dropped."""


def why_unreadable(path: object, error: OSError | RuntimeError) -> str:
    """Why a file cannot be read, as a sentence: the same words in every command."""
    if isinstance(error, FileNotFoundError):
        return f"There is no file {path}."
    if isinstance(error, IsADirectoryError):
        return f"{path} is a folder, not a file."
    return f"{path} cannot be read: {getattr(error, 'strerror', None) or error}."


_COMPARED_CHARACTERS = 128


def nearest(name: str, known: Iterable[str]) -> str:
    """How a refusal of an unknown `name` ends: with the known name nearest to it, or with all of them.

    Of a name only as much is compared as a name may have: requests bring names of megabytes.
    """
    choices = sorted(known)
    close = get_close_matches(name[:_COMPARED_CHARACTERS], choices, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(choices)}."
