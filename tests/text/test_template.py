"""Chat templates come with a model, from anywhere: whatever they do, rendering ends, and others go on."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from rekindle.core.request import Message
from rekindle.engine.hf.engine import HfEngine
from rekindle.errors import InvalidPrompt
from rekindle.models.files import ModelFiles
from rekindle.text import chat_template as templates
from rekindle.text.chat_template import make_renderer
from rekindle.text.tools.styles import TemplateTools
from tests.conftest import CHAT_TEMPLATE

pytestmark = pytest.mark.thorough

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
_DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x [OP] ns.x %}{% endfor %}"
HOSTILE = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over what loops made": "{% for i in range(99999)|list|product if x %}{% endfor %}"
    "{% set r = range(99999)|list %}{% for a in r %}{% for b in r %}{% if a == b %}{% endif %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'a' * 10**10 }}",
    "a long text of parts": "{% set n = messages|length * 10**10 %}{{ 'a' * n }}",
    "a large number": "{{ 10 ** (10 ** 9) }}",
    "a large number of parts": "{% set n = messages|length %}{{ (9 + n) ** ((5 + n) ** 9) }}",
    "text that doubles by +": _DOUBLING.replace("[OP]", "+"),
    "text that doubles by ~": _DOUBLING.replace("[OP]", "~"),
    "lists that double": _DOUBLING.replace("'ab'", "[1]").replace("[OP]", "+"),
    "filled text": "{{ 'a'.ljust(10**10) }}",
    "centred text": "{{ 'a' | center(10**10) }}",
    "formatted text": "{{ '%9999999999d' % 1 }}",
    "formatted text by a method": "{{ '{:>9999999999}'.format(1) }}",
    "replaced text": "{% set a = 'a' * 99999 %}{{ a.replace('a', a).replace('a', a) }}",
    "indented JSON": "{{ messages | tojson(indent=9999999999) }}",
    "macros that double": "{% macro m(n) %}{{ m(n - 1) ~ m(n - 1) if n }}{% endmacro %}{{ m(99) }}",
    "macros without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "filler without end": "{{ lipsum(n=10**7) }}",
    "much written": "{% for a in range(99999) %}{% for b in range(999) %}{{ 'a' * 999 }}{% endfor %}{% endfor %}",
    "batches": "{{ range(99999)|batch(10**9, 'a')|list }}",
    "never closed": "{%" * 200_000,
    "never closed text": "{{ " + "'\\" * 200_000,
    "deep brackets": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "deep conditions": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "the sandbox left": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the sandbox left by a namespace": "{% set ns = namespace(__class__=1) %}{{ ns }}",
    "the sandbox left by a name": "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns._x }}",
    "the sandbox left by an attribute": "{{ dict.__base__.__subclasses__() }}{{ dict.mro() }}",
}


def spent_seconds() -> float:
    """CPU time of this process and of all it started, also of those that ended."""
    ended = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    running = [child.cpu_times() for child in psutil.Process().children()]
    return sum(used.ru_utime + used.ru_stime for used in ended) + sum(used.user + used.system for used in running)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.timeout(60)
def test_a_hostile_template_is_refused_within_two_seconds_and_others_are_rendered(name: str) -> None:
    assert make_renderer("{{ messages[0].content }}", "", "")(CHAT) == "Hello"  # what renders is ready
    began = spent_seconds()
    TemplateTools.of(HOSTILE[name])
    with pytest.raises(InvalidPrompt) as caught:
        make_renderer(HOSTILE[name], "", "")(CHAT)
    assert spent_seconds() - began < 2.0 and len(str(caught.value)) < 2000
    assert make_renderer("{{ messages[0].content }}", "", "")(CHAT) == "Hello"


def test_a_hostile_template_of_a_model_folder_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "hostile"))
    (folder / "chat_template.jinja").write_text(HOSTILE["loops in loops"])
    tokenizer = HfEngine.load(ModelFiles("hostile", folder), device="cpu").tokenizer
    with pytest.raises(InvalidPrompt, match="takes too long"):
        tokenizer.encode_chat([Message("user", "Hello")])
    assert tokenizer.encode("Hello")


THINKING = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.content }};{% endfor %}"
ORDINARY = {
    "chat": CHAT_TEMPLATE,
    "reasoning": THINKING,
    "what is there": "{{ bos_token }}{{ eos_token }}{{ tools is defined }}{{ documents is none }}",
    "json": "{{ messages | tojson(indent=2, separators=(',', ': '), sort_keys=true) }}{{ '<&é' | tojson }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "controls": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "dict": "{% set d = dict(a=1) %}{{ d.a }}{{ dict.fromkeys(['x']).keys() | list }}{{ namespace(self=1).self }}",
    "blocks": "  {% if true %}\n  a\n  {% endif %}\nb\n",
    "a year": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_a_template_renders_as_transformers_renders_it(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(ORDINARY[name])
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "A 🙂 é\n <b>"},
        {"role": "assistant", "content": "x", "thinking": "hm"},
        {"role": "assistant", "content": "y", "reasoning": "so", "thinking": "then"},
        {"role": "user", "content": ""},
    ]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    render = HfEngine.load(ModelFiles("model", folder), device="cpu").tokenizer._render
    assert render is not None and render(chat) == expected


def test_half_characters_and_values_that_are_no_json_pass_as_transformers_passes_them() -> None:
    render = make_renderer("{{ messages[0].content }}{{ messages[0].at }}", "", "")
    assert render([{"role": "user", "content": "\ud800", "at": object()}]) == "\ud800<object>"


def test_a_long_chat_is_rendered() -> None:
    text = "é🙂 word " * 600_000  # 7 MB
    chat = [{"role": "user", "content": text}] * 3
    assert (
        make_renderer("{% for m in messages %}{{ m.content | trim }}|{% endfor %}", "", "")(chat)
        == f"{text.strip()}|" * 3
    )


def test_what_a_template_says_of_the_messages_is_told() -> None:
    with pytest.raises(InvalidPrompt, match="refuses these messages: no system"):
        make_renderer("{{ raise_exception('no system') }}", "", "")(CHAT)
    with pytest.raises(InvalidPrompt, match="refuses these messages: .*else"):
        make_renderer("{% else %}", "", "")(CHAT)


def test_one_process_renders_all_templates() -> None:
    make_renderer("a", "", "")(CHAT)
    process = templates._process
    assert make_renderer("b", "", "")(json.loads(json.dumps(CHAT))) == "b" and templates._process is process
