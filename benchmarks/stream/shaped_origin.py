"""An origin behind a shaped link, in a process of its own: what it does takes no time of who is measured.

python -m benchmarks.stream.shaped_origin FOLDER     says its address, then answers commands, one line of JSON each
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.stream.shaping import ShapedProxy
from benchmarks.stream.traces import Trace
from rekindle.errors import RekindleError
from rekindle.remote.publish.serve import OriginServer, OriginSettings

_ANY = Trace("any", np.ones(1), np.full(1, 1e9))
_STOP_SECONDS = 10.0


class ShapedOrigin:
    """That process, from outside. A context manager."""

    def __init__(self, folder: Path) -> None:
        """Raises `RekindleError` if it does not start."""
        command = [sys.executable, "-m", "benchmarks.stream.shaped_origin", str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lock = threading.Lock()
        self.url = str(self._answer()["url"])

    def begin(self, trace: Trace) -> None:
        """End all connections, and begin another trace."""
        shape = {"name": trace.name, "lengths": trace.lengths.tolist(), "rates": trace.rates.tolist()}
        self._ask({"begin": {**shape, "offset": trace.offset}})

    @property
    def carried_bytes(self) -> int:
        """What came over the link since then."""
        return int(self._ask({})["carried"])

    def __enter__(self) -> ShapedOrigin:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # it ends when nobody asks any more
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with self._lock:
            print(json.dumps(command), file=self._process.stdin, flush=True)
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RekindleError("The origin of the bench has ended; what it said is above.")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main(folder: Path) -> None:
    """Serve until standard input ends."""
    with OriginServer(folder, OriginSettings(port=0)).running() as url:
        place = urlsplit(url)
        with ShapedProxy(str(place.hostname), int(place.port or 0), _ANY) as proxy:
            print(json.dumps({"url": proxy.url}), flush=True)
            for line in sys.stdin:
                if shape := json.loads(line).get("begin"):
                    lengths, rates = np.array(shape["lengths"]), np.array(shape["rates"])
                    proxy.begin(Trace(shape["name"], lengths, rates, shape["offset"]))
                print(json.dumps({"carried": proxy.link.carried_bytes}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
