"""SmolLM2 guesses questions about a text."""

from __future__ import annotations

import pytest

from rekindle import Session
from rekindle.engine.base import Engine
from rekindle.idle.generated_questions import (
    list_grammar,
    parse_questions,
    prompt_for_questions,
    prompt_from_history,
    summary_grammar,
    summary_prompt,
)

pytestmark = pytest.mark.real

TEXT = (
    "Agneta Falk keeps the lighthouse on Ormund Island. She moved there from Bergen in 2011. Her brother Jonas brings "
    "food every Friday in his green boat. In March a storm broke two windows of the lamp room. Jonas ordered new glass "
    "in Bergen. The glass came three weeks later, and one pane was too small. Agneta wrote to the glazier, who sent "
    "another one without a bill. A school class visited the lighthouse in May. The children drew pictures of the lamp. "
    "Agneta hung them on the stairs."
)


def test_a_small_model_guesses_questions_about_a_text_and_about_what_was_asked(smollm2: Engine) -> None:
    with Session(smollm2, reuse="off") as session:
        abstract = session.chat(summary_prompt([TEXT]), max_tokens=40, grammar=summary_grammar()).text
        assert len(abstract.split()) >= 5
        grammar = list_grammar(1)
        guessed = session.chat(prompt_for_questions([], [abstract], 1), max_tokens=60, grammar=grammar).text
        assert parse_questions(guessed, 1)
        asked = ["When did Agneta move to Ormund Island?", "What did Jonas order?", "Who visited the lighthouse?"]
        more = session.chat(prompt_from_history(asked, 1), max_tokens=60, grammar=grammar).text
        assert parse_questions(more, 1)
