"""Whatever the bytes: every parser reads them or refuses them, in bounded time and memory (`family`).

FUZZ_COUNT   how many inputs each family gets; `make soak` gives a million together
FUZZ_SEED    another seed is other inputs
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import FAMILIES

COUNT = int(os.environ.get("FUZZ_COUNT", "600"))
SEED = os.environ.get("FUZZ_SEED", "1")
_TIMEOUT_SECONDS = 300 + COUNT // 4

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux tells it"),
    pytest.mark.timeout(_TIMEOUT_SECONDS + 60),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_input_is_read_or_refused_and_nothing_else_happens(family: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.family", family, SEED, "0", str(COUNT)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
