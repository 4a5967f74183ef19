"""One answer to be generated, and what its worker tells of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_runtime.generation import GenerationConfig, GenerationResult
from dflash_tools.serve_errors import ApiError


@dataclasses.dataclass(frozen=True)
class ScoredToken:
    """A token of the answer with the target's own probabilities, before temperature, penalties and filters."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """Likeliest tokens of the place and their logarithms of probability, best first."""


@dataclasses.dataclass(frozen=True)
class TokenText:
    """A scored token as it is shown."""

    token: str
    text_bytes: bytes | None
    """None where the token stands for no text."""
    logprob: float
    top: list[tuple[str, bytes | None, float]]
    offset: int
    """Characters of the answer before it."""


@dataclasses.dataclass(frozen=True)
class Started:
    """The prompt was understood and is being worked on."""

    prompt_tokens: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """Text that is certain, with its tokens where the request wants them."""

    text: str
    tokens: list[TokenText]


@dataclasses.dataclass(frozen=True)
class Finished:
    """The answer is complete; `tokens` are those no piece brought."""

    result: GenerationResult
    tokens: list[TokenText]


@dataclasses.dataclass(frozen=True)
class Failed:
    """There is no answer, or only the part that was told."""

    error: ApiError


Event = Started | Piece | Finished | Failed


@dataclasses.dataclass(frozen=True)
class Question:
    """What one answer is wanted to, apart from which bundle says it."""

    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]
    """Text as it is, token ids, or messages for the chat template."""
    config: GenerationConfig
    """`max_new_tokens` is 0 where the request leaves the length to the server."""
    top_logprobs: int | None = None
    """How many alternatives come with each token; None: no probabilities at all."""
    json_schema: str | None = None
    """JSON text of the schema the answer must follow."""
    max_tokens_field: str = "max_tokens"
    """The field the request says the length in."""


@dataclasses.dataclass(eq=False)
class Job:
    """A question in the queue. Equal to nothing but itself."""

    client: str
    question: Question
    emit: Callable[[Event], None]
    """Takes events; called by the worker's thread."""
    ticket: int = 0
    """Order of arrival over all bundles."""
    arrived_s: float = dataclasses.field(default_factory=time.monotonic)
    cancelled: bool = False
    """Set by the asking side, read between rounds."""
