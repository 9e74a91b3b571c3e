"""JSON of strangers."""

from __future__ import annotations

import json

import pytest

from rekindle.safe_read import MAX_VALUES, parse_untrusted_json

REFUSED = {
    "nothing": b"",
    "nested without end": b"[" * 100_000,
    "a number of thousands of digits": b"9" * 5000,
    "half of a pair": rb'"\ud800"',
    "half of a pair deep inside": rb'{"a": ["x", {"\udfff": 1}]}',
    "half of a pair that is not escaped": '"\ud800"',
    "no UTF-8": b'"\xff"',
    "another encoding": '{"a": 1}'.encode("utf-16"),
    "too many lists": b"[" + b"[]," * MAX_VALUES + b"[]]",
    "too many dictionaries": b"[" + b'{"a":1},' * MAX_VALUES + b"0]",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_sound_json_is_a_value_error_and_nothing_else(what: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_untrusted_json(REFUSED[what])
    assert not isinstance(caught.value, RecursionError)


@pytest.mark.parametrize(
    "value", [None, [], {"a": [1, 2.5, "é", "\U0001f600"]}, "[{," * 20_000, list(range(60_000)), "x" * 1_000_000]
)
def test_sound_json_is_read_as_ever(value: object) -> None:
    assert parse_untrusted_json(json.dumps(value)) == value
    assert parse_untrusted_json(json.dumps(value, ensure_ascii=False).encode()) == value
