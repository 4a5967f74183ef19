"""One running request: decoded rounds become text pieces and, at the end, a result."""

from __future__ import annotations

import time
from collections.abc import Iterator

from dflash_runtime.backend import Backend
from dflash_runtime.bundle import Manifest
from dflash_runtime.decode import Round, decode
from dflash_runtime.errors import PromptError
from dflash_runtime.generation import GenerationConfig, GenerationResult
from dflash_runtime.text_stream import TextStream
from dflash_runtime.tokenizer import Tokenizer


class TextPieces(Iterator[str]):
    """Iterator over the text of a running request; `result` is there once it has ended."""

    def __init__(
        self, backend: Backend, manifest: Manifest, tokenizer: Tokenizer | None,
        *, prompt_ids: list[int], config: GenerationConfig, started_s: float,
    ) -> None:
        self._backend_name = backend.name
        self._prompt_token_count = len(prompt_ids)
        self._block_size = config.fixed_block_size(manifest)
        stop_ids = manifest.text.stop_token_ids if config.stop_token_ids is None else config.stop_token_ids
        self._rounds = decode(
            backend, prompt_ids,
            max_new_tokens=config.max_new_tokens, max_context_tokens=manifest.max_context_tokens,
            stop_token_ids=frozenset(stop_ids), block_size_of=config.block_size_of(manifest),
        )
        detokenize = (lambda ids: "") if tokenizer is None else tokenizer.decode
        self._text = TextStream(detokenize, config.stop_strings)
        self._started_s = started_s
        self._first_token_s = 0.0
        self._decode_s = 0.0
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._acceptance_lengths: list[int] = []
        self._proposed_ids: list[list[int]] = []
        self._finish_reason: str | None = None
        self._closed = False

    @property
    def result(self) -> GenerationResult:
        """What the request produced; PromptError while the stream has not been read to its end."""
        if self._finish_reason is None:
            raise PromptError("The stream has not ended, so it has no result yet. Read it to its end first.")
        decoded = len(self._token_ids) - 1
        return GenerationResult(
            text="".join(self._pieces), token_ids=self._token_ids,
            prompt_token_count=self._prompt_token_count, finish_reason=self._finish_reason,
            acceptance_lengths=self._acceptance_lengths, proposed_ids=self._proposed_ids,
            tokens_per_s=decoded / self._decode_s if decoded else 0.0,
            time_to_first_token_ms=self._first_token_s * 1000,
            backend=self._backend_name, block_size=self._block_size,
        )

    def close(self) -> None:
        """Abandons the request; a result that is already there stays."""
        self._closed = True
        self._rounds.close()

    def __next__(self) -> str:
        """The next piece of text, never empty."""
        while self._finish_reason is None:
            if self._closed:
                raise PromptError("The stream was closed, or another request began. Start the request again.")
            if piece := self._commit(self._next_round()):
                self._pieces.append(piece)
                return piece
        raise StopIteration

    def _next_round(self) -> Round:
        before = time.perf_counter()
        done = next(self._rounds)
        now = time.perf_counter()
        if self._token_ids:
            self._decode_s += now - before  # the time the reader takes between pieces is not ours
        else:
            self._first_token_s = now - self._started_s
        return done

    def _commit(self, done: Round) -> str:
        """Takes a round's tokens up to where a stop string is complete, and returns their text."""
        text, taken, reason = "", 0, done.finish_reason
        for i, token in enumerate(done.committed):
            taken += 1
            if reason != "stop" or i + 1 < len(done.committed):  # the stop token has no text
                text += self._text.push(token)
            if self._text.stopped:
                reason = "stop"
                break
        if reason is not None:
            text += self._text.finish()
            reason = "stop" if self._text.stopped else reason
            self._rounds.close()
        self._token_ids += done.committed[:taken]
        if done.proposed:
            self._acceptance_lengths.append(taken)
            self._proposed_ids.append(done.proposed)
        self._finish_reason = reason
        return text
