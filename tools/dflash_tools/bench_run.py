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
from dflash_tools.bench_job import GENAI, SERVER, EngineRun, Question
from dflash_tools.bench_prompts import PromptSet, find_prompts, template_text, thinking_args, thinking_words
from dflash_tools.bench_report import (
    SCHEMA_VERSION,
    BenchReport,
    MemoryFacts,
    PairFacts,
    PromptFacts,
    disturbance_notes,
    few_rounds_notes,
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
from dflash_tools.bundle_memory import session_memory
from dflash_tools.device_conditions import environment_settings, read_conditions, read_state
from dflash_tools.engine_place import EnginePlace, find_engine_place
from dflash_tools.machine_probe import Machine
from dflash_tools.power_meter import PowerMeter
from dflash_tools.scripted_acceptance import SCRIPTABLE_BACKENDS

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
    plan = _make_plan(path, options, machine)
    conditions, before = read_conditions(machine, uses_gpu=uses_gpu), read_state(machine, uses_gpu=uses_gpu)
    progress("prepare", 0, 1)
    questions = _questions(plan, options, scratch)
    contexts = context_questions(questions, sorted(set(options.contexts)), plan.bundle, options.backend)
    entrants = convert_for_genai(plan.entrants, options.genai_folder, scratch)
    with PowerMeter(uses_gpu=uses_gpu) as meter:
        runs = run_rounds(entrants, plan.settings, [*questions, *contexts], options.rounds, scratch, progress)
    rows = mode_results(entrants, runs, meter.energy_joules)
    changed = conditions.differences(read_conditions(machine, uses_gpu=uses_gpu))
    notes = few_rounds_notes(options.rounds) + disturbance_notes(conditions, before, changed) + scripted_notes(rows)
    return BenchReport(
        schema_version=SCHEMA_VERSION,
        command=options.command,
        started=started.isoformat(timespec="seconds"),
        duration_s=round(time.monotonic() - began, 1),
        tool_version=options.tool_version,
        pair=_pair(plan.bundle, options),
        rounds=options.rounds,
        prompts=_prompt_facts(plan, questions, options.max_new_tokens),
        conditions=conditions,
        before=before,
        after=read_state(machine, uses_gpu=uses_gpu),
        environment=environment_settings(),
        versions={e.label: own[0].versions for e, own in zip(entrants, runs, strict=True)},
        rows=rows,
        comparisons=comparisons(entrants, runs, rows),
        contexts=context_results(entrants[0], runs[0]),
        memory=_memory(plan, runs),
        power_source=meter.source,
        notes=notes,
    )


@dataclasses.dataclass(frozen=True)
class _Plan:
    bundle: Bundle
    place: EnginePlace
    entrants: list[Entrant]
    settings: Settings
    prompts: PromptSet
    thinking: str


def _make_plan(path: Path, options: BenchOptions, machine: Machine) -> _Plan:
    """Everything that can be refused, before anything is measured."""
    if options.scripted and options.backend not in SCRIPTABLE_BACKENDS:
        raise DFlashError(
            f"--scripted-acceptance cannot measure {options.backend}, which drafts and accepts without the host; it "
            f"measures {', '.join(SCRIPTABLE_BACKENDS)}."
        )
    bundle = Bundle.open(path)
    place = find_engine_place(bundle, options.backend, machine)
    modes = our_modes(bundle, options.block_sizes, options.scripted)
    entrants = find_entrants(bundle, modes, options.against, options.model, options.drafter)
    if options.backend != "ort-cpu" and any(entrant.engine == GENAI for entrant in entrants):
        raise DFlashError(f"onnxruntime-genai is measured in fp32 on the CPU: beside ort-cpu, not {options.backend}.")
    if options.raw and any(entrant.engine == SERVER for entrant in entrants):
        raise DFlashError("A server applies its own chat template, so --raw prompts cannot be compared with it.")
    template = None if options.raw else template_text(bundle)
    own = bundle.manifest.text.template_args
    args = {**own, **options.template_args, **thinking_args(template, options.thinking)}
    device = "cpu" if options.backend == "ort-cpu" else "cuda"
    settings = Settings(path, options.backend, options.threads, device, place.precision, args)
    prompts = find_prompts(options.prompts, options.num_prompts)
    return _Plan(bundle, place, entrants, settings, prompts, thinking_words(template, args))


def _questions(plan: _Plan, options: BenchOptions, scratch: Path) -> list[Question]:
    questions = make_questions(plan.prompts, plan.settings, options.max_new_tokens, raw=options.raw, scratch=scratch)
    if options.scripted:
        answers = plain_answers(questions, plan.settings, scratch)
        questions = [dataclasses.replace(q, answer=said) for q, said in zip(questions, answers, strict=True)]
    return questions


def _pair(bundle: Bundle, options: BenchOptions) -> PairFacts:
    drafter = bundle.manifest.drafter
    return PairFacts(
        bundle=str(bundle.path),
        target=bundle.manifest.target.name,
        drafter=None if drafter is None else drafter.name,
        drafter_block_size=None if drafter is None else drafter.block_size,
        backend=options.backend,
        threads=options.threads,
    )


def _prompt_facts(plan: _Plan, questions: Sequence[Question], max_new_tokens: int) -> PromptFacts:
    return PromptFacts(
        name=plan.prompts.name,
        count=len(questions),
        picked=plan.prompts.picked,
        wrapping=plan.prompts.wrapping,
        thinking=plan.thinking,
        sha256=plan.prompts.sha256,
        prompt_tokens=[len(question.ids) for question in questions],
        max_new_tokens=max_new_tokens,
    )


def _memory(plan: _Plan, runs: Sequence[Sequence[EngineRun]]) -> MemoryFacts:
    session = session_memory(plan.bundle, plan.place.precision, plan.place.ring_rows)
    pairs = [(e, own) for e, own in zip(plan.entrants, runs, strict=True) if e.engine != SERVER]
    device = {e.label: [r.device_memory_bytes for r in own if r.device_memory_bytes] for e, own in pairs}
    return MemoryFacts(
        weight_bytes=session.weight_bytes,
        kv_bytes=session.kv_bytes,
        engine_bytes=plan.place.file_bytes,
        peak_resident_bytes={e.label: max(r.peak_resident_bytes for r in own) for e, own in pairs},
        device_bytes={label: max(sizes) for label, sizes in device.items() if sizes},
    )
