"""A session: a bundle opened on a backend, serving any number of requests one after another."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_runtime.adaptive import BlockSizeController
from dflash_runtime.backend import Backend, Round, open_backend
from dflash_runtime.bundle import Bundle
from dflash_runtime.decode import decode
from dflash_runtime.errors import PromptError
from dflash_runtime.generation import GenerationConfig, GenerationResult, check_ids
from dflash_runtime.text_stream import TextStream
from dflash_runtime.tokenizer import Tokenizer

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


class Session:
    """Generates text with a bundle. Use it as a context manager or call `close`.

    A request keeps the rows of the tokens it begins with like the one before; starting one ends a stream that was left
    unfinished. Nobody else may use the backend in between.
    """

    def __init__(self, bundle: Bundle, backend: Backend, tokenizer: Tokenizer | None) -> None:
        self.bundle, self.tokenizer, self._backend = bundle, tokenizer, backend
        self._current: TextPieces | None = None
        self.controller = BlockSizeController(bundle.manifest.block_sizes)
        self._closed = False

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], backend: str = "ort-cpu",
        *, threads: int | None = None, prefill_chunk_tokens: int = 128, cuda_graphs: bool | None = None,
    ) -> Session:
        """Opens a bundle for generation.

        Args:
            path: The bundle folder.
            backend: What executes the graphs.
            threads: CPU threads; None lets the backend choose.
            prefill_chunk_tokens: Most prompt tokens per target call; larger is faster and takes more memory.
            cuda_graphs: Enqueue each cycle as one CUDA graph; None where the backend is known to allow it.

        Raises:
            BundleError: no bundle there, or a file is missing or altered.
            BackendError: the backend is unknown or not available here, or an option of it is out of range.
            EngineError: the bundle has no usable engine for it.
        """
        bundle = Bundle.open(path)
        opened = open_backend(backend, bundle, threads, prefill_chunk_tokens, cuda_graphs)
        return cls(bundle, opened, Tokenizer.open(bundle))

    def generate(self, prompt: Prompt, config: GenerationConfig | None = None) -> GenerationResult:
        """Runs one request to its end.

        Args:
            prompt: Text, a list of messages (`{"role": ..., "content": ...}`), or token ids.
            config: Options; None for the defaults.

        Raises:
            PromptError: the prompt or an option cannot be used.
            NumericsError: the model's logits were not finite.
        """
        pieces = self.stream(prompt, config)
        list(pieces)
        return pieces.result

    def stream(self, prompt: Prompt, config: GenerationConfig | None = None) -> TextPieces:
        """Like `generate`, but gives the text round by round; the iterator's `result` is there once it has ended."""
        if self._closed:
            raise PromptError("The session is closed. Open another one with Session.open.")
        started = time.perf_counter()
        config = config or GenerationConfig()
        config.check(self.bundle.manifest)
        if config.stop_strings and self.tokenizer is None:
            raise PromptError("stop_strings is given, but the bundle has no tokenizer. Use stop_token_ids.")
        ids = self._prompt_ids(prompt, config)
        self._current = TextPieces(self, ids, config, started)
        return self._current

    def close(self) -> None:
        """Frees the backend. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._backend.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _prompt_ids(self, prompt: Prompt, config: GenerationConfig) -> list[int]:
        """Token ids of any kind of prompt, checked against the vocabulary and the context."""
        manifest, tokenizer, ids = self.bundle.manifest, self.tokenizer, prompt
        if isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping)):
            if tokenizer is None:
                raise PromptError("The bundle has no tokenizer, so the prompt must be a list of token ids.")
            if isinstance(prompt, str) and (config.raw or not tokenizer.has_chat_template):
                ids = tokenizer.encode_text(prompt)
            elif config.raw:
                raise PromptError("raw is True, but the prompt is a list of messages. Leave raw out or give text.")
            else:
                ids = tokenizer.encode_messages(_messages(prompt), config.template_args)
        ids = check_ids("prompt", ids, manifest.target.vocab_size)
        if not ids:
            raise PromptError("The prompt has no tokens. Give at least one.")
        if len(ids) > manifest.max_context_tokens:
            remedy = "Shorten the prompt or build the bundle with a larger --max-context."
            raise PromptError(f"The prompt has {len(ids)} tokens, the context {manifest.max_context_tokens}. {remedy}")
        return ids


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
        self._progress, self._controller = config.progress, controller if config.block_size == "auto" else None
        if self._controller is not None:
            controller.begin()
        self._rounds = decode(
            backend, prompt_ids,
            max_new_tokens=config.max_new_tokens, max_context_tokens=manifest.max_context_tokens,
            stop_token_ids=frozenset(stop_ids), chooser=self._chooser,
            block_size_of=config.block_size_of(manifest) if self._controller is None else lambda n: controller.choose(),
            kept_rows=_kept_rows(self.known_ids, prompt_ids) if config.reuse_prefix else 0, read=self._read)
        decode_ids = (lambda ids: "") if session.tokenizer is None else session.tokenizer.decode
        self._text = TextStream(decode_ids, config.stop_strings)
        self._started_s, self._first_token_s, self._decode_s, self._closed = started_s, 0.0, 0.0, False
        self.rounds: list[Round] = []  # what was committed so far, the prefill's token first
        self._pieces: list[str] = []

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
        """The text of the next round; it may be empty, so that a reader who would leave is asked at every round."""
        if self.rounds and self.rounds[-1].finish_reason is not None:
            raise StopIteration
        if self._closed:
            raise PromptError("The stream was closed, or another request began. Start the request again.")
        self._pieces.append(self._commit(self._next_round()))
        return self._pieces[-1]

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

    def _read(self, rows: int) -> None:
        self.known_ids = self._prompt_ids[: rows + 1]  # right, if the next line ends the request
        self._progress(rows, len(self._prompt_ids))
        self.known_ids = []

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


def _messages(prompt: Any) -> list[Mapping[str, Any]]:
    """Messages of a prompt, checked; a text alone is what the user says."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(f'message {i} is {message!r}; it must be like {{"role": "user", "content": "..."}}.')
    return messages


def _kept_rows(known_ids: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """Tokens the prompt begins with that have rows; its last one is run again, for the logits behind it."""
    most = max(0, min(len(known_ids), len(prompt_ids)) - 1)
    return next((i for i in range(most) if known_ids[i] != prompt_ids[i]), most)
