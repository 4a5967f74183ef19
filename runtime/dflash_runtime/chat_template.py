"""Chat templates, rendered by Jinja with Hugging Face's conventions."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, ext, nodes, parser, sandbox

from dflash_runtime.errors import PromptError


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
