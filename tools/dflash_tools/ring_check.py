"""Compares a drafter over rings with the same graphs over caches of the whole context: rounds past the ring's end."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from dflash_export.deviation import Array, Worst, deviation, mean_deviation
from dflash_export.graph_runner import GraphRunner
from dflash_runtime.bundle import Bundle, CheckRow, GraphFacts
from dflash_runtime.engine_record import HostEngineRecord, engine_folder, open_engine
from dflash_runtime.window_rings import Ring
from dflash_tools.int8_product_graphs import keep_activations
from dflash_tools.lowered_check import TOLERANCE, allowed_rounding, lowered_without_rings, open_graph

_SEED = 61
_ROUNDS = 8


class _Drafter:
    """Context and draft graph over the same caches."""

    def __init__(self, context: GraphRunner, draft: GraphRunner) -> None:
        self._context, self._draft = context, draft

    def append(self, taps: Array, position: int) -> None:
        self._context.run(taps=taps, position=np.array([position]))

    def draft(self, ids: Array, position: int) -> dict[str, Array]:
        self._draft.state = dict(self._context.state)
        outputs = self._draft.run(input_ids=ids, position=np.array([position]))
        self._context.state = dict(self._draft.state)
        return outputs


def check_rings(bundle: Bundle, backend: str) -> list[CheckRow]:
    """Drafts over context rows of noise, some blocks of which are rejected in part, until every ring has come round.

    Args:
        bundle: With engines for `backend`, made without a window for layers that have none.
        backend: `ort-cpu`.

    Returns:
        Rows of stage `rings`; none where no cache is a ring. Where products round activations to int8, a sum in
        another order can change what they are rounded to: then the same graphs with activations in fp32 are compared
        exactly, and the engine as it runs by what such rounding costs the same drafter without rings.
    """
    record, manifest = open_engine(bundle, backend), bundle.manifest
    if not record.rings or manifest.drafter is None:
        return []
    rounds = bool(manifest.quantized) and record.versions.get("activations") != "fp32"
    folder = engine_folder(bundle, backend)
    own, kept = ({facts.file: ir.load(folder / facts.file) for facts in _graphs(bundle)} for _ in range(2))
    fp32 = {facts.file: lowered_without_rings(bundle, facts, record, exact=True) for facts in _graphs(bundle)}
    if not rounds:
        return _compare_exactly(bundle, record, fp32, own)
    for model in kept.values():
        keep_activations(model)
    rows = _compare_exactly(bundle, record, fp32, kept)
    whole = {facts.file: lowered_without_rings(bundle, facts, record) for facts in _graphs(bundle)}
    lost, cost = 0.0, 0.0
    calls = _Calls(bundle, record)
    for right, rounding, found in calls.drafts((fp32, {}), (whole, {}), (own, record.rings)):
        cost = max(cost, mean_deviation(rounding["draft_logits"], right["draft_logits"]))
        lost = max(lost, mean_deviation(found["draft_logits"], rounding["draft_logits"]))
    allowed = allowed_rounding(cost)
    return [*rows, CheckRow("int8 rings", "drafter draft_logits", lost, allowed, lost <= allowed, calls.covered)]


def _compare_exactly(
    bundle: Bundle, record: HostEngineRecord, whole: Mapping[str, ir.Model], ringed: Mapping[str, ir.Model]
) -> list[CheckRow]:
    calls, worst = _Calls(bundle, record), Worst()
    for expected, found in calls.drafts((whole, {}), (ringed, record.rings)):
        worst.add("drafter draft_logits", deviation(found["draft_logits"], expected["draft_logits"]))
        worst.add("drafter draft_ids", float((found["draft_ids"] != expected["draft_ids"]).sum()))
    return worst.rows("rings", TOLERANCE, calls.covered)


class _Calls:
    """The rounds that drafters are compared on: full rings to begin with, then some blocks."""

    def __init__(self, bundle: Bundle, record: HostEngineRecord) -> None:
        self._bundle, context = bundle, bundle.manifest.max_context_tokens
        self._block, self._filled = max(bundle.manifest.block_sizes), max(r.rows for r in record.rings.values()) - 2
        self._first = max(0, min(self._filled, context - self._filled - _ROUNDS * self._block))
        sizes = ", ".join(str(rows) for rows in sorted({ring.rows for ring in record.rings.values()}))
        self._words = f"{_ROUNDS} rounds on rings of {sizes} rows"
        self._end = self._first

    @property
    def covered(self) -> str:
        """What the rounds went over so far."""
        return f"{self._words}, rows {self._first} to {self._end}"

    def drafts(self, *given: tuple[Mapping[str, ir.Model], Mapping[str, Ring]]) -> Iterator[list[dict[str, Array]]]:
        """What each of some drafters, graphs and their rings, says in each round."""
        bundle, manifest = self._bundle, self._bundle.manifest
        assert manifest.drafter is not None
        capacity = self._first + self._filled + (_ROUNDS + 1) * self._block
        drafters = [_open(bundle, models, capacity, rings) for models, rings in given]
        rng, noise = random.Random(_SEED), np.random.default_rng(_SEED)
        width = int(next(t.shape[-1] for t in manifest.target.graph.outputs if t.name == "taps"))
        position, rows = self._first, self._filled
        for _ in range(_ROUNDS):
            taps = noise.standard_normal((1, rows, width), dtype=np.float32)
            for drafter in drafters:
                drafter.append(taps, position)
            position += rows if rows == self._filled else rng.randint(1, rows)
            rows = rng.choice([size for size in manifest.block_sizes if size > 1])
            ids = np.full((1, rows), manifest.drafter.mask_token_id)
            ids[0, 0] = rng.randrange(manifest.target.vocab_size)
            yield [drafter.draft(ids, position) for drafter in drafters]
        self._end = position


def _graphs(bundle: Bundle) -> list[GraphFacts]:
    drafter = bundle.manifest.drafter
    return [] if drafter is None else [drafter.context_graph, drafter.graph]


def _open(bundle: Bundle, models: Mapping[str, ir.Model], capacity_rows: int, rings: Mapping[str, Ring]) -> _Drafter:
    runners = []
    for facts in _graphs(bundle):
        runner = open_graph(bundle, models[facts.file], facts, capacity_rows)
        for name, ring in rings.items():
            runner.state[name] = np.ascontiguousarray(runner.state[name][:, :, : ring.rows])
        runners.append(runner)
    return _Drafter(*runners)
