"""Which checks a bundle gets: the whole model where it fits into free memory, else part by part. Never none."""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import torch

from dflash_export.build_plan import BuildPlan
from dflash_export.build_stages import BuildStages
from dflash_export.dequantized_weights import check_rounding, dequantized_places
from dflash_export.drafter import Drafter
from dflash_export.drafter_build import DrafterPlan
from dflash_export.drafter_gate import DrafterGate
from dflash_export.drafter_weights import load_drafter
from dflash_export.evidence import (
    RUN_WINDOW_TOKENS,
    QuantizedQuality,
    TargetEvidence,
    gate_prompts,
    gather_target_evidence,
)
from dflash_export.layer_gate import LayerGate
from dflash_export.parity import PrecisionPasses, check_target
from dflash_export.quality import acceptance_row, perplexity_row
from dflash_export.quality_notes import unmeasured
from dflash_export.quantized_formats.imported_place import ImportedPlace
from dflash_export.text_run import acceptance_length
from dflash_export.weight_store import Progress
from dflash_export.window_gate import check_windows
from dflash_runtime.bundle import CheckRow, Manifest

MEMORY_FACTORS = {"fp32": 1.6, "fp16": 5.0, "bf16": 5.0}
"""What comparing a whole model takes on top of the build, in multiples of its fp32 weights. Measured: 1.35 for
SmolLM2-135M in fp32, 3.7 and growing for a 1.5 B bf16 model, whose weights are widened and folded."""
QUANTIZED_FACTOR = 2.0
"""What comes on top of these where weights are quantised: the original is run too, and the portable graph's weights are
floats again. Measured with int4 on SmolLM2-135M in fp32: 3.3 in all."""
BUILD_BYTES = 600_000_000
"""What a build has resident after the trace, torch included."""
MOST_BYTES = 1_500_000_000
"""No build takes more by itself, whatever the model."""


def fits_memory(manifest: Manifest, wanted: str) -> bool:
    """Whether the whole model is run: asked for, or it takes little enough memory.

    Args:
        manifest: Of the bundle.
        wanted: `full`, `layers` or `auto`.
    """
    free: int = psutil.virtual_memory().available
    room = min(free, MOST_BYTES - BUILD_BYTES)
    return wanted == "full" or (wanted == "auto" and _whole_bytes(manifest) < room)


def check_portable(
    root: Path,
    manifest: Manifest,
    plan: BuildPlan,
    passes: PrecisionPasses,
    progress: Progress,
    stages: BuildStages | None = None,
) -> tuple[list[CheckRow], TargetEvidence | None]:
    """The parity gate of one build: target and drafter graphs against PyTorch.

    Args:
        root: The bundle.
        manifest: Its manifest.
        plan: What was built.
        passes: For half precision.
        progress: Called with stage, done, total.
        stages: What a killed build left.

    Returns:
        The rows, and PyTorch's outputs where the whole model was run.
    """
    evidence, stages = None, stages or BuildStages(None)
    # Free memory changes: a build that goes on takes the way it began.
    whole = stages.load("whole gate")
    if whole is None:
        whole = fits_memory(manifest, plan.options.gate)
        stages.save("whole gate", whole)
    if whole:
        progress("check target", 0, 2)
        prompts = gate_prompts(root / "tokenizer" / "tokenizer.json", manifest.target.vocab_size)
        quantized_root = root if manifest.quantized else None
        evidence = gather_target_evidence(plan.target.checkpoint.folder, manifest, prompts, quantized_root)
        progress("check target", 1, 2)
        rows = check_target(root, manifest, evidence, passes)
        rows += _perplexity_rows(evidence.quantized)
        progress("check target", 2, 2)
    else:
        rows = LayerGate(root, manifest, plan.target.config, plan.target.places, passes).check(progress, stages)
    plan.notes += unmeasured(manifest, evidence, _whole_bytes(manifest))
    target, reached = plan.target, 0 if evidence is None else RUN_WINDOW_TOKENS
    places = {**target.places, **dequantized_places(root, manifest)}
    rows += check_windows(root, manifest, target.config, places, passes, progress, reached_tokens=reached)
    rows += check_rounding(root, manifest, plan.target.places, "target")
    if plan.drafter is not None:
        progress("check drafter", 0, 1)
        taps = torch.from_numpy(evidence.text_taps)[None] if evidence is not None else None
        gate = DrafterGate(root, manifest, plan.drafter, passes, whole_tables=evidence is not None)
        rows += gate.check(taps)
        floats = not any(isinstance(place, ImportedPlace) for place in plan.drafter.weights.places.values())
        if evidence is not None and evidence.quantized is not None and floats:  # else nobody has the original
            rows.append(_acceptance_row(plan.drafter, gate.exact_drafter(), evidence.quantized))
        rows += check_rounding(root, manifest, plan.drafter.weights.bundle_places, "drafter")
        progress("check drafter", 1, 1)
    return rows, evidence


def _whole_bytes(manifest: Manifest) -> float:
    """What comparing the whole model takes on top of the build."""
    fp32_bytes = sum(4 * math.prod(entry.shape) for entry in manifest.weights.values())
    return fp32_bytes * (MEMORY_FACTORS[manifest.precision] + (QUANTIZED_FACTOR if manifest.quantized else 0.0))


def _perplexity_rows(quality: QuantizedQuality | None) -> list[CheckRow]:
    if quality is None or quality.original.perplexity is None or quality.quantized.perplexity is None:
        return []
    values = quality.original.perplexity, quality.quantized.perplexity
    return [perplexity_row("perplexity", *values, quality.window_tokens, "quantised")]


def _acceptance_row(plan: DrafterPlan, quantized: Drafter, quality: QuantizedQuality) -> CheckRow:
    """Both pairs in PyTorch: each drafter on its own target's texts."""
    original = load_drafter(plan.config, plan.weights, *quality.original_tables, torch.float32)
    size, mask = plan.config.block_size, plan.config.mask_token_id
    lengths = [
        acceptance_length(drafter, texts, size, mask)
        for drafter, texts in ((original, quality.original.texts), (quantized, quality.quantized.texts))
    ]
    texts = quality.original.texts
    count = sum(len(ids) for ids in texts.ids) - sum(texts.prompt_tokens)
    return acceptance_row(size, lengths[0], lengths[1], f"{count} greedy tokens after {len(texts.ids)} prompts")
