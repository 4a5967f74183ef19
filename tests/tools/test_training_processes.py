"""Several processes train what one would; a terminal sees how it goes, a pipe sees nothing."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_files import few_steps, write_training_files

from dflash_tools.acceptance import MeanAcceptance
from dflash_tools.training_progress import TrainingProgress


@pytest.mark.parametrize("stop_first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_train_what_one_does(tmp_path: Path, stop_first: bool) -> None:
    write_training_files(tmp_path)
    few_steps(tmp_path, tmp_path / "one")
    arguments = [
        "train-drafter", "--target", tmp_path / "target", "--data", tmp_path / "answers.jsonl", "--out",
        tmp_path / "two", "--layers", 2, "--block-size", 4, "--steps", 8, "--batch-size", 3, "--anchors", 5,
        "--held-out", 3, "--precision", "fp32", "--dtype", "fp32", "--report-every", 3,
    ]  # fmt: skip
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    def run(*more: str) -> None:
        argv = [*launch, "-m", "dflash_tools.cli", *map(str, arguments), *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=200, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("step ") == 1  # one of them reports

    if stop_first:
        run("--stop-after", "0")
        assert not (tmp_path / "two" / "model.safetensors").exists()
        run("--resume")
    else:
        run()
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_loss_acceptance_and_share() -> None:
    terminal = Terminal()
    progress = TrainingProgress(terminal)
    progress.say_tap_size(1_500_000, 12)
    progress.stage("taps", 1, 2)
    progress.start(0, 4, 2)
    progress.step(1, 3.0, None)
    progress.step(2, 2.5, MeanAcceptance(1.75, 1.8))
    progress.step(4, 2.0, MeanAcceptance(2.25, 2.3))
    shown = terminal.getvalue()
    assert "taps of 12 texts: 1.5 MB on disk" in shown
    assert "step 2/4  epoch 1  loss 2.500  acceptance length 1.75  50 %" in shown
    assert "step 4/4  epoch 2  loss 2.000  acceptance length 2.25" in shown


def test_a_pipe_sees_nothing() -> None:
    pipe = io.StringIO()
    progress = TrainingProgress(pipe)
    progress.say_tap_size(1, 1)
    progress.stage("taps", 1, 2)
    progress.start(0, 4, 2)
    progress.step(1, 3.0, MeanAcceptance(1.75, 1.8))
    assert pipe.getvalue() == ""
