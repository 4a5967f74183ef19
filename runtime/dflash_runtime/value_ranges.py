"""How large the values of half-precision graphs become, and which of them fp16 is not trusted with: `ranges.json`.

Written by the exporter, read wherever fp16 engines are made, on machines without the checkpoint. A file of its own
beside the manifest: a program that does not know it opens the bundle all the same.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dflash_runtime.bundle import Bundle, read_record, write_record

RANGES_NAME = "ranges.json"
RANGES_SCHEMA_VERSION = 1
FP16_LARGEST = 65504.0
FP16_TRUSTED = FP16_LARGEST / 4
"""What is seen to reach more is kept in fp32. Calibration reads some hundred tokens, and the outliers of a model come
with its first token and its separators, whatever the text: another text moves them by less than a factor of two.
Four leaves as much again, and a residual near 65,504 has steps of 32, so little is lost by keeping it in fp32."""


@dataclasses.dataclass(frozen=True)
class ValueRange:
    """One half-precision value of a portable graph."""

    graph: str
    """`target`, `drafter_context` or `drafter`."""
    value: str
    """Its name in the graph."""
    what: str
    """In words: `residual after layer 11`."""
    layer: int | None
    """None outside the layers."""
    reached: float
    """Largest magnitude over the calibration calls, computed in fp32 on the bundle's weights."""


@dataclasses.dataclass(frozen=True)
class RangeRecord:
    """What `ranges.json` says."""

    schema_version: int
    precision: str
    """Of the bundle: in an fp16 one the graphs already keep in fp32 what `beyond` gives; in a bf16 one they do not."""
    trusted: float
    """Largest magnitude left to fp16."""
    covered: str
    """The calibration calls, in words."""
    ranges: list[ValueRange]

    def beyond(self, graph: str | None = None) -> list[ValueRange]:
        """The values fp16 is not trusted with, in the order of the graph; of all graphs, or of one."""
        return [r for r in self.ranges if r.reached > self.trusted and graph in (None, r.graph)]

    def largest(self) -> ValueRange | None:
        """The value that reached most."""
        return max(self.ranges, key=lambda r: r.reached, default=None)


def write_ranges(root: Path, record: RangeRecord) -> None:
    """Writes `ranges.json` into a bundle under construction."""
    write_record(root / RANGES_NAME, record)


def read_ranges(bundle: Bundle) -> RangeRecord | None:
    """What the bundle's `ranges.json` says; None for a bundle that was never scanned.

    Raises:
        BundleError: the file is damaged or of another version.
    """
    if RANGES_NAME not in bundle.manifest.files:
        return None
    return read_record(RangeRecord, bundle.file(RANGES_NAME), RANGES_SCHEMA_VERSION)
