"""The parity gate of the drafter: context rows, hidden proposals and ids against our PyTorch module.

The reference computes every draft anew, without any cache, with every mask written out.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from dflash_export.deviation import Array, Worst, deviation
from dflash_export.drafter import Drafter, draft_without_cache
from dflash_export.drafter_build import DrafterPlan
from dflash_export.drafter_weights import load_drafter
from dflash_export.graph_runner import GraphRunner
from dflash_export.parity import EXACT_TOLERANCE, ROUNDED_FACTOR, PrecisionPasses, serialise
from dflash_export.weight_store import PRECISIONS, TORCH_DTYPES
from dflash_export.weight_values import read_weight
from dflash_runtime.bundle import CheckRow, DrafterFacts, Manifest

_SEED = 4


class _Round(NamedTuple):
    rows: int
    """Committed context rows before the draft."""
    block_size: int


class DrafterGate:
    """Compares `drafter_context.onnx` and `drafter.onnx` with the PyTorch module."""

    def __init__(self, root: Path, manifest: Manifest, plan: DrafterPlan, passes: PrecisionPasses) -> None:
        assert manifest.drafter is not None
        self.root, self.manifest, self.plan, self.passes = root, manifest, plan, passes
        self.facts: DrafterFacts = manifest.drafter
        self.rounds = self._rounds()
        self.capacity = max(r.rows + r.block_size for r in self.rounds) + 40

    def _rounds(self) -> list[_Round]:
        sizes = sorted({2, self.facts.block_size, *self.manifest.block_sizes})
        windows = [w for w in self.plan.config.windows if w is not None and w <= 512]
        starts = sorted({1, 9, *(w - 3 for w in windows), *(w + 7 for w in windows)})
        limit = self.manifest.max_context_tokens
        rounds = [_Round(start + 2 * i, size) for start in starts for i, size in enumerate(sizes)]
        return sorted({r for r in rounds if r.rows <= limit}) or [_Round(1, sizes[0])]

    def check(self, taps: Tensor | None) -> list[CheckRow]:
        """All rounds, in fp32 and, for a half-precision bundle, in its own dtype.

        Args:
            taps: Real taps [1, C, K*H] to begin the context with; the rest, or all, is random.
        """
        taps = self._taps(taps)
        dtype = TORCH_DTYPES[PRECISIONS[self.manifest.precision]]
        exact_drafter = self._drafter(dtype).float()
        expected = self._reference(exact_drafter, taps)
        worst = self._compare(expected, taps, half=False)
        covered = "rounds (context rows, block): " + ", ".join(f"({r.rows}, {r.block_size})" for r in self.rounds)
        rows = worst.rows("portable", EXACT_TOLERANCE, covered)
        if dtype is torch.float32:
            return rows
        del exact_drafter
        own = Worst()
        for one, two in zip(self._reference(self._drafter(dtype), taps.to(dtype)), expected, strict=True):
            for name, found, wanted in _pairs(one, two):
                own.add(name, deviation(found, wanted))
        tolerances = {k: ROUNDED_FACTOR * v + EXACT_TOLERANCE for k, v in own.by_tensor.items()}
        rounded = self._compare(expected, taps, half=True)
        return rows + rounded.rows("precision", tolerances, f"{self.manifest.precision}, {covered}")

    def _taps(self, given: Tensor | None) -> Tensor:
        width = next(int(t.shape[-1]) for t in self.facts.context_graph.inputs if t.name == "taps")
        noise = torch.randn(1, self.capacity, width, generator=torch.Generator().manual_seed(_SEED))
        if given is not None:
            count = min(given.shape[1], self.capacity)
            noise *= given.std()
            noise[:, :count] = given[:, :count]
        return noise.to(TORCH_DTYPES[PRECISIONS[self.manifest.precision]]).float()

    def _drafter(self, dtype: torch.dtype) -> Drafter:
        target = self.manifest.target
        tables = [
            read_weight(self.root, self.manifest.weights[n]) for n in (target.embedding_weight, target.head_weight)
        ]
        return load_drafter(self.plan.config, self.plan.weights, tables[0], tables[1], dtype)

    def _anchor(self, round_: _Round) -> int:
        return (round_.rows * 7919 + round_.block_size) % self.manifest.target.vocab_size

    def _reference(self, drafter: Drafter, taps: Tensor) -> list[dict[str, Array]]:
        results = []
        for r in self.rounds:
            ids = torch.full((1, r.block_size), self.facts.mask_token_id)
            ids[0, 0] = self._anchor(r)
            _, logits = draft_without_cache(drafter, taps[:, : r.rows], ids)
            with torch.no_grad():
                context = drafter.context(taps[:, : r.rows], torch.arange(r.rows)[None])
            rows = [np.stack([k.float().numpy(), v.float().numpy()]) for k, v in context]
            results.append({"drafter context": np.stack(rows), "draft_logits": logits.float().numpy()})
        return results

    def _compare(self, expected: list[dict[str, Array]], taps: Tensor, *, half: bool) -> Worst:
        worst = Worst()
        context = self._open(self.facts.context_graph.file, half)
        draft = self._open(self.facts.graph.file, half)
        done = 0
        for r, reference in zip(self.rounds, expected, strict=True):
            # Rows past the committed ones hold what a rejected block left: the next append replaces them.
            chunk = taps[:, done : r.rows].numpy()
            waste = np.full((1, 3, chunk.shape[-1]), 3.0, dtype=np.float32)
            outputs = context.run(taps=np.concatenate([chunk, waste], axis=1), position=np.array([done]))
            state = [outputs[t.output] for t in self.facts.context_graph.state]
            rows = [
                np.stack([k[:, :, : r.rows], v[:, :, : r.rows]]) for k, v in zip(state[0::2], state[1::2], strict=True)
            ]
            draft.state = dict(context.state)
            ids = np.full((1, r.block_size), self.facts.mask_token_id, dtype=np.int64)
            ids[0, 0] = self._anchor(r)
            proposals = draft.run(input_ids=ids, position=np.array([r.rows]))
            context.state = dict(draft.state)
            found = {"drafter context": np.stack(rows), "draft_logits": proposals["draft_logits"]}
            for name, one, two in _pairs(found, reference):
                worst.add(name, deviation(one, two))
            if not half:
                wanted = reference["draft_logits"].argmax(-1)
                worst.add("draft_ids", float((proposals["draft_ids"] != wanted).sum()))
            done = r.rows
        return worst

    def _open(self, file: str, half: bool) -> GraphRunner:
        facts = self.facts.graph if file == self.facts.graph.file else self.facts.context_graph
        model = ir.load(self.root / file)
        weights = None
        if half:
            model = self.passes.emulate_half(model)
        elif self.manifest.precision != "fp32":
            names = [n for n in model.graph.initializers if n in self.manifest.weights]
            weights = {n: read_weight(self.root, self.manifest.weights[n]).float().numpy() for n in names}
            model = self.passes.to_fp32(model)
        return GraphRunner(serialise(model), self.root, dataclasses.replace(facts), self.capacity, weights)


def _pairs(one: dict[str, Array], two: dict[str, Array]) -> list[tuple[str, Array, Array]]:
    return [(name, one[name], two[name]) for name in two]
