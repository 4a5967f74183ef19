"""From a target and its answers to a drafter's checkpoint: every stage of a training in its order."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_export.drafter import Drafter
from dflash_export.drafter_data_record import DATA_RECORD
from dflash_export.tap_rule import default_target_layer_ids
from dflash_export.text_files import read_text_facts
from dflash_export.weight_store import TORCH_DTYPES
from dflash_runtime.bundle import write_atomically
from dflash_runtime.errors import CheckpointError, OutputError
from dflash_tools.acceptance import MeanAcceptance
from dflash_tools.new_drafter import check_taps, drafter_config_json, make_drafter, round_parameters, write_drafter
from dflash_tools.peak_memory import own_peak_bytes
from dflash_tools.training_answers import Answers
from dflash_tools.training_checkpoint import STATE_FILE, load_state, save_state
from dflash_tools.training_data import JoinedTaps, data_record, join_parts, read_parts
from dflash_tools.training_loop import Pace, Recipe, Training, run_training
from dflash_tools.training_mask_id import choose_mask_token_id, read_token_facts
from dflash_tools.training_processes import Processes, half_precision_pays
from dflash_tools.training_progress import TrainingProgress
from dflash_tools.training_start import read_earlier_drafter, settle_shape, start_from_drafter, start_from_target
from dflash_tools.training_taps import CachedTaps, TapFileFacts, cache_bytes, cache_taps, is_cached
from dflash_tools.training_target import FrozenTarget, find_target, target_digest

WORK_FOLDER = "training"
"""Below the output: state and taps. Nothing of a finished drafter."""


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """What the user asked for; None means the default."""

    target: str
    data: tuple[Path, ...]
    """Files of answers, or folders made by `make-data`."""
    out: Path
    num_layers: int | None = None
    block_size: int | None = None
    layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    epochs: int = 6
    num_steps: int | None = None
    batch_size: int = 4
    max_anchors: int = 512
    peak_learning_rate: float = 6e-4
    max_text_tokens: int = 3072
    num_held_out: int = 32
    seed: int = 0
    precision: str = "auto"
    dtype: str = "bf16"
    """Of the written checkpoint."""
    report_every_steps: int = 100
    save_every_s: float = 300.0
    stop_after_s: float | None = None
    resume: bool = False
    init: str = "random"
    """First weights: `random`, or `target` for copies of its last layers."""
    draw_slots: bool = False
    other_tokens: int | None = None
    earlier: str | None = None
    """A drafter to start from; it decides layers, taps and mask id, and the block size unless that is given."""


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a training made, or how far it came."""

    out: Path
    complete: bool
    step: int
    num_steps: int
    history: list[dict[str, float]]
    acceptance: MeanAcceptance | None
    """Predicted on the held-out texts, with the weights as written."""
    num_parameters: int
    num_texts: int
    num_held_out: int
    num_answer_tokens: int
    seconds: float
    """Of all steps."""
    step_ms: float
    peak_memory_bytes: int
    config: dict[str, Any]
    settings: dict[str, Any]


def train(options: TrainOptions, processes: Processes, progress: TrainingProgress) -> TrainResult:
    """Trains, or goes on training, and writes the checkpoint when it is complete.

    Raises:
        DFlashError: anything the user can mend, before the long work where that is possible.
    """
    plan = find_target(options.target)
    text = plan.config.get_text_config()
    parts = read_parts(options.data, vocab_size=int(text.vocab_size), max_text_tokens=_text_limit(options, text))
    answers, record = join_parts(parts, options.num_held_out), data_record(options.data)
    earlier = None if options.earlier is None else read_earlier_drafter(options.earlier)
    shape = settle_shape(
        earlier, num_layers=options.num_layers, block_size=options.block_size, layer_ids=options.layer_ids,
        mask_token_id=options.mask_token_id, default_layer_ids=default_target_layer_ids(int(text.num_hidden_layers)),
    )  # fmt: skip
    layer_ids = list(shape.layer_ids)
    check_taps(layer_ids, int(text.num_hidden_layers))
    config = drafter_config_json(
        plan.config, num_layers=shape.num_layers, block_size=shape.block_size, layer_ids=layer_ids,
        mask_token_id=_mask_token_id(shape.mask_token_id, plan.checkpoint.folder, int(text.vocab_size), answers),
    )  # fmt: skip
    work = _work_folder(options)
    target = FrozenTarget.load(plan, processes.device)
    facts = TapFileFacts(answers.sha256, target_digest(plan), tuple(layer_ids), len(layer_ids) * int(text.hidden_size))
    taps = _taps(options, work, parts, facts, target, processes, progress)
    drafter = make_drafter(config, *target.tables(), options.seed)
    if earlier is not None:
        start_from_drafter(drafter, earlier)
    elif options.init == "target":
        start_from_target(drafter, target, layer_ids, taps.of(answers.trained[0]))
    del target  # what is left of it are the two tables
    recipe = _recipe(options, answers, processes)
    training = Training(drafter, answers, taps, recipe, processes)
    settings = {
        **dataclasses.asdict(recipe), "config": config, "answers": answers.sha256, "target": facts.target_sha256,
        "held_out": len(answers.held_out), "processes": processes.count,
        "start": options.init if earlier is None else earlier.sha256,
    }  # fmt: skip
    state = load_state(work, settings)
    if state is not None:
        training.restore(state)
    pace = Pace(options.report_every_steps, options.save_every_s, options.stop_after_s)
    progress.start(training.step, recipe.num_steps, training.steps_per_epoch)
    complete = run_training(
        training, recipe, pace, processes,
        save=lambda: save_state(work, training.state(settings)), report=progress.step,
    )  # fmt: skip
    acceptance, count = None, 0
    if complete and processes.first:
        acceptance, count = _write(options, config, drafter, training)
        if record is not None:
            write_atomically(options.out / DATA_RECORD, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return _result(options, answers, training, recipe, config, settings, complete, acceptance, count)


def _text_limit(options: TrainOptions, text: Any) -> int:
    trained = getattr(text, "max_position_embeddings", None)
    return min(options.max_text_tokens, int(trained)) if trained else options.max_text_tokens


def _mask_token_id(wanted: int | None, folder: Path, num_rows: int, answers: Answers) -> int:
    stops = read_text_facts(folder, {})[0].stop_token_ids
    used = (i for text in answers.texts for i in text.token_ids)
    return choose_mask_token_id(read_token_facts(folder, num_rows, stops), used, wanted)


def _work_folder(options: TrainOptions) -> Path:
    work = options.out / WORK_FOLDER
    state = work / STATE_FILE
    if options.resume and not state.is_file() and not work.is_dir():
        raise CheckpointError(f"--resume: {options.out} holds no training to go on with. Leave --resume out.")
    if not options.resume and state.is_file():
        raise OutputError(f"{options.out} holds a training. Go on with --resume, or choose another --out.")
    if (options.out / "model.safetensors").exists() and not state.is_file():
        raise OutputError(f"{options.out} holds a model. Choose another --out.")
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{work} cannot be made: {error.strerror or error}.") from error
    return work


def _taps(
    options: TrainOptions, work: Path, parts: Sequence[Answers], facts: TapFileFacts, target: FrozenTarget,
    processes: Processes, progress: TrainingProgress,
) -> JoinedTaps:  # fmt: skip
    """The cache beside the data where `make-data` left one that fits, else one of this training."""
    caches = []
    for number, (place, part) in enumerate(zip(options.data, parts, strict=True)):
        own = dataclasses.replace(facts, answers_sha256=part.sha256)
        folder = place if place.is_dir() and is_cached(place, part, own) else work / str(number)
        if processes.first and not is_cached(folder, part, own):
            folder.mkdir(exist_ok=True)
            progress.say_tap_size(cache_bytes(part, own.row_values), len(part.texts))
            cache_taps(folder, part, own, lambda ids: target.taps(ids, facts.layer_ids), progress.stage)
        processes.first_says(True)  # the others wait here until the cache is there
        caches.append(CachedTaps(folder, part, own.row_values))
    return JoinedTaps(parts, caches)


def _recipe(options: TrainOptions, answers: Answers, processes: Processes) -> Recipe:
    steps = options.num_steps or options.epochs * math.ceil(len(answers.trained) / options.batch_size)
    half = options.precision == "bf16" or (options.precision == "auto" and half_precision_pays(processes.device))
    return Recipe(
        num_steps=steps, batch_size=options.batch_size, max_anchors=options.max_anchors,
        peak_learning_rate=options.peak_learning_rate, seed=options.seed, half_precision=half,
        draw_slots=options.draw_slots, other_tokens=options.other_tokens,
    )  # fmt: skip


def _write(
    options: TrainOptions, config: dict[str, Any], drafter: Drafter, training: Training
) -> tuple[MeanAcceptance | None, int]:
    dtype = TORCH_DTYPES[{"fp32": "F32", "bf16": "BF16"}[options.dtype]]
    trained = {name: p.detach().clone() for name, p in drafter.named_parameters() if p.requires_grad}
    round_parameters(drafter, dtype)
    acceptance = training.held_out_acceptance()
    count = write_drafter(options.out, config, drafter, dtype)
    with torch.no_grad():  # the state goes on with the unrounded ones
        for name, parameter in drafter.named_parameters():
            if name in trained:
                parameter.copy_(trained[name])
    return acceptance, count


def _result(
    options: TrainOptions, answers: Answers, training: Training, recipe: Recipe, config: dict[str, Any],
    settings: dict[str, Any], complete: bool, acceptance: MeanAcceptance | None, count: int,
) -> TrainResult:  # fmt: skip
    return TrainResult(
        out=options.out,
        complete=complete,
        step=training.step,
        num_steps=recipe.num_steps,
        history=training.history,
        acceptance=acceptance,
        num_parameters=count,
        num_texts=len(answers.texts),
        num_held_out=len(answers.held_out),
        num_answer_tokens=answers.num_answer_tokens(answers.trained),
        seconds=training.seconds,
        step_ms=1000 * training.seconds / max(1, training.step),
        peak_memory_bytes=own_peak_bytes(),
        config=config,
        settings=settings,
    )
