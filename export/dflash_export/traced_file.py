"""Keeps a traced target on disk, so that a build that was killed later need not trace it again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from dflash_export.build_stages import BuildStages
from dflash_export.hollow_model import make_hollow_model
from dflash_export.target_trace import TracedTarget, trace_target
from dflash_export.trace_hooks import ATTENTION_NAME, LayerState
from dflash_export.weight_store import TORCH_DTYPES, Progress
from dflash_runtime.bundle import sha256_of

_STAGE = "target trace"


def trace_or_load(
    config: PreTrainedConfig, dtype: torch.dtype, stages: BuildStages, progress: Progress
) -> TracedTarget:
    """Traces a target, or takes the trace that a killed build left.

    Args:
        config: The target's configuration.
        dtype: Of parameters, cache and taps.
        stages: What a killed build left, and where this one leaves its trace.
        progress: Called with stage, done, total.
    """
    file, kept = stages.file("traced target.onnx"), stages.load(_STAGE)
    if file is None:
        return trace_target(config, dtype, progress)
    if kept is None or not file.is_file() or sha256_of(file) != kept["sha256"]:
        _save(trace_target(config, dtype, progress), file, stages)
    # Both ways end here, so that a build that goes on makes the same bytes as one that was never killed.
    return _load(stages.load(_STAGE), file, config, dtype)


def _save(traced: TracedTarget, file: Path, stages: BuildStages) -> None:
    graph = traced.model.graph
    for name in [name for name in graph.initializers if name in traced.parameters]:
        graph.inputs.append(graph.initializers.pop(name))
    temporary = file.with_suffix(".partial")
    ir.save(traced.model, temporary)
    temporary.replace(file)
    spelling = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    facts = {f.name: getattr(traced, f.name) for f in dataclasses.fields(traced) if f.name not in ("model", "module")}
    facts["layers"] = [dataclasses.asdict(layer) for layer in traced.layers]
    facts["parameters"] = {name: [spelling[dtype], shape] for name, (dtype, shape) in traced.parameters.items()}
    stages.save(_STAGE, {"sha256": sha256_of(file), "facts": facts})


def _load(kept: dict[str, Any], file: Path, config: PreTrainedConfig, dtype: torch.dtype) -> TracedTarget:
    facts = dict(kept["facts"])
    facts["layers"] = [LayerState(**{k: _as_stored(v) for k, v in layer.items()}) for layer in facts["layers"]]
    facts["parameters"] = {n: (TORCH_DTYPES[kind], tuple(shape)) for n, (kind, shape) in facts["parameters"].items()}
    model = ir.load(file)
    graph = model.graph
    for value in [value for value in graph.inputs if value.name in facts["parameters"]]:
        graph.inputs.remove(value)
        graph.initializers[str(value.name)] = value
    module = make_hollow_model(config, dtype, FakeTensorMode(allow_non_fake_inputs=True), ATTENTION_NAME)
    return TracedTarget(model=model, module=module, **facts)


def _as_stored(value: Any) -> Any:
    """JSON knows no tuples."""
    return tuple(value) if isinstance(value, list) else value
