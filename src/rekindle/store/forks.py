"""Forks: what must be put down before one, and is taken up again by parent and child."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Forked(Protocol):
    """Something that must not be in use while its process forks."""

    def before_fork(self) -> None:
        """Put it down. Called in the thread that forks."""

    def after_fork(self) -> None:
        """Go on, in parent and child alike."""


def watch(forked: Forked) -> None:
    """Put it down before every fork from now on, for as long as it lives."""
    _OPEN.add(forked)


_OPEN: weakref.WeakSet[Forked] = weakref.WeakSet()


class _Held(threading.local):
    """What the forking thread has stopped."""

    forked: list[Forked] = []  # noqa: RUF012  (always replaced, never changed)


_held = _Held()


def _before_fork() -> None:
    _held.forked = list(_OPEN)
    for forked in _held.forked:
        forked.before_fork()


def _after_fork() -> None:
    for forked in reversed(_held.forked):
        forked.after_fork()
    _held.forked = []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
