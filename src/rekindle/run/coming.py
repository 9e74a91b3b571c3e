"""What an origin has of a prompt: looked for, and on its way, while the prompt waits or its beginning is computed.

Nobody waits for it: who wants to know asks what has come of it by now.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from rekindle.core.cells import Cell, Cells
from rekindle.errors import Cancelled
from rekindle.origin.failure import OriginFailed
from rekindle.origin.line import Stop
from rekindle.run.carrier import OriginCarrier
from rekindle.run.link import Link

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Offer:
    """The beginning of a prompt, in one quality, on its way here."""

    carrier: OriginCarrier
    link: Link

    @property
    def cells(self) -> Cells:
        """What can come."""
        return self.carrier.cells


class Coming:
    """One prompt. `close` it, whatever happened."""

    def __init__(self, find: Callable[[Stop], Offer | None], tokens: int, failed: Callable[[str], None]) -> None:
        """Begin to look. `find` may raise `OriginFailed`, which `failed` is told; so many first tokens are here
        already, or will be computed before long."""
        self._find, self._here, self._failed = find, tokens, failed
        self._stop = Stop()
        self._changed = threading.Condition()
        self._offer: Offer | None = None
        self._over = False
        threading.Thread(target=self._run, name="rekindle-coming", daemon=True).start()

    @property
    def over(self) -> bool:
        """Whether it was found, or will not be."""
        with self._changed:
            return self._over

    @property
    def offer(self) -> Offer | None:
        """What was found; None while it was not."""
        with self._changed:
            return self._offer

    def wait(self, seconds: float) -> None:
        """Until that is known, or so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._over, seconds)

    def close(self) -> None:
        """Bring nothing more. Idempotent; does not wait for what hangs."""
        self._stop.set()
        with self._changed:
            self._over = True
            offer = self._offer
            self._changed.notify_all()
        if offer is not None:
            offer.link.close()

    def _run(self) -> None:
        offer = self._found()
        with self._changed:
            late, self._over = self._stop.asked, True
            self._offer = None if late else offer
            self._changed.notify_all()
        if offer is not None and late:
            offer.link.close()

    def _found(self) -> Offer | None:
        try:
            offer = self._find(self._stop)
        except Cancelled:
            return None
        except OriginFailed as failed:
            if not self._stop.asked:
                self._failed(str(failed))
            return None
        except Exception as error:  # whatever it is: the prompt is computed
            log.exception("Looking for a prompt at the origin failed.")
            self._failed(f"{type(error).__name__}: {error}")
            return None
        if offer is not None:
            offer.link.want(_backwards(offer.cells, self._here))
        return offer


def _backwards(cells: Cells, here: int) -> list[Cell]:
    """From the back, the top layer first: where both lanes meet is not known yet. The lowest layer is computed."""
    first = -(-here // cells.chunk_tokens)
    chunks = reversed(range(first, cells.chunks))
    return [Cell(chunk, layer) for chunk in chunks for layer in reversed(range(1, cells.layers))]
