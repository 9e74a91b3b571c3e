"""Where a model runs: sensible by default, as told if told, refused if impossible."""

from __future__ import annotations

import pytest
import torch

from rekindle.engine.hf import device as module
from rekindle.engine.hf.device import choose_placement
from rekindle.errors import InvalidSetting


@pytest.fixture
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("computes", "stored", "expected"),
    [
        (False, torch.bfloat16, torch.float32),
        (True, torch.bfloat16, torch.bfloat16),
        (True, torch.float32, torch.float32),
        (True, torch.float16, torch.float32),
    ],
)
def test_a_cpu_computes_what_it_can(
    cpu_only: None, monkeypatch: pytest.MonkeyPatch, computes: bool, stored: torch.dtype, expected: torch.dtype
) -> None:
    monkeypatch.setattr(module, "cpu_computes_bfloat16", lambda: computes)
    placement = choose_placement(stored=stored)
    assert placement.device.type == "cpu" and placement.dtype == expected and placement.reason


@pytest.mark.parametrize(
    ("native", "stored", "expected"),
    [
        (True, torch.float32, torch.bfloat16),
        (True, torch.float16, torch.float16),
        (False, torch.bfloat16, torch.float16),
    ],
)
def test_a_gpu_computes_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, native: bool, stored: torch.dtype, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native)
    placement = choose_placement(stored=stored)
    assert placement.device.type == "cuda" and placement.dtype == expected


def test_apples_gpu_computes_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_placement(stored=torch.float32).dtype == torch.float16
    assert choose_placement(stored=torch.bfloat16).dtype == torch.bfloat16
    assert choose_placement("cpu").device.type == "cpu"


def test_what_is_told_is_done(cpu_only: None) -> None:
    assert choose_placement("cpu", "float16").dtype == torch.float16


@pytest.mark.parametrize(
    ("device", "dtype", "words"),
    [
        ("cuda", "auto", "not available"),
        ("cuda:7", "auto", "not available"),
        ("tpu", "auto", "unknown"),
        ("cpu:x", "auto", "unknown"),
        ("cpu", "float8", "unknown"),
        ("mps", "auto", "not"),
    ],
)
def test_what_is_not_there_is_refused(cpu_only: None, device: str, dtype: str, words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        choose_placement(device, dtype)
