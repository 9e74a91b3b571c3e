"""Names for the records of a file."""

from __future__ import annotations

from rekindle.knowledge.read.text import one_line


class Names:
    """Gives each record of one file a name that no other has."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._taken: set[str] = set()

    def unique(self, own: str | None, number: int) -> str:
        """`source#own`, or `source#number` for a record without a name; counted on where that is taken."""
        wanted = name = one_line(own or "") or str(number)
        again = 1
        while name in self._taken:
            # The number first: a thousand records of one name would else be counted through a thousand times.
            name = f"{wanted}~{number}" if again == 1 else f"{wanted}~{number}~{again}"
            again += 1
        self._taken.add(name)
        return f"{self._source}#{name}"
