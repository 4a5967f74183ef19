"""The whole build: export, gate, lower, compare, generate. Nothing appears at its place until all of it passed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from dflash_engines.ort_cpu import lower_bundle
from dflash_export.build import BuildOptions, BuildPlan, export_bundle, plan_build
from dflash_export.evidence import TargetEvidence
from dflash_export.gate import Gate
from dflash_export.parity import PrecisionPasses, require_passed
from dflash_export.staging import check_output_place, staged_folder
from dflash_runtime.bundle import MANIFEST_NAME, Bundle, CheckRow, Manifest, write_text_atomically
from dflash_runtime.generation import GenerationConfig
from dflash_runtime.session import Session
from dflash_tools.half_precision import emulate_half, to_fp32
from dflash_tools.lowered_check import check_lowered

Progress = Callable[[str, int, int], None]
PASSES = PrecisionPasses(to_fp32, emulate_half)


@dataclasses.dataclass(frozen=True)
class BuildReport:
    """What a build did."""

    path: Path
    manifest: Manifest
    seconds: float
    notes: list[str]


def build(options: BuildOptions, out: Path, backend: str, progress: Progress) -> BuildReport:
    """Checkpoints to a checked bundle at `out`.

    Args:
        options: What to build.
        out: Its place; an older bundle there is replaced when the new one is complete.
        backend: `ort-cpu`, or `none` for portable graphs only.
        progress: Called with stage, done, total.

    Raises:
        DFlashError: anything the user can mend; nothing is left behind.
    """
    started = time.monotonic()
    plan = plan_build(options)
    check_output_place(out, plan.needed_bytes)
    with staged_folder(out) as root:
        manifest = export_bundle(plan, root, progress)
        finish(root, manifest, plan, backend, progress)
    return BuildReport(out, Bundle.open(out, check_files=False).manifest, time.monotonic() - started, plan.notes)


def finish(root: Path, manifest: Manifest, plan: BuildPlan, backend: str, progress: Progress) -> None:
    """Gates a fresh bundle, lowers it, compares, generates, and writes the table into it.

    Raises:
        ParityError: a check failed.
    """
    gate = Gate(root, manifest, plan, PASSES)
    rows = gate.check(progress)
    require_passed(rows)
    if backend != "none":
        progress("lower", 0, 1)
        lower_bundle(root)
        progress("lower", 1, 1)
        if gate.fits_memory:
            progress("check lowered", 0, 1)
            rows += check_lowered(Bundle.open(root, check_files=False), backend)
            rows += check_tokens(root, manifest, gate.evidence, backend)
            progress("check lowered", 1, 1)
        require_passed(rows)
    manifest = dataclasses.replace(manifest, checks=rows)
    write_text_atomically(root / MANIFEST_NAME, manifest.to_json())


def check_tokens(root: Path, manifest: Manifest, evidence: TargetEvidence, backend: str) -> list[CheckRow]:
    """The runtime's greedy text, plain and speculative, against PyTorch's."""
    modes: list[tuple[str, dict[str, object]]] = [("plain", {"plain": True})]
    if manifest.drafter is not None:
        modes += [(f"block size {b}", {"block_size": b}) for b in manifest.block_sizes]
    rows = []
    with Session.open(root, backend, prefill_chunk_tokens=8) as session:
        for name, options in modes:
            differing = count = 0
            for prompt, expected in zip(evidence.prompts, evidence.continuations, strict=True):
                config = GenerationConfig(max_new_tokens=len(expected), **options)  # type: ignore[arg-type]
                found = session.generate(prompt, config).token_ids
                wanted = _until_stop(expected, set(manifest.text.stop_token_ids))
                differing += sum(a != b for a, b in zip(found, wanted, strict=False)) + abs(len(found) - len(wanted))
                count += len(wanted)
            covered = f"{count} tokens after {len(evidence.prompts)} prompts, fp32, against PyTorch"
            rows.append(CheckRow("tokens", name, float(differing), 0.0, differing == 0, covered))
    return rows


def _until_stop(tokens: list[int], stops: set[int]) -> list[int]:
    for i, token in enumerate(tokens):
        if token in stops:
            return tokens[: i + 1]
    return tokens
