"""The gate's comparison of engines with the portable graphs; what is wrong is named by the weight that makes it."""

from __future__ import annotations

import numpy as np

from dflash_export.deviation import deviation
from dflash_runtime.bundle import Bundle, CheckRow
from dflash_tools.debug_graphs import INPUT, PORTABLE, open_debug_probe
from dflash_tools.graph_probe import joined_taps
from dflash_tools.lowered_check import TOLERANCE, check_lowered
from dflash_tools.reference_record import CONTEXT, DRAFTER, TARGET
from dflash_tools.reference_tensors import Tensors, is_choice, is_output
from dflash_tools.ring_check import check_rings

_ROWS, _SEED = 12, 41


def check_engine(bundle: Bundle, backend: str) -> list[CheckRow]:
    """Every output and cache on the same calls, rings past their end; see `check_lowered` and `check_rings`.

    Args:
        bundle: With engines for `backend`.
        backend: `ort-cpu`.

    Returns:
        The rows. Where one of them failed, the first tensor that differs comes in front of them: of one call, in the
        order of computation, with products of the engine in fp32.
    """
    rows = [*check_lowered(bundle, backend), *check_rings(bundle, backend)]
    first = None if all(row.passed for row in rows) else _first_divergence(bundle, backend)
    return rows if first is None else [first, *rows]


def _first_divergence(bundle: Bundle, backend: str) -> CheckRow | None:
    rows = min(_ROWS, bundle.manifest.max_context_tokens)
    ids = np.random.default_rng(_SEED).integers(0, bundle.manifest.target.vocab_size, rows).tolist()
    capacity = rows + 2 * max(bundle.manifest.block_sizes)
    probes = [open_debug_probe(bundle, form, capacity, exact=True) for form in (PORTABLE, backend)]
    expected, found = (probe.target(ids, 0) for probe in probes)
    row = _first(TARGET, expected, found)
    drafter = bundle.manifest.drafter
    if row is not None or drafter is None:
        return row
    taps = joined_taps(expected)
    row = _first(CONTEXT, *(probe.context(taps, 0) for probe in probes))
    block = [ids[0], *[drafter.mask_token_id] * (drafter.block_size - 1)]
    return row or _first(DRAFTER, *(probe.draft(block, rows) for probe in probes))


def _first(kind: str, expected: Tensors, found: Tensors) -> CheckRow | None:
    of_both = [name for name in expected if name in found and not is_choice(name) and not name.endswith(INPUT)]
    for name in sorted(of_both, key=is_output):
        off = deviation(found[name], expected[name])
        if not off <= TOLERANCE:
            covered = f"the first of {len(of_both)} tensors that differs"
            return CheckRow("lowered", f"{kind} {name}", off, TOLERANCE, False, covered)
    return None
