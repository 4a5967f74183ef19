"""Level state reads the buffers of the runtime itself: its faults are named by layer, K or V, and row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import Make, Once
from pairs import quiet
from planting import PAIR
from validation_runs import make, ort_cpu, portable, stored

from dflash_runtime import GenerationConfig, Session
from dflash_runtime.bundle import Bundle
from dflash_runtime.decode import HostCycles
from dflash_runtime.ort_cpu import OrtCpuBackend
from dflash_tools.held_rows import held_rows
from dflash_tools.reference_file import Reference
from dflash_tools.reference_record import ReferenceText
from dflash_tools.validate_comparison import Bounds
from dflash_tools.validate_run import validate
from dflash_tools.validate_state import check_state
from dflash_tools.validate_verdict import Verdict

APPEND, APPEND_WAITING, VERIFY = OrtCpuBackend.append_context, OrtCpuBackend._append_waiting, OrtCpuBackend.verify
ONE_ROW_LEFT = "thirteen char"
"""A prompt whose last piece of prefill is one row, which waits to be appended."""


@pytest.fixture(scope="module")
def healthy(exported: Make) -> Path:
    return exported(PAIR)


@pytest.fixture(scope="module")
def reference(healthy: Path, once: Once) -> Reference:
    prompts = [ONE_ROW_LEFT, "2 + 2"]
    return stored(once("state-reference", lambda f: make(healthy, f / "r", new_tokens=12, prompts=prompts)) / "r")


def state_of(bundle: Path, reference: Reference, engine: Any = ort_cpu) -> Verdict:
    opened = Bundle.open(bundle, check_files=False)
    (verdict,) = validate(opened, engine(opened), reference, quiet, ("state",)).verdicts
    return verdict


def first_block(text: ReferenceText) -> int:
    return text.rounds[0].position


def drops_a_row(self: OrtCpuBackend) -> None:
    """The first row of a block is not appended."""
    rows = self._waiting_rows
    if rows in (4, 8) and self._waiting_end > rows:
        self._waiting[:, : rows - 1], self._waiting_rows = self._waiting[:, 1:rows].copy(), rows - 1
    APPEND_WAITING(self)


def forgets_waiting_rows(self: OrtCpuBackend) -> None:
    """A row that was to be appended later never is."""
    if self._waiting_rows == 1:
        self._waiting_rows = 0
    APPEND_WAITING(self)


def leaves_a_value_stale(self: OrtCpuBackend, block: Sequence[int], position: int) -> list[int]:
    """The anchor's row of one value cache is what it was before the pass."""
    cache = self._target_state["past_key_values.2.value"]
    before = cache[:, :, position].copy()
    found = VERIFY(self, block, position)
    cache[:, :, position] = before
    return found


def appends_one_row_late(self: HostCycles) -> Any:
    """The decode loop hands a block's taps to the drafter at the wrong place; the backend does as it is told."""
    backend = self._backend
    try:
        backend.append_context = lambda rows, position: APPEND(backend, rows, position + 1)  # type: ignore[method-assign, arg-type]
        return READ_CYCLE(self)
    finally:
        del backend.append_context


READ_CYCLE = HostCycles.read_cycle


class StateFault(NamedTuple):
    owner: Any
    name: str
    fault: Callable[..., Any]
    graph: str
    layer: int
    part: str
    row: Callable[[ReferenceText], int]


FAULTS = [
    StateFault(OrtCpuBackend, "_append_waiting", drops_a_row, "drafter_context", 0, "cached key", first_block),
    StateFault(OrtCpuBackend, "_append_waiting", forgets_waiting_rows, "drafter_context", 0, "cached key",
               lambda text: len(text.ids) - 1),
    StateFault(OrtCpuBackend, "verify", leaves_a_value_stale, "target", 2, "cached value", first_block),
    StateFault(HostCycles, "read_cycle", appends_one_row_late, "drafter_context", 0, "cached key", first_block),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.fault.__name__)
def test_a_fault_of_the_runtime_is_named(
    healthy: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch, fault: StateFault
) -> None:
    monkeypatch.setattr(fault.owner, fault.name, fault.fault)
    verdict = state_of(healthy, reference)
    assert verdict.status == "failed" and verdict.first is not None
    found, row = verdict.first, fault.row(reference.facts.texts[0])
    assert (found.graph, found.layer, found.part) == (fault.graph, fault.layer, fault.part)
    assert found.tensor == f"present.{fault.layer}.{fault.part.removeprefix('cached ')}"
    assert found.where == f"row {row} (position {row}) of text 0, after the decode loop"
    assert found.deviation > found.allowed


@pytest.mark.parametrize("engine", [ort_cpu, portable], ids=["ort-cpu", "portable"])
def test_every_row_of_both_models_is_compared(healthy: Path, reference: Reference, engine: Any) -> None:
    verdict = state_of(healthy, reference, engine)
    assert verdict.first is None and verdict.status == "passed"
    assert {row.tensor for row in verdict.rows} == {"target keys", "target values", "drafter keys", "drafter values"}
    texts = reference.facts.texts
    rows = sum(len(text.ids) + len(text.tokens) - 1 for text in texts)
    rejected = sum(1 + len(one.proposed) - len(one.committed) for text in texts for one in text.rounds)
    assert rejected > 8
    assert verdict.rows[0].covered.startswith(f"{2 * rows} rows of 2 texts in the runtime's caches, after")
    assert f"with {rejected} rejected proposals" in verdict.rows[0].covered


def test_rows_are_read_from_the_backends_own_memory(healthy: Path) -> None:
    """A number changed there is the number that is read, whatever graphs would hand out."""
    with Session.open(healthy, threads=1) as session:
        session.generate([5, 6, 7, 8, 9], GenerationConfig(max_new_tokens=1))
        backend = session._backend
        assert isinstance(backend, OrtCpuBackend)
        backend._drafter_state["past_key_values.1.key"][0, 0, 3, 2] = 77.0
        found = held_rows(backend, session.bundle.manifest, 4)
    cache = found["drafter"]["present.1.key"]
    assert cache.first == 0 and cache.rows.shape[0] == 4 and cache.rows[3, 2] == 77.0
    assert not (found["target"]["present.1.key"].rows == 77.0).any()


def test_caches_that_are_not_finite_fail(healthy: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoils(self: OrtCpuBackend, block: Sequence[int], position: int) -> list[int]:
        self._target_state["past_key_values.0.key"][:, :, 0] = np.nan
        return VERIFY(self, block, position)

    monkeypatch.setattr(OrtCpuBackend, "verify", spoils)
    verdict = state_of(healthy, reference)
    assert verdict.status == "failed" and verdict.first is not None and verdict.first.found == "not finite"


def test_nothing_held_is_a_failure(healthy: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_tools.validate_state.held_rows", lambda *_: {})
    verdict = state_of(healthy, reference)
    assert verdict.status == "failed" and verdict.first is not None and verdict.first.found == "missing"
    with Session.open(healthy, threads=1) as session:
        facts = type(reference.facts)(**{**vars(reference.facts), "texts": []})
        empty = check_state(session, session._backend, Reference(facts, {}), Bounds(reference, "fp32"), drafts=True)
    assert empty.status == "failed" and "nothing was checked" in empty.notes[-1]
