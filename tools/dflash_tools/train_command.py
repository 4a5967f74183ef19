"""`dflash-export train-drafter`: a drafter for a target that has none."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.sizes import bytes_text, count_text

if TYPE_CHECKING:
    from dflash_tools.training_run import TrainResult


def _read_taps(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", value):
        raise click.BadParameter(f"{value!r} is no list of layers such as 1,8,14,20,27.")
    return tuple(int(i) for i in value.split(","))


@click.command("train-drafter", cls=DFlashCommand, short_help="Train a drafter on a target's own answers.")
@click.option("--target", required=True, help="Catalog name, Hugging Face id (a revision after @), or folder.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    required=True,
    multiple=True,
    help="Answers: a file, or a folder made by make-data; repeatable.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the drafter's checkpoint.")
@click.option("--from", "earlier", metavar="DRAFTER", help="Start with this drafter's weights, layers and taps.")
@click.option(
    "--init",
    type=click.Choice(["random", "target"]),
    default="random",
    show_default=True,
    help="First weights; target copies its last layers.",
)
@click.option("--layers", type=click.IntRange(1), help="Layers of the drafter.  [default: 5]")
@click.option("--block-size", type=click.IntRange(2), help="Anchor included.  [default: 16]")
@click.option(
    "--taps", callback=_read_taps, metavar="LAYER,...", help="Target layers to tap. [default: the authors' rule]"
)
@click.option("--mask-token-id", type=click.IntRange(0), help="Id of unknown tokens. [default: one that no text holds]")
@click.option("--epochs", type=click.IntRange(1), default=6, show_default=True)
@click.option("--steps", type=click.IntRange(1), help="Steps in all, in place of --epochs.")
@click.option("--batch-size", type=click.IntRange(1), default=4, show_default=True, help="Texts a step.")
@click.option("--anchors", type=click.IntRange(1), default=512, show_default=True, help="Most blocks of a text a step.")
@click.option("--draw-slots", is_flag=True, help="Draw slots by their weight: half the head's work, noisier steps.")
@click.option(
    "--other-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Softmax over the answers' tokens and N others drawn each step.  [default: all tokens]",
)
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), default=6e-4, show_default=True, help="Peak.")
@click.option("--max-length", type=click.IntRange(8), default=3072, show_default=True, help="Tokens a text is cut to.")
@click.option(
    "--held-out", type=click.IntRange(0), default=32, show_default=True, help="Texts to measure on, not train on."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "bf16"]),
    default="auto",
    show_default=True,
    help="Of matrix products; auto is bf16 where the hardware has it.",
)
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True, help="To store.")
@click.option("--report-every", type=click.IntRange(1), default=100, show_default=True, metavar="STEPS")
@click.option("--save-every", type=click.FloatRange(0), default=5, show_default=True, metavar="MINUTES")
@click.option("--stop-after", type=click.FloatRange(0), metavar="MINUTES", help="Stop then; --resume goes on.")
@click.option("--resume", is_flag=True, help="Go on with the training in --out.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def command(as_json: bool, **values: Any) -> None:
    """Trains a DFlash drafter for TARGET on the target's own answers, and writes it in z-lab's format.

    The target stays as it is; so do the embedding and the output head, which the drafter borrows. Several GPUs:
    start it with torchrun.
    """
    with needs_extra("export"):
        from dflash_tools.drafter_card import write_card
        from dflash_tools.training_processes import joined_processes
        from dflash_tools.training_progress import TrainingProgress
        from dflash_tools.training_run import train
    options = _options(values)
    with joined_processes() as processes:
        result = train(options, processes, TrainingProgress())
        if not processes.first:
            return
        if result.complete:
            write_card(options, result, ["dflash-export", *sys.argv[1:]])
    if as_json:
        click.echo(json.dumps(_facts(result)))
    else:
        _print(result)


def _options(values: dict[str, Any]) -> Any:
    from dflash_tools.training_run import TrainOptions

    if values["earlier"] is not None and values["init"] != "random":
        raise click.UsageError("--from and --init target contradict each other; give one of them.")
    minutes = values["stop_after"]
    return TrainOptions(
        target=values["target"],
        data=values["data"],
        out=values["out"],
        num_layers=values["layers"],
        block_size=values["block_size"],
        layer_ids=values["taps"],
        mask_token_id=values["mask_token_id"],
        epochs=values["epochs"],
        num_steps=values["steps"],
        batch_size=values["batch_size"],
        max_anchors=values["anchors"],
        peak_learning_rate=values["learning_rate"],
        max_text_tokens=values["max_length"],
        num_held_out=values["held_out"],
        seed=values["seed"],
        precision=values["precision"],
        dtype=values["dtype"],
        report_every_steps=values["report_every"],
        save_every_s=60 * values["save_every"],
        stop_after_s=None if minutes is None else 60 * minutes,
        resume=values["resume"],
        init=values["init"],
        draw_slots=values["draw_slots"],
        other_tokens=values["other_tokens"],
        earlier=values["earlier"],
    )


def _facts(result: TrainResult) -> dict[str, Any]:
    facts = dataclasses.asdict(result)
    return {**facts, "out": str(result.out)}


def _print(result: TrainResult) -> None:
    done = f"step {result.step} of {result.num_steps}, {result.step_ms:.0f} ms a step"
    click.echo(f"{'training':<12}{done}, peak memory {bytes_text(result.peak_memory_bytes)}")
    if not result.complete:
        click.echo("Not complete. Go on with the same command and --resume.")
        return
    click.echo(f"{'drafter':<12}{result.out}, {count_text(result.num_parameters)} parameters")
    if result.acceptance is not None:
        click.echo(
            f"{'acceptance':<12}{result.acceptance.over_rounds:.2f} tokens a round, predicted on "
            f"{result.num_held_out} held-out texts"
        )
    click.echo(f"{'left over':<12}{result.out / 'training'}: state and taps, not part of the drafter; delete at will")
    click.echo(f"\nAdd it: dflash-export add-drafter BUNDLE {shlex.quote(str(result.out))}")
