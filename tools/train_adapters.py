"""Train the three sample adapters of src/rekindle/samples/adapters, from the notes in tools/adapter_texts.

    python tools/train_adapters.py --model FOLDER --out src/rekindle/samples/adapters

FOLDER holds SmolLM2-135M-Instruct as `rekindle pull smollm2` writes it. Needs torch, transformers and safetensors, and
no network. Writes OUT/NAME/ in PEFT's format and what was measured to OUT/training.json. The seed is fixed: the same
machine gives the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))

from adapter_texts.examples import STYLES, Example, examples, in_style

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
SIZE_LIMIT_BYTES = 1_000_000
SEED = 9
BATCH = 8
WARMUP_SHARE = 0.1  # of the steps
REPLY_TOKENS = 96  # the longest reply of the examples has 57
END = "<|im_end|>"
IGNORED = -100  # in place of a token that is not part of the reply


@dataclass(frozen=True)
class Recipe:
    """What one adapter adds to the model. The three differ on purpose: they are test cases too.

    `rank_pattern` and `alpha_pattern` give the projections they name another rank and alpha; `layers` is None for all.
    """

    name: str
    does: str
    targets: tuple[str, ...]
    rank: int
    alpha: int
    learning_rate: float
    rslora: bool = False
    layers: tuple[int, ...] | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, int] = field(default_factory=dict)

    def rank_of(self, target: str) -> int:
        """The rank of a projection."""
        return self.rank_pattern.get(target, self.rank)

    def scale_of(self, target: str) -> float:
        """What the product of both matrices is multiplied with."""
        alpha, rank = self.alpha_pattern.get(target, self.alpha), self.rank_of(target)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def config(self) -> dict[str, Any]:
        """adapter_config.json, as PEFT reads it."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": BASE,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "use_rslora": self.rslora,
            "use_dora": False,
            "target_modules": list(self.targets),
            "layers_to_transform": None if self.layers is None else list(self.layers),
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": dict(self.alpha_pattern),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }


RECIPES = (
    Recipe("list", "answers with three short bullets", ("q_proj", "v_proj"), rank=8, alpha=16, learning_rate=1e-3),
    Recipe(
        "json",
        "answers with one JSON object: subject, topic, answer, tip",
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        rank=4,
        alpha=4,
        learning_rate=1e-3,
        rslora=True,
    ),
    Recipe(
        "pirate",
        "answers like a stage pirate",
        ("gate_proj", "up_proj", "down_proj"),
        rank=4,
        alpha=8,
        learning_rate=1e-3,
        layers=tuple(range(15, 30)),
        rank_pattern={"down_proj": 6},
        alpha_pattern={"down_proj": 12},
    ),
)


class LoraLinear(nn.Module):
    """A frozen projection and what an adapter adds to it. `on` False is the projection alone."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale, self.on = base, scale, True
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:  # [..., in_features] -> [..., out_features]
        out: Tensor = self.base(x)
        if not self.on:
            return out
        return out + functional.linear(functional.linear(x, self.lora_a), self.lora_b) * self.scale


def attach(model: nn.Module, recipe: Recipe) -> dict[str, LoraLinear]:
    """Wrap the projections a recipe names, in place. Returns them by their names in the bare model.

    Every other weight is frozen. Raises ValueError when the model has none of the projections.
    """
    model.requires_grad_(False)
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    wrapped: dict[str, LoraLinear] = {}
    for name, module in found:
        path, _, target = name.rpartition(".")
        if target not in recipe.targets or (recipe.layers is not None and layer_of(name) not in recipe.layers):
            continue
        device = module.weight.device
        wrapped[name] = LoraLinear(module, recipe.rank_of(target), recipe.scale_of(target)).to(device)
        setattr(model.get_submodule(path), target, wrapped[name])
    if not wrapped:
        raise ValueError(f"this model has none of {', '.join(recipe.targets)}: take {BASE}")
    return wrapped


def detach(model: nn.Module, wrapped: Mapping[str, LoraLinear]) -> None:
    """Undo `attach`."""
    for name, module in wrapped.items():
        path, _, target = name.rpartition(".")
        setattr(model.get_submodule(path), target, module.base)


def layer_of(name: str) -> int | None:
    """The number of the decoder layer that a module is in, None outside of them."""
    number = name.partition("layers.")[2].partition(".")[0]
    return int(number) if number else None


def save(folder: Path, recipe: Recipe, wrapped: Mapping[str, LoraLinear]) -> int:
    """Write an adapter as PEFT does, in float16. Returns the bytes of its weights.

    Raises ValueError when a weight is not finite or the file is over the limit.
    """
    tensors: dict[str, Tensor] = {}
    for name, module in wrapped.items():
        for letter, weight in (("A", module.lora_a), ("B", module.lora_b)):
            half = weight.detach().to("cpu", torch.float16).contiguous()
            if not bool(torch.isfinite(half).all()):
                raise ValueError(f"{recipe.name}: {name} is not finite; train with a lower learning rate")
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = half
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "adapter_model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(recipe.config(), indent=2) + "\n", "utf-8")
    weights.chmod(0o644)  # safetensors writes for the owner alone; these are for everyone
    size_bytes = weights.stat().st_size
    if size_bytes >= SIZE_LIMIT_BYTES:
        raise ValueError(f"{weights} has {size_bytes} bytes, the limit is {SIZE_LIMIT_BYTES}: lower a rank")
    return size_bytes


@dataclass(frozen=True)
class Tokens:
    """An example as the model sees it: the prompt up to where the assistant speaks, and the reply with its end."""

    prompt: list[int]
    reply: list[int]


def encode(tokenizer: Any, example: Example) -> Tokens:
    """Tokenize an example through the chat template."""
    text = tokenizer.apply_chat_template(example.messages, tokenize=False, add_generation_prompt=True)
    ids = [tokenizer(one, add_special_tokens=False)["input_ids"] for one in (text, example.reply)]
    return Tokens(ids[0], [*ids[1], end_of(tokenizer)])


def end_of(tokenizer: Any) -> int:
    """The token that ends a message in the chat template. What a tokenizer calls its end may be that of a document."""
    end: int | None = tokenizer.convert_tokens_to_ids(END)
    return int(tokenizer.eos_token_id) if end is None else end


def reply_loss(model: Any, batch: list[Tokens]) -> Tensor:
    """The summed loss of the replies in a batch, divided by nothing."""
    device = model.device
    rows = [torch.tensor([*one.prompt, *one.reply]) for one in batch]
    wanted = [torch.tensor([*([IGNORED] * len(one.prompt)), *one.reply]) for one in batch]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)  # [batch, tokens]
    labels = nn.utils.rnn.pad_sequence(wanted, batch_first=True, padding_value=IGNORED).to(device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    mask = torch.arange(ids.shape[1], device=device)[None] < lengths[:, None]
    spoken = labels[:, 1:] != IGNORED  # logits of prompts would cost more than all layers together
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        hidden = model.get_decoder()(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
        logits = model.get_output_embeddings()(hidden[:, :-1][spoken])  # [reply tokens, vocabulary]
    return functional.cross_entropy(logits.float(), labels[:, 1:][spoken], reduction="sum")


def batches(count: int, steps: int) -> Iterator[list[int]]:
    """Numbers of examples, a batch a step, in a new order each round."""
    order: list[int] = []
    for _ in range(steps):
        if len(order) < BATCH:
            order += torch.randperm(count).tolist()
        yield order[:BATCH]
        order = order[BATCH:]


def train(model: Any, recipe: Recipe, parameters: list[nn.Parameter], data: list[Tokens], steps: int) -> None:
    """Fit the adapter's weights: AdamW, a short warm-up, then straight down to nothing."""
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    warmup = max(1, round(steps * WARMUP_SHARE))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    model.train()
    for step, numbers in enumerate(batches(len(data), steps), start=1):
        batch = [data[number] for number in numbers]
        loss = reply_loss(model, batch) / sum(len(one.reply) for one in batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == steps:
            print(f"  {recipe.name}: step {step} of {steps}, loss {loss.item():.3f}", flush=True)
    model.eval()


@torch.no_grad()
def mean_loss(model: Any, data: list[Tokens]) -> float:
    """Loss a reply token, over all examples."""
    total = sum(reply_loss(model, data[start : start + BATCH]).item() for start in range(0, len(data), BATCH))
    return total / sum(len(one.reply) for one in data)


@torch.no_grad()
def replies(model: Any, tokenizer: Any, data: list[Tokens]) -> list[str]:
    """What the model says to each prompt, greedily."""
    longest = max(len(one.prompt) for one in data)
    pad = end_of(tokenizer)
    ids = torch.tensor([[pad] * (longest - len(one.prompt)) + one.prompt for one in data], device=model.device)
    mask = torch.tensor([[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in data])
    out = model.generate(
        input_ids=ids,
        attention_mask=mask.to(model.device),
        do_sample=False,
        max_new_tokens=REPLY_TOKENS,
        pad_token_id=pad,
        eos_token_id=pad,
    )
    return [tokenizer.decode(row[longest:], skip_special_tokens=True) for row in out]


@dataclass(frozen=True)
class Effort:
    """How long to train one adapter, and how many held-out prompts to answer with and without it."""

    steps: int = 300
    replies: int = 27


@dataclass(frozen=True)
class Measured:
    """What training one adapter gave. Shares and losses are of held-out examples; `before` is the bare model."""

    does: str
    examples: int
    held_out: int
    steps: int
    seconds: float
    size_bytes: int
    loss_before: float
    loss_after: float
    in_style_before: float
    in_style_after: float
    samples: list[dict[str, str]]


def make(model: Any, tokenizer: Any, recipe: Recipe, out: Path, effort: Effort) -> Measured:
    """Train one adapter, write it to `out`, and leave the model as it was."""
    torch.manual_seed(SEED)
    asked = effort.replies
    given = examples(recipe.name)
    held = [one for one in given if one.held_out]
    learned = [encode(tokenizer, one) for one in given if not one.held_out]
    tested = [encode(tokenizer, one) for one in held]
    spread = [number * len(held) // asked for number in range(asked)]  # over all subjects
    shown = sorted({number * (asked - 1) // 2 for number in range(3)})  # first, middle and last of them
    prompts = [tested[number] for number in spread]

    wrapped = attach(model, recipe)
    parameters = [weight for module in wrapped.values() for weight in (module.lora_a, module.lora_b)]
    switch(wrapped, on=False)
    loss_before, bare = mean_loss(model, tested), replies(model, tokenizer, prompts)
    switch(wrapped, on=True)
    started = time.perf_counter()
    train(model, recipe, parameters, learned, effort.steps)
    seconds = time.perf_counter() - started
    for weight in parameters:  # what is measured is what is written
        weight.data = weight.data.half().float()
    size_bytes = save(out / recipe.name, recipe, wrapped)
    loss_after, adapted = mean_loss(model, tested), replies(model, tokenizer, prompts)
    detach(model, wrapped)
    return Measured(
        does=recipe.does,
        examples=len(learned),
        held_out=len(held),
        steps=effort.steps,
        seconds=round(seconds, 1),
        size_bytes=size_bytes,
        loss_before=round(loss_before, 3),
        loss_after=round(loss_after, 3),
        in_style_before=round(sum(in_style(recipe.name, one) for one in bare) / asked, 3),
        in_style_after=round(sum(in_style(recipe.name, one) for one in adapted) / asked, 3),
        samples=[
            {"prompt": held[spread[number]].prompt, "without": bare[number], "with": adapted[number]}
            for number in shown
        ],
    )


def switch(wrapped: Mapping[str, LoraLinear], *, on: bool) -> None:
    """Let the adapter act, or not."""
    for module in wrapped.values():
        module.on = on


def show(name: str, measured: Measured) -> None:
    """Print what came out, for people."""
    print(
        f"{name}: loss {measured.loss_before} -> {measured.loss_after}, "
        f"in style {measured.in_style_before:.0%} -> {measured.in_style_after:.0%}, "
        f"{measured.size_bytes} bytes, {measured.seconds} s"
    )
    for sample in measured.samples:
        print(f"\n  > {sample['prompt']}\n  without: {sample['without']}\n  with: {sample['with']}", flush=True)
    print()


def main() -> None:
    """Train the adapters that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="SmolLM2 as a transformers folder")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the adapters go")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=Effort.steps, help=f"of {BATCH} examples each")
    parser.add_argument("--only", choices=list(STYLES), help="train this one only")
    parser.add_argument(
        "--replies", type=int, default=Effort.replies, help="held-out prompts to answer, with and without"
    )
    chosen = parser.parse_args()
    if chosen.steps < 1 or chosen.replies < 1:
        parser.error("--steps and --replies must be at least 1")
    tokenizer = AutoTokenizer.from_pretrained(chosen.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32, local_files_only=True)
    model.to(chosen.device).eval()
    chosen.out.mkdir(parents=True, exist_ok=True)
    page = chosen.out / "training.json"
    results = json.loads(page.read_text("utf-8")) if page.exists() else {}
    effort = Effort(chosen.steps, chosen.replies)
    for recipe in RECIPES:
        if chosen.only in (None, recipe.name):
            measured = make(model, tokenizer, recipe, chosen.out, effort)
            show(recipe.name, measured)
            results[recipe.name] = asdict(measured)
            page.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
