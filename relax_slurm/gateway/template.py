"""Chat templates, in the Jinja environment that transformers gives them (`utils/chat_template_utils.py` there)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from relax_slurm.gateway.model_folder import Unusable


class Refused(Exception):
    """The messages cannot be rendered; the text says why, for whoever sent them."""


class _Refusal(TemplateError):
    """What a template's own `raise_exception` raises."""


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said. Here it only is a block with names of its own."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own attribute

    def parse(self, parser: Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_as_it_is"), [], [], body)
        block.set_lineno(line)
        return block

    def _as_it_is(self, caller: Macro) -> str:
        return str(caller())


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape what HTML gives a meaning to."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


_environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
)
_environment.filters["tojson"] = _tojson
_environment.globals["raise_exception"] = _raise_exception
_environment.globals["strftime_now"] = _strftime_now


class ChatTemplate:
    """One compiled template. `Unusable` when it is no template."""

    def __init__(self, text: str) -> None:
        try:
            self._template = _environment.from_string(text)
        except (TemplateSyntaxError, RecursionError) as error:
            raise Unusable(f"its chat template cannot be compiled ({error})") from None

    def render(self, variables: Mapping[str, Any], max_characters: int) -> str:
        """The text; `Refused` with the template's own words, or with what went wrong in it.

        It stops at `max_characters`. It does not stop by itself in a loop that says nothing: that takes the end of
        the process.
        """
        pieces: list[str] = []
        left = max_characters
        try:
            for piece in self._template.generate(**variables):
                left -= len(piece)
                if left < 0:
                    raise Refused(f"the rendered messages are longer than {max_characters} characters; send less")
                pieces.append(piece)
        except _Refusal as error:
            raise Refused(f"the chat template refuses these messages: {error}") from None
        except Refused:
            raise
        except MemoryError:
            raise Refused("rendering these messages took more memory than a renderer may have; send less") from None
        except Exception as error:
            # Whatever a stranger's template does wrong with a stranger's messages is an answer, not a fault of ours.
            raise Refused(f"the chat template failed on these messages ({type(error).__name__}: {error})") from None
        return "".join(pieces)
