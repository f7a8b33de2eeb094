"""What a simulated engine says: arithmetic as a policy, a verdict as a judge, more text otherwise. Pure."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from hashlib import blake2b

_EXPRESSION = re.compile(r"(?:[-+(]\s?){0,8}\d[\d\s.+\-*/()x×÷]*")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_REFERENCE = re.compile(
    r"(?:reference|ground[ _-]?truth|label|expected|correct|gold|target|standard)"
    r"[\w \"'-]*[:=]\s*(?P<value>[^\n]+)",
    re.IGNORECASE,
)
_ANSWER = re.compile(
    r"(?:answer|response|prediction|output|student|candidate)[\w \"'-]*[:=]\s*(?P<value>[^\n]+)",
    re.IGNORECASE,
)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:/\d+)?")
_WORDS = "the model reads this step then one so each value follows from a rule that holds once more along it".split()  # noqa: SIM905
MAX_EXPRESSION = 400


def unit(*parts: object) -> float:
    """A number in [0, 1) that depends on nothing but `parts`."""
    digest = blake2b("\x1f".join(map(str, parts)).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def solve(text: str) -> str | None:
    """The value of the last arithmetic expression in `text`, or None when there is none."""
    for match in reversed(list(_EXPRESSION.finditer(text[-8192:]))):
        expression = match.group().strip().rstrip("=").rstrip(". \n")
        if not re.search(r"\d\s*[-+*/x×÷)]+[\s(-]*\d", expression) or len(expression) > MAX_EXPRESSION:
            continue
        value = evaluate(expression)
        if value is not None:
            return number_text(value)
    return None


def evaluate(expression: str) -> Fraction | None:
    """Exact value of +, -, *, / and parentheses over numbers; None when it is anything else."""
    plain = expression.replace("×", "*").replace("÷", "/").replace("x", "*")
    try:
        return _value(ast.parse(" ".join(plain.split()), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        inner = _value(node.operand)
        return inner if isinstance(node.op, ast.UAdd) else -inner
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not arithmetic")


def number_text(value: Fraction) -> str:
    """Integers plainly, terminating decimals as such, everything else rounded to six places."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.6f}".rstrip("0").rstrip(".")


def wrong(answer: str, draw: float) -> str:
    """An answer near the right one that is never the right one."""
    shift = 1 + int(draw * 9)
    return number_text(Fraction(answer) + (shift if draw < 0.5 else -shift))


def grade(text: str) -> str:
    """`1` when the answer in `text` agrees with the reference in it, else `0`.

    Without both, an equation is checked; without that, nothing was shown to be right.
    """
    references = list(_REFERENCE.finditer(text))
    taken = [match.span() for match in references]
    answers = [
        match.group("value")
        for match in _ANSWER.finditer(text)
        if not any(start <= match.start() < end for start, end in taken)
    ]
    answers += [match.group(1) for match in _BOXED.finditer(text)]
    if references and answers:
        return "1" if _essence(references[-1].group("value")) == _essence(answers[-1]) else "0"
    left, equals, right = text.rpartition("=")
    found = _NUMBER.search(right) if equals else None
    if found is None:
        return "0"
    return "1" if solve(left) == _essence(found.group()) else "0"


def _essence(value: str) -> str:
    """What is compared: the last number if there is one, else the words."""
    boxed = _BOXED.search(value)
    numbers = _NUMBER.findall(boxed.group(1) if boxed else value)
    if numbers:
        try:
            return number_text(Fraction(numbers[-1]))
        except (ValueError, ZeroDivisionError):
            return str(numbers[-1])
    return " ".join(re.findall(r"\w+", value.casefold()))


def words(*seed: object) -> Iterator[str]:
    """Endless filler that depends on nothing but `seed`."""
    index = 0
    while True:
        yield _WORDS[int(unit(*seed, index) * len(_WORDS))]
        index += 1
