r"""Finds the answer in a response, and compares answers. Pure.

An answer is what stands in the last `\boxed{…}`, or after the last `Answer:` of the last line that has one.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_ANSWER = 500
"""Characters; nobody's answer is longer, and a judge must not be asked about an essay."""
_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]*)")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:/\d+(?:\.\d+)?)?")
_FRACTION = re.compile(r"\\d?frac\{([^{}]+)\}\{([^{}]+)\}")


def boxed(text: str) -> str | None:
    r"""The inside of the last complete `\boxed{…}`; braces inside are counted."""
    at = len(text)
    while (at := text.rfind("\\boxed{", 0, at)) >= 0:
        depth, start = 1, at + len("\\boxed{")
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start:place].strip()
    return None


def marked_answer(text: str) -> str | None:
    """The answer that is marked as one; None when none is, or it is empty."""
    found = boxed(text)
    if found is None:
        lines = _ANSWER.findall(text)
        found = lines[-1].strip().rstrip(".").strip() if lines else None
    return found or None


def answer_of(text: str, *, bare: bool) -> str | None:
    """The marked answer; with `bare` also a response that is nothing but its answer."""
    found = marked_answer(text)
    if found is None and bare:
        found = text.strip() or None
    return found


def equal(answer: str, label: str) -> bool:
    """Whether two answers say the same: as numbers if both are, else as text without marks and spaces."""
    left, right = _plain(answer), _plain(label)
    if left == right:
        return True
    numbers = _value(left), _value(right)
    return None not in numbers and numbers[0] == numbers[1]


def last_number(text: str) -> str | None:
    """The last number of a text."""
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def _plain(text: str) -> str:
    text = _FRACTION.sub(r"\1/\2", text)
    text = re.sub(r"\\(?:text|mathrm|mathbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[!,;: ]|\\left|\\right|[$%\s]", "", text).rstrip(".")
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", text).casefold()


def _value(text: str) -> Fraction | None:
    if len(text) > MAX_ANSWER or not _NUMBER.fullmatch(text):
        return None
    above, _, below = text.partition("/")
    try:
        return Fraction(above) / Fraction(below or "1")
    except ZeroDivisionError:
        return None
