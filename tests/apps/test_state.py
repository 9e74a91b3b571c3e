"""Names of states, and what they mean."""

from __future__ import annotations

import pytest

from rekindle.apps import state_of
from rekindle.core.request import Request
from rekindle.core.scope import APP_STATES, AppRef, Scope
from rekindle.errors import InvalidSetting


def test_what_is_no_state_is_refused_with_the_nearest() -> None:
    assert [state_of(f" {state.upper()} ") for state in APP_STATES] == list(APP_STATES)
    with pytest.raises(InvalidSetting, match="Did you mean 'background'"):
        state_of("backgruond")
    with pytest.raises(InvalidSetting, match="background, foreground, killed"):
        state_of("???")


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
