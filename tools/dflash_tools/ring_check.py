"""Compares a drafter over rings with the same graphs over caches of the whole context: rounds past the ring's end."""

from __future__ import annotations

import random

import numpy as np
import onnx_ir as ir

from dflash_export.deviation import Array, Worst, deviation
from dflash_export.graph_runner import GraphRunner
from dflash_runtime.bundle import Bundle, CheckRow
from dflash_runtime.engine_record import engine_folder, open_engine
from dflash_tools.lowered_check import TOLERANCE, lowered_without_rings, open_graph

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
        Rows of stage `rings`; none where no cache is a ring.
    """
    record, manifest = open_engine(bundle, backend), bundle.manifest
    if not record.rings or manifest.drafter is None:
        return []
    block, filled = max(manifest.block_sizes), max(ring.rows for ring in record.rings.values()) - 2
    first = max(0, min(filled, manifest.max_context_tokens - filled - _ROUNDS * block))
    capacity = first + filled + (_ROUNDS + 1) * block
    whole, ringed = (_open(bundle, backend, capacity, rings=rings) for rings in (False, True))
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
        worst.add("drafter draft_logits", deviation(found["draft_logits"], expected["draft_logits"]))
        worst.add("drafter draft_ids", float((found["draft_ids"] != expected["draft_ids"]).sum()))
    sizes = ", ".join(str(rows) for rows in sorted({ring.rows for ring in record.rings.values()}))
    return worst.rows("rings", TOLERANCE, f"{_ROUNDS} rounds on rings of {sizes} rows, rows {first} to {position}")


def _open(bundle: Bundle, backend: str, capacity_rows: int, *, rings: bool) -> _Drafter:
    drafter, record = bundle.manifest.drafter, open_engine(bundle, backend)
    assert drafter is not None
    runners = []
    for facts in (drafter.context_graph, drafter.graph):
        model = ir.load(engine_folder(bundle, backend) / facts.file) if rings else lowered_without_rings(
            bundle, facts, record
        )  # fmt: skip
        runner = open_graph(bundle, model, facts, capacity_rows)
        for name, ring in record.rings.items() if rings else ():
            runner.state[name] = np.ascontiguousarray(runner.state[name][:, :, : ring.rows])
        runners.append(runner)
    return _Drafter(*runners)
