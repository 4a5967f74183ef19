"""What `dflash-export engines` says about TensorRT engines."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dflash_tools.ring_lines import ring_lines
from dflash_tools.sizes import bytes_text

if TYPE_CHECKING:
    from dflash_engines.tensorrt_engines import BuiltEngines


def report_json(built: BuiltEngines) -> dict[str, Any]:
    """The engines as plain JSON values."""
    record = built.record
    return {
        "backend": record.backend,
        "path": str(built.folder),
        "tensorrt_version": record.tensorrt_version,
        "compute_capability": record.compute_capability,
        "form": record.form,
        "precision": record.execution_precision,
        "weights": record.weights_mode,
        "block_sizes": record.block_sizes,
        "prefill_chunk_tokens": record.prefill_chunk_tokens,
        "capacity_rows": record.capacity_rows,
        "engine_bytes": built.engine_bytes,
        "weight_bytes": built.weight_bytes,
        "saved_bytes": built.saved_bytes,
        "held_bytes": built.held_bytes,
        "build_s": round(built.seconds, 1),
        "build_peak_bytes": built.build_peak_bytes,
        "reused": built.reused,
        "warnings": built.warnings,
        "weights_reason": built.weights_reason,
        "engines": [
            {
                "kind": engine.kind,
                "file_bytes": record.files[engine.file].size_bytes,
                "profiles": [dataclasses.asdict(profile) for profile in engine.profiles],
                "scratch_bytes": engine.scratch_bytes,
            }
            for engine in record.engines
        ],
    }


def report_lines(built: BuiltEngines) -> list[str]:
    """The engines for a person."""
    record = built.record
    lines = [
        f"{record.backend} {record.tensorrt_version} engines for compute capability {record.compute_capability} in "
        f"{built.folder}",
        f"  {record.form} form, {record.execution_precision}, blocks {record.block_sizes or 'none'}, prefill "
        f"{record.prefill_chunk_tokens}, {record.capacity_rows} cache rows",
    ]
    lines += [f"  {line}" for line in ring_lines(record)]
    for engine in record.engines:
        scratch = f", scratch {bytes_text(max(engine.scratch_bytes))}" if engine.scratch_bytes else ""
        made = "was there" if engine.kind in built.reused else f"peak {bytes_text(engine.build_peak_bytes)}"
        size = bytes_text(record.files[engine.file].size_bytes)
        lines.append(f"  {engine.kind:<16} {size:>9}, {len(engine.profiles)} profiles{scratch}, {made}")
    if record.weights_mode == "shared":
        weights = f"weights on the device {bytes_text(built.weight_bytes)}, each once for all engines"
        held = f", of it {bytes_text(built.held_bytes)} weights in int4" if built.held_bytes else ""
        saved = bytes_text(built.saved_bytes)
        lines.append(f"  engines {bytes_text(built.engine_bytes)}{held}; {weights} (saves {saved})")
    else:
        lines.append(f"  engines {bytes_text(built.engine_bytes)}, their own copies of the weights included")
    if built.seconds:
        lines.append(f"  built in {built.seconds:.1f} s, at most {bytes_text(built.build_peak_bytes)} of memory")
    lines += [f"  {built.weights_reason}"] if built.weights_reason else []
    lines += [f"  Warning: {warning}" for warning in built.warnings]
    lines.append("  Built, not executed: no GPU has run these engines yet.")
    return lines
