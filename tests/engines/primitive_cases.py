"""Targets, drafters and calls, and the comparison of a primitive graph with its portable one over them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir
from bare_ort import Array, BareSession, deviation
from primitive_session import PrimitiveSession, filled_caches
from tiny_graphs import Layer, Sizes, drafter_context_model

from dflash_engines.primitive_form import lower_primitive

CAPACITY = 56
TOLERANCE = 2e-5
W = 6

FULL, WINDOW = Layer(), Layer(window=W)
BOTH_WAYS, WINDOW_BOTH_WAYS = Layer(causal=False), Layer(causal=False, window=W)

TARGETS = {
    "llama": Sizes(),
    "qwen2": Sizes(bias=True, kv_heads=1),
    "qwen3": Sizes(head_norms=True),
    "mistral": Sizes(layers=(WINDOW, WINDOW)),
    "gemma2": Sizes(softcap=2.0, layers=(WINDOW, FULL), kv_heads=1),
    "no-groups": Sizes(kv_heads=4, layers=(FULL, Layer(window=1), WINDOW)),
    "odd-sizes": Sizes(head_dim=6, value_dim=10, softcap=2.0),
}
DRAFTERS = {
    "bidirectional": Sizes(layers=(BOTH_WAYS, BOTH_WAYS), head_norms=True),
    "windows": Sizes(layers=(WINDOW_BOTH_WAYS, WINDOW, BOTH_WAYS), kv_heads=1),
    "causal": Sizes(layers=(FULL, FULL), kv_heads=4),
}
# (rows committed before, rows of this call): prefill, blocks after rollbacks, single rows
CALLS = ((0, 16), (16, 4), (18, 1), (19, 4), (19, 16), (27, 1), (25, 4))
WINDOW_EDGES = ((0, W - 1), (W - 1, 1), (W, 1), (W + 1, 4), (W - 1, 4), (W, 16), (W + 1, 1))


def inputs_of(model: ir.Model, position: int, rows: int) -> dict[str, Array]:
    random = np.random.default_rng(position * 100 + rows)
    offered = {
        "input_ids": random.integers(0, Sizes().vocab, (1, rows)),
        "taps": random.standard_normal((1, rows, 2 * Sizes().hidden)).astype(np.float32),
        "position": np.array([position]),
        "logit_rows": np.arange(rows),
    }
    return {name: array for name, array in offered.items() if name in {v.name for v in model.graph.inputs}}


def assert_same(found: dict[str, Array], expected: dict[str, Array], length: int, tolerance: float = TOLERANCE) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        rows = slice(length) if name.startswith("present.") else slice(None)
        if array.dtype == np.int64:
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        else:
            one, two = found[name][:, :, rows], array[:, :, rows]
            assert np.isfinite(one).all(), name
            assert deviation(one, two) < tolerance, name


def compare_target(
    model: ir.Model, lowered: ir.Model, fill: float = 0.0, capacity: int = CAPACITY,
    calls: Iterable[tuple[int, int]] = CALLS,
) -> None:  # fmt: skip
    portable = BareSession(model, CAPACITY)
    primitive = PrimitiveSession(lowered, filled_caches(lowered, capacity, fill))
    for position, rows in calls:
        inputs = inputs_of(model, position, rows)
        assert_same(primitive(**inputs), portable(**inputs), position + rows)


def without_presents(outputs: dict[str, Array]) -> dict[str, Array]:
    return {name: array for name, array in outputs.items() if not name.startswith("present.")}


def compare_drafter(
    model: ir.Model, lowered: ir.Model, sizes: Sizes, fill: float = 0.0, calls: Iterable[tuple[int, int]] = CALLS
) -> None:
    """Rows as drafter_context appends them, then a block; the portable drafter leaves its block's rows behind."""
    context = drafter_context_model(sizes)
    lowered_context = lower_primitive(context, "drafter_context")
    caches = filled_caches(lowered_context, CAPACITY, fill)
    append, primitive_append = BareSession(context, CAPACITY), PrimitiveSession(lowered_context, caches)
    draft, primitive_draft = BareSession(model, CAPACITY), PrimitiveSession(lowered, caches)
    draft.state = append.state
    for position, rows in calls:
        taps = inputs_of(context, position, rows)
        assert_same(primitive_append(**taps), append(**taps), position + rows)
        for block in (1, 2, 4, 16):
            ids = inputs_of(model, position + rows, block)
            found, expected = primitive_draft(**ids), draft(**ids)
            assert_same(without_presents(found), without_presents(expected), position + rows)
