"""This program as an engine of `bench`: plain decoding and every block size in one session."""

from __future__ import annotations

import time

from dflash_runtime import GenerationConfig, Session
from dflash_runtime.backend import open_backend
from dflash_runtime.bundle import Bundle
from dflash_runtime.tokenizer import Tokenizer
from dflash_tools.bench_job import Answer, Job, Mode, Question
from dflash_tools.bench_peers import versions_of
from dflash_tools.engine_place import find_engine_place
from dflash_tools.plan_formulas import PREFILL_CHUNK_TOKENS
from dflash_tools.scripted_acceptance import SCRIPTABLE_BACKENDS, AcceptanceScript, ScriptedBackend
from dflash_tools.stage_times import request_times, timed

_LIBRARIES = {"ort-cpu": ("onnxruntime",), "ort-cuda": ("onnxruntime-gpu",)}
"""What executes the graphs, where a package of that name is always there; TensorRT's is named in the engines."""


class OurEngine:
    """A session whose backend is timed, call by call."""

    def __init__(self, job: Job) -> None:
        """Opens the bundle on its backend; errors are those of `Session.open`."""
        bundle = Bundle.open(job.bundle)
        inner = open_backend(job.backend, bundle, job.threads, PREFILL_CHUNK_TOKENS)
        self._timed = timed(inner)
        self._scripted = ScriptedBackend(self._timed)
        self._scriptable = job.backend in SCRIPTABLE_BACKENDS
        self._vocab_size = bundle.manifest.target.vocab_size
        backend = self._scripted if self._scriptable else self._timed
        self._session = Session(bundle, backend, Tokenizer.open(bundle))
        self.precision = find_engine_place(bundle, job.backend).precision
        self.versions = versions_of("dflash-export", *_LIBRARIES.get(job.backend, ()))
        self._context_answers: dict[int, list[int]] = {}

    def answer(self, mode: Mode, number: int, question: Question) -> Answer:
        """Runs one request. At a length of context every round commits one token by script: cycles are what counts."""
        script = mode.scripted_tokens
        said = question.answer
        if question.context_tokens is not None and mode.block_size > 1 and self._scriptable:
            script, said = 1, self._context_answer(number, question)
        self._scripted.script = None
        if script is not None and said is not None:
            self._scripted.script = AcceptanceScript(len(question.ids), said, script, self._vocab_size)
        answer = self._run(mode, number, question)
        if question.context_tokens is not None and mode.block_size == 1:
            self._context_answers[number] = answer.token_ids
        return answer

    def close(self) -> None:
        """Frees the session."""
        self._session.close()

    def _context_answer(self, number: int, question: Question) -> list[int]:
        if number not in self._context_answers:
            self._scripted.script = None
            self._context_answers[number] = self._run(Mode(1), number, question).token_ids
        return self._context_answers[number]

    def _run(self, mode: Mode, number: int, question: Question) -> Answer:
        plain = mode.block_size == 1
        config = GenerationConfig(
            max_new_tokens=question.max_new_tokens,
            block_size=None if plain else mode.block_size,
            plain=plain,
            stop_token_ids=question.stop_token_ids,
            reuse_prefix=False,  # every repetition runs the whole prompt
        )
        started = time.monotonic()
        result = self._session.generate(question.ids, config)
        ended = time.monotonic()
        times = request_times(self._timed.calls)
        whole = list(range(len(times.cycles)))
        if question.context_tokens is not None:  # a block the end of the output cut costs less
            whole = [i for i in whole if times.rows[i] == mode.block_size]
        lengths = [1] * len(times.cycles) if plain else result.acceptance_lengths
        return Answer(
            mode=mode,
            question=number,
            token_ids=result.token_ids,
            time_to_first_token_ms=result.time_to_first_token_ms,
            round_ms=[times.cycles[i] for i in whole],
            round_tokens=[lengths[i] for i in whole],
            started_s=started,
            ended_s=ended,
            proposed_ids=None if plain or question.context_tokens is not None else result.proposed_ids,
            prefill_ms=times.prefill,
            prefill_context_ms=times.prefill_context,
            stages_ms=[times.stages[i] for i in whole],
            context_tokens=question.context_tokens,
        )
