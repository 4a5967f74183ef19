"""Text and messages to token ids and back, from the bundle's `tokenizer/` folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dflash_runtime.bundle import Bundle
from dflash_runtime.chat_template import ChatTemplate
from dflash_runtime.errors import BundleError, PromptError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The pair's tokenizer and chat template."""

    def __init__(self, folder: Path, bos_token_id: int | None, template_args: Mapping[str, Any]) -> None:
        try:
            self._tokens = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception for every kind of fault
            raise BundleError(f"{folder / 'tokenizer.json'} cannot be read: {error}.") from error
        self._tokens.no_truncation()
        self._tokens.no_padding()
        settings = _read_json(folder / "tokenizer_config.json")
        specials = {name: settings[name] for name in _SPECIAL_TOKENS if settings.get(name)}
        self._specials = {name: t["content"] if isinstance(t, dict) else t for name, t in specials.items()}
        self._bos_token_id = bos_token_id
        self._adds_bos = bos_token_id is not None and self._tokens.encode("a").ids[:1] == [bos_token_id]
        self._template_args = dict(template_args)
        source = _template_source(folder, settings)
        self._template = None if source is None else ChatTemplate(source)
        self.has_chat_template = source is not None

    @classmethod
    def open(cls, bundle: Bundle) -> Tokenizer | None:
        """The bundle's tokenizer, or None where the bundle has none and speaks token ids only."""
        folder, text = bundle.path / "tokenizer", bundle.manifest.text
        present = (folder / "tokenizer.json").is_file()
        return cls(folder, text.bos_token_id, text.template_args) if present else None

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
        variables = {**self._specials, **self._template_args, **(template_args or {})}
        text = self._template.render(messages, variables)
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


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several under names; `default` is the one for plain conversations
        named = {entry["name"]: entry["template"] for entry in template}
        if "default" not in named:
            raise BundleError(f"{folder} has the chat templates {sorted(named)} and none named 'default'.")
        template = named["default"]
    return template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BundleError(f"{path} is not valid JSON ({error}). Copy or build the bundle again.") from error
    return data if isinstance(data, dict) else {}
