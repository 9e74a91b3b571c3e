"""The file of settings: TOML of any keys, values and nesting."""

from __future__ import annotations

from pathlib import Path
from random import Random

from rekindle.errors import InvalidSetting
from rekindle.settings import SETTINGS, Settings
from tests.fuzz import mutations
from tests.fuzz.family import Family

_VALUES = (
    "1", "-1", "0.5", "nan", "inf", "-inf", "1e400", "9" * 400, "9" * 5000, "0x" + "f" * 400, "0b1", "1_000", "true",
    '"1GB"', '"auto"', '""', '"none"', '"off"', '"~"', '"~\\u0000"', '"~nobody-here/x"', '"\\u0000"', '"\\uD800"',
    "'''a\nb'''", '"' + "x" * 20_000 + '"', "[]", "[1, 2]", "{}", "{a = 1}", "1979-05-27", "1979-05-27T07:32:00Z",
    "[" * 2000 + "]" * 2000, "{a=" * 1000 + "1" + "}" * 1000, "[" + "{}," * 1300 + "]", "07:32:00", '"10%"', "9" * 11,
)  # fmt: skip


class Inputs(Family):
    """Lines of all settings that there are, and of some that there are not."""

    errors = (InvalidSetting,)

    def __init__(self, folder: Path) -> None:
        self.path = folder / "rekindle.toml"
        self.names = list(SETTINGS)

    def prepare(self, random: Random) -> int:
        lines = []
        for name in random.sample(self.names, random.choice((0, 1, 1, 1, 2, 5))):
            key = random.choice(
                (
                    name,
                    name,
                    name,
                    name,
                    f'"{name}"',
                    f"{name}.x",
                    name.upper(),
                    "é",
                    "a." * random.choice((3, 1500, 20_000)) + "b",
                )
            )
            lines.append(f"{key} = {random.choice(_VALUES)}")
        if random.randrange(10) == 0:
            lines.append(
                random.choice(("[table]", "[[tables]]", "[a.b.c]", "# " + "c" * 100_000, "\ufeff", "[" * 3000))
            )
        text = "\n".join(lines).encode()
        if random.randrange(3) == 0:
            text = mutations.bits(random, text)
        self.path.write_bytes(text)
        return len(text)

    def read(self) -> None:
        Settings.load(environment={}, file=self.path)
