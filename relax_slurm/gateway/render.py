"""Messages to token ids with a model's own tokenizer and chat template, and without the libraries of the model.

Equal to `AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, add_generation_prompt=True)` of
transformers, for folders with a tokenizer.json. Imported by renderer processes only (`render_worker`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers

from relax_slurm.gateway import model_folder
from relax_slurm.gateway.model_folder import AddedToken, ModelFolder, Unusable
from relax_slurm.gateway.sources import RenderSource
from relax_slurm.gateway.template import ChatTemplate, Refused

MAX_CHARACTERS = 16 * 1024 * 1024
"""Longest text that a template may make of messages."""
CACHED = 4
"""Renderers that one process keeps."""
NO_VARIABLES = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages"),
        *("padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs"),
        "truncation",
    }
)
"""Arguments of `apply_chat_template` that would change more than a template's variables, and what is set here."""


class Renderer:
    """Tokenizer and templates of one source. `Unusable` when they cannot be had."""

    def __init__(self, source: RenderSource) -> None:
        self._folder = model_folder.read(source)
        self._name = source.template_name
        self._templates: dict[str, ChatTemplate] = {}
        self._tokenizer = _tokenizer(self._folder)
        self._special = {name: token.content for name, token in self._folder.special_tokens.items()}
        self._template(tools=False)

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the conversation. `Refused` when the template does not take it."""
        text = self.text(messages, add_generation_prompt, chat_template_kwargs)
        try:
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:
            # The library has no exception of its own; a lone surrogate, for one, is no text to it.
            raise Refused(f"the rendered messages cannot be tokenized ({error})") from None
        if not encoded.ids:
            raise Refused("the chat template makes no token of these messages; send some text")
        return list(encoded.ids)

    def text(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model reads it."""
        given = dict(chat_template_kwargs or {})
        wrong = sorted(given.keys() & NO_VARIABLES)
        if wrong:
            raise Refused(f"chat_template_kwargs.{wrong[0]} is no variable of a template; leave it out")
        variables = {
            "tools": None,
            "documents": None,
            **self._special,
            **given,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._template(tools=given.get("tools") is not None).render(variables, MAX_CHARACTERS)

    def _template(self, *, tools: bool) -> ChatTemplate:
        text = self._folder.template(self._name, tools=tools)
        if text not in self._templates:
            self._templates[text] = ChatTemplate(text)
        return self._templates[text]


def _tokenizer(folder: ModelFolder) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder.tokenizer))
    except Exception as error:  # the library has no exception of its own
        raise Unusable(f"{folder.tokenizer} cannot be read by tokenizers {tokenizers.__version__} ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # The same three steps as transformers, in its order: tokens of the configuration, then named ones that are still
    # missing, then all named ones as special.
    present = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    listed = [_library_token(token) for _, token in sorted(folder.added_tokens.items())]
    missing = [token for token in listed if repr(token) not in present]
    if missing:
        tokenizer.add_tokens(missing)
    named = [_library_token(token) for token in folder.special_tokens.values()]
    known = tokenizer.get_added_tokens_decoder().values()
    contents = {token.content for token in known}
    absent = [token for token in named if token.content not in contents]
    if absent:
        tokenizer.add_tokens(absent)
    if named:
        tokenizer.add_special_tokens(named)
    return tokenizer


def _library_token(token: AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=not token.special if token.normalized is None else token.normalized,
        special=token.special,
    )


class Renderers:
    """The last few renderers, each until a file of its folder changes."""

    def __init__(self, make: Callable[[RenderSource], Renderer] = Renderer, size: int = CACHED) -> None:
        self._make = make
        self._size = size
        self._kept: OrderedDict[RenderSource, tuple[Any, Renderer]] = OrderedDict()

    def get(self, source: RenderSource) -> Renderer:
        """The renderer of `source`, made when it is new or its folder has changed. `Unusable` when it cannot be."""
        state = model_folder.state_of(source)
        kept = self._kept.pop(source, None)
        renderer = kept[1] if kept is not None and kept[0] == state else self._make(source)
        self._kept[source] = (state, renderer)
        while len(self._kept) > self._size:
            self._kept.popitem(last=False)
        return renderer
