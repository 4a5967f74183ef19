"""Which checks a bundle gets: the whole model where it fits into free memory, else part by part. Never none."""

from __future__ import annotations

from pathlib import Path

import psutil

from dflash_export.build import BuildPlan
from dflash_export.drafter_gate import check_drafter
from dflash_export.evidence import TargetEvidence, gate_prompts, gather_target_evidence
from dflash_export.layer_gate import LayerGate
from dflash_export.parity import PrecisionPasses, check_target
from dflash_export.weight_store import ITEM_BYTES, Progress
from dflash_runtime.bundle import CheckRow, Manifest

MEMORY_FACTOR = 3.0
"""fp32 weights are held by ONNX Runtime mapped, folded and packed at the same time, measured at its peak."""


class Gate:
    """The parity gate of one build.

    Attributes:
        fits_memory: The whole model is checked.
        evidence: PyTorch's outputs, there after `check` when `fits_memory`.
    """

    evidence: TargetEvidence

    def __init__(self, root: Path, manifest: Manifest, plan: BuildPlan, passes: PrecisionPasses) -> None:
        self.root, self.manifest, self.plan, self.passes = root, manifest, plan, passes
        fp32_bytes = sum(e.length_bytes // ITEM_BYTES[e.dtype] * 4 for e in manifest.weights.values())
        wanted = plan.options.gate
        free = psutil.virtual_memory().available
        self.fits_memory = wanted == "full" or (wanted == "auto" and fp32_bytes * MEMORY_FACTOR < free)

    def check(self, progress: Progress) -> list[CheckRow]:
        """All checks of the portable graphs, drafter included."""
        plan, manifest = self.plan, self.manifest
        folder = plan.target.checkpoint.folder
        if self.fits_memory:
            progress("check target", 0, 2)
            prompts = gate_prompts(self.root / "tokenizer" / "tokenizer.json", manifest.target.vocab_size)
            self.evidence = gather_target_evidence(folder, manifest, prompts)
            progress("check target", 1, 2)
            rows = check_target(self.root, manifest, self.evidence, self.passes)
            progress("check target", 2, 2)
        else:
            gate = LayerGate(self.root, manifest, plan.target.config, plan.target.places, self.passes)
            rows = gate.check(progress)
        if manifest.drafter is not None:
            rows += check_drafter(self.root, manifest, plan, self.passes, progress)
        return rows
