"""The training itself: batches, steps, reports and saved states."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dflash_export.drafter import Drafter
from dflash_tools.acceptance import MeanAcceptance, mean_acceptance
from dflash_tools.new_drafter import own_parameters
from dflash_tools.training_answers import Answers
from dflash_tools.training_attention import draft_blocks
from dflash_tools.training_blocks import (
    Blocks,
    anchor_range,
    draw_anchors,
    drawn_weights,
    loss_decay,
    make_blocks,
    seeded_generator,
)
from dflash_tools.training_checkpoint import TrainingState
from dflash_tools.training_data import JoinedTaps
from dflash_tools.training_evaluation import right_prefixes, walk_rounds
from dflash_tools.training_head_rows import HeadRows, HeadSample
from dflash_tools.training_loss import head_loss
from dflash_tools.training_processes import Processes
from dflash_tools.training_schedule import TextOrder, learning_rate


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Numbers of the training; the defaults are the paper's."""

    num_steps: int
    batch_size: int = 4
    """Texts a step."""
    max_anchors: int = 512
    """Blocks of a text, drawn anew every epoch."""
    peak_learning_rate: float = 6e-4
    warmup_share: float = 0.04
    max_gradient_norm: float = 1.0
    seed: int = 0
    half_precision: bool = False
    """Matrix products in bf16; weights and sums stay fp32."""
    draw_slots: bool = False
    """Slots are drawn with their weight as the chance, instead of weighted: about half of them, and so of the head's
    work, at a block of 8."""
    other_tokens: int | None = None
    """Tokens that no answer holds drawn for each step's softmax; None for the whole vocabulary."""


class Training:
    """A drafter under training.

    Attributes:
        step: Steps done.
        history: What was reported.
        recent_losses: Of the steps since the last report.
        seconds: Time spent in steps, in this run and those before it.
    """

    def __init__(
        self, drafter: Drafter, answers: Answers, taps: JoinedTaps, recipe: Recipe, processes: Processes
    ) -> None:
        self._drafter, self._answers, self._taps = drafter.to(processes.device), answers, taps
        self._recipe, self._processes = recipe, processes
        self._parameters = own_parameters(drafter)
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=recipe.peak_learning_rate)
        self._order = TextOrder(answers.trained, recipe.batch_size, recipe.seed)
        dtype = torch.bfloat16 if recipe.half_precision else torch.float32
        self._head = drafter.lm_head.weight.detach().to(dtype)
        used = {i for number in answers.trained for i in answers.texts[number].answer_ids}
        others = recipe.other_tokens
        self._sample = None if others is None else HeadSample(self._head, used, others, recipe.seed)
        self._gamma = loss_decay(drafter.config.block_size)
        self.step, self.seconds = 0, 0.0
        self.history: list[dict[str, float]] = []
        self.recent_losses: list[float] = []

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return self._order.steps_per_epoch

    def blocks(self, number: int, epoch: int) -> Blocks:
        """Blocks of a text in an epoch: the same whenever they are asked for."""
        text = self._answers.texts[number]
        ids = torch.tensor(text.token_ids)
        generator = seeded_generator(self._recipe.seed, epoch, number)
        anchors = draw_anchors(anchor_range(text.answer_start, len(ids)), self._recipe.max_anchors, generator)
        config = self._drafter.config
        blocks = make_blocks(ids, anchors, config.block_size, config.mask_token_id, self._gamma)
        if self._recipe.draw_slots:
            return dataclasses.replace(blocks, weights=drawn_weights(blocks.weights, generator))
        return blocks

    def train_step(self) -> float:
        """One step over one batch; returns its loss."""
        started = time.perf_counter()
        recipe, processes = self._recipe, self._processes
        self._optimizer.param_groups[0]["lr"] = learning_rate(
            self.step, recipe.num_steps, recipe.peak_learning_rate, recipe.warmup_share
        )
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        loss, weight = torch.zeros(2, device=processes.device)
        head = HeadRows(self._head) if self._sample is None else self._sample.rows(self.step)
        # Text by text: nothing is padded, and the sums are those of the whole batch.
        for number in self._order.batch(self.step)[processes.rank :: processes.count]:
            blocks = self.blocks(number, self._order.epoch(self.step)).to(processes.device)
            part = self._loss(number, blocks, head)
            part.backward()  # type: ignore[no-untyped-call]
            loss, weight = loss + part.detach(), weight + blocks.weights.sum()
        loss, weight = processes.sum_gradients(self._parameters.values(), loss, weight)
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), recipe.max_gradient_norm)
        self._optimizer.step()
        self.step += 1
        self.recent_losses.append(float(loss / weight))
        self.seconds += time.perf_counter() - started
        return self.recent_losses[-1]

    def _loss(self, number: int, blocks: Blocks, head: HeadRows) -> Tensor:
        taps = self._taps.of(number).to(blocks.anchors.device)
        with self._precision():
            hidden = draft_blocks(self._drafter, taps, blocks)[:, 1:]
        return head_loss(hidden.flatten(0, 1), head, blocks.labels.flatten(), blocks.weights.flatten())

    def held_out_acceptance(self) -> MeanAcceptance | None:
        """Mean acceptance length on the held-out texts, predicted; None without such texts."""
        return self.acceptance_on(self._answers.held_out)

    def acceptance_on(self, numbers: tuple[int, ...]) -> MeanAcceptance | None:
        """Mean acceptance length on some texts, predicted."""
        rounds = []
        for number in numbers:
            taps = self._taps.of(number).to(self._processes.device)
            with self._precision():
                prefixes = right_prefixes(self._drafter, self._head, self._answers.texts[number], taps)
            rounds.append(walk_rounds(prefixes))
        return mean_acceptance(rounds)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        device = self._processes.device.type
        return torch.autocast(device, dtype=torch.bfloat16, enabled=self._recipe.half_precision)

    def state(self, settings: dict[str, Any]) -> TrainingState:
        """What to save."""
        parameters = {name: p.detach().cpu().clone() for name, p in self._parameters.items()}
        return TrainingState(
            settings, self.step, parameters, self._optimizer.state_dict(), list(self.history),
            list(self.recent_losses), self.seconds,
        )  # fmt: skip

    def restore(self, state: TrainingState) -> None:
        """Goes on from a saved state."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(state.parameters[name])
        self._optimizer.load_state_dict(state.optimizer)
        self.step, self.seconds = state.step, state.seconds
        self.history, self.recent_losses = list(state.history), list(state.recent_losses)

    def report(self) -> MeanAcceptance | None:
        """Measures on the held-out texts and adds to the history."""
        measured = self.held_out_acceptance()
        entry = {"step": float(self.step), "loss": sum(self.recent_losses) / len(self.recent_losses)}
        if measured is not None:
            entry["acceptance_length"] = measured.over_rounds
        self.history.append(entry)
        self.recent_losses.clear()
        return measured


@dataclasses.dataclass(frozen=True)
class Pace:
    """When a run reports, saves and stops."""

    report_every_steps: int
    save_every_s: float
    stop_after_s: float | None = None
    """Of this run; the training can be resumed."""


def run_training(
    training: Training,
    recipe: Recipe,
    pace: Pace,
    processes: Processes,
    *,
    save: Callable[[], None],
    report: Callable[[int, float, MeanAcceptance | None], None],
) -> bool:
    """Steps until the end or the time limit, saving now and then.

    Args:
        training: Fresh or restored.
        recipe: Its numbers.
        pace: When to report, save and stop.
        processes: The first one measures and saves.
        save: Puts the state on disk.
        report: Called after every step with steps done, loss, and the held-out acceptance where it was measured.

    Returns:
        Whether the training is complete.
    """
    started = saved = time.monotonic()
    while training.step < recipe.num_steps:
        loss = training.train_step()
        last = training.step == recipe.num_steps
        due = training.step % pace.report_every_steps == 0 or last
        measured = training.report() if due and processes.first else None
        report(training.step, loss, measured)
        now = time.monotonic()
        over = pace.stop_after_s is not None and now - started >= pace.stop_after_s
        stop = processes.first_says(over) and not last
        if (stop or last or now - saved >= pace.save_every_s) and processes.first:
            save()
            saved = now
        if stop:
            return False
    return True
