"""The model card of a trained drafter: what it was trained on and how, what it reaches, and what it does not."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from dflash_runtime.bundle import write_atomically
from dflash_tools.sizes import bytes_text, count_text
from dflash_tools.training_data import data_record
from dflash_tools.training_run import TrainOptions, TrainResult

CARD_FILE = "README.md"


def write_card(options: TrainOptions, result: TrainResult, argv: Sequence[str]) -> Path:
    """Writes README.md beside the checkpoint.

    Args:
        options: Of the training.
        result: Of a complete training.
        argv: The command that made it.
    """
    path = options.out / CARD_FILE
    write_atomically(path, card_text(options, result, argv))
    return path


def card_text(options: TrainOptions, result: TrainResult, argv: Sequence[str]) -> str:
    """The card as Markdown."""
    name = target_name(options.target)
    return "\n\n".join(
        [
            f"# DFlash drafter for {name}",
            "A block-diffusion drafter for speculative decoding (DFlash, arXiv 2602.06036). It proposes "
            f"{result.config['block_size'] - 1} tokens at a time and works with this target only. Embedding and output "
            "head are the target's.",
            _table(options, result),
            "## Acceptance\n\n" + _acceptance(result),
            "## Limits\n\n" + _limits(result),
            "## Made by\n\n    " + shlex.join(argv),
        ]
    ) + "\n"


def target_name(reference: str) -> str:
    """What a card calls a target: a hub id as it is, a folder by its own name and never by its path."""
    folder = Path(reference)
    return folder.resolve().name if folder.is_dir() else reference


def _table(options: TrainOptions, result: TrainResult) -> str:
    config, settings = result.config, result.settings
    own = config["dflash_config"]
    precision = "bf16" if settings["half_precision"] else "fp32"
    slots = "of slots drawn with chances that lean" if settings["draw_slots"] else "weighted"
    others = settings["other_tokens"]
    softmax = "" if others is None else f" over the answers' tokens and {others} others drawn for each step"
    rows = [
        ("target", f"`{target_name(options.target)}`: {config['num_target_layers']} layers of {config['hidden_size']}"),
        ("drafter", f"{config['num_hidden_layers']} layers, {count_text(result.num_parameters)} parameters"),
        ("block size", f"{result.config['block_size']}, anchor included"),
        ("taps", f"outputs of target layers {', '.join(map(str, own['target_layer_ids']))}, counted from 0"),
        ("mask token id", str(own["mask_token_id"])),
        ("data", f"{result.num_texts - result.num_held_out} texts with {result.num_answer_tokens:,} answer tokens"),
        *_data_rows(options),
        ("first weights", _start(options, result)),
        (
            "recipe",
            f"{result.num_steps} steps of {settings['batch_size']} texts, at most {settings['max_anchors']} random "
            f"anchors in each answer, drawn anew every epoch; cross-entropy{softmax}, {slots} towards early slots; "
            f"AdamW at {settings['peak_learning_rate']:g}, {settings['warmup_share']:.0%} warm-up, then cosine; "
            f"gradients clipped at {settings['max_gradient_norm']:g}; seed {settings['seed']}",
        ),
        (
            "cost",
            f"{result.seconds / 60:.1f} minutes, {result.step_ms:.0f} ms a step, products in {precision}, peak memory "
            f"{bytes_text(result.peak_memory_bytes)}",
        ),
    ]
    return "| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in rows)


def _start(options: TrainOptions, result: TrainResult) -> str:
    if options.earlier is not None:
        digest = result.settings["start"]
        return f"those of the drafter `{target_name(options.earlier)}`, SHA-256 of its tensors {digest}"
    return {"random": "random", "target": "copies of the target's last layers and final norm"}[options.init]


def _data_rows(options: TrainOptions) -> list[tuple[str, str]]:
    """How `make-data` made the answers, where it did."""
    facts = data_record(options.data)
    if facts is None:
        return []
    chosen = "greedy" if facts["temperature"] == 0 else f"sampled at temperature {facts['temperature']:g}"
    text = "prompts as they are" if facts["raw"] else "prompts through the chat template"
    if facts["template_args"]:
        text += " with " + ", ".join(f"{key}={json.dumps(value)}" for key, value in facts["template_args"].items())
    return [("answers", f"the target's own, {chosen}, at most {facts['max_new_tokens']} tokens; {text}")]


def _acceptance(result: TrainResult) -> str:
    if result.acceptance is None:
        return "No text was held out, so nothing was measured."
    found = result.acceptance
    lines = [
        f"On {result.num_held_out} texts of the same kind that were not trained on: **{found.over_rounds:.2f}** tokens "
        f"a round of draft and verify, the target's own token included ({found.over_requests:.2f} as a mean over "
        "texts). Predicted from the drafter's guesses at every position of the target's own answers, with the weights "
        "as stored.",
        "",
        "| step | loss | acceptance length |",
        "|---|---|---|",
    ]
    shown = result.history if len(result.history) <= 12 else result.history[:: len(result.history) // 12 + 1]
    if shown and shown[-1] is not result.history[-1]:
        shown = [*shown, result.history[-1]]
    lines += [f"| {int(h['step'])} | {h['loss']:.3f} | {h['acceptance_length']:.2f} |" for h in shown]
    return "\n".join(lines)


def _limits(result: TrainResult) -> str:
    return (
        "It knows texts like those it was trained on; on others fewer tokens are accepted, and the output is the "
        "target's in any case. Acceptance on other prompts, and speed, were not measured by the training: "
        "`dflash-export run BUNDLE PROMPT --json` tells both. A fine-tuned or quantised copy of the target is another "
        "target; chat template arguments other than those of the data lower the acceptance too."
    )
