"""One running request: decoded rounds become text pieces and, at the end, a result."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dflash_runtime.cycles import Round
from dflash_runtime.decode import decode
from dflash_runtime.errors import PromptError
from dflash_runtime.generation import GenerationConfig, GenerationResult
from dflash_runtime.text_stream import TextStream

if TYPE_CHECKING:
    from dflash_runtime.session import Session


class TextPieces(Iterator[str]):
    """Iterator over the text of a running request; `result` is there once it has ended."""

    def __init__(self, session: Session, prompt_ids: list[int], config: GenerationConfig, started_s: float) -> None:
        backend, manifest, controller = session._backend, session.bundle.manifest, session.controller
        if (before := session._current) is not None:
            before.close()
        # Tokens of the text in the caches, oldest first. All but the newest have their rows in both models.
        self.known_ids: list[int] = [] if before is None else before.known_ids
        self._prompt_ids, self._facts = prompt_ids, (backend.name, config.fixed_block_size(manifest))
        stop_ids = manifest.text.stop_token_ids if config.stop_token_ids is None else config.stop_token_ids
        self._chooser = None
        if config.needs_logits or config.chooser:
            from dflash_runtime.sampling import TokenChooser  # NumPy is for those who run something

            self._chooser = (config.chooser or TokenChooser)(config, prompt_ids, manifest.target.vocab_size)
        self._controller = controller if config.block_size == "auto" else None
        if self._controller is not None:
            controller.begin()
        self._rounds = decode(
            backend, prompt_ids,
            max_new_tokens=config.max_new_tokens, max_context_tokens=manifest.max_context_tokens,
            stop_token_ids=frozenset(stop_ids), chooser=self._chooser,
            block_size_of=config.block_size_of(manifest) if self._controller is None else lambda n: controller.choose(),
            kept_rows=_kept_rows(self.known_ids, prompt_ids) if config.reuse_prefix else 0,
        )
        decode_ids = (lambda ids: "") if session.tokenizer is None else session.tokenizer.decode
        self._text = TextStream(decode_ids, config.stop_strings)
        self._started_s, self._first_token_s, self._decode_s = started_s, 0.0, 0.0
        self.rounds: list[Round] = []  # what was committed so far, the prefill's token first
        self._pieces: list[str] = []
        self._closed = False

    @property
    def result(self) -> GenerationResult:
        """What the request produced; PromptError while the stream has not been read to its end."""
        if not self.rounds or (reason := self.rounds[-1].finish_reason) is None:
            raise PromptError("The stream has not ended, so it has no result yet. Read it to its end first.")
        backend, block_size = self._facts
        token_ids = [token for done in self.rounds for token in done.committed]
        drafted = [done for done in self.rounds if done.proposed]
        return GenerationResult(
            text="".join(self._pieces), token_ids=token_ids,
            prompt_token_count=len(self._prompt_ids), finish_reason=reason,
            acceptance_lengths=[len(done.committed) for done in drafted],
            proposed_ids=[done.proposed for done in drafted],
            tokens_per_s=(len(token_ids) - 1) / self._decode_s if len(token_ids) > 1 else 0.0,
            time_to_first_token_ms=self._first_token_s * 1000, backend=backend, block_size=block_size,
            rounds_by_block_size=dict(sorted(Counter(done.block_size for done in self.rounds[1:]).items())),
            seed=None if self._chooser is None else self._chooser.seed, reused_token_count=self.rounds[0].kept_rows,
        )

    def close(self) -> None:
        """Abandons the request; a result that is already there stays."""
        self._closed = True
        self._rounds.close()

    def __next__(self) -> str:
        """The next piece of text, never empty."""
        while not self.rounds or self.rounds[-1].finish_reason is None:
            if self._closed:
                raise PromptError("The stream was closed, or another request began. Start the request again.")
            if piece := self._commit(self._next_round()):
                self._pieces.append(piece)
                return piece
        raise StopIteration

    def _next_round(self) -> Round:
        before = time.perf_counter()
        known, self.known_ids = self.known_ids, []  # if anything is raised now, rows may be half written
        done = next(self._rounds)
        now = time.perf_counter()
        if self.rounds:
            self._decode_s += now - before  # the time the reader takes between pieces is not ours
            if self._controller is not None:
                complete = done.finish_reason is None
                self._controller.observe(done.block_size, len(done.committed), 1000 * (now - before), complete=complete)
        else:
            self._first_token_s = now - self._started_s
            known = list(self._prompt_ids)
        known += done.committed
        self.known_ids = known
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
        self.rounds.append(done._replace(committed=done.committed[:taken], finish_reason=reason))
        return text


def _kept_rows(known_ids: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """Tokens the prompt begins with that have rows; its last one is run again, for the logits behind it."""
    most = max(0, min(len(known_ids), len(prompt_ids)) - 1)
    return next((i for i in range(most) if known_ids[i] != prompt_ids[i]), most)
