"""The fp16 guard: what calibration shows to be beyond fp16 is kept in fp32, and how large everything became is stored.

An fp16 bundle gets graphs with fp32 islands. A bf16 bundle keeps its graphs; fp16 engines that are made of it later
read from `ranges.json` what has to be in fp32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from dflash_export.build_stages import BuildStages
from dflash_export.graph_facts import finish_interface
from dflash_export.graph_files import load_graph, weights_by_name, write_graph
from dflash_export.graph_runner import Array
from dflash_export.memory_release import release_memory
from dflash_export.parity import PrecisionPasses
from dflash_export.range_scan import calibration_texts, empty_caches, scan_graph, target_calls
from dflash_export.real_residuals import gated_layers, save_residuals
from dflash_export.weight_store import Progress
from dflash_runtime.bundle import GraphFacts, Manifest
from dflash_runtime.errors import EngineError, ParityError
from dflash_runtime.value_ranges import (
    FP16_LARGEST,
    FP16_TRUSTED,
    RANGES_SCHEMA_VERSION,
    RangeRecord,
    ValueRange,
    write_ranges,
)

SCANNED_PARAMETERS = 1 << 29
"""A bf16 bundle of a larger target is not scanned, as that takes longer than all else in its build and helps fp16
engines alone, which then say that they are unguarded."""


def is_guarded(manifest: Manifest, passes: PrecisionPasses) -> bool:
    """Whether the graphs of a bundle under construction are scanned: always in fp16."""
    if passes.keep_in_fp32 is None:
        return False
    return manifest.precision == "fp16" or manifest.target.num_parameters <= SCANNED_PARAMETERS


class RangeGuard:
    """Scans the graphs of one bundle under construction, one after the other."""

    def __init__(
        self, root: Path, passes: PrecisionPasses, progress: Progress, stages: BuildStages | None = None
    ) -> None:
        """Prepares; nothing is read yet.

        Args:
            root: The bundle.
            passes: For running graphs in fp32 and for keeping values in fp32.
            progress: Called with stage, done, total.
            stages: Where residuals are left for the layer gate.
        """
        self._root, self._passes, self._progress, self._stages = root, passes, progress, stages or BuildStages(None)
        self._ranges: list[ValueRange] = []
        self._taps: list[Array] = []
        self._texts: list[list[int]] = []

    def guard_target(self, manifest: Manifest, known: RangeRecord | None = None) -> Manifest:
        """Scans `target.onnx` on the calibration texts.

        Args:
            manifest: With the target, its text files copied.
            known: What an earlier scan found: the graph is as it has to be, and only its taps are new.

        Returns:
            The manifest, with the graph's new interface where taps are kept in fp32.

        Raises:
            ParityError: fp16 cannot hold a value that cannot be kept in fp32 either.
        """
        if manifest.precision == "fp32":
            return manifest
        self._texts = calibration_texts(self._root, manifest)
        calls = target_calls(manifest, self._texts)
        facts = manifest.target.graph
        entered = [f"hidden_states.{index}" for index in gated_layers(manifest)]
        ranges, found = self._scan(manifest, "target", facts, calls, ["taps", *entered])
        self._taps = [outputs["taps"] for outputs in found]
        if any(one.reached > FP16_TRUSTED for one in ranges):
            save_residuals(self._stages, {name: found[-1][name] for name in entered})
        if known is not None:
            taps = [one for one in ranges if one.value == "taps"]
            self._ranges = [one for one in known.ranges if one.graph == "target" and one.value != "taps"] + taps
            return manifest
        facts = self._keep(manifest, "target", facts, ranges)
        return dataclasses.replace(manifest, target=dataclasses.replace(manifest.target, graph=facts))

    def guard_drafter(self, manifest: Manifest) -> Manifest:
        """Scans the drafter's graphs on the taps of the calibration texts.

        Args:
            manifest: With the drafter; `guard_target` was called before.

        Returns:
            The manifest, as `guard_target` gives it.

        Raises:
            ParityError: as `guard_target`.
        """
        drafter = manifest.drafter
        if drafter is None or manifest.precision == "fp32":
            return manifest
        context, draft = drafter.context_graph, drafter.graph
        capacity = max(taps.shape[1] for taps in self._taps) + drafter.block_size
        position = np.zeros(1, np.int64)
        caches = empty_caches(context, capacity)
        calls = [{"taps": taps, "position": position, **caches} for taps in self._taps]
        ranges, found = self._scan(manifest, "drafter_context", context, calls, [t.output for t in context.state])
        context = self._keep(manifest, "drafter_context", context, ranges)
        block = np.full((1, drafter.block_size), drafter.mask_token_id, np.int64)
        calls = []
        for ids, taps, rows in zip(self._texts, self._taps, found, strict=True):
            anchored = block.copy()
            anchored[0, 0] = ids[-1]
            past = {tensor.input: rows[tensor.output] for tensor in draft.state}
            calls.append({"input_ids": anchored, "position": np.full(1, taps.shape[1]), **past})
        ranges, _ = self._scan(manifest, "drafter", draft, calls, [])
        draft = self._keep(manifest, "drafter", draft, ranges)
        return dataclasses.replace(
            manifest, drafter=dataclasses.replace(drafter, context_graph=context, graph=draft)
        )

    def write(self, manifest: Manifest) -> None:
        """Writes `ranges.json`; nothing for an fp32 bundle, whose graphs round nowhere."""
        if manifest.precision == "fp32":
            return
        count = sum(len(ids) for ids in self._texts)
        covered = f"{len(self._texts)} texts of together {count} tokens, all {manifest.target.num_layers} layers"
        write_ranges(
            self._root,
            RangeRecord(RANGES_SCHEMA_VERSION, manifest.precision, FP16_TRUSTED, covered, self._ranges),
        )

    def _scan(
        self, manifest: Manifest, kind: str, facts: GraphFacts, calls: Sequence[Mapping[str, Array]], wanted: list[str]
    ) -> tuple[list[ValueRange], list[dict[str, Array]]]:
        self._progress("scan ranges", 0, 1)
        scan = scan_graph(self._root, manifest, kind, facts, self._passes, calls, wanted)
        self._ranges += scan.ranges
        release_memory()
        self._progress("scan ranges", 1, 1)
        return scan.ranges, scan.outputs

    def _keep(self, manifest: Manifest, kind: str, facts: GraphFacts, ranges: list[ValueRange]) -> GraphFacts:
        """Puts what fp16 is not trusted with in fp32; a graph without such values is left as it is, byte for byte."""
        beyond = [one for one in ranges if one.reached > FP16_TRUSTED]
        if manifest.precision != "fp16" or not beyond:
            return facts
        by_name = weights_by_name(self._root, manifest.weights, facts.file)
        model = load_graph(self._root, manifest.weights, facts.file)
        try:
            kept = self._kept(model, beyond)
        except EngineError as error:
            stuck = next(one for one in beyond if not self._can_be_kept(model, one))
            raise ParityError(
                f"the {kind} is not safe in fp16: {stuck.what} reached {stuck.reached:.3g}, and fp16 ends at "
                f"{FP16_LARGEST:,.0f}. {error} Build with --precision bf16."
            ) from error
        facts = finish_interface(kept, kind, facts.file, [tensor.window_tokens for tensor in facts.state[0::2]])
        write_graph(kept, manifest.weights, self._root, facts.file, by_name)
        return facts

    def _kept(self, model: ir.Model, values: Sequence[ValueRange]) -> ir.Model:
        assert self._passes.keep_in_fp32 is not None
        return self._passes.keep_in_fp32(model, [one.value for one in values])

    def _can_be_kept(self, model: ir.Model, one: ValueRange) -> bool:
        try:
            self._kept(model, [one])
        except EngineError:
            return False
        return True
