"""English words that say nothing about what a question is about."""

from __future__ import annotations

_TEXT = """
a about all also am an and any are as at be been but by can could did do does for from had has have he her hers him his
how i if in into is it its just me my no not of on or our ours she should so some than that the their them then there
these they this those to was we were what when where which who whom whose why will with would you your yours s t
"""

STOPWORDS = frozenset(_TEXT.split())
