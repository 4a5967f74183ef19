"""A session: a bundle opened on a backend, serving any number of requests one after another."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_runtime.adaptive import BlockSizeController
from dflash_runtime.backend import Backend, open_backend
from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import PromptError
from dflash_runtime.generation import GenerationConfig, GenerationResult, check_ids
from dflash_runtime.request import TextPieces
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
        for _ in pieces:
            pass
        return pieces.result

    def stream(self, prompt: Prompt, config: GenerationConfig | None = None) -> TextPieces:
        """Like `generate`, but gives the text piece by piece; the iterator's `result` is there once it has ended."""
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
        manifest, tokenizer = self.bundle.manifest, self.tokenizer
        if isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping)):
            if tokenizer is None:
                raise PromptError("The bundle has no tokenizer, so the prompt must be a list of token ids.")
            if isinstance(prompt, str) and (config.raw or not tokenizer.has_chat_template):
                ids = tokenizer.encode_text(prompt)
            elif config.raw:
                raise PromptError("raw is True, but the prompt is a list of messages. Leave raw out or give text.")
            else:
                ids = tokenizer.encode_messages(_messages(prompt), config.template_args)
        else:
            ids = list(prompt)  # type: ignore[arg-type]
        ids = check_ids("prompt", ids, manifest.target.vocab_size)
        if not ids:
            raise PromptError("The prompt has no tokens. Give at least one.")
        if len(ids) > manifest.max_context_tokens:
            remedy = "Shorten the prompt or build the bundle with a larger --max-context."
            raise PromptError(f"The prompt has {len(ids)} tokens, the context {manifest.max_context_tokens}. {remedy}")
        return ids


def _messages(prompt: Any) -> list[Mapping[str, Any]]:
    """Messages of a prompt, checked; a text alone is what the user says."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(f'message {i} is {message!r}; it must be like {{"role": "user", "content": "..."}}.')
    return messages
