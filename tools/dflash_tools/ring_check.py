"""Compares a drafter over rings with the same graphs over caches of the whole context: rounds past the ring's end."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from dflash_engines.ort_cpu import lower_model
from dflash_engines.portable_graph import load_portable
from dflash_export.deviation import Array, Worst, deviation, mean_deviation
from dflash_export.graph_runner import GraphRunner
from dflash_runtime.bundle import Bundle, CheckRow, GraphFacts
from dflash_runtime.engine_record import HostEngineRecord, engine_folder, open_engine
from dflash_runtime.window_rings import Ring
from dflash_tools.lowered_check import ROUNDED_TOLERANCE, TOLERANCE, kind_of, lowered_without_rings, open_graph

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
        exactly, and the engine's own by the bound of such rounding.
    """
    record, manifest = open_engine(bundle, backend), bundle.manifest
    if not record.rings or manifest.drafter is None:
        return []
    rounds = bool(manifest.quantized) and record.versions.get("activations") != "fp32"
    own = {facts.file: ir.load(engine_folder(bundle, backend) / facts.file) for facts in _graphs(bundle)}
    if not rounds:
        return _compare(bundle, record, own, "rings", exact=True)
    exact = {facts.file: lower_model(load_portable(bundle, facts.file), kind_of(bundle, facts), activations="fp32",
                                     rings=record.rings) for facts in _graphs(bundle)}  # fmt: skip
    rows = _compare(bundle, record, exact, "rings", exact=True)
    return rows + _compare(bundle, record, own, "int8 rings", exact=False)


def _compare(
    bundle: Bundle, record: HostEngineRecord, models: Mapping[str, ir.Model], stage: str, *, exact: bool
) -> list[CheckRow]:
    manifest = bundle.manifest
    assert manifest.drafter is not None
    block, filled = max(manifest.block_sizes), max(ring.rows for ring in record.rings.values()) - 2
    first = max(0, min(filled, manifest.max_context_tokens - filled - _ROUNDS * block))
    capacity = first + filled + (_ROUNDS + 1) * block
    plain = {facts.file: lowered_without_rings(bundle, facts, record, exact=exact) for facts in _graphs(bundle)}
    whole, ringed = _open(bundle, plain, capacity, {}), _open(bundle, models, capacity, record.rings)
    rng, noise, worst = random.Random(_SEED), np.random.default_rng(_SEED), Worst()
    width = int(next(t.shape[-1] for t in manifest.target.graph.outputs if t.name == "taps"))
    position, rows = first, filled
    for _ in range(_ROUNDS):
        taps = noise.standard_normal((1, rows, width), dtype=np.float32)
        whole.append(taps, position)
        ringed.append(taps, position)
        position += rows if rows == filled else rng.randint(1, rows)
        rows = rng.choice([size for size in manifest.block_sizes if size > 1])
        ids = np.full((1, rows), manifest.drafter.mask_token_id)
        ids[0, 0] = rng.randrange(manifest.target.vocab_size)
        expected, found = whole.draft(ids, position), ringed.draft(ids, position)
        measure = deviation if exact else mean_deviation
        worst.add("drafter draft_logits", measure(found["draft_logits"], expected["draft_logits"]))
        if exact:
            worst.add("drafter draft_ids", float((found["draft_ids"] != expected["draft_ids"]).sum()))
    sizes = ", ".join(str(rows) for rows in sorted({ring.rows for ring in record.rings.values()}))
    tolerance = TOLERANCE if exact else ROUNDED_TOLERANCE
    return worst.rows(stage, tolerance, f"{_ROUNDS} rounds on rings of {sizes} rows, rows {first} to {position}")


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
