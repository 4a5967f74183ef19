"""The parity gate for a target that does not fit into memory twice: part by part, on the checkpoint's own weights.

First, tapped and last layers are run one at a time over a filled cache with a rollback, the embedding by rows and
the output head in slices that cover the whole vocabulary.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from dflash_export.deviation import Worst, deviation
from dflash_export.evidence import plan_steps
from dflash_export.graph_runner import Array, GraphRunner
from dflash_export.layer_reference import LayerReference
from dflash_export.parity import EXACT_TOLERANCE, ROUNDED_FACTOR, GraphEdit, PrecisionPasses, serialise
from dflash_export.reference_run import Step, StepOutputs
from dflash_export.tensor_files import TensorPlace
from dflash_export.weight_store import PRECISIONS, TORCH_DTYPES, Progress
from dflash_export.weight_values import read_weight
from dflash_runtime.bundle import CheckRow, GraphFacts, Manifest

HEAD_ROWS = 8192
"""Rows of the output head in one slice."""
_SEED = 31


class LayerGate:
    """Compares parts of `target.onnx` with the same parts in PyTorch."""

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        config: PreTrainedConfig,
        places: dict[str, TensorPlace],
        passes: PrecisionPasses,
    ) -> None:
        """Prepares; nothing is read yet.

        Args:
            root: The bundle.
            manifest: Its manifest.
            config: The target's config.
            places: State-dict name -> tensor in the checkpoint.
            passes: Used when the bundle is in half precision.
        """
        self.root, self.manifest, self.config, self.places, self.passes = root, manifest, config, places, passes
        windows = [tensor.window_tokens for tensor in manifest.target.graph.state]
        self.steps = plan_steps(64, windows, manifest.max_context_tokens)

    def layer_ids(self) -> list[int]:
        """First, tapped and last layers."""
        return sorted({0, *self.manifest.taps.layer_ids, self.manifest.target.num_layers - 1})

    def check(self, progress: Progress) -> list[CheckRow]:
        """All parts; see the module."""
        chosen = self.layer_ids()
        exact, lowered, rounded, allowed = Worst(), Worst(), Worst(), Worst()
        for done, index in enumerate(chosen):
            progress("check layers", done, len(chosen) + 1)
            self._check_layer(index, exact, lowered, rounded, allowed)
        progress("check layers", len(chosen), len(chosen) + 1)
        reference = self._reference(torch.float32)
        exact.add("embedding", self._check_embedding(reference))
        exact.add("logits", self._check_head(reference))
        if self.passes.lower is not None:
            lowered.add("embedding", self._check_embedding(reference, self.passes.lower))
            lowered.add("logits", self._check_head(reference, self.passes.lower))
        progress("check layers", len(chosen) + 1, len(chosen) + 1)
        covered = (
            f"layer by layer: layers {', '.join(map(str, chosen))} of {self.manifest.target.num_layers}, embedding "
            f"rows, the whole head; calls (rows before, new): "
            + ", ".join(f"({s.position}, {len(s.ids)})" for s in self.steps)
        )
        rows = exact.rows("portable", EXACT_TOLERANCE, covered)
        rows += lowered.rows("lowered", EXACT_TOLERANCE, covered)
        tolerances = {k: ROUNDED_FACTOR * v + EXACT_TOLERANCE for k, v in allowed.by_tensor.items()}
        return rows + rounded.rows("precision", tolerances, f"{self.manifest.precision}, {covered}")

    def _reference(self, dtype: torch.dtype) -> LayerReference:
        target = self.manifest.target
        names = (target.embedding_weight, target.head_weight)
        return LayerReference(self.config, self.places, PRECISIONS[self.manifest.precision], dtype, names)

    def _residuals(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(_SEED)
        H = self.manifest.target.hidden_size
        return [torch.randn(1, len(step.ids), H, generator=generator) for step in self.steps]

    def _check_layer(self, index: int, exact: Worst, lowered: Worst, rounded: Worst, allowed: Worst) -> None:
        dtype = TORCH_DTYPES[PRECISIONS[self.manifest.precision]]
        residuals = [r.to(dtype).float() for r in self._residuals()]
        entered, expected = self._reference(torch.float32).run_layer(index, self.steps, residuals)
        self._compare(index, self._open_layer(index), entered, expected, exact)
        if self.passes.lower is not None:
            self._compare(index, self._open_layer(index, self.passes.lower), entered, expected, lowered)
        if dtype is torch.float32:
            return
        half_in, half_out = self._reference(dtype).run_layer(index, self.steps, [r.to(dtype) for r in residuals])
        for one, two in zip(half_out, expected, strict=True):
            for name, found, wanted in _layer_pairs(index, one, two):
                allowed.add(name, deviation(found, wanted))
        emulated = self.passes.emulate_half(self._layer_part(index))
        runner = GraphRunner(serialise(emulated), self.root, self._facts(index), self._capacity())
        self._compare(index, runner, half_in, expected, rounded)

    def _layer_part(self, index: int) -> ir.Model:
        return self._part(
            [f"hidden_states.{index}", f"past_key_values.{index}.key", f"past_key_values.{index}.value"],
            [f"hidden_states.{index + 1}", f"present.{index}.key", f"present.{index}.value"],
        )

    def _open_layer(self, index: int, edit: GraphEdit | None = None) -> GraphRunner:
        """One layer computed in fp32, as it is or lowered."""
        model = self._layer_part(index)
        weights = None
        if self.manifest.precision != "fp32":
            weights = {n: read_weight(self.root, self.manifest.weights[n]).float().numpy() for n in _weights_of(model)}
            model = self.passes.to_fp32(model)
        model = edit(model) if edit is not None else model
        return GraphRunner(serialise(model), self.root, self._facts(index), self._capacity(), weights)

    def _compare(
        self, index: int, runner: GraphRunner, entered: list[Array], expected: list[StepOutputs], worst: Worst
    ) -> None:
        for step, residual, reference in zip(self.steps, entered, expected, strict=True):
            outputs = runner.run(**self._inputs(runner, step, {f"hidden_states.{index}": residual}))
            length = step.position + len(step.ids)
            found = StepOutputs(
                reference.logits,
                outputs[f"hidden_states.{index + 1}"],
                [outputs[f"present.{index}.key"][0, :, :length]],
                [outputs[f"present.{index}.value"][0, :, :length]],
            )
            for name, one, two in _layer_pairs(index, found, reference):
                worst.add(name, deviation(one, two))

    def _inputs(self, runner: GraphRunner, step: Step, given: dict[str, Array]) -> dict[str, Array]:
        offered = {
            "input_ids": np.array([step.ids], dtype=np.int64),
            "position": np.array([step.position], dtype=np.int64),
            "logit_rows": np.arange(len(step.ids), dtype=np.int64),
            **given,
        }
        # The capacity is read off the first layer's cache, whichever layer is run.
        for tensor in self.manifest.target.graph.state:
            if tensor.input not in runner.state:
                shape = [self._capacity() if d == "T" else int(d) for d in tensor.shape]
                offered[tensor.input] = np.zeros(shape, dtype=np.float32)
        wanted = {tensor.name for tensor in runner.session.get_inputs()} - runner.state.keys()
        return {name: array for name, array in offered.items() if name in wanted}

    def _facts(self, index: int) -> GraphFacts:
        graph = self.manifest.target.graph
        return dataclasses.replace(graph, state=graph.state[2 * index : 2 * index + 2])

    def _capacity(self) -> int:
        return max(step.position + len(step.ids) for step in self.steps) + 4

    def _part(self, inputs: list[str], outputs: list[str]) -> ir.Model:
        """The piece of the target graph between named values; position and token ids stay inputs where needed."""
        model = ir.load(self.root / self.manifest.target.graph.file)
        given = set(inputs)
        names = [str(v.name) for v in model.graph.inputs if v.name not in given] + inputs
        graph = ir.convenience.extract(model.graph, names, outputs)
        used = [v for v in graph.inputs if v.uses() or v.name in given]
        graph.inputs.clear()
        graph.inputs.extend(used)
        return ir.Model(graph, ir_version=model.ir_version)

    def _check_embedding(self, reference: LayerReference, edit: GraphEdit | None = None) -> float:
        V = self.manifest.target.vocab_size
        ids = sorted({0, 1, V // 3, V // 2, V - 2, V - 1} & set(range(V)))
        expected = reference.embed(ids).float().numpy()
        model = self._part(["input_ids"], ["hidden_states.0"])
        name = self.manifest.target.embedding_weight
        rows = read_weight(self.root, self.manifest.weights[name])[ids].float().numpy()
        found = self._run_with_table(model, name, rows, {"input_ids": np.arange(len(ids))[None]}, edit)
        return deviation(found["hidden_states.0"], expected)

    def _check_head(self, reference: LayerReference, edit: GraphEdit | None = None) -> float:
        target = self.manifest.target
        residual = self._residuals()[0][:, :3]
        last = f"hidden_states.{target.num_layers}"
        worst = 0.0
        for start in range(0, target.vocab_size, HEAD_ROWS):
            rows = slice(start, min(start + HEAD_ROWS, target.vocab_size))
            expected = reference.head(residual, rows).numpy()
            model = self._part([last, "logit_rows"], ["logits"])
            table = read_weight(self.root, self.manifest.weights[target.head_weight])[rows].float().numpy()
            given = {last: residual.numpy(), "logit_rows": np.arange(residual.shape[1])}
            found = self._run_with_table(model, target.head_weight, table, given, edit)
            worst = max(worst, deviation(found["logits"][0], expected))
        return worst

    def _run_with_table(
        self, model: ir.Model, table_name: str, table: Array, inputs: dict[str, Array], edit: GraphEdit | None
    ) -> dict[str, Array]:
        """Runs a part in fp32 with some rows in place of a whole table."""
        half = self.manifest.precision != "fp32"
        model = self.passes.to_fp32(model) if half else model
        for node in model.graph:
            for output in node.outputs:
                output.shape = None  # a sliced table makes the traced sizes wrong
        value = model.graph.initializers[table_name]
        value.shape = ir.Shape(table.shape)
        value.const_value = ir.ExternalTensor(
            self.manifest.weights[table_name].file,
            0,
            table.nbytes,
            ir.DataType.FLOAT,
            shape=ir.Shape(table.shape),
            name=table_name,
            base_dir=self.root,
        )
        weights = {table_name: table}
        if half:
            others = [n for n in _weights_of(model) if n != table_name]
            weights |= {n: read_weight(self.root, self.manifest.weights[n]).float().numpy() for n in others}
        model = edit(model) if edit is not None else model
        facts = dataclasses.replace(self.manifest.target.graph, state=[])
        runner = GraphRunner(serialise(model), self.root, facts, 1, weights)
        return runner.run(**self._inputs(runner, Step(0, [0]), inputs))


def _weights_of(model: ir.Model) -> list[str]:
    return [n for n, v in model.graph.initializers.items() if isinstance(v.const_value, ir.ExternalTensor)]


def _layer_pairs(index: int, one: StepOutputs, two: StepOutputs) -> list[tuple[str, Array, Array]]:
    return [
        (f"layer {index} output", one.hidden[-1] if one.hidden.ndim == 3 else one.hidden, two.hidden[-1]),
        (f"layer {index} keys", one.keys[0], two.keys[0]),
        (f"layer {index} values", one.values[0], two.values[0]),
    ]
