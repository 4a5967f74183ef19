"""The whole build: export, gate, lower, compare, generate. Nothing appears at its place until all of it passed."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from dflash_engines import ort_cuda
from dflash_engines.half_precision import emulate_half, keep_in_fp32, to_fp32
from dflash_engines.ort_cpu import lower_bundle, lower_model
from dflash_engines.tensorrt_engines import BuiltEngines, build_engines, check_buildable
from dflash_engines.tensorrt_plan import EngineOptions
from dflash_export.add_drafter import plan_addition, write_with_drafter
from dflash_export.build import export_bundle
from dflash_export.build_plan import BuildOptions, plan_build
from dflash_export.build_stages import hash_plan, open_stages
from dflash_export.drafter_gate import DrafterGate
from dflash_export.gate import check_portable, fits_memory
from dflash_export.memory_release import return_large_blocks
from dflash_export.parity import PrecisionPasses, require_passed
from dflash_export.staging import check_output_place, clear_leftovers, resumable_folder, staged_folder, take_place
from dflash_runtime.bundle import MANIFEST_NAME, Bundle, CheckRow, GraphKind, Manifest, write_record
from dflash_runtime.errors import EngineError
from dflash_tools.engine_check import check_engine
from dflash_tools.engine_logits import check_perplexity
from dflash_tools.greedy_check import check_own_tokens, check_tokens
from dflash_tools.lowered_check import check_fused

Progress = Callable[[str, int, int], None]
EngineBuilder = Callable[[Bundle, EngineOptions, Progress], BuiltEngines]


@dataclasses.dataclass(frozen=True)
class BuildReport:
    """What a build did."""

    path: Path
    manifest: Manifest
    seconds: float
    notes: list[str]
    engines: list[BuiltEngines] = dataclasses.field(default_factory=list)
    """TensorRT engines, where they were asked for."""


def build(
    options: BuildOptions,
    out: Path,
    backend: str,
    progress: Progress,
    engine_options: Sequence[EngineOptions] = (),
    build_engine: EngineBuilder = build_engines,
    *,
    for_cuda: bool = False,
) -> BuildReport:
    """Checkpoints to a checked bundle at `out`.

    Args:
        options: What to build.
        out: Its place; an older bundle there is replaced when the new one is complete.
        backend: `ort-cpu`, or `none` for portable graphs only.
        progress: Called with stage, done, total.
        engine_options: TensorRT engines to build on top, one set for each kind of GPU.
        build_engine: Builds one set.
        for_cuda: Lower the graphs for ONNX Runtime's CUDA provider too.

    Raises:
        DFlashError: anything the user can mend; nothing is left behind. A build that is killed or interrupted leaves
            what it has done beside `out`, and the same build goes on from there.
    """
    started = time.monotonic()
    return_large_blocks()
    plan = plan_build(options)
    for one in engine_options:
        check_buildable(one, plan.target.precision)
    if for_cuda and plan.target.precision == "fp32":
        raise EngineError("ort-cuda computes in fp16 or bf16, and this is an fp32 bundle. Give --precision bf16.")
    check_output_place(out, 0)
    plan.settle_weights(out)
    check_output_place(out, plan.needed_bytes)
    made_by = hash_plan([dataclasses.asdict(options), backend, list(map(repr, engine_options)), sys.argv], plan.files())
    with resumable_folder(out) as staging:
        root, stages, note = open_stages(staging, made_by)
        plan.notes += [note] if note else []
        manifest = export_bundle(plan, root, progress, stages, _passes(backend))
        rows, evidence = check_portable(root, manifest, plan, _passes(backend), progress, stages)
        require_passed(rows)
        if backend != "none":
            _lower(root, progress)
            if evidence is not None:
                progress("check lowered", 0, 1)
                rows += check_engine(Bundle.open(root, check_files=False), backend)
                require_passed(rows)
                quality = evidence.quantized
                if quality is not None and (original := quality.original.perplexity) is not None:
                    rows.append(check_perplexity(Bundle.open(root, check_files=False), backend, original))
                if manifest.quantized:  # another token than PyTorch's may be said where activations are rounded
                    rows += check_own_tokens(root, manifest, backend)
                else:
                    rows += check_tokens(root, manifest, backend, evidence.prompts, evidence.continuations)
                progress("check lowered", 1, 1)
        engines = []
        if engine_options:
            rows += _check_networks(root, progress)
            require_passed(rows)
            engines = [build_engine(Bundle.open(root, check_files=False), one, progress) for one in engine_options]
        if for_cuda:
            ort_cuda.lower_bundle(Bundle.open(root, check_files=False), None, progress)
        _conclude(root, manifest, rows)
        take_place(root, out)
    engines = [dataclasses.replace(one, folder=out / one.folder.relative_to(root)) for one in engines]
    return dataclasses.replace(_report(out, started, plan.notes), engines=engines)


def _check_networks(root: Path, progress: Progress) -> list[CheckRow]:
    progress("check network", 0, 1)
    rows = check_fused(Bundle.open(root, check_files=False))
    progress("check network", 1, 1)
    return rows


def add_drafter(
    bundle_path: Path,
    drafter: str,
    backend: str,
    progress: Progress,
    *,
    block_sizes: tuple[int, ...] = (),
    template_args: dict[str, Any] | None = None,
    gate: str = "auto",
    local_files_only: bool = False,
) -> BuildReport:
    """Gives a bundle its drafter; the target is neither traced nor copied again, and its checkpoint not needed.

    Args:
        bundle_path: The bundle; it is replaced when the new one is complete and checked.
        drafter: Catalog name, Hugging Face id, or folder.
        backend: `ort-cpu`, or `none`.
        progress: Called with stage, done, total.
        block_sizes: Block sizes to make engines for.
        template_args: Chat template arguments, over what is known of the drafter.
        gate: `full`, `layers` or `auto`.
        local_files_only: Use the hub cache alone.

    Raises:
        DFlashError: anything the user can mend; the bundle is as it was.
    """
    started = time.monotonic()
    clear_leftovers(bundle_path.absolute())
    bundle = Bundle.open(bundle_path)
    plan = plan_addition(bundle, drafter, block_sizes, local_files_only)
    with staged_folder(bundle_path) as root:
        manifest = write_with_drafter(
            bundle, plan, root, progress, block_sizes=block_sizes, template_args=template_args, passes=_passes(backend)
        )
        progress("check drafter", 0, 1)
        whole = fits_memory(manifest, gate)
        drafter_rows = DrafterGate(root, manifest, plan, _passes(backend), whole_tables=whole).check(None)
        progress("check drafter", 1, 1)
        rows = [*manifest.checks, *drafter_rows]
        require_passed(rows)
        if backend != "none":
            _lower(root, progress)
            if whole:
                rows += check_engine(Bundle.open(root, check_files=False), backend)
                require_passed(rows)
                rows += check_own_tokens(root, manifest, backend)
        _conclude(root, manifest, rows)
    return _report(bundle_path, started, plan.notes)


def _passes(backend: str) -> PrecisionPasses:
    if backend == "none":
        return PrecisionPasses(to_fp32, emulate_half, keep_in_fp32=keep_in_fp32)
    return PrecisionPasses(to_fp32, emulate_half, lower_target_part, lower_drafter_graph, keep_in_fp32)


def lower_target_part(model: ir.Model) -> ir.Model:
    """Lowers a piece of a target graph as the whole graph is lowered, with nothing rounded on the way."""
    return lower_model(model, "target", activations="fp32")


def lower_drafter_graph(model: ir.Model, kind: GraphKind) -> ir.Model:
    """Lowers one of the drafter's graphs, with nothing rounded on the way."""
    return lower_model(model, kind, activations="fp32")


def _lower(root: Path, progress: Progress) -> None:
    progress("lower", 0, 1)
    lower_bundle(Bundle.open(root, check_files=False))
    progress("lower", 1, 1)


def _conclude(root: Path, manifest: Manifest, rows: list[CheckRow]) -> None:
    require_passed(rows)
    manifest = dataclasses.replace(manifest, checks=rows)
    write_record(root / MANIFEST_NAME, manifest)


def _report(path: Path, started: float, notes: list[str]) -> BuildReport:
    manifest = Bundle.open(path, check_files=False).manifest
    return BuildReport(path, manifest, time.monotonic() - started, notes)
