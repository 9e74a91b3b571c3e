"""Names of states, and what they mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.apps import LIFECYCLE, state_of
from rekindle.core.request import Request
from rekindle.core.scope import APP_STATES, AppRef, AppState, Scope
from rekindle.errors import InvalidSetting

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "apps.md"


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("active", "foreground"),
        ("Not Running", "killed"),
        ("not_running", "killed"),
        ("onPause", "foreground"),
        ("ON_STOP", "background"),
        ("Suspended", "background"),
        ("TRIM_MEMORY_UI_HIDDEN", "background"),
        ("killed", "killed"),
    ],
)
def test_a_name_of_any_system_is_one_of_three_states(name: str, state: AppState) -> None:
    assert state_of(name) == state


def test_no_name_means_two_things() -> None:
    meant: dict[str, set[str]] = {}
    for row in LIFECYCLE:
        for name in (row.name, *row.also):
            meant.setdefault("".join(filter(str.isalnum, name.lower())), set()).add(row.state)
            assert state_of(name) == row.state in APP_STATES
    assert all(len(states) == 1 for states in meant.values())


def test_what_is_no_state_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidSetting, match="suspended"):
        state_of("suspendd")
    with pytest.raises(InvalidSetting, match="foreground, background, killed"):
        state_of("???")


def test_the_page_has_the_whole_table() -> None:
    page = PAGE.read_text("utf-8")
    for row in LIFECYCLE:
        also = "".join(f", `{name}`" for name in row.also)
        assert f"| {row.platform} | `{row.name}`{also} | {row.state} |" in page


def test_a_request_says_who_asks() -> None:
    request = Request.of("text", app="mail", app_state="background")
    assert request.app_ref(Scope("somebody")) == AppRef("somebody", "mail", "background")
    assert Request.of("text").app_ref("somebody") is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"app": ""},
        {"app": "x" * 257},
        {"app": "half \ud800"},
        {"app": "mail", "app_state": "killed"},
        {"app_state": "foreground"},
    ],
)
def test_who_asks_has_a_name_and_is_alive(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidSetting):
        Request.of("text", **wrong)  # type: ignore[arg-type]
