"""Engines for the recording device: the networks TensorRT gets, but in fp32, so that ONNX Runtime can run them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from dflash_engines.passes.explicit_mask import ExplicitMaskPass
from dflash_engines.passes.flat_matmul import FlatMatMulPass
from dflash_engines.passes.weight_inputs import WeightInputsPass
from dflash_engines.primitive_form import GraphKind, lower_primitive
from dflash_engines.tensorrt_network import _fix_capacity
from dflash_runtime.bundle import Bundle, file_facts
from dflash_runtime.device_engine import (
    DEVICE_ENGINE_SCHEMA_VERSION,
    BoundWeight,
    DeviceEngineRecord,
    EngineProfile,
    GraphEngine,
    device_tag,
)

BACKENDS = {"fused": "tensorrt-rtx", "primitive": "tensorrt"}


def write_recorded_engines(
    bundle: Bundle, form: str, block_sizes: Sequence[int], chunk: int, layouts: Sequence[int] = ()
) -> Path:
    """Writes the engines of a bundle; `layouts` are the shorter caches of the primitive form."""
    manifest = bundle.manifest
    capacity = manifest.max_context_tokens + max(*manifest.block_sizes, chunk)
    folder = bundle.path / "engines" / device_tag(BACKENDS[form], "8.9")
    folder.mkdir(parents=True, exist_ok=True)
    graphs: dict[GraphKind, str] = {"target": manifest.target.graph.file}
    if manifest.drafter is not None:
        graphs["drafter_context"] = manifest.drafter.context_graph.file
        graphs["drafter"] = manifest.drafter.graph.file
    engines = []
    for kind, file in graphs.items():
        model, weights = _network(ir.load(bundle.file(file)), kind, form, capacity)
        (folder / f"{kind}.engine").write_bytes(ir.to_proto(model).SerializeToString())
        sizes = list(block_sizes) if kind == "drafter" else sorted({1, *block_sizes, chunk})
        logit_rows = {n: 0 if kind != "target" else 1 if n == chunk else n for n in sizes}
        profiles = [EngineProfile(n, logit_rows[n], rows) for n in sizes for rows in (*layouts, capacity)]
        engines.append(GraphEngine(kind, f"{kind}.engine", "key", profiles, weights, [0] * len(profiles), 0))
    DeviceEngineRecord(
        DEVICE_ENGINE_SCHEMA_VERSION, BACKENDS[form], "1.7.1", "8.9", form, "fp32", "shared", capacity,
        list(block_sizes), chunk, {name: manifest.files[name].sha256 for name in graphs.values()}, engines,
        file_facts(folder, [engine.file for engine in engines]), {},
    ).write(folder)  # fmt: skip
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
