"""LoRA adapters: configs and safetensors headers that say anything."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from rekindle.engine.lora_files import CONFIG, WEIGHTS, read_adapter
from rekindle.errors import AdapterRefused, ModelNotFound
from tests.fuzz import mutations
from tests.fuzz.family import Family
from tests.lora import fake_pairs, save_lora

_PATTERNS = ("(a+)+$", ".*.*.*.*.*.*.*x", "(?:\\w{200}){200}", "(?=a)b", "(.)\\1", "[", "layers.1.k", "^layers",
             "\\w{90}", "(" * 300 + ")" * 300, "é", "\\", "k|", "(?P<x>a)(?P=x)", "a{0,65535}{0,65535}")  # fmt: skip


class Inputs(Family):
    """An adapter of three layers with all options that are read."""

    errors = (AdapterRefused, ModelNotFound)

    def __init__(self, folder: Path) -> None:
        self.folder = save_lora(
            folder / "adapter",
            fake_pairs(1),
            target_modules=["k", "v"],
            rank_pattern={"layers.1.k": 2},
            alpha_pattern={"v": 4},
            layers_to_transform=[1, 2],
            use_rslora=True,
            lora_dropout=0.1,
            base_model_name_or_path="somebody/model",
        )
        self.config = json.loads((self.folder / CONFIG).read_text())
        self.weights = (self.folder / WEIGHTS).read_bytes()
        self.names = [name for name in json.loads(self.weights[8 : 8 + self.header_bytes]) if name != "__metadata__"]

    @property
    def header_bytes(self) -> int:
        return int.from_bytes(self.weights[:8], "little")

    def prepare(self, random: Random) -> int:
        config, weights = dict(self.config), self.weights
        kind = random.randrange(4)
        if kind == 0:
            config = mutations.tree(random, config)
        elif kind == 1:
            name = random.choice(("rank_pattern", "alpha_pattern", "target_modules", "layers_to_transform"))
            count = random.choice((1, 3, 20, 3000 if random.randrange(20) == 0 else 5))
            chosen = [f"{random.choice(_PATTERNS)}{n if n > 20 else ''}" for n in range(count)]
            as_list = [*range(count)] if name == "layers_to_transform" else chosen
            config[name] = dict.fromkeys(chosen, 2) if name.endswith("pattern") else random.choice((as_list, chosen[0]))
        elif kind == 2:
            weights = self._other_weights(random)
        if random.randrange(5) == 0:
            weights = mutations.bits(random, weights)
        text = mutations.text_of(config).encode("utf-8", "surrogatepass")
        if random.randrange(10) == 0:
            text = mutations.bits(random, text)
        (self.folder / CONFIG).write_bytes(text)
        (self.folder / WEIGHTS).write_bytes(weights)
        return len(text) + 2 * len(weights)

    def read(self) -> None:
        lora = read_adapter(self.folder)
        assert lora.digest

    def _other_weights(self, random: Random) -> bytes:
        header = json.loads(self.weights[8 : 8 + self.header_bytes])
        body = self.weights[8 + self.header_bytes :]
        if random.randrange(4) == 0:  # many tensors of the same bytes
            for number in range(random.choice((10, 5000))):
                header[f"base_model.model.layers.{number}.k.lora_A.weight"] = header[self.names[0]]
        elif random.randrange(4) == 0:  # long names, among them those that patterns need long for
            header["a" * random.choice((100, 100_000)) + ".lora_A.weight"] = header[self.names[0]]
        else:
            header = mutations.tree(random, header)
        text = mutations.text_of(header).encode("utf-8", "surrogatepass")
        length = len(text) if random.randrange(8) else mutations.number(random, 8, len(text))
        return length.to_bytes(8, "little") + text + body
