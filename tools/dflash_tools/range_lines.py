"""What a bundle's scan of values says about fp16, in a few lines: which tensor reached what, what is kept in fp32."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_runtime.bundle import Bundle
from dflash_runtime.value_ranges import FP16_LARGEST, RangeRecord, ValueRange, read_ranges

_MOST_LINES = 6


def range_lines(bundle: Bundle) -> Iterator[str]:
    """Lines for `inspect` and the end of `build`; none for an fp32 bundle, which rounds nowhere."""
    if bundle.manifest.precision == "fp32":
        return
    record = read_ranges(bundle)
    if record is None:
        yield "not known how large its values become: an older dflash-export made this bundle; build it again"
        return
    yield from _found(record)
    yield f"scanned: {record.covered}; trusted to fp16 up to {record.trusted:,.0f}"


def _found(record: RangeRecord) -> Iterator[str]:
    beyond, largest = record.beyond(), record.largest()
    if largest is None:
        return
    if not beyond:
        yield f"all values fit: {_reached(largest)}, the largest; fp16 ends at {FP16_LARGEST:,.0f}"
        return
    would = "are" if record.precision == "fp16" else "would be, in fp16 engines,"
    yield f"{len(beyond)} values {would} kept in fp32; fp16 ends at {FP16_LARGEST:,.0f}"
    told = _grouped(beyond)
    yield from told[:_MOST_LINES]
    if len(told) > _MOST_LINES:
        yield f"and {len(told) - _MOST_LINES} more: see ranges.json"


def _grouped(beyond: list[ValueRange]) -> list[str]:
    """Residuals, which follow one another, as one line; every other value for itself, the largest first."""
    lines = []
    for graph in dict.fromkeys(one.graph for one in beyond):
        residuals = [one for one in beyond if one.graph == graph and one.what.startswith("residual")]
        if residuals:
            largest = max(residuals, key=lambda one: one.reached)
            lines.append(f"{_of(graph)}{_reached(largest)}: residuals from layer {residuals[0].layer} on")
    others = [one for one in beyond if not one.what.startswith("residual")]
    return lines + [f"{_of(one.graph)}{_reached(one)}" for one in sorted(others, key=lambda one: -one.reached)]


def _of(graph: str) -> str:
    return "" if graph == "target" else f"{graph}: "


def _reached(one: ValueRange) -> str:
    return f"{one.what} reached {one.reached:,.4g}"
