"""Texts and chats that tokenizers find hard."""

from __future__ import annotations

from rekindle.core.request import Message

TEXTS = {
    "empty": "",
    "a space": " ",
    "whitespace": " \t\n\r\n  \u00a0\u2003\u3000\v\f ",
    "many line ends": "\n" * 100,
    "trailing spaces": "word   \n\n\n   word   ",
    "words": "The quick brown fox jumps over the lazy dog, doesn't it? I'll, we've, they'd.",
    "digits": "in  2024 it was 3.14159, 1,000,000 or 0x7f; 12:34:56, ½ and ４２",
    "code": "def f(x):\n\treturn {'a': [x for x in range(10)]}  # ok\n```python\nprint('x')\n```",
    "accents": "Übersetze: Grüße, süß, naïve, Ångström, ΑΒΓ αβγ, Привет",
    "combining": "e\u0301 a\u030a n\u0303 \u1112\u1161\u11ab Z\u0351\u036b\u0343A\u030d\u0310LGO",
    "the same, composed": "\u00e9 \u00e5 \u00f1 \ud55c",
    "other scripts": "東京は日本の首都です。 서울 กรุงเทพ दिल्ली العربية עברית ქართული",
    "emoji": "🙂👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 ☕️ 1️⃣",
    "right to left": "abc \u202eאבג\u202c def \u200f",
    "invisible": "a\u200bb\u200dc\ufeffd\u00ade\u2060f",
    "null": "a\x00b\x00\x00c",
    "control characters": "".join(map(chr, range(1, 32))) + "\x7f\x80\x9f",
    "ends of the planes": "\ue000 \uf8ff \uffff \U0001fffe \U0010ffff \U000e0041",
    "one letter, often": "a" * 3000,
    "one emoji, often": "🙂" * 500,
    "long": "Every morning the keeper wrote down the wind, and 12 gulls — «très bien» 東京 🙂.\n" * 1200,  # 100 kB
}
assert len(TEXTS["long"].encode()) > 100_000

CHATS = [
    [Message("user", "Name three colours.")],
    [Message("system", "You are a pirate."), Message("user", "Where is the treasure?")],
    [
        Message("user", "My name is Ada."),
        Message("assistant", "Hello Ada! How can I help you?"),
        Message("user", "What is my name?"),
    ],
    *([Message("user", text)] for name, text in TEXTS.items() if name not in ("empty", "null", "long")),
    [Message("system", ""), Message("user", " x "), Message("assistant", "\n"), Message("user", "…")],
    [Message("user", TEXTS["long"])],
]
