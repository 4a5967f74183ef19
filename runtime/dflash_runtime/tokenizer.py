"""Text and messages to token ids and back, from the bundle's `tokenizer/` folder.

Chat templates are rendered by Jinja with Hugging Face's conventions.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError, ext, nodes, parser, sandbox

from dflash_runtime.bundle import Bundle, TextFacts
from dflash_runtime.errors import BundleError, PromptError


class Tokenizer:
    """The pair's tokenizer and chat template."""

    def __init__(self, folder: Path, facts: TextFacts) -> None:
        try:
            self._tokens = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception for every kind of fault
            raise BundleError(f"{folder / 'tokenizer.json'} cannot be read: {error}.") from error
        self._tokens.no_truncation()
        self._tokens.no_padding()
        self._bos_token_id, self._variables = facts.bos_token_id, {**facts.special_tokens, **facts.template_args}
        self._adds_bos = facts.bos_token_id is not None and self._tokens.encode("a").ids[:1] == [facts.bos_token_id]
        self.has_chat_template, template = facts.has_chat_template, folder / "chat_template.jinja"
        self._template = ChatTemplate(template.read_text(encoding="utf-8")) if self.has_chat_template else None

    @classmethod
    def open(cls, bundle: Bundle) -> Tokenizer | None:
        """The bundle's tokenizer, or None where the bundle has none and speaks token ids only."""
        folder = bundle.path / "tokenizer"
        return cls(folder, bundle.manifest.text) if (folder / "tokenizer.json").is_file() else None

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text as it is, with the special tokens the tokenizer itself adds."""
        ids: list[int] = self._tokens.encode(text).ids
        return ids[1:] if self._adds_bos and ids[1:2] == ids[:1] else ids

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Ids of a conversation through the chat template, ending where the assistant begins.

        `template_args` go to the template, over the bundle's own.

        Raises:
            PromptError: no template, or it refuses the messages.
        """
        if self._template is None:
            raise PromptError("The bundle has no chat template for messages. Pass text or token ids instead.")
        text = self._template.render(messages, {**self._variables, **(template_args or {})})
        # The template writes the special tokens it wants; a BOS it leaves to the tokenizer is added here.
        ids: list[int] = self._tokens.encode(text, add_special_tokens=False).ids
        if self._adds_bos and self._bos_token_id is not None and ids[:1] != [self._bos_token_id]:
            ids.insert(0, self._bos_token_id)
        return ids

    def name(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None for an id without one."""
        return self._tokens.id_to_token(token_id)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return self._tokens.decode(ids, skip_special_tokens=True)


class _GenerationTag(ext.Extension):
    """`{% generation %}` marks the assistant's words for training; for prompts its content just stays."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own spelling

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template; it runs in a sandbox, as it comes with the checkpoint."""

    def __init__(self, source: str) -> None:
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise PromptError(f"The bundle's chat template is no valid Jinja: {error}. Use raw=True.") from error

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt text, ending where the assistant's answer begins.

        Raises:
            PromptError: the template refuses the messages.
        """
        fixed: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render({**fixed, **variables, "messages": messages})
        except (TemplateError, TypeError) as error:
            roles = [message.get("role") for message in messages]
            raise PromptError(
                f"The chat template refuses messages of roles {roles}: {error}. Change them or use raw=True."
            ) from error


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which models have never seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
