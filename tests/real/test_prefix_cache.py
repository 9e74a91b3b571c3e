"""The chief law on real weights: the same greedy text cold, warm, and warm after a restart, with every hit counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle import Session
from rekindle.cache.cost import AlwaysReuse
from rekindle.core.reply import Reply
from rekindle.core.request import parse_prompt
from rekindle.engine.base import Engine, EngineWrapper
from rekindle.session.calibrate.prompts import sample_text
from tests.parity.engines import common
from tests.parity.sessions import assert_bit_equal, opened, record

pytestmark = pytest.mark.real

REPLY_TOKENS = 6
PARAGRAPHS = [text for text in sample_text().split("\n\n") if len(text) > 200]

CODE = '''def longest_common_prefix(words: list[str]) -> str:
    """The longest text that all words begin with."""
    if not words:
        return ""
    first, last = min(words), max(words)
    for index, letter in enumerate(first):
        if letter != last[index]:
            return first[:index]
    return first


def test_longest_common_prefix() -> None:
    assert longest_common_prefix(["flower", "flow", "flight"]) == "fl"
    assert longest_common_prefix([]) == '''
LOG = "\n".join(
    f"2024-03-{day:02d}T0{day}:15:00Z lamp[{100 + day}] {level} bulb hours={day * 37} visibility={22 - day}nm"
    for day, level in enumerate(["INFO", "INFO", "WARN", "INFO", "ERROR"], start=1)
)
TABLE = "| day | wind | oil (l) |\n|---|---|---|\n" + "\n".join(
    f"| {d} | {d % 9} | {d * 0.7:.1f} |" for d in range(1, 9)
)


def about(passage: int, question: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "Answer from the text only, in one sentence."},
        {"role": "user", "content": f"{PARAGRAPHS[passage]}\n\nQuestion: {question}"},
    ]


PROMPTS: dict[str, Any] = {
    "steps": about(0, "How many steps does the tower have?"),
    "oil": about(1, "Why was more oil used in March?"),
    "sister": about(2, "What does the sister ask?"),
    "children": about(3, "How deep is the water at the rock?"),
    "letters": about(4, "What happened to the two letters?"),
    "continued": PARAGRAPHS[1],
    "rewritten": f"Rewrite as a poem of four lines.\n\n{PARAGRAPHS[3][:400]}\n\nPoem:\n",
    "pirate": [
        {"role": "system", "content": "You are a pirate who answers every question with a story about the sea."},
        {"role": "user", "content": "Where is the treasure, captain? And who has the map now?"},
    ],
    "names": [
        {"role": "user", "content": "My name is Ada, I live in a lighthouse, and I have two cats, Bit and Byte."},
        {"role": "assistant", "content": "Hello Ada! Give my regards to Bit and Byte."},
        {"role": "user", "content": "What are the names of my cats, and where do they live?"},
    ],
    "arithmetic": "Q: A crate holds 12 lamps. There are 7 crates and 5 loose lamps. How many lamps are there?\n"
    "A: Let us count step by step. First,",
    "code": CODE,
    "log": f"{LOG}\n\nThe first error happened at",
    "table": f"{TABLE}\n\nThe day with the most oil was day",
    "json": '{"lighthouse": {"name": "Holm", "height_m": 41, "steps": 91, "keepers": ["Jens", "Marie"]}, '
    '"lamp": {"kind": "electric", "range_nm": 22, "hours": 2000}, "log": [{"day": "Monday", "wind": "',
    "german": "Übersetze ins Englische: »Die Möwen kreisten über dem Leuchtturm, während süßer Regen auf die "
    "Wälder fiel; niemand wußte, ob das Schiff je zurückkäme.«\nEnglish:",
    "japanese": "東京の灯台守は毎晩、海を見ながら日記を書いた。霧の夜には二秒の音と十八秒の静けさがあった。"
    "Translate into English: ",
    "emoji": "🌊🗼🚢 Weather report in emoji, one for each hour: ☀️⛅🌧️⛈️🌩️🌨️❄️🌬️🌫️🌈 — naïve café, façade, "
    "œuvre, Ærøskøbing, Ελλάδα, Москва, العربية, हिन्दी, ไทย.\nNow in words:",
    "spaces": "Name:\t\tHolm   \n\n\n  - one\r\n  - two  \n\t- three\u00a0four\u2003five\n\n"
    + "x " * 20
    + "\n\nThe list above has",
    "tools": [
        {"role": "system", "content": "You can call get_tide(place, day). Answer with a call, and nothing else."},
        {"role": "user", "content": "When is high water at Holm on Friday, and at Ærø on the day after?"},
    ],
    "repeated": "the light turns, " * 30 + "and then",
}


EVERY_TIME = ("oil", "names", "code", "log", "emoji", "spaces")  # one of each kind; all of them in `make test-long`


class Lent(EngineWrapper):
    """An engine that several sessions share: closing one of them leaves it as it is."""

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def engine(smollm2: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        # What these sessions measure is not what this machine's own sessions should remember.
        patch.setattr("rekindle.cache.cost.home_folder", lambda: tmp_path_factory.mktemp("home"))
        yield smollm2


def tokens_of(engine: Engine, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return engine.tokenizer.encode(prompt)
    return engine.tokenizer.encode_chat(parse_prompt(prompt))  # type: ignore[arg-type]


def ask(session: Session, prompt: Any, **options: Any) -> Reply:
    return session.stream(prompt, max_tokens=REPLY_TOKENS, **options).reply


@pytest.fixture(scope="module")
def shared(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Session, Path]]:
    folder = tmp_path_factory.mktemp("shared") / "cache"
    with opened(Lent(engine), folder) as session:
        yield session, folder


def test_the_prompts_are_many_and_of_real_length(engine: Engine) -> None:
    lengths = {name: len(tokens_of(engine, prompt)) for name, prompt in PROMPTS.items()}
    assert len(PROMPTS) >= 20
    assert all(40 <= length <= 300 for length in lengths.values()), lengths


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.long) for name in PROMPTS]
)
def test_the_text_is_the_same_cold_warm_and_after_a_restart(
    name: str, engine: Engine, shared: tuple[Session, Path]
) -> None:
    (session, folder), prompt = shared, PROMPTS[name]
    count = len(tokens_of(engine, prompt))
    cold = ask(session, prompt, reuse="off")
    assert cold.reuse.reused == 0 and cold.usage.prompt_tokens == count
    session.warm([prompt])
    warm = ask(session, prompt)
    assert warm.reuse.engine == warm.usage.cached_tokens == count - 1
    assert warm.tokens == cold.tokens
    session.flush()
    with opened(Lent(engine), folder, memory_limit=0) as restarted:
        again = ask(restarted, prompt)
        assert again.reuse.disk == again.usage.cached_tokens == count - 1
        assert again.tokens == cold.tokens
    assert warm.text == again.text == cold.text


def test_another_question_about_a_passage_computes_only_the_question(engine: Engine, tmp_path: Path) -> None:
    questions = ["Who came on Monday?", "How far can the light be seen?"]
    chats = [about(0, question) for question in questions]
    with opened(Lent(engine), tmp_path / "cache") as session:
        session.warm([chats[0]])
        known = tokens_of(engine, chats[0])
        for chat in chats[1:]:
            tokens = tokens_of(engine, chat)
            reply = ask(session, chat)
            assert reply.reuse.reused == common(tokens, known) > 150
            assert reply.tokens == ask(session, chat, reuse="off").tokens


def test_a_chat_of_five_turns_is_the_same_and_each_turn_reuses_the_last(engine: Engine, tmp_path: Path) -> None:
    questions = [
        "Hello! I keep a lighthouse.",
        "What should I write down every day?",
        "And when there is fog?",
        "Who built the first lighthouse?",
        "Thank you. Good night!",
    ]
    messages: list[dict[str, str]] = [{"role": "system", "content": "You are brief."}]
    last: list[int] = []
    asked = 0
    folder = tmp_path / "cache"
    session = opened(Lent(engine), folder)
    for turn, question in enumerate(questions):
        messages.append({"role": "user", "content": question})
        tokens = tokens_of(engine, messages)
        if turn == 3:  # and it goes on after a restart
            session.close()
            session = opened(Lent(engine), folder)
        reply = session.chat(messages, max_tokens=6)
        assert reply.reuse.reused == min(common(tokens, last), len(tokens) - 1)
        assert reply.reuse.reused >= asked, "at least all of the last prompt"
        assert reply.tokens == session.chat(messages, max_tokens=6, reuse="off").tokens, turn
        asked = len(tokens)
        last = [*tokens, *reply.tokens[:-1]]
        messages.append({"role": "assistant", "content": reply.text})
        session.flush()
    session.close()


@pytest.mark.parametrize(
    "split", [pytest.param(256, marks=pytest.mark.long), 300, pytest.param(512, marks=pytest.mark.long)]
)
def test_deterministic_logits_are_bit_equal_cold_and_warm(split: int, engine: Engine, tmp_path: Path) -> None:
    tokens = engine.tokenizer.encode("\n\n".join(PARAGRAPHS))[: split + 100]
    seen: dict[str, list[np.ndarray]] = {}
    for name in ("cold", "warm"):
        folder = tmp_path / name
        if name == "warm":
            with opened(Lent(engine), folder, deterministic=True) as session:
                session.warm([[*tokens[:split], 17, 18, 19]])
        with opened(Lent(engine), folder, deterministic=True) as session:
            seen[name] = record(session.engine)
            reply = session.generate(tokens, max_tokens=4, min_tokens=4)
            assert reply.reuse.disk == (0 if name == "cold" else split // 256 * 256)
    assert_bit_equal(seen["warm"], seen["cold"])


def test_with_keep_reply_tokens_the_next_turn_begins_behind_the_whole_reply(engine: Engine, tmp_path: Path) -> None:
    """A sampled reply is often not what the tokenizer would make of its text."""
    reused = {}
    for keeps in (False, True):
        with Session(Lent(engine), cache=str(tmp_path / str(keeps)), keep_reply_tokens=keeps) as session:
            chat = [{"role": "user", "content": "Write zzzqx 12345 67 in words"}]
            for seed in range(20):
                reply = session.chat(chat, max_tokens=20, temperature=1.5, seed=seed)
                told = session.engine.tokenizer.encode(reply.text)
                if list(reply.tokens) != told:
                    break
            chat += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "And now backwards."}]
            again = session.chat(chat, max_tokens=2)
            reused[keeps] = again.usage.cached_tokens
            assert list(reply.tokens) != told, "no reply shows the difference"
            if keeps:
                assert again.usage.cached_tokens >= reply.usage.prompt_tokens + len(reply.tokens) - 1
    assert reused[True] > reused[False] > 0


def test_explain_names_the_differing_text_and_what_changes(engine: Engine, tmp_path: Path) -> None:
    rules = "You are a careful assistant of a lighthouse. " * 12
    with Session(Lent(engine), cache=str(tmp_path / "explained")) as session:
        session.cache.kv.costs = AlwaysReuse()  # a busy machine may compute a few tokens sooner than it loads them
        for day in ("Monday", "Tuesday", "Friday"):
            session.generate(f"Today is {day}. {rules}", max_tokens=1)
            session.flush()
        told = session.explain(f"Today is Sunday. {rules}")
        assert told.difference is not None and told.difference.ours.startswith("·Sunday.")
        assert told.change is not None and told.change.now == "·Sunday" and "·Friday" in told.change.earlier
        assert told.change.shared_tokens > 64 and told.change.saved_seconds is not None
        spaced = session.explain(f"Today is Monday.\u00a0 {rules}")
        assert spaced.difference is not None and "NO-BREAK SPACE" in spaced.difference.ours
        assert spaced.predicted_seconds is not None and spaced.cold_seconds >= spaced.predicted_seconds
