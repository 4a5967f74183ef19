"""Makes the demo pair: a tiny target and its drafter, both trained here on arithmetic stories made up here.

    python -m dflash_tools.make_demo_pair --out DIR

The pair that ships was made by this command. The folder holds `target` and `drafter`, as checkpoints.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import click

from dflash_runtime.errors import OutputError
from dflash_tools.arithmetic_texts import questions_and_answers
from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.progress import ProgressLine

NUM_TEXTS = 6000
SEED = 1


def make_pair(
    out: Path, *, sizes: Any, num_texts: int, drafter_steps: int, learning_rate: float, batch_size: int,
    max_anchors: int, block_size: int, num_held_out: int, progress: ProgressLine, argv: list[str],
) -> dict[str, Any]:  # fmt: skip
    """Trains target and drafter through the same stages as a user's own pair.

    Args:
        out: New folder.
        sizes: `TinySizes` of the target.
        num_texts: Stories; the target's own answers to them train the drafter.
        drafter_steps: Steps of the drafter's training.
        learning_rate: Peak of the drafter's; so small a drafter wants more than the recipe's.
        batch_size: Texts a step of the drafter's training.
        max_anchors: Blocks of a text a step.
        block_size: Anchor included.
        num_held_out: Texts to measure on.
        progress: Shows the stages.
        argv: The command, for the drafter's card.

    Returns:
        Last loss of the target, predicted acceptance length, sizes in bytes.
    """
    import torch

    from dflash_tools.data_making import DataOptions, make_data
    from dflash_tools.drafter_card import write_card
    from dflash_tools.tiny_target_training import train_tiny_target
    from dflash_tools.training_processes import Processes, default_device
    from dflash_tools.training_progress import TrainingProgress
    from dflash_tools.training_run import TrainOptions, train

    if out.exists():
        raise OutputError(f"{out} exists already. Choose another --out, or delete it.")
    pairs = questions_and_answers(num_texts, SEED)
    target, drafter = out / "target", out / "drafter"
    loss = train_tiny_target(target, pairs, sizes, seed=SEED, dtype=torch.bfloat16, progress=progress)
    with tempfile.TemporaryDirectory() as scratch:
        prompts = Path(scratch) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(question) + "\n" for question, _ in pairs), encoding="utf-8")
        data = DataOptions(str(target), prompts, Path(scratch) / "data", max_new_tokens=96, batch_size=32)
        make_data(data, progress, lambda text: None)
        options = TrainOptions(
            str(target), (data.out,), drafter, num_layers=2, block_size=block_size, num_steps=drafter_steps,
            batch_size=batch_size, max_anchors=max_anchors, peak_learning_rate=learning_rate,
            num_held_out=num_held_out, seed=SEED, precision="fp32", report_every_steps=250,
        )  # fmt: skip
        result = train(options, Processes(0, 1, default_device()), TrainingProgress())
        write_card(options, result, argv)
    shutil.rmtree(drafter / "training")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    found = result.acceptance
    return {"target_loss": loss, "acceptance_length": found and found.over_rounds, "size_bytes": size}


@click.command(cls=DFlashCommand)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New folder.")
@click.option("--texts", type=click.IntRange(100), default=NUM_TEXTS, show_default=True)
@click.option("--target-steps", type=click.IntRange(1), default=1500, show_default=True)
@click.option("--drafter-steps", type=click.IntRange(1), default=2500, show_default=True)
def main(out: Path, texts: int, target_steps: int, drafter_steps: int) -> None:
    """Makes the demo pair in the new folder OUT and prints what it reaches."""
    with needs_extra("export"):
        from dflash_tools.tiny_target_training import TinySizes
    argv = ["python", "-m", "dflash_tools.make_demo_pair", "--out", str(out), "--texts", str(texts)]
    argv += ["--target-steps", str(target_steps), "--drafter-steps", str(drafter_steps)]
    with ProgressLine() as progress:
        made = make_pair(
            out, sizes=TinySizes(num_steps=target_steps), num_texts=texts, drafter_steps=drafter_steps,
            learning_rate=2e-3, batch_size=8, max_anchors=24, block_size=8, num_held_out=64,
            progress=progress, argv=argv,
        )  # fmt: skip
    click.echo(json.dumps(made))


if __name__ == "__main__":
    main()
