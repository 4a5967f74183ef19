"""The parity gate of the drafter: context rows, hidden proposals and ids against our PyTorch module.

The reference computes every draft anew, without any cache, with every mask written out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from dflash_export.dequantize_nodes import put_float_rows
from dflash_export.dequantized_weights import dequantized_places, read_float_rows
from dflash_export.deviation import Array, Worst, deviation
from dflash_export.drafter import Drafter, draft_without_cache, proposals_by_definition
from dflash_export.drafter_build import DrafterPlan
from dflash_export.drafter_weights import CODEBOOKS, PREFIX, load_drafter, quantized_parameters, set_parameter
from dflash_export.drafter_window_gate import Form, check_drafter_windows
from dflash_export.evidence import RUN_WINDOW_TOKENS
from dflash_export.graph_files import load_graph
from dflash_export.graph_runner import GraphRunner
from dflash_export.parity import EXACT_TOLERANCE, ROUNDED_FACTOR, PrecisionPasses, serialise
from dflash_export.piecewise_runner import PiecewiseGraph
from dflash_export.quantized_formats.imported_place import ImportedPlace
from dflash_export.tensor_files import TensorPlace
from dflash_export.weight_store import PRECISIONS, TORCH_DTYPES
from dflash_export.weight_values import BundleWeights, read_weight, weights_as_float32
from dflash_runtime.bundle import CheckRow, DrafterFacts, GraphFacts, Manifest

PIECEWISE_PARAMETERS = 1 << 26
"""A larger drafter is run piece by piece, its weights read as they are needed."""
SAMPLED_ROWS = 1024
"""Rows of each end of the head that are compared where tables are cut."""
_SEED = 4


class _Round(NamedTuple):
    rows: int
    """Committed context rows before the draft."""
    block_size: int


class DrafterGate:
    """Compares `drafter_context.onnx` and `drafter.onnx` with the PyTorch module."""

    def __init__(
        self, root: Path, manifest: Manifest, plan: DrafterPlan, passes: PrecisionPasses, *, whole_tables: bool = True
    ) -> None:
        """Prepares; nothing is read yet.

        Args:
            root: The bundle.
            manifest: Its manifest, with the drafter.
            plan: The drafter's checkpoint.
            passes: For half precision.
            whole_tables: Use every row of embedding and head. Otherwise only the rows that are read and a sample
                of the head: the target's own check covers the rest of what the drafter borrows.
        """
        assert manifest.drafter is not None
        self.root, self.manifest, self.plan, self.passes = root, manifest, plan, passes
        self.facts: DrafterFacts = manifest.drafter
        self.rounds = self._rounds()
        target = manifest.target
        self.tables = plan.weights.table_names(target.embedding_weight, target.head_weight)
        borrowed = self.tables == (target.embedding_weight, target.head_weight)
        self.token_rows = None if whole_tables or not borrowed else self._sample_rows()
        self.capacity = max(r.rows + r.block_size for r in self.rounds) + 40

    def _rounds(self) -> list[_Round]:
        sizes = sorted({2, self.facts.block_size, *self.manifest.block_sizes})
        windows = [w for w in self.plan.config.windows if w is not None and w <= RUN_WINDOW_TOKENS]
        starts = sorted({1, 9, *(w - 3 for w in windows), *(w + 7 for w in windows)})
        limit = self.manifest.max_context_tokens
        rounds = [_Round(start + 2 * i, size) for start in starts for i, size in enumerate(sizes)]
        return sorted({r for r in rounds if r.rows <= limit}) or [_Round(1, sizes[0])]

    def _sample_rows(self) -> list[int]:
        """Vocabulary rows of the cut tables: the tokens that are read, and some of both ends."""
        V = self.manifest.target.vocab_size
        read = {self.facts.mask_token_id, *(self._anchor(r) for r in self.rounds)}
        return sorted(read | set(range(min(V, SAMPLED_ROWS))) | set(range(max(0, V - SAMPLED_ROWS), V)))

    def _row(self, token_id: int) -> int:
        return token_id if self.token_rows is None else self.token_rows.index(token_id)

    def check(self, taps: Tensor | None) -> list[CheckRow]:
        """All rounds, in fp32 and, for a half-precision bundle, in its own dtype.

        Args:
            taps: Real taps [1, C, K*H] to begin the context with; the rest, or all, is random.
        """
        taps = self._taps(taps)
        dtype = TORCH_DTYPES[PRECISIONS[self.manifest.precision]]
        exact_drafter = self.exact_drafter()
        expected = self._reference(exact_drafter, taps)
        worst = self._compare(expected, taps, "exact")
        covered = "rounds (context rows, block): " + ", ".join(f"({r.rows}, {r.block_size})" for r in self.rounds)
        rows = worst.rows("portable", EXACT_TOLERANCE, covered)
        if self.passes.lower_drafter and self.token_rows is not None:  # else it is compared after it was written
            rows += self._compare(expected, taps, "lowered").rows("lowered", EXACT_TOLERANCE, covered)
        rows += self._check_windows(exact_drafter)
        if dtype is torch.float32:
            return rows
        del exact_drafter
        rounded = self._compare(expected, taps, "half")
        tolerances = self._tolerances(expected, taps, dtype)
        return rows + rounded.rows("precision", tolerances, f"{self.manifest.precision}, {covered}")

    def _tolerances(self, expected: list[dict[str, Array]], taps: Tensor, dtype: torch.dtype) -> dict[str, float]:
        """What our module loses in half precision; in bf16 where it overflows in fp16 and the graph must not."""
        own = Worst()
        for one, two in zip(self._reference(self._drafter(dtype), taps), expected, strict=True):
            for name, found, wanted in _pairs(one, two):
                own.add(name, deviation(found, wanted))
        if dtype is torch.float16 and not np.isfinite(list(own.by_tensor.values())).all():
            return self._tolerances(expected, taps, torch.bfloat16)
        return {name: ROUNDED_FACTOR * value + EXACT_TOLERANCE for name, value in own.by_tensor.items()}

    def _check_windows(self, exact_drafter: Drafter) -> list[CheckRow]:
        limit = self.manifest.max_context_tokens
        widths = sorted({w for w in self.plan.config.windows if w is not None and RUN_WINDOW_TOKENS < w < limit})
        mask = self._row(self.facts.mask_token_id)
        forms: list[Form] = ["exact", "lowered"] if self.passes.lower_drafter else ["exact"]
        return check_drafter_windows(
            exact_drafter, self.facts.graph.state, torch.full((1, self.facts.block_size), mask), widths, limit,
            lambda form, capacity: self._open(self.facts.graph, form, capacity), forms,
        )  # fmt: skip

    def _taps(self, given: Tensor | None) -> Tensor:
        facts = next(tensor for tensor in self.facts.context_graph.inputs if tensor.name == "taps")
        width = int(facts.shape[-1])
        noise = torch.randn(1, self.capacity, width, generator=torch.Generator().manual_seed(_SEED))
        if given is not None:
            count = min(given.shape[1], self.capacity)
            noise *= given.std()
            noise[:, :count] = given[:, :count]
        return noise.to(TORCH_DTYPES[facts.dtype]).float()

    def _drafter(self, *dtypes: torch.dtype) -> Drafter:
        target, weights = self.manifest.target, self.plan.weights
        names = (target.embedding_weight, target.head_weight)
        embedding, head = (read_float_rows(self.root, self.manifest, n, self.token_rows) for n in names)
        weights = dataclasses.replace(weights, places=self._float_places(weights.places))
        if self.token_rows is not None:
            weights = dataclasses.replace(weights, vocab_size=len(self.token_rows))
        drafter = load_drafter(self.plan.config, weights, embedding, head, *dtypes)
        for name in CODEBOOKS if self.token_rows is not None and self.plan.config.dflash2 is not None else ():
            rows = drafter.get_parameter(name)[self.token_rows]
            set_parameter(drafter, name, torch.nn.Parameter(rows, requires_grad=False))
        self._put_dequantized(drafter, dtypes[-1])
        return drafter

    def _float_places(self, places: Mapping[str, TensorPlace]) -> dict[str, TensorPlace]:
        """The checkpoint's tensors; what it brings quantised is read from the bundle."""
        found = dequantized_places(self.root, self.manifest)
        return {
            name: found[PREFIX + name] if isinstance(place, ImportedPlace) else place for name, place in places.items()
        }

    def exact_drafter(self) -> Drafter:
        """The module in fp32, with the weights as the bundle rounds them."""
        return self._drafter(TORCH_DTYPES[PRECISIONS[self.manifest.precision]], torch.float32)

    def _put_dequantized(self, drafter: Drafter, dtype: torch.dtype) -> None:
        """Gives the drafter the values its quantised matrices have in the bundle, the borrowed ones included."""
        for parameter, name in quantized_parameters(self.manifest.quantized, self.tables).items():
            rows = self.token_rows if name in self.tables else None
            value = read_float_rows(self.root, self.manifest, name, rows).to(dtype)
            set_parameter(drafter, parameter, torch.nn.Parameter(value, requires_grad=False))

    def _anchor(self, round_: _Round) -> int:
        return (round_.rows * 7919 + round_.block_size) % self.manifest.target.vocab_size

    def _reference(self, drafter: Drafter, taps: Tensor) -> list[dict[str, Array]]:
        results = []
        for r in self.rounds:
            ids = torch.full((1, r.block_size), self._row(self.facts.mask_token_id))
            ids[0, 0] = self._row(self._anchor(r))
            hidden, logits = draft_without_cache(drafter, taps[:, : r.rows], ids)
            proposed = proposals_by_definition(drafter, hidden, logits, ids[:, :1])
            with torch.no_grad():
                context = drafter.context(taps[:, : r.rows], torch.arange(r.rows)[None])
            rows = [np.stack([k.float().numpy(), v.float().numpy()]) for k, v in context]
            results.append(
                {
                    "drafter context": np.stack(rows),
                    "draft_logits": logits.float().numpy(),
                    "draft_ids": proposed.numpy(),
                }
            )
        return results

    def _compare(self, expected: list[dict[str, Array]], taps: Tensor, form: Form) -> Worst:
        worst = Worst()
        context = self._open(self.facts.context_graph, form, self.capacity)
        draft = self._open(self.facts.graph, form, self.capacity)
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
            ids = np.full((1, r.block_size), self._row(self.facts.mask_token_id), dtype=np.int64)
            ids[0, 0] = self._row(self._anchor(r))
            proposals = draft.run(input_ids=ids, position=np.array([r.rows]))
            context.state = dict(draft.state)
            found = {"drafter context": np.stack(rows), "draft_logits": proposals["draft_logits"]}
            for name, one, two in _pairs(found, reference):
                worst.add(name, deviation(one, two))
            if form != "half":
                worst.add("draft_ids", float((proposals["draft_ids"] != reference["draft_ids"]).sum()))
            done = r.rows
        return worst

    def _open(self, facts: GraphFacts, form: Form, capacity: int) -> GraphRunner | PiecewiseGraph:
        """One of the two graphs with its weights and with caches of `capacity` rows, zeroed."""
        model = load_graph(self.root, self.manifest.weights, facts.file)
        if self.token_rows is not None:
            self._cut_tables(model, self.token_rows)
        quantized = self.manifest.quantized.keys() & model.graph.initializers.keys()
        half_stored = self.manifest.precision != "fp32"
        if form == "half" and self.token_rows is not None:
            self._cut_quantized_tables(model, self.token_rows)
        if half_stored:
            model = self.passes.emulate_half(model) if form == "half" else self.passes.to_fp32(model)
        if form != "half" and self.token_rows is not None:
            self._cut_quantized_tables(model, self.token_rows)
        if form == "lowered":
            assert self.passes.lower_drafter is not None
            model = self.passes.lower_drafter(model, "drafter" if facts is self.facts.graph else "drafter_context")
        if self.facts.num_parameters > PIECEWISE_PARAMETERS and not quantized:
            read = BundleWeights(self.root, self.manifest.weights)
            return PiecewiseGraph(ir.to_proto(model), read, facts.state, capacity)
        weights = weights_as_float32(self.root, self.manifest, model) if half_stored and form != "half" else None
        return GraphRunner(serialise(model), self.root, facts, capacity, weights)

    def _cut_tables(self, model: ir.Model, rows: list[int]) -> None:
        """Puts the chosen rows of embedding and head in place of the whole tables, inside the graph."""
        with_row_per_token = {*self.tables, *(PREFIX + name for name in CODEBOOKS)}
        for name in with_row_per_token & model.graph.initializers.keys():
            value = model.graph.initializers[name]
            entry = self.manifest.weights[name]
            if name in self.manifest.quantized:
                continue
            table = read_weight(self.root, entry)[rows].contiguous().view(torch.uint8).numpy()
            stored = table.view(value.const_value.dtype.numpy()).reshape(len(rows), -1)  # type: ignore[union-attr]
            value.const_value = ir.Tensor(stored, name=name)
            value.shape = ir.Shape(stored.shape)
        for output in (output for node in model.graph for output in node.outputs):
            if output.shape is not None and self.manifest.target.vocab_size in output.shape:
                output.shape = None

    def _cut_quantized_tables(self, model: ir.Model, rows: list[int]) -> None:
        """The same for quantised tables, in the type the graph now computes in."""
        for name in set(self.tables) & self.manifest.quantized.keys() & model.graph.initializers.keys():
            put_float_rows(model, name, read_float_rows(self.root, self.manifest, name, rows))


def _pairs(one: dict[str, Array], two: dict[str, Array]) -> list[tuple[str, Array, Array]]:
    return [(name, one[name], two[name]) for name in two if name != "draft_ids"]
