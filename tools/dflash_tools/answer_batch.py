"""A target's answers to many prompts at once: a row that is finished takes the next prompt."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_runtime.errors import UnsupportedModelError
from dflash_tools.answer_attention import ATTENTION_NAME, RowsCache


@dataclasses.dataclass(frozen=True)
class AnswerRules:
    """How answers are chosen and when they end."""

    max_new_tokens: int
    stop_token_ids: Collection[int]
    temperature: float = 0.0
    """0 for greedy."""


@dataclasses.dataclass
class _Row:
    number: int
    length: int
    """Columns of the cache in use."""
    next_id: int
    answer: list[int]
    generator: torch.Generator


class AnswerBatch:
    """A target with a cache for a fixed number of rows."""

    def __init__(self, model: Any, num_rows: int, capacity: int, rules: AnswerRules) -> None:
        """Prepares the model.

        Args:
            model: A causal language model of Transformers; its attention is replaced.
            num_rows: Prompts answered at once.
            capacity: Tokens of the longest prompt with its answer.
            rules: Of the answers.
        """
        text = model.config.get_text_config()
        self._num_layers = int(text.num_hidden_layers)
        self._num_rows, self._capacity = num_rows, capacity
        self._rules = rules
        self._model = model
        self._device = next(model.parameters()).device
        model.set_attn_implementation(ATTENTION_NAME)
        names = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    @torch.inference_mode()
    def answer(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], finished: Callable[[int], None]
    ) -> list[list[int]]:
        """Answers of all prompts, stop tokens included.

        Args:
            prompts: Token ids, none empty.
            seeds: One a prompt, used where the temperature is above 0.
            finished: Called with the length of every finished answer.
        """
        cache = RowsCache(self._num_layers, self._num_rows, self._capacity)
        answers: list[list[int]] = [[] for _ in prompts]
        waiting = list(range(len(prompts)))[::-1]
        rows: list[_Row] = []
        while waiting or rows:
            while waiting and len(rows) < self._num_rows:
                number = waiting.pop()
                row = self._start(cache, len(rows), number, prompts[number], seeds[number])
                rows.append(row)
            at = 0
            while at < len(rows):  # rows that are finished go; the last one takes their place in the cache
                row = rows[at]
                if not self._is_finished(row):
                    at += 1
                    continue
                answers[row.number] = row.answer
                finished(len(row.answer))
                last = rows.pop()
                if last is not row:
                    cache.move_row(len(rows), at, last.length)
                    rows[at] = last
            if rows and (len(rows) == self._num_rows or not waiting):
                self._step(cache, rows)
        return answers

    def _is_finished(self, row: _Row) -> bool:
        return len(row.answer) >= self._rules.max_new_tokens or row.answer[-1] in self._rules.stop_token_ids

    def _start(self, cache: RowsCache, place: int, number: int, prompt: Sequence[int], seed: int) -> _Row:
        ids = torch.tensor([list(prompt)], device=self._device)
        logits = self._run(cache, slice(place, place + 1), ids, torch.arange(len(prompt), device=self._device)[None])
        row = _Row(number, len(prompt), 0, [], torch.Generator().manual_seed(seed))
        self._take(row, logits[0], int(logits[0].argmax()))
        return row

    def _step(self, cache: RowsCache, rows: list[_Row]) -> None:
        ids = torch.tensor([[row.next_id] for row in rows], device=self._device)
        positions = torch.tensor([[row.length] for row in rows], device=self._device)
        logits = self._run(cache, slice(0, len(rows)), ids, positions)
        best = logits.argmax(-1).tolist()
        for i, row in enumerate(rows):
            row.length += 1
            self._take(row, logits[i], best[i])

    def _take(self, row: _Row, logits: Tensor, best: int) -> None:
        row.next_id = best
        if self._rules.temperature > 0:
            chances = (logits.float().cpu() / self._rules.temperature).softmax(-1).cumsum(-1)
            draw = torch.rand(1, generator=row.generator) * chances[-1]
            row.next_id = min(int(torch.searchsorted(chances, draw, right=True)), len(chances) - 1)
        row.answer.append(row.next_id)

    def _run(self, cache: RowsCache, rows: slice, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, V] of the last new token of each row."""
        cache.begin(rows, positions)
        output = self._model(
            input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **{self._cache_argument: cache}
        )
        if cache.attention_calls != self._num_layers:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} has {self._num_layers} layers and {cache.attention_calls} used the "
                "attention that batched answers need. Answers from another program can be given to train-drafter."
            )
        logits: Tensor = output.logits[:, -1]
        return logits
