"""Engines for the recording device: the networks TensorRT gets, but in fp32, so that ONNX Runtime can run them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from dflash_engines.acceptance_graph import ACCEPTANCE
from dflash_engines.candidates_graph import CANDIDATES
from dflash_engines.passes.explicit_mask import ExplicitMaskPass
from dflash_engines.passes.flat_matmul import FlatMatMulPass
from dflash_engines.passes.weight_inputs import WeightInputsPass
from dflash_engines.passes.window_rows import WindowRowsPass
from dflash_engines.primitive_form import lower_primitive
from dflash_engines.tensorrt_network import _fix_capacity
from dflash_engines.tensorrt_plan import EngineOptions, EnginePlan
from dflash_engines.tensorrt_versions import VERSIONS
from dflash_runtime.bundle import Bundle, GraphKind, write_record
from dflash_runtime.device_engine import BoundWeight, GraphEngine, device_tag
from dflash_runtime.engine_record import ENGINE_RECORD_NAME

BACKENDS = {"fused": "tensorrt-rtx", "primitive": "tensorrt"}


def write_recorded_engines(
    bundle: Bundle, form: str, block_sizes: Sequence[int], chunk: int, layouts: Sequence[int] = (),
    draft_window_tokens: int | None = None,
) -> Path:
    """Writes the engines of an fp32 bundle as planned for a bf16 one; `layouts` are the shorter caches of the
    primitive form, which are longer than these contexts otherwise."""
    backend, half = BACKENDS[form], dataclasses.replace(bundle.manifest, precision="bf16")
    row = next(row for row in VERSIONS if (row.flavour, row.form) == (backend, form))
    options = EngineOptions(backend, block_sizes=block_sizes, prefill_chunk_tokens=chunk,
                            draft_window_tokens=draft_window_tokens)
    plan = EnginePlan(Bundle(bundle.path, half), options, row, "1.7.1", "8.9")
    if layouts:
        plan._capacities = lambda: [*layouts, plan.capacity_rows]  # type: ignore[method-assign]
    folder = bundle.path / "engines" / device_tag(backend, "8.9")
    folder.mkdir(parents=True, exist_ok=True)
    engines = []
    for kind in plan.kinds:
        if kind in (ACCEPTANCE, CANDIDATES):
            onnx, weights = plan.network(kind).onnx, list[BoundWeight]()
        else:
            portable, rings = ir.load(bundle.file(plan.graphs[kind])), {} if kind == "target" else plan.rings
            WindowRowsPass(rings)(portable)
            model, weights = _network(portable, kind, form, plan.capacity_rows)  # type: ignore[arg-type]
            onnx = ir.to_proto(model).SerializeToString()
        (folder / f"{kind}.engine").write_bytes(onnx)
        profiles = plan.profiles(kind)
        engines.append(GraphEngine(kind, f"{kind}.engine", "key", profiles, weights, [0] * len(profiles), 0))
    write_record(folder / ENGINE_RECORD_NAME,
                 dataclasses.replace(plan.record(engines, folder), execution_precision="fp32"))  # fmt: skip
    return folder


def _network(model: ir.Model, kind: GraphKind, form: str, capacity: int) -> tuple[ir.Model, list[BoundWeight]]:
    lowered = model.clone() if form == "fused" else lower_primitive(model, kind)
    lifting = WeightInputsPass()
    if form == "fused":
        ExplicitMaskPass()(lowered)
    FlatMatMulPass()(lowered)
    lifting(lowered)
    if form == "fused":
        _fix_capacity(lowered, capacity)
    return lowered, [BoundWeight(w.input, w.weight, w.dtype) for w in lifting.weight_inputs]
