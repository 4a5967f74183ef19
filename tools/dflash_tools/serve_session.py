"""A loaded bundle: answers one job after another, in the thread that opened it."""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from dflash_runtime.errors import DFlashError, PromptError
from dflash_runtime.generation import GenerationConfig
from dflash_runtime.sampling import TokenChooser
from dflash_runtime.session import Session
from dflash_runtime.tokenizer import Tokenizer
from dflash_tools.error_lines import needs_extra
from dflash_tools.run_block_size import controller_from, pick_block_size, text_depends_on_blocks
from dflash_tools.serve_chooser import ServedChooser
from dflash_tools.serve_errors import ApiError, as_api_error
from dflash_tools.serve_jobs import Failed, Finished, Job, Piece, Question, ScoredToken, Started
from dflash_tools.serve_metrics import ServeMetrics
from dflash_tools.serve_token_text import ShownTokens, TokenTexts

if TYPE_CHECKING:
    from dflash_tools.serve_grammar import JsonGrammars


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """How bundles are opened and used."""

    backend: str = "ort-cpu"
    threads: int | None = None
    block_size: int | Literal["auto"] | None = None
    plain: bool = False
    max_new_tokens: int | None = None
    """Most tokens of an answer; None: what the context has room for."""

    def config(self) -> GenerationConfig:
        """What all answers have in common."""
        return GenerationConfig(max_new_tokens=self.max_new_tokens or 1, block_size=self.block_size, plain=self.plain)


class _LeftError(Exception):
    """Nobody wants the answer any more."""


class LoadedBundle:
    """A session with what is made once for it."""

    def __init__(self, name: str, session: Session, options: SessionOptions, metrics: ServeMetrics) -> None:
        if session.tokenizer is None:
            raise DFlashError(f"{session.bundle.path} has no tokenizer, so it cannot speak text. Build it with one.")
        self.name, self.session, self._options, self._metrics = name, session, options, metrics
        self._tokenizer: Tokenizer = session.tokenizer
        self._texts = TokenTexts(session.tokenizer)
        # By length of context, and for texts that may not depend on time: reading the machine's state takes time.
        self._picked: dict[tuple[int, bool], GenerationConfig] = {}

    def run(self, job: Job) -> None:
        """Answers a job: events to whoever asked, numbers to the metrics.

        Once it is cancelled it ends behind the round, or the piece of the prompt, that runs.
        """
        waited_s = time.monotonic() - job.arrived_s
        try:
            finished = self._answer(job)
        except DFlashError as error:
            told = as_api_error(error)
            self._metrics.count_ending(self.name, "refused" if told.status < 500 else "failed")
            job.emit(Failed(told))
            return
        if finished is None:
            self._metrics.count_ending(self.name, "cancelled")
        else:
            self._metrics.count_result(self.name, finished.result, waited_s)
            job.emit(finished)

    def close(self) -> None:
        """Frees the session."""
        self.session.close()
        gc.collect()  # buffers of a backend may hang in cycles

    def _answer(self, job: Job) -> Finished | None:
        question, manifest = job.question, self.session.bundle.manifest
        ids = self._prompt_ids(question)
        choosers: list[ServedChooser] = []

        def progress(done: int, total: int) -> None:
            if job.cancelled:
                raise _LeftError

        pieces = self.session.stream(ids, self._config(question, len(ids), choosers, progress))
        scored: list[ScoredToken] = choosers[0].scored if choosers else []
        shown, shown_chars = ShownTokens(self._texts, manifest.text.stop_token_ids), 0
        job.emit(Started(len(ids)))
        try:
            for piece in pieces:
                if job.cancelled:
                    raise _LeftError
                shown_chars += len(piece)
                if piece:
                    job.emit(Piece(piece, shown.until(scored, shown_chars)))
        except _LeftError:
            pieces.close()
            return None
        last = shown.until(scored, shown_chars)
        return Finished(pieces.result, [*last, *shown.rest(shown_chars)])

    def _prompt_ids(self, question: Question) -> list[int]:
        prompt = question.prompt
        if isinstance(prompt, str):
            ids = self._tokenizer.encode_text(prompt)
        elif prompt and not isinstance(prompt[0], int):
            ids = self._message_ids(question)
        else:
            ids = list(prompt)  # type: ignore[arg-type]
        room = self.session.bundle.manifest.max_context_tokens
        if len(ids) > room:
            raise ApiError(400, f"The prompt has {len(ids)} tokens and this model's context {room}. Shorten it.",
                           code="context_length_exceeded")  # fmt: skip
        return ids

    def _message_ids(self, question: Question) -> list[int]:
        messages: Any = question.prompt
        try:
            return self._tokenizer.encode_messages(messages, question.config.template_args)
        except DFlashError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_prompt") from error
        except Exception as error:  # a template is a program that came with the checkpoint: anything may be raised
            raise ApiError(400, f"The chat template fails at these messages: {error!r}. Change them.", param="messages",
                           code="invalid_prompt") from error  # fmt: skip

    def _config(self, question: Question, prompt_tokens: int, choosers: list[ServedChooser],
                progress: Callable[[int, int], None]) -> GenerationConfig:  # fmt: skip
        config, most = question.config, self._options.max_new_tokens
        wanted = config.max_new_tokens or most or self.session.bundle.manifest.max_context_tokens
        if most is not None and wanted > most:
            field = question.max_tokens_field
            raise ApiError(400, f"{field} is {wanted}; this server answers with at most {most} tokens.", param=field,
                           code="invalid_value")  # fmt: skip
        config = dataclasses.replace(config, max_new_tokens=wanted, progress=progress)
        if question.top_logprobs is not None or question.json_schema is not None:
            config = dataclasses.replace(config, chooser=functools.partial(self._chooser, question, choosers))
        size = self._block_size(config, prompt_tokens + wanted // 2)
        config = dataclasses.replace(config, block_size=size.block_size, plain=size.plain)
        try:
            config.check(self.session.bundle.manifest)
        except PromptError as error:  # it begins with the option's name
            raise ApiError(400, str(error), param=str(error).split()[0].lower(), code="invalid_value") from error
        return config

    def _chooser(self, question: Question, choosers: list[ServedChooser], sampling: GenerationConfig,
                 prompt: Sequence[int], vocab_size: int) -> TokenChooser:  # fmt: skip
        grammar = None if question.json_schema is None else self._grammars.compile(question.json_schema)
        top = question.top_logprobs
        choosers.append(ServedChooser(sampling, prompt, vocab_size, top_logprobs=top, grammar=grammar))
        return choosers[-1]

    @functools.cached_property
    def _grammars(self) -> JsonGrammars:
        with needs_extra("serve"):
            from dflash_tools.serve_grammar import JsonGrammars
        return JsonGrammars(self.session.bundle)

    def _block_size(self, asked: GenerationConfig, context_tokens: int) -> GenerationConfig:
        """Block size, `auto` or plain decoding, as `run` takes it for a request and a length of context."""
        near = 1 << max(0, context_tokens - 1).bit_length()
        key = near, text_depends_on_blocks(asked)
        if key not in self._picked:
            options, session = self._options, self.session
            config = dataclasses.replace(asked, max_new_tokens=1, block_size=options.block_size, plain=options.plain)
            picked = pick_block_size(session.bundle, config, options.backend, options.threads, near)
            if not self._picked and picked.profile is not None:  # from then on it learns, request by request
                session.controller = controller_from(picked.profile, session.bundle.manifest.block_sizes, near)
            self._picked[key] = picked.config
        return self._picked[key]
