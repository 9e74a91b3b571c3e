"""Linear layers of a few tokens: the same sums, in another order, where that is faster."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from rekindle.engine.base import Row
from rekindle.engine.hf.few_tokens import FewTokensLinear, speed_up
from tests.tiny import tiny_engine


@pytest.fixture
def avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were a processor on which it is faster."""
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: True)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each product that is not torch's own."""
    seen: list[int] = []
    product = torch.mm

    def noted(weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        seen.append(inputs.shape[1])
        return product(weight, inputs)

    monkeypatch.setattr("torch.mm", noted)
    return seen


@pytest.mark.usefixtures("avx512")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("tokens", "few"), [(1, False), (3, False), (4, True), (48, True), (49, False)])
def test_a_few_tokens_give_what_torch_gives(tokens: int, few: bool, bias: bool, products: list[int]) -> None:
    torch.manual_seed(tokens)
    layer = nn.Linear(24, 40, bias=bias)
    speed_up(layer)
    hidden = torch.randn(1, tokens, 24)
    out = layer(hidden)
    assert products == ([tokens] if few else [])
    assert out.is_contiguous()
    torch.testing.assert_close(out, functional.linear(hidden, layer.weight, layer.bias), atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("avx512")
def test_several_sequences_at_once_are_left_to_torch(products: list[int]) -> None:
    layer = nn.Linear(24, 40)
    speed_up(layer)
    layer(torch.randn(2, 8, 24))
    layer(torch.randn(8, 24))
    assert products == []


@pytest.mark.usefixtures("avx512")
def test_only_plain_float32_layers_change() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16), Own(4, 4), nn.ReLU())
    speed_up(model)
    assert [type(layer) for layer in model] == [FewTokensLinear, nn.Linear, Own, nn.ReLU]


@pytest.mark.parametrize(("mkl", "capability"), [(False, "AVX512"), (True, "AVX2"), (True, "DEFAULT")])
def test_other_processors_keep_torchs_own(mkl: bool, capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: mkl)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    layer = nn.Linear(4, 4)
    speed_up(layer)
    assert type(layer) is nn.Linear


@pytest.mark.usefixtures("avx512")
def test_a_models_own_layers_stay_as_they_are_and_its_steps_agree(products: list[int]) -> None:
    """The user's model is shared, its module tree is not."""
    tokens = list(range(3, 23))
    engine = tiny_engine()
    with engine.open(len(tokens), "plain") as sequence:
        engine.step([Row.following(sequence, tokens[:4])])
        (logits,) = engine.step([Row.following(sequence, tokens[4:])])
        assert set(products) == {4, 16}
        assert not any(isinstance(layer, FewTokensLinear) for layer in engine.model.modules())
        with torch.inference_mode():
            expected = engine.model(torch.tensor([tokens])).logits[0, -1:]
    torch.testing.assert_close(torch.from_numpy(logits), expected, atol=1e-4, rtol=1e-4)
