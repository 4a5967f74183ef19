"""Runs the processes of a measurement: every engine once a round, in turn, each alone on the machine."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import DFlashError, PromptError
from dflash_runtime.tokenizer import Tokenizer
from dflash_tools.bench_job import OURS, EngineRun, Job, Mode, Question, read_run, write_json
from dflash_tools.bench_prompts import PromptSet
from dflash_tools.scripted_acceptance import SCRIPTABLE_BACKENDS

Progress = Callable[[str, int, int], None]
SCRIPTED_CONTEXT_TOKENS, DRAFTED_CONTEXT_TOKENS = 24, 96
"""Tokens decoded at each length of context, enough for a median of the cycles: at one token a round by script, and
where no script can be used."""


@dataclasses.dataclass(frozen=True)
class Entrant:
    """One engine that takes part, and how."""

    engine: str
    label: str
    model: str | None
    drafter: str | None
    modes: list[Mode]
    served_model: str | None = None


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all entrants share."""

    bundle: Path
    backend: str
    threads: int | None
    device: str
    precision: str
    template_args: dict[str, Any]


def run_rounds(
    entrants: Sequence[Entrant], settings: Settings, questions: list[Question], rounds: int, scratch: Path,
    progress: Progress,
) -> list[list[EngineRun]]:
    """Measures all entrants in turn, A B C B C A C A B; each process asks everything.

    Args:
        entrants: Who takes part; lengths of context are measured for ours alone.
        settings: What they share.
        questions: The same for all.
        rounds: How often.
        scratch: Folder for files that travel between the processes.
        progress: Told before each process.

    Returns:
        For each entrant its runs, in the order of the rounds.

    Raises:
        DFlashError: a process failed, with its own words.
    """  # fmt: skip
    found: list[list[EngineRun]] = [[] for _ in entrants]
    for turn in range(rounds):
        for i in range(len(entrants)):
            number = (i + turn) % len(entrants)
            progress("measure", turn * len(entrants) + i, rounds * len(entrants))
            asked = [q for q in questions if entrants[number].engine == OURS or q.context_tokens is None]
            found[number].append(run_process(_job(entrants[number], settings, asked, turn), scratch))
    return found


def run_process(job: Job, scratch: Path) -> EngineRun:
    """Runs one job in a process of its own; DFlashError with the process's own words where it fails."""
    asked, told = scratch / "job.json", scratch / "result.json"
    told.unlink(missing_ok=True)
    write_json(asked, job)
    argv = [sys.executable, "-m", "dflash_tools.bench_worker", str(asked), str(told)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not told.is_file():
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}, no message"]
        raise DFlashError(f"Measuring {job.engine} failed: {lines[-1].removeprefix('Error: ')}")
    return read_run(told)


def make_questions(
    prompts: PromptSet, settings: Settings, max_new_tokens: int, *, raw: bool, scratch: Path
) -> list[Question]:
    """Encodes the prompts. Where a conversation has several turns, each is answered by plain decoding here.

    Args:
        prompts: What is asked.
        settings: Of the measurement.
        max_new_tokens: Longest answer.
        raw: Texts go in as they are, without the chat template.
        scratch: Folder for files that travel between the processes.

    Raises:
        PromptError: a prompt that cannot be encoded, or that leaves no room for an answer.
    """
    bundle = Bundle.open(settings.bundle)
    tokenizer = Tokenizer.open(bundle)
    if tokenizer is None:
        raise PromptError(f"{settings.bundle} has no tokenizer to encode prompts with.")
    raw = raw or not tokenizer.has_chat_template
    make = _QuestionMaker(bundle, tokenizer, settings.template_args, max_new_tokens)
    questions: list[Question] = []
    waiting: list[tuple[list[dict[str, Any]], list[str]]] = []  # a conversation so far, and turns still to come
    for conversation in prompts.conversations:
        if conversation and isinstance(conversation[0], dict):
            questions.append(make.chat([dict(message) for message in conversation if isinstance(message, dict)]))
        elif raw:
            questions.append(make.text("\n".join(str(turn) for turn in conversation)))
        else:
            waiting.append(([], [str(turn) for turn in conversation]))
    while waiting:
        asked = [[*said, {"role": "user", "content": turns[0]}] for said, turns in waiting]
        made = [make.chat(messages) for messages in asked]
        questions += made
        left = [i for i, (_, turns) in enumerate(waiting) if len(turns) > 1]
        answers = plain_answers([made[i] for i in left], settings, scratch) if left else []
        waiting = [
            ([*asked[i], {"role": "assistant", "content": tokenizer.decode(ids)}], waiting[i][1][1:])
            for i, ids in zip(left, answers, strict=True)
        ]
    return questions


def plain_answers(questions: list[Question], settings: Settings, scratch: Path) -> list[list[int]]:
    """The target's own answers, decoded plainly in a process of its own."""
    entrant = Entrant(OURS, "", None, None, [Mode(1)])
    run = run_process(_job(entrant, settings, questions, 0), scratch)
    return [answer.token_ids for answer in run.answers]


def context_new_tokens(backend: str) -> int:
    """Tokens decoded at each length of context."""
    return SCRIPTED_CONTEXT_TOKENS if backend in SCRIPTABLE_BACKENDS else DRAFTED_CONTEXT_TOKENS


def context_questions(
    questions: Sequence[Question], lengths: Sequence[int], bundle: Bundle, backend: str
) -> list[Question]:
    """For each length a prompt of that many tokens: the last ones of all prompts in a row, repeated as needed.

    Raises:
        PromptError: a length the bundle's context has no room for.
    """
    text = [token for question in questions for token in question.ids]
    made, new_tokens = [], context_new_tokens(backend)
    for length in lengths:
        most = bundle.manifest.max_context_tokens - new_tokens
        if not 1 <= length <= most:
            raise PromptError(f"A context of {length} tokens cannot be measured; this bundle has room for 1 to {most}.")
        ids = (text * (length // len(text) + 1))[-length:]
        made.append(Question(ids, None, new_tokens, [], context_tokens=length))
    return made


class _QuestionMaker:
    def __init__(self, bundle: Bundle, tokenizer: Tokenizer, args: dict[str, Any], max_new_tokens: int) -> None:
        self._stops = bundle.manifest.text.stop_token_ids
        self._context = bundle.manifest.max_context_tokens
        self._tokenizer, self._args, self._tokens = tokenizer, args, max_new_tokens

    def chat(self, messages: list[dict[str, Any]]) -> Question:
        return self._question(self._tokenizer.encode_messages(messages, self._args), messages)

    def text(self, text: str) -> Question:
        return self._question(self._tokenizer.encode_text(text), None)

    def _question(self, ids: list[int], messages: list[dict[str, Any]] | None) -> Question:
        if len(ids) + self._tokens > self._context:
            raise PromptError(
                f"A prompt of {len(ids)} tokens and {self._tokens} new ones exceed the context of {self._context}. "
                "Take fewer --max-new-tokens, or build the bundle with a larger --max-context."
            )
        return Question(ids, messages, self._tokens, self._stops)


def _job(entrant: Entrant, settings: Settings, questions: list[Question], turn: int) -> Job:
    return Job(
        engine=entrant.engine,
        bundle=str(settings.bundle),
        backend=settings.backend,
        threads=settings.threads,
        device=settings.device,
        precision=settings.precision,
        model=entrant.model,
        drafter=entrant.drafter,
        served_model=entrant.served_model,
        template_args=settings.template_args,
        modes=entrant.modes,
        questions=questions,
        turn=turn,
    )
