"""One measurement of one bundle, from options to report."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import DFlashError
from dflash_tools.bench_entrants import convert_for_genai, find_entrants, our_modes
from dflash_tools.bench_job import GENAI, SERVER, EngineRun, Mode, Question
from dflash_tools.bench_prompts import PromptSet, find_prompts, template_text, thinking_args, thinking_words
from dflash_tools.bench_report import (
    SCHEMA_VERSION,
    BenchReport,
    MemoryFacts,
    PromptFacts,
    disturbance_notes,
    scripted_notes,
)
from dflash_tools.bench_result import comparisons, context_results, mode_results
from dflash_tools.bench_rounds import (
    Entrant,
    Settings,
    context_questions,
    make_questions,
    plain_answers,
    run_rounds,
)
from dflash_tools.bench_statistics import FEWEST_ROUNDS
from dflash_tools.bundle_memory import session_memory
from dflash_tools.device_conditions import environment_settings, read_conditions, read_state
from dflash_tools.engine_place import EnginePlace, find_engine_place
from dflash_tools.machine_probe import Machine
from dflash_tools.power_meter import PowerMeter

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """What the command line asks for; see `dflash-export bench --help`."""

    prompts: str
    num_prompts: int
    max_new_tokens: int
    block_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    scripted: tuple[int, ...]
    backend: str
    threads: int | None
    rounds: int
    against: tuple[str, ...]
    model: str | None
    drafter: str | None
    genai_folder: Path | None
    thinking: str | None
    template_args: dict[str, Any]
    raw: bool
    command: str
    tool_version: str


def run_bench(path: Path, options: BenchOptions, scratch: Path, progress: Progress) -> BenchReport:
    """Measures one bundle.

    Args:
        path: The bundle.
        options: What to measure.
        scratch: Folder for files that travel between the processes, and for converted models.
        progress: Told how far it is.

    Raises:
        DFlashError: a bundle, peer, prompt or option that cannot be used; named before anything is measured.
    """
    started, began = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
    machine, uses_gpu = Machine(), options.backend != "ort-cpu"
    bundle = Bundle.open(path)
    place = find_engine_place(bundle, options.backend, machine)
    entrants = find_entrants(
        bundle, our_modes(bundle, options.block_sizes, options.scripted), options.against, options.model,
        options.drafter,
    )  # fmt: skip
    _check_genai(entrants, options.backend)
    args, thinking = _template_args(bundle, options)
    settings = Settings(
        path, options.backend, options.threads, "cuda" if uses_gpu else "cpu", place.precision, args
    )
    prompts = find_prompts(options.prompts, options.num_prompts)
    conditions, before = read_conditions(machine, uses_gpu=uses_gpu), read_state(machine, uses_gpu=uses_gpu)
    progress("prepare", 0, 1)
    questions = _questions(bundle, options, prompts, settings, entrants[0].modes, scratch)
    entrants = convert_for_genai(entrants, options.genai_folder, scratch)
    contexts = context_questions(questions, sorted(set(options.contexts)), bundle)
    with PowerMeter(uses_gpu=uses_gpu) as meter:
        runs = run_rounds(entrants, settings, [*questions, *contexts], options.rounds, scratch, progress)
    rows = mode_results(entrants, runs, meter.energy_joules)
    drafter = bundle.manifest.drafter
    return BenchReport(
        schema_version=SCHEMA_VERSION,
        command=options.command,
        started=started.isoformat(timespec="seconds"),
        duration_s=round(time.monotonic() - began, 1),
        tool_version=options.tool_version,
        bundle=str(path),
        target=bundle.manifest.target.name,
        drafter=None if drafter is None else drafter.name,
        drafter_block_size=None if drafter is None else drafter.block_size,
        backend=options.backend,
        threads=options.threads,
        rounds=options.rounds,
        prompts=_prompt_facts(prompts, questions, thinking, options.max_new_tokens),
        conditions=conditions,
        before=before,
        after=read_state(machine, uses_gpu=uses_gpu),
        environment=environment_settings(),
        versions={e.label: own[0].versions for e, own in zip(entrants, runs, strict=True)},
        rows=rows,
        comparisons=comparisons(entrants, runs, rows),
        contexts=context_results(entrants[0], runs[0]),
        memory=_memory(bundle, place, entrants, runs),
        power_source=meter.source,
        notes=_notes(options) + disturbance_notes(conditions, before) + scripted_notes(rows),
    )


def _template_args(bundle: Bundle, options: BenchOptions) -> tuple[dict[str, Any], str]:
    """Arguments of the chat template over the bundle's own, and the thinking mode in words."""
    template = None if options.raw else template_text(bundle)
    own = bundle.manifest.text.template_args
    args = {**own, **options.template_args, **thinking_args(template, options.thinking)}
    return args, thinking_words(template, args)


def _questions(
    bundle: Bundle, options: BenchOptions, prompts: PromptSet, settings: Settings, modes: Sequence[Mode], scratch: Path
) -> list[Question]:
    questions = make_questions(prompts, settings, options.max_new_tokens, raw=options.raw, scratch=scratch)
    if any(mode.scripted_tokens for mode in modes):
        answers = plain_answers(questions, settings, scratch)
        questions = [dataclasses.replace(q, answer=said) for q, said in zip(questions, answers, strict=True)]
    return questions


def _check_genai(entrants: Sequence[Entrant], backend: str) -> None:
    if backend != "ort-cpu" and any(entrant.engine == GENAI for entrant in entrants):
        raise DFlashError(f"onnxruntime-genai is measured in fp32 on the CPU, so beside ort-cpu and not {backend}.")


def _prompt_facts(prompts: PromptSet, questions: Sequence[Question], thinking: str, max_new_tokens: int) -> PromptFacts:
    return PromptFacts(
        name=prompts.name,
        count=len(questions),
        picked=prompts.picked,
        wrapping=prompts.wrapping,
        thinking=thinking,
        sha256=prompts.sha256,
        prompt_tokens=[len(question.ids) for question in questions],
        max_new_tokens=max_new_tokens,
    )


def _memory(
    bundle: Bundle, place: EnginePlace, entrants: Sequence[Entrant], runs: Sequence[Sequence[EngineRun]]
) -> MemoryFacts:
    session = session_memory(bundle, place.precision)
    pairs = [(entrant, own) for entrant, own in zip(entrants, runs, strict=True) if entrant.engine != SERVER]
    device = {e.label: [r.device_memory_bytes for r in own if r.device_memory_bytes] for e, own in pairs}
    return MemoryFacts(
        weight_bytes=session.weight_bytes,
        kv_bytes=session.kv_bytes,
        engine_bytes=place.file_bytes,
        peak_resident_bytes={e.label: max(r.peak_resident_bytes for r in own) for e, own in pairs},
        device_bytes={label: max(sizes) for label, sizes in device.items() if sizes},
    )


def _notes(options: BenchOptions) -> list[str]:
    if options.rounds >= FEWEST_ROUNDS:
        return []
    return [f"Fewer than {FEWEST_ROUNDS} rounds cannot tell an effect from the spread; these are {options.rounds}."]
