"""TensorRT-RTX takes the primitive form: parsed and built as strongly typed networks, which needs no GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir
import pytest
from tiny_graphs import Layer, Sizes, drafter_context_model, drafter_model, target_model

from dflash_engines.primitive_form import lower_primitive
from dflash_runtime.bundle import GraphKind

# (smallest, optimal, largest) of the tokens of a call and of the rows of a cache: two sizes of bucket in one profile
TOKENS, CAPACITY = (1, 16, 64), (128, 256, 512)
HALF = Sizes(precision="fp16", hidden=64, head_dim=64, value_dim=64, softcap=2.0, head_norms=True)
TARGET = dataclasses.replace(HALF, layers=(Layer(), Layer(window=16)))
DRAFTER = dataclasses.replace(HALF, layers=(Layer(causal=False), Layer(causal=False, window=16)))


def build(model: ir.Model, compute_capability: str) -> Any:
    trt = pytest.importorskip("tensorrt_rtx")
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse(ir.to_proto(model).SerializeToString())
    assert parsed, [str(parser.get_error(i)) for i in range(parser.num_errors)]
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, compute_capability), 0)
    for tensor in (network.get_input(i) for i in range(network.num_inputs)):
        sizes = CAPACITY if tensor.name.startswith("past_key_values.") else TOKENS
        if -1 in tensor.shape:
            profile.set_shape(tensor.name, *([size if d == -1 else d for d in tensor.shape] for size in sizes))
    config.add_optimization_profile(profile)
    return builder.build_serialized_network(network, config)


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("target", target_model(TARGET)),
        ("drafter_context", drafter_context_model(DRAFTER)),
        ("drafter", drafter_model(DRAFTER)),
    ],
)
def test_a_half_precision_graph_builds(kind: GraphKind, model: ir.Model) -> None:
    engine = build(lower_primitive(model, kind), "SM86")
    assert engine is not None and engine.nbytes > 10_000
