"""One call of an engine against the reference: how far each tensor is off, and how far it may be."""

from __future__ import annotations

import dataclasses

import numpy as np

from dflash_runtime.bundle import CheckRow
from dflash_runtime.errors import BundleError
from dflash_tools.reference_file import Reference
from dflash_tools.reference_record import INT8_PRODUCTS
from dflash_tools.reference_tensors import Array, Tensors, is_choice, is_output, sketch

EXACT_TOLERANCE = 1e-4
"""fp32 against fp32, relative: other kernels sum in another order. The build's own gate takes the same."""
ROUNDED_FACTOR = 3.0
"""Where results are rounded a tensor may deviate from fp32 this many times as far as PyTorch itself does with the same
rounding: a half precision, or activations of quantised products in int8."""


class Bounds:
    """What is allowed on an engine that computes in `precision`.

    Raises:
        BundleError: PyTorch's own deviation in that precision is not in the reference, or PyTorch overflows in it.
    """

    def __init__(self, reference: Reference, precision: str) -> None:
        self.exact = precision == "fp32"
        self._own = None
        if self.exact:
            return
        own = reference.facts.own.get(precision)
        if own is None:
            raise BundleError(
                f"The reference does not say how far PyTorch itself deviates in {precision}, so nothing can be judged. "
                f"Make it again: dflash-export reference BUNDLE"
                + ("" if precision == INT8_PRODUCTS else f" --precision {precision}")
            )
        margins = {"target/logits": own.target_margin, "drafter/draft_logits": own.draft_margin}
        measured = [*own.tensors.items(), *own.state.items(), *margins.items()]
        infinite = [name for name, value in measured if not np.isfinite(value)]
        if infinite:  # nothing is over an infinite bound
            raise BundleError(f"PyTorch itself overflows in {precision} at {infinite[0]}. Use bf16 or fp32.")
        self._own = own

    def allowed(self, graph: str, name: str) -> float:
        """Largest relative deviation of a tensor."""
        if self._own is None:
            return EXACT_TOLERANCE
        return ROUNDED_FACTOR * self._own.tensors.get(f"{graph}/{name}", 0.0) + EXACT_TOLERANCE

    def allowed_state(self, graph: str, name: str) -> float:
        """The same for a row of a cache that holds what the engine itself computed, round by round."""
        if self._own is None:
            return EXACT_TOLERANCE
        return ROUNDED_FACTOR * self._own.state.get(f"{graph}/{name}", 0.0) + EXACT_TOLERANCE

    def margin(self, model: str) -> float:
        """By how many logits a token may lose against another one and still be chosen; 0 in fp32."""
        if self._own is None:
            return 0.0
        return ROUNDED_FACTOR * (self._own.target_margin if model == "target" else self._own.draft_margin)


@dataclasses.dataclass(frozen=True)
class Difference:
    """One tensor of one call."""

    name: str
    rows: Array
    """Relative deviation of each row."""
    allowed: float

    @property
    def worst(self) -> float:
        """Over all rows."""
        return float(self.rows.max(initial=0.0))

    @property
    def is_wrong(self) -> bool:
        """Not finite, or further off than allowed."""
        return not self.worst <= self.allowed

    @property
    def first_row(self) -> int:
        """The first row that is wrong."""
        return int(np.argmax(~(self.rows <= self.allowed)))


def differences(reference: Reference, number: int, found: Tensors, bounds: Bounds) -> list[Difference]:
    """Compares what a call gave with what is kept of it, in the order of computation.

    Outputs must be there and of the right shape; inner tensors are compared where both sides have them alike.
    """
    call, compared = reference.facts.calls[number], []
    for name in reference.facts.tensors[number]:
        if is_choice(name) and not bounds.exact:
            continue  # in half precision another token is judged by its margin
        allowed = 0.0 if is_choice(name) else bounds.allowed(call.graph, name)
        if name not in found:
            if is_output(name):
                compared.append(Difference(name, np.full(1, np.inf), allowed))
            continue
        expected = reference.expected(f"{number}/{name}")
        same_width = reference.is_sketched(name) or expected.shape == found[name].shape
        if not is_output(name) and (not same_width or len(expected) != len(found[name])):
            continue
        if not same_width:
            compared.append(Difference(name, np.full(len(found[name]), np.inf), allowed))
            continue
        compared.append(Difference(name, reference.row_deviations(f"{number}/{name}", name, found[name]), allowed))
    return compared


def values_at(reference: Reference, key: str, name: str, found: Array, row: int) -> tuple[str, str]:
    """The numbers of a row where it is off the most, found and expected, as text."""
    expected = reference.expected(key)[row]
    seen = sketch(found[row : row + 1])[0] if reference.is_sketched(name) else found[row]
    if seen.shape != expected.shape:
        return f"shape {found.shape}", f"a row of {expected.shape[-1]} numbers"
    with np.errstate(invalid="ignore"):
        gaps = np.where(np.isfinite(seen), np.abs(seen - expected), np.inf)
    column = int(gaps.argmax())
    what = "sum" if reference.is_sketched(name) else "number"
    return f"{seen[column]:.6g} ({what} {column} of {seen.size})", f"{expected[column]:.6g}"


class WorstRows:
    """The worst case of each kind of tensor, as rows of the table."""

    def __init__(self, level: str) -> None:
        self._level = level
        self._worst: dict[str, tuple[float, float]] = {}

    def add(self, kind: str, worst: float, allowed: float) -> None:
        """Keeps the case that is nearest to, or furthest over, what is allowed."""
        before = self._worst.get(kind)
        if before is None or not worst / max(allowed, 1e-30) <= before[0] / max(before[1], 1e-30):
            self._worst[kind] = worst, allowed

    def rows(self, covered: str) -> list[CheckRow]:
        """One row a kind."""
        return [
            CheckRow(self._level, kind, worst, allowed, worst <= allowed, covered)
            for kind, (worst, allowed) in self._worst.items()
        ]
