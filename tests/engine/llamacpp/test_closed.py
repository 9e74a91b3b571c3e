"""After the end: every use raises `Closed`, from whatever thread; nothing reads memory that was freed.

In processes of their own, because what is tested for would end the process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("xllamacpp")

from rekindle.core.kv import Span
from rekindle.core.request import Message
from rekindle.engine.base import Row
from rekindle.errors import Closed
from tests.engine.llamacpp.alone import alone
from tests.engine.llamacpp.conftest import Load
from tests.engine.llamacpp.vocabularies import CONTROL, NORMAL, byte_level

pytestmark = [pytest.mark.llamacpp]

EVERY_USE = """
def refused(use):
    try:
        use()
    except Closed:
        return
    sys.exit(f"not refused: {use}")

def check(engine, sequence, filled, kv, snapshot):
    tokenizer = engine.tokenizer
    chat = [Message("user", "hello")]
    for use in (
        lambda: engine.open(5, "plain"),
        lambda: engine.step([Row.following(sequence, [1, 2])]),
        lambda: engine.step([Row.following(filled, [1, 2])]),
        lambda: engine.identity("plain"),
        lambda: tokenizer.encode("hello"),
        lambda: tokenizer.encode_chat(chat),
        lambda: tokenizer.encode_chat([Message("user", "<|end|>")]),
        lambda: tokenizer.encode_replayed([Message("assistant", "a"), *chat], {0: WrittenReply((1,))}),
        lambda: tokenizer.decode([1, 2]),
        lambda: tokenizer.spell([256]),
        lambda: filled.truncate(0),
        lambda: filled.export(Span(0, 2)) if kv is not None else filled.snapshot(),
        lambda: filled.append(kv) if kv is not None else filled.snapshot(),
        lambda: sequence.restore(snapshot, 5) if snapshot is not None else filled.export(Span(1, 2)),
        lambda: filled.size_bytes if kv is None else filled.export(Span(0, 1)),
    ):
        refused(use)
    sequence.close()
    filled.close()
    filled.close()
    engine.close()
    engine.close()
    refused(lambda: sequence.length)
    refused(lambda: filled.reserve(4))
"""


def check_every_use(path: Path) -> None:
    alone(f"""{EVERY_USE}
import logging
logging.getLogger("rekindle").setLevel(logging.CRITICAL)
engine = load({str(path)!r})
sequence, filled = engine.open(20, engine.regime(20)), engine.open(20, engine.regime(20))
engine.step([Row.following(filled, [1, 2, 3, 4, 5])])
spans = engine.capabilities.spans
kv, snapshot = (filled.export(Span(0, 2)), None) if spans else (None, filled.snapshot())
engine.close()
junk = [bytes([170]) * (64 << 10) for _ in range(200)]  # lies where the model lay
check(engine, sequence, filled, kv, snapshot)
""")


def test_every_use_of_a_closed_engine_is_refused(tmp_path: Path) -> None:
    """With a vocabulary so large that its memory goes back to the system: reading it afterwards shows."""
    vocabulary = byte_level(control=("<|end|>", "<|turn|>", "<|stop|>"))
    vocabulary.template = "{% for m in messages %}<|turn|>{{ m.content }}<|end|>{% endfor %}"
    vocabulary.add(NORMAL, *(f"unused{number}" for number in range(60_000)))
    vocabulary.add(CONTROL, *(f"<|extra{number}|>" for number in range(10)))
    check_every_use(vocabulary.write(tmp_path / "words.gguf"))


@pytest.mark.parametrize("architecture", ["mamba", "lfm2", "gemma2", "qwen2vl"])
def test_every_use_of_a_closed_opaque_engine_is_refused(architecture: str, opaque_files: dict[str, Path]) -> None:
    check_every_use(opaque_files[architecture])


def test_closing_twice_and_a_closed_sequence(tiny: Path, load: Load) -> None:
    engine = load(tiny)
    sequence = engine.open(10, engine.regime(10))
    engine.step([Row.following(sequence, [1, 2])])
    sequence.close()
    sequence.close()
    for use in (
        lambda: sequence.length,
        lambda: sequence.size_bytes,
        lambda: sequence.reserve(11),
        lambda: sequence.truncate(0),
        lambda: sequence.export(Span(0, 1)),
        lambda: sequence.snapshot(),
        lambda: sequence.restore(b"", 1),
        lambda: engine.step([Row(sequence, [1], [0])]),
    ):
        with pytest.raises(Closed):
            use()
    assert engine.open(10, engine.regime(10)).length == 0, "its number is free again"
    assert engine.tokenizer.encode_chat([Message("user", "x")])
    engine.close()
    engine.close()


def test_closing_while_others_are_at_work_ends_them_with_closed(tiny: Path) -> None:
    """Export, step, tokenize, open and snapshot, from several threads, while the engine goes."""
    alone(
        f"""
import random, time
for seed in range(25):
    engine = load({str(tiny)!r})
    tokenizer, regime = engine.tokenizer, engine.regime(200)
    filled = engine.open(200, regime)
    engine.step([Row.following(filled, [t % 250 for t in range(150)])])
    kv = filled.export(Span(0, 50))
    wrong, begun = [], threading.Barrier(6)

    def at_work(use):
        begun.wait()
        try:
            while True:
                use()
        except Closed:
            pass
        except BaseException as error:
            wrong.append(error)

    def steps():
        sequence = engine.open(100, regime)
        try:
            engine.step([Row.following(sequence, list(range(60)))], lambda: False)
            sequence.append(kv) if sequence.capacity >= 110 else None
        finally:
            sequence.close()

    uses = [
        lambda: filled.export(Span(10, 140)),
        steps,
        lambda: tokenizer.encode("some words " * 50),
        lambda: tokenizer.encode_chat([Message("user", "hi<|end|>"), Message("assistant", "a" * 300)]),
        lambda: tokenizer.spell(list(range(256))),
    ]
    threads = [threading.Thread(target=at_work, args=(use,)) for use in uses]
    for thread in threads:
        thread.start()
    begun.wait()
    time.sleep(random.Random(seed).random() / 50)
    engine.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not wrong, wrong
    filled.close()
""",
        timeout_seconds=300,
    )


def test_closing_waits_for_the_step_that_runs(tmp_path: Path) -> None:
    alone(f"""
from tests.tiny_gguf import write_llama
engine = load(write_llama(Path({str(tmp_path)!r}) / "slow.gguf", context=3000))
sequence = engine.open(3000, engine.regime(3000))
begun, done = threading.Event(), []
def step():
    def look():
        begun.set()
        return False
    done.append(engine.step([Row.following(sequence, [5] * 3000)], look))
thread = threading.Thread(target=step)
thread.start()
begun.wait()
engine.close()
thread.join()
assert len(done) == 1 and np.isfinite(done[0][0]).all()
""")


def test_a_program_that_just_ends_ends_well(tiny: Path) -> None:
    """Nothing is closed: neither engine nor sequence, nor a thread that is still at work."""
    alone(f"""
engine = load({str(tiny)!r})
sequence = engine.open(100, engine.regime(100))
engine.step([Row.following(sequence, [1, 2, 3])])
sampler = engine.sampler(Sampling(temperature=1.0), [1])
def for_ever():
    while True:
        other = engine.open(50, engine.regime(50))
        engine.step([Row.following(other, [5] * 50)])
        other.close()
threading.Thread(target=for_ever, daemon=True).start()
""")


@pytest.mark.parametrize("flash", ["on", "off"])
def test_a_program_ends_though_a_feed_that_was_left_behind_still_hangs(tiny: Path, flash: str) -> None:
    alone(
        f"""
import time
engine = load({str(tiny)!r}, flash_attention={flash!r})
sequence = engine.open(100, engine.regime(100))
begun = threading.Event()
class Hanging:
    span, layers = Span(0, 40), range(len(engine.layout.layers))
    def fill(self, layer, out):
        if layer:
            begun.set()
            time.sleep(1000)
try:
    engine.step([Row(sequence, [1, 2], [40, 41], feeds=(Hanging(),))], begun.is_set)
except RekindleError as error:
    assert "cancelled" in str(error)
engine.close()
""",
        timeout_seconds=60,
    )
