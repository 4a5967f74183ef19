"""The parity gate for a target that does not fit into memory twice: part by part, on the checkpoint's own weights.

First, tapped and last layers are run one at a time over a filled cache with a rollback, the embedding by rows and
the output head in slices that cover the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from dflash_export.build_stages import BuildStages
from dflash_export.dequantized_weights import dequantized_places
from dflash_export.deviation import Worst, deviation
from dflash_export.evidence import plan_steps
from dflash_export.graph_runner import Array
from dflash_export.layer_reference import LayerReference
from dflash_export.memory_release import release_memory
from dflash_export.parity import EXACT_TOLERANCE, ROUNDED_FACTOR, PrecisionPasses
from dflash_export.real_residuals import gated_layers, load_residuals
from dflash_export.reference_run import StepOutputs
from dflash_export.target_parts import TargetParts
from dflash_export.tensor_files import TensorPlace
from dflash_export.weight_store import PRECISIONS, TORCH_DTYPES, Progress
from dflash_export.weight_values import place_of, read_converted
from dflash_runtime.bundle import CheckRow, Manifest, sha256_of

HEAD_ELEMENTS = 1 << 24
"""Weights of the output head in one slice."""
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
        self.root, self.manifest, self.config, self.passes = root, manifest, config, passes
        self.places = {**places, **dequantized_places(root, manifest)}
        self.steps = plan_steps(64, [], manifest.max_context_tokens)
        self.parts = TargetParts(root, manifest, passes, max(s.position + len(s.ids) for s in self.steps) + 4)

    def layer_ids(self) -> list[int]:
        """First, tapped and last layers."""
        return gated_layers(self.manifest)

    def check(self, progress: Progress, stages: BuildStages | None = None) -> list[CheckRow]:
        """All parts; see the module.

        Args:
            progress: Called with stage, done, total.
            stages: What a killed build left: a layer that was compared is not compared again.
        """
        stages = stages or BuildStages(None)
        graph = sha256_of(self.root / self.manifest.target.graph.file)
        chosen = self.layer_ids()
        exact, lowered, rounded, allowed = Worst(), Worst(), Worst(), Worst()
        for done, index in enumerate(chosen):
            progress("check layers", done, len(chosen) + 1)
            kept = stages.load(f"layer {index}")
            found = (Worst(), Worst(), Worst(), Worst())
            if kept is None or kept["graph"] != graph:
                self._check_layer(index, load_residuals(stages, index, self.steps), *found)
                kept = {"graph": graph, "worst": [one.by_tensor for one in found]}
                stages.save(f"layer {index}", kept)
                release_memory()
            for worst, deviations in zip((exact, lowered, rounded, allowed), kept["worst"], strict=True):
                worst.by_tensor |= deviations
        progress("check layers", len(chosen), len(chosen) + 1)
        reference = self.reference(torch.float32)
        self._check_embedding(reference, exact, lowered)
        self._check_head(reference, exact, lowered)
        progress("check layers", len(chosen) + 1, len(chosen) + 1)
        covered = (
            f"layer by layer: layers {', '.join(map(str, chosen))} of {self.manifest.target.num_layers}, embedding "
            f"rows, the whole head; calls (rows before, new): "
            + ", ".join(f"({s.position}, {len(s.ids)})" for s in self.steps)
            + (" (quantised weights as floats)" if self.manifest.quantized else "")
        )
        rows = exact.rows("portable", EXACT_TOLERANCE, covered)
        rows += lowered.rows("lowered", EXACT_TOLERANCE, covered)
        tolerances = {k: ROUNDED_FACTOR * v + EXACT_TOLERANCE for k, v in allowed.by_tensor.items()}
        return rows + rounded.rows("precision", tolerances, f"{self.manifest.precision}, {covered}")

    def reference(self, dtype: torch.dtype) -> LayerReference:
        """The target in PyTorch, of which only the part under test has weights."""
        target = self.manifest.target
        names = (target.embedding_weight, target.head_weight)
        return LayerReference(self.config, self.places, PRECISIONS[self.manifest.precision], dtype, names)

    def _residuals(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(_SEED)
        H = self.manifest.target.hidden_size
        return [torch.randn(1, len(step.ids), H, generator=generator) for step in self.steps]

    def _check_layer(
        self, index: int, real: list[Tensor] | None, exact: Worst, lowered: Worst, rounded: Worst, allowed: Worst
    ) -> None:
        dtype = TORCH_DTYPES[PRECISIONS[self.manifest.precision]]
        residuals = real or [r.to(dtype).float() for r in self._residuals()]
        entered, expected = self.reference(torch.float32).run_layer(index, self.steps, residuals)
        self._compare(index, self.parts.layer(index), entered, expected, exact)
        if self.passes.lower is not None:
            self._compare(index, self.parts.layer(index, self.passes.lower), entered, expected, lowered)
        if dtype is torch.float32:
            return
        half_in, half_out = self.reference(dtype).run_layer(index, self.steps, [r.to(dtype) for r in residuals])
        if dtype is torch.float16 and not all(np.isfinite(one.hidden).all() for one in half_out):
            coarse = self.reference(torch.bfloat16)  # PyTorch overflows in fp16, and the graph must not
            half_in, half_out = coarse.run_layer(index, self.steps, [r.to(torch.bfloat16) for r in residuals])
        for one, two in zip(half_out, expected, strict=True):
            for name, found, wanted in layer_pairs(index, one, two):
                allowed.add(name, deviation(found, wanted))
        self._compare(index, self.passes.emulate_half(self.parts.stored_layer(index)), half_in, expected, rounded)

    def _compare(
        self, index: int, model: ir.Model, entered: list[Array], expected: list[StepOutputs], worst: Worst
    ) -> None:
        results = self.parts.run_layer(model, index, self.steps, entered, {})
        for outputs, reference in zip(results, expected, strict=True):
            for name, one, two in layer_pairs(index, layer_outputs(index, outputs), reference):
                worst.add(name, deviation(one, two))

    def _check_embedding(self, reference: LayerReference, exact: Worst, lowered: Worst) -> None:
        V, name = self.manifest.target.vocab_size, self.manifest.target.embedding_weight
        ids = sorted({0, 1, V // 3, V // 2, V - 2, V - 1} & set(range(V)))
        expected = reference.embed(ids).float().numpy()
        rows = np.concatenate([self._rows(name, slice(i, i + 1)) for i in ids])
        parts = self.parts.table_parts(["input_ids"], "hidden_states.0", name, len(ids))
        for worst, part in zip((exact, lowered), parts, strict=False):
            found = self.parts.run_table(part, name, rows, {"input_ids": np.arange(len(ids))[None]})
            worst.add("embedding", deviation(found["hidden_states.0"], expected))

    def _check_head(self, reference: LayerReference, exact: Worst, lowered: Worst) -> None:
        target = self.manifest.target
        residual = self._residuals()[0][:, :3]
        last, head = f"hidden_states.{target.num_layers}", target.head_weight
        given = {last: residual.numpy(), "logit_rows": np.arange(residual.shape[1])}
        parts: dict[int, list[onnx.ModelProto]] = {}
        step = max(1, HEAD_ELEMENTS // target.hidden_size)
        for start in range(0, target.vocab_size, step):
            rows = slice(start, min(start + step, target.vocab_size))
            count = rows.stop - start
            if count not in parts:
                parts[count] = self.parts.table_parts([last, "logit_rows"], "logits", head, count)
            expected, table = reference.head(residual, rows).numpy(), self._rows(head, rows)
            for worst, part in zip((exact, lowered), parts[count], strict=False):
                found = self.parts.run_table(part, head, table, given)
                worst.add("logits", deviation(found["logits"][0], expected))

    def _rows(self, name: str, rows: slice) -> Array:
        own = self.places[name] if name in self.manifest.quantized else None
        place = own or place_of(self.root, self.manifest.weights[name])
        return read_converted(place.rows(rows.start, rows.stop), torch.float32).numpy()


def layer_outputs(index: int, outputs: Mapping[str, Array]) -> StepOutputs:
    """What a layer of the graph gave, in the form of the reference."""
    hidden = outputs[f"hidden_states.{index + 1}"]
    return StepOutputs(
        hidden[:0], hidden, [outputs[f"present.{index}.key"][0]], [outputs[f"present.{index}.value"][0]]
    )


def layer_pairs(index: int, one: StepOutputs, two: StepOutputs) -> list[tuple[str, Array, Array]]:
    """Output, keys and values of a layer, each from both sides."""
    return [
        (f"layer {index} output", one.hidden[-1] if one.hidden.ndim == 3 else one.hidden, two.hidden[-1]),
        (f"layer {index} keys", one.keys[0], two.keys[0]),
        (f"layer {index} values", one.values[0], two.values[0]),
    ]
