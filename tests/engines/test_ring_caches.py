"""Drafter graphs over rings against the portable ones over the whole context, in bare ONNX Runtime."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import onnx_ir as ir
import pytest
from bare_ort import Array, BareSession, deviation
from tiny_graphs import Layer, Sizes, drafter_context_model, drafter_model

from dflash_engines.ort_cpu import lower_model
from dflash_engines.passes import window_rings
from dflash_runtime.window_rings import Ring

WINDOW, BLOCKS, CAPACITY = 9, (1, 2, 4, 8), 96
CAUSAL, BOTH_WAYS = Layer(window=WINDOW), Layer(causal=False, window=WINDOW)
FULL = Layer(causal=False)
PAIRS = {
    "causal": Sizes(layers=(CAUSAL, CAUSAL)),
    "both-ways": Sizes(layers=(BOTH_WAYS, BOTH_WAYS), head_norms=True),
    "mixed": Sizes(layers=(CAUSAL, FULL, Layer(window=3)), kv_heads=4),
    "small-heads": Sizes(layers=(BOTH_WAYS, FULL), bias=True, head_dim=8, value_dim=8),
}
TOLERANCE = 2e-5


def rings_of(sizes: Sizes, short: int = 0) -> dict[str, Ring]:
    return {
        f"past_key_values.{i}.{part}": Ring(layer.window, layer.window + max(BLOCKS) - 1 - short)
        for i, layer in enumerate(sizes.layers) if layer.window is not None for part in ("key", "value")
    }  # fmt: skip


class Drafter:
    """Context and draft graph over the same memory."""

    def __init__(self, context: ir.Model, draft: ir.Model, fill: float) -> None:
        self.context, self.draft = (BareSession(model, CAPACITY, fill=fill) for model in (context, draft))
        for name, array in self.context.state.items():
            self.draft.state[name] = array


def worst_deviation(sizes: Sizes, rings: dict[str, Ring], seed: int = 0, fill: float = 0.0) -> float:
    """Rounds of random blocks over more than three windows, some of each block rejected; the worst logit of all."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    context, draft = drafter_context_model(sizes), drafter_model(sizes)
    whole = Drafter(context, draft, 0.0)
    lowered = (lower_model(context, "drafter_context", rings=rings), lower_model(draft, "drafter", rings=rings))
    ringed, worst = Drafter(*lowered, fill), 0.0

    def both(kind: str, position: int, **inputs: Array) -> list[dict[str, Array]]:
        sessions = [getattr(drafter, kind) for drafter in (whole, ringed)]
        return [session(position=np.array([position]), **inputs) for session in sessions]

    position = 0
    for rows in (30, 5):  # a prefill in pieces: the first has more rows than the ring
        both("context", position, taps=noise.standard_normal((1, rows, 2 * sizes.hidden), dtype=np.float32))
        position += rows
    while position < CAPACITY - 2 * max(BLOCKS):
        block = rng.choice(BLOCKS)
        if block > 1:
            expected, found = both("draft", position, input_ids=np.array([[rng.randrange(61) for _ in range(block)]]))
            worst = max(worst, deviation(found["draft_logits"], expected["draft_logits"]))
        both("context", position, taps=noise.standard_normal((1, block, 2 * sizes.hidden), dtype=np.float32))
        position += rng.randint(1, block)
    return worst


@pytest.mark.parametrize("fill", [0.0, 1e4])
@pytest.mark.parametrize("name", PAIRS)
def test_a_ring_says_what_the_whole_context_says(name: str, fill: float) -> None:
    for seed in range(3):
        assert worst_deviation(PAIRS[name], rings_of(PAIRS[name]), seed, fill) < TOLERANCE


@pytest.mark.parametrize("name", PAIRS)
def test_a_ring_one_row_short_shows(name: str) -> None:
    assert max(worst_deviation(PAIRS[name], rings_of(PAIRS[name], short=1), seed) for seed in range(3)) > TOLERANCE


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one_shows(name: str, off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = window_rings._mask

    def wrong(attention: window_rings.CachedAttention, ring: Ring) -> tuple[ir.Value, ir.Value]:
        return right(attention, dataclasses.replace(ring, window_tokens=ring.window_tokens + off))

    monkeypatch.setattr(window_rings, "_mask", wrong)
    assert worst_deviation(PAIRS[name], rings_of(PAIRS[name])) > TOLERANCE


def test_the_form_of_the_graphs() -> None:
    sizes = PAIRS["mixed"]
    rings = rings_of(sizes)
    draft = lower_model(drafter_model(sizes), "drafter", rings=rings)
    context = lower_model(drafter_context_model(sizes), "drafter_context", rings=rings)
    for model in (draft, context):
        rows = {v.name: v.shape[2] for v in model.graph.inputs if v.shape is not None and len(v.shape) == 4}
        assert {name: size for name, size in rows.items() if isinstance(size, int)} == {
            name: ring.rows for name, ring in rings.items()
        }
        assert [n.op_type for n in model.graph].count("TensorScatter") == 6
    assert [n.op_type for n in draft.graph].count("GroupQueryAttention") == 0


def test_a_layer_without_a_window_gets_one() -> None:
    """What `--draft-window` asks for: the same as a layer that was made with the window."""
    bounded, free = Sizes(layers=(BOTH_WAYS, BOTH_WAYS)), Sizes(layers=(FULL, FULL))
    rings = rings_of(bounded)
    one, two = (lower_model(drafter_model(sizes), "drafter", rings=rings) for sizes in (bounded, free))
    fill = np.random.default_rng(0).standard_normal
    sessions = [BareSession(model, CAPACITY) for model in (one, two)]
    for name, array in sessions[0].state.items():
        array[:] = fill(array.shape)
        sessions[1].state[name][:] = array
    inputs = {"input_ids": np.arange(8)[None], "position": np.array([40])}
    found, expected = (session(**inputs)["draft_logits"] for session in sessions)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
