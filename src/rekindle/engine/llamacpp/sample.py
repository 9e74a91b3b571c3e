"""A chain of llama.cpp's own samplers, over any logits."""

from __future__ import annotations

import ctypes
import secrets
import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rekindle.core.request import Sampling
from rekindle.engine.llamacpp.c_api import DEFAULT_SEED, TokenData, TokenDataArray, llama

_COLDEST = 1e-6  # lower temperatures would overflow, and are greedy anyway
_TOKEN = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])


class ChainSampler:
    """Draws the tokens of one reply. See `TokenSampler` for the contract."""

    def __init__(
        self, sampling: Sampling, context: Sequence[int], vocabulary_size: int, *, token_limit: int = 1 << 16
    ) -> None:
        """`context` is the prompt: a repetition penalty counts it too, as far as the last `token_limit` go."""
        self._chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        weakref.finalize(self, llama.llama_sampler_free, self._chain).atexit = False
        self._remembers = sampling.repetition_penalty != 1.0
        for sampler in _samplers(sampling, vocabulary_size, token_limit):
            llama.llama_sampler_chain_add(self._chain, sampler)
        if self._remembers:
            for token in context:
                llama.llama_sampler_accept(self._chain, token)
        self._candidates = np.zeros(vocabulary_size, _TOKEN)
        self._plainly_greedy = sampling.temperature < _COLDEST and not self._remembers

    def draw(self, logits: NDArray[np.float32]) -> int:
        """The next token, from logits `[vocabulary]`."""
        if self._plainly_greedy:
            return int(logits.argmax())
        candidates = self._candidates
        candidates["id"] = np.arange(len(candidates))
        candidates["logit"], candidates["p"] = logits, 0.0
        data = ctypes.cast(candidates.ctypes.data, ctypes.POINTER(TokenData))
        array = TokenDataArray(data=data, size=len(candidates), selected=-1, sorted=False)
        llama.llama_sampler_apply(self._chain, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        llama.llama_sampler_accept(self._chain, token)
        return token


def _samplers(sampling: Sampling, vocabulary_size: int, token_limit: int) -> list[int]:
    """In llama.cpp's usual order: penalties, truncation, temperature, sampling."""
    chain = []
    if (penalty := sampling.repetition_penalty) != 1.0:
        chain.append(llama.llama_sampler_init_penalties(vocabulary_size, token_limit, penalty, 0.0, 0.0))
    if sampling.temperature < _COLDEST:
        return [*chain, llama.llama_sampler_init_greedy()]
    if sampling.top_k is not None and sampling.top_k < vocabulary_size:
        chain.append(llama.llama_sampler_init_top_k(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(llama.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p > 0.0:
        chain.append(llama.llama_sampler_init_min_p(sampling.min_p, 1))
    chain.append(llama.llama_sampler_init_temp(sampling.temperature))
    chain.append(llama.llama_sampler_init_dist(_seed(sampling.seed)))
    return chain


def _seed(seed: int | None) -> int:
    """32 bits of a seed; not the value that means a random seed to llama.cpp."""
    wanted = secrets.randbits(32) if seed is None else (seed ^ seed >> 32) & 0xFFFFFFFF
    return min(wanted, DEFAULT_SEED - 1)
