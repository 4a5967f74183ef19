"""Measures a pair on this device: time of a cycle by block size and context, acceptance by block size and position."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_runtime.bundle import Bundle
from dflash_tools.acceptance import mean_acceptance
from dflash_tools.bench_entrants import our_modes
from dflash_tools.bench_job import OURS, Answer, Job, Mode, Question
from dflash_tools.bench_ours import OurEngine
from dflash_tools.bench_prompts import PromptSet, template_text, thinking_words
from dflash_tools.bench_rounds import Settings, context_new_tokens, context_questions, make_questions
from dflash_tools.bench_statistics import percentile
from dflash_tools.device_conditions import read_conditions, read_state
from dflash_tools.engine_place import EnginePlace
from dflash_tools.machine_probe import Machine
from dflash_tools.position_acceptance import count_positions, histogram
from dflash_tools.speed_profile import BlockAcceptance, CycleCost, ProfilePrompts, SpeedProfile
from dflash_tools.stage_times import STAGES

Progress = Callable[[str, int, int], None]
DEFAULT_CONTEXTS = (64, 256, 1024, 4096, 16384)


@dataclasses.dataclass(frozen=True)
class TuneOptions:
    """What `tune` is asked for."""

    backend: str
    threads: int | None
    block_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    """Empty for those of the defaults the bundle has room for."""
    rounds: int
    max_new_tokens: int
    tool_version: str


def contexts_for(bundle: Bundle, wanted: Sequence[int], backend: str) -> list[int]:
    """The lengths to measure: those wanted, else the defaults this bundle has room for, and its longest."""
    longest = bundle.manifest.max_context_tokens - context_new_tokens(backend)
    return sorted(set(wanted)) or [n for n in DEFAULT_CONTEXTS if n < longest] + [longest]


def measure_profile(
    bundle: Bundle, place: EnginePlace, prompts: PromptSet, options: TuneOptions, scratch: Path, machine: Machine,
    progress: Progress,
) -> SpeedProfile:
    """Measures everything in one session.

    Args:
        bundle: The pair.
        place: Its engines.
        prompts: What acceptance is measured on.
        options: What to measure.
        scratch: Folder for files that travel between processes.
        machine: Where power mode and clocks are read.
        progress: Told how far it is.

    Raises:
        DFlashError: the bundle, an option or a prompt cannot be used.
    """  # fmt: skip
    uses_gpu = options.backend != "ort-cpu"
    conditions, before = read_conditions(machine, uses_gpu=uses_gpu), read_state(machine, uses_gpu=uses_gpu)
    template, args = template_text(bundle), dict(bundle.manifest.text.template_args)
    settings = Settings(bundle.path, options.backend, options.threads, "cpu", place.precision, args)
    questions = make_questions(prompts, settings, options.max_new_tokens, raw=False, scratch=scratch)
    modes = our_modes(bundle, options.block_sizes, ())
    with contextlib.closing(OurEngine(_job(settings, modes))) as engine:
        engine.answer(modes[-1], 0, dataclasses.replace(questions[0], max_new_tokens=16))  # warms up
        lengths = contexts_for(bundle, options.contexts, options.backend)
        at_lengths = context_questions(questions, lengths, bundle, options.backend)
        costs = _costs(engine, modes, at_lengths, options.rounds, progress)
        acceptance = [_acceptance(engine, mode, questions, progress) for mode in modes if mode.block_size > 1]
    return SpeedProfile(
        made=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        tool_version=options.tool_version,
        backend=options.backend,
        threads=options.threads,
        engine_sha256=place.record_sha256,
        conditions=conditions,
        load_average=before.load_average,
        prompts=_prompt_facts(prompts, questions, thinking_words(template, args)),
        costs=costs,
        acceptance=acceptance,
    )


def _prompt_facts(prompts: PromptSet, questions: Sequence[Question], thinking: str) -> ProfilePrompts:
    return ProfilePrompts(prompts.name, prompts.sha256, len(questions), questions[0].max_new_tokens, thinking)


def _costs(
    engine: OurEngine, modes: Sequence[Mode], questions: Sequence[Question], rounds: int, progress: Progress
) -> list[CycleCost]:
    """Every mode at every length, in turn, `rounds` times."""
    found: dict[tuple[int, int], list[Answer]] = defaultdict(list)
    for turn in range(rounds):
        for number, question in enumerate(questions):
            progress("cycles", turn * len(questions) + number, rounds * len(questions))
            for mode in modes:
                answer = engine.answer(mode, number, question)
                found[mode.block_size, int(question.context_tokens or 0)].append(answer)
    return [_cost(size, length, answers) for (size, length), answers in sorted(found.items())]


def _cost(block_size: int, context_tokens: int, answers: Sequence[Answer]) -> CycleCost:
    cycles = [ms for answer in answers for ms in answer.round_ms]
    stages = [one for answer in answers for one in answer.stages_ms or []]
    low, median, high = (percentile(cycles, share) for share in (0.25, 0.5, 0.75))
    parts = {name: percentile([one[name] for one in stages], 0.5) for name in STAGES}
    return CycleCost(block_size, context_tokens, median, low, high, parts, len(cycles))


def _acceptance(
    engine: OurEngine, mode: Mode, questions: Sequence[Question], progress: Progress
) -> BlockAcceptance:
    answers = []
    for number, question in enumerate(questions):
        progress(f"acceptance, {mode.name}", number, len(questions))
        answers.append(engine.answer(mode, number, question))
    rounds = [done for answer in answers for done in answer.rounds()]
    counts = count_positions(rounds, mode.block_size)
    mean = mean_acceptance([answer.round_tokens for answer in answers])
    return BlockAcceptance(
        mode.block_size,
        counts.reached,
        counts.accepted,
        histogram(rounds, mode.block_size),
        1.0 if mean is None else mean.over_rounds,
        1.0 if mean is None else mean.over_requests,
    )


def _job(settings: Settings, modes: list[Mode]) -> Job:
    return Job(
        engine=OURS, bundle=str(settings.bundle), backend=settings.backend, threads=settings.threads,
        device=settings.device, precision=settings.precision, model=None, drafter=None, served_model=None,
        template_args=settings.template_args, modes=modes, questions=[], turn=0,
    )  # fmt: skip
