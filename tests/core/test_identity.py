"""Identity: equal for the same model, different for any other."""

from __future__ import annotations

from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from rekindle.core.identity import Identity, digest_of_config, digest_of_fields

SAME = Identity("w", "c", "t", "m", "float32", "plain")


def test_every_field_changes_the_digest() -> None:
    for field in fields(Identity):
        assert replace(SAME, **{field.name: "other"}).digest != SAME.digest


@given(st.lists(st.text(max_size=5), max_size=5), st.lists(st.text(max_size=5), max_size=5))
def test_different_fields_never_collide_by_concatenation(first: list[str], second: list[str]) -> None:
    assert (digest_of_fields(*first) == digest_of_fields(*second)) == (first == second)


def test_a_config_keeps_its_digest_whatever_tool_wrote_it() -> None:
    config = {"model_type": "llama", "hidden_size": 32, "rope_parameters": {"rope_theta": 1.0}}
    resaved = {"transformers_version": "9", "rope_parameters": {"rope_theta": 1.0}, **config, "dtype": "float16"}
    assert digest_of_config(config) == digest_of_config(resaved)
    assert digest_of_config(config) != digest_of_config({**config, "rope_parameters": {"rope_theta": 2.0}})
