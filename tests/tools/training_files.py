"""A tiny target with answers to train on, and trainings of a few steps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tiny_models import write_target

from dflash_tools.training_processes import Processes
from dflash_tools.training_progress import TrainingProgress
from dflash_tools.training_run import TrainOptions, TrainResult, train


def write_random_answers(path: Path, count: int = 12, *, seed: int = 0, prompts: list[list[int]] | None = None) -> None:
    """Prompts and answers of random bytes."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        prompt = [rng.randrange(200) for _ in range(rng.randrange(2, 9))] if prompts is None else prompts[i]
        rows.append({"prompt_ids": prompt, "answer_ids": [rng.randrange(200) for _ in range(rng.randrange(4, 20))]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_training_files(folder: Path) -> None:
    """`target` and `answers.jsonl` below a folder."""
    write_target(folder / "target", num_hidden_layers=6)
    write_random_answers(folder / "answers.jsonl")


def few_steps(folder: Path, out: Path, **changes: Any) -> TrainResult:
    """A training of eight steps unless told otherwise, in this process."""
    values: dict[str, Any] = {
        "num_layers": 2, "block_size": 4, "num_steps": 8, "batch_size": 3, "max_anchors": 5, "num_held_out": 3,
        "precision": "fp32", "dtype": "fp32", "report_every_steps": 3, **changes,
    }  # fmt: skip
    data = values.pop("data", folder / "answers.jsonl")
    options = TrainOptions(str(folder / "target"), data if isinstance(data, tuple) else (data,), out, **values)
    return train(options, Processes(0, 1, torch.device("cpu")), TrainingProgress())
