"""Answers in OpenAI's shape, whole or as chunks of a stream."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dflash_runtime.generation import GenerationResult
from dflash_tools.serve_jobs import TokenText

FINISH_REASONS = {"stop": "stop", "length": "length", "context": "length"}


class Shape(Protocol):
    """What differs between chat and plain completions."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, text: str) -> dict[str, Any]:
        """The text of a whole choice."""

    def opening(self) -> dict[str, Any] | None:
        """The first chunk of a choice; None: there is none without text."""

    def piece(self, text: str) -> dict[str, Any]:
        """A piece of text in a chunk; an empty one at the end."""

    def logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        """Probabilities of tokens."""


class ChatShape:
    """`/v1/chat/completions`."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self, text: str) -> dict[str, Any]:
        """See `Shape`."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def opening(self) -> dict[str, Any] | None:
        """See `Shape`."""
        return {"delta": {"role": "assistant", "content": "", "refusal": None}}

    def piece(self, text: str) -> dict[str, Any]:
        """See `Shape`."""
        return {"delta": {"content": text} if text else {}}

    def logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        """See `Shape`."""
        content = [
            {**_scored(token.token, token.text_bytes, token.logprob), "top_logprobs": [_scored(*t) for t in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class CompletionShape:
    """`/v1/completions`."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def whole(self, text: str) -> dict[str, Any]:
        """See `Shape`."""
        return {"text": text}

    def opening(self) -> dict[str, Any] | None:
        """See `Shape`."""
        return None

    def piece(self, text: str) -> dict[str, Any]:
        """See `Shape`."""
        return {"text": text}

    def logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        """See `Shape`."""
        return {
            "tokens": [token.token for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{text: logprob for text, _, logprob in token.top} for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


def _scored(token: str, text_bytes: bytes | None, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": None if text_bytes is None else list(text_bytes)}


@dataclasses.dataclass(frozen=True)
class Reply:
    """Writes what belongs to one request."""

    shape: Shape
    model: str
    fingerprint: str
    wants_logprobs: bool
    wants_usage: bool
    answers_per_prompt: int = 1
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))
    created_s: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def whole(self, texts: Sequence[str], tokens: Sequence[Sequence[TokenText]],
              results: Sequence[GenerationResult], prompt_tokens: int) -> dict[str, Any]:
        """A complete answer; the arguments have an entry for each choice."""
        choices = [
            {"index": i, **self.shape.whole(text), "logprobs": self._logprobs(tokens[i]),
             "finish_reason": FINISH_REASONS[results[i].finish_reason]}
            for i, text in enumerate(texts)
        ]  # fmt: skip
        return {**self._head(self.shape.whole_object), "choices": choices, "usage": self._usage(results, prompt_tokens)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before a choice's first text."""
        part = self.shape.opening()
        return None if part is None else self._chunk(index, part, (), None)

    def piece(self, index: int, text: str, tokens: Sequence[TokenText]) -> dict[str, Any]:
        """A chunk with text."""
        return self._chunk(index, self.shape.piece(text), tokens, None)

    def ending(self, index: int, result: GenerationResult, tokens: Sequence[TokenText]) -> dict[str, Any]:
        """The last chunk of a choice."""
        return self._chunk(index, self.shape.piece(""), tokens, FINISH_REASONS[result.finish_reason])

    def usage(self, results: Sequence[GenerationResult], prompt_tokens: int) -> dict[str, Any]:
        """The last chunk of a stream that was asked for usage."""
        return {**self._head(self.shape.chunk_object), "choices": [], "usage": self._usage(results, prompt_tokens)}

    def _chunk(self, index: int, part: Mapping[str, Any], tokens: Sequence[TokenText],
               finish_reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if tokens else None
        choice = {"index": index, **part, "logprobs": logprobs, "finish_reason": finish_reason}
        told = {"usage": None} if self.wants_usage else {}
        return {**self._head(self.shape.chunk_object), "choices": [choice], **told}

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        return self.shape.logprobs(tokens) if self.wants_logprobs else None

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"{self.shape.id_prefix}-{self.id}", "object": kind, "created": self.created_s,
                "model": self.model, "system_fingerprint": self.fingerprint}  # fmt: skip

    def _usage(self, results: Sequence[GenerationResult], prompt_tokens: int) -> dict[str, Any]:
        """Tokens: each prompt once, answers all. Proposals that were refused are in no total, unlike at OpenAI."""
        completion = sum(len(result.token_ids) for result in results)
        accepted = sum(length - 1 for result in results for length in result.acceptance_lengths)
        proposed = sum(len(ids) for result in results for ids in result.proposed_ids)
        cached = sum(result.reused_token_count for result in results[:: self.answers_per_prompt])
        return {
            "prompt_tokens": prompt_tokens, "completion_tokens": completion,
            "total_tokens": prompt_tokens + completion, "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"accepted_prediction_tokens": accepted,
                                          "rejected_prediction_tokens": max(0, proposed - accepted)},
        }  # fmt: skip
