"""Random weights for a bundle that has none: written into its files, or made where a device can take them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_runtime.bundle import MANIFEST_NAME, Bundle, WeightEntry, file_facts, write_record

Array = npt.NDArray[Any]
_CHUNK_ELEMENTS = 1 << 22


def spread_of(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """(middle, standard deviation) that keep activations in range: norms around 1, biases around 0."""
    if len(shape) > 1:
        return 0.0, shape[-1] ** -0.5
    return (1.0 if "norm" in name else 0.0), 0.1


def fill_weights(root: Path, seed: int, likely_tokens: int | None = None) -> Bundle:
    """Writes random bf16 values over the weights of a bundle and states its files anew.

    Args:
        root: The bundle folder; its weight files have their size already, their content is replaced.
        seed: The same seed gives the same weights.
        likely_tokens: Only so many tokens are likely, so that a random drafter is accepted now and then.
    """
    bundle = Bundle.open(root, check_files=False)
    manifest = bundle.manifest
    random = np.random.default_rng(seed)
    for name, entry in manifest.weights.items():
        with bundle.file(entry.file).open("r+b") as stream:
            stream.seek(entry.offset_bytes)
            done = 0
            for values in _values(name, entry, random):
                if likely_tokens is not None and name == manifest.target.head_weight:
                    row = (done + np.arange(values.size)) // entry.shape[-1]
                    values[row >= likely_tokens] *= np.float32(0.02)
                done += values.size
                stream.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    facts = file_facts(root, list(manifest.files))
    write_record(root / MANIFEST_NAME, dataclasses.replace(manifest, files=facts))
    return Bundle.open(root)


def _values(name: str, entry: WeightEntry, random: np.random.Generator) -> Iterator[Array]:
    middle, deviation = spread_of(name, tuple(entry.shape))
    left = math.prod(entry.shape)
    while left:
        count = min(left, _CHUNK_ELEMENTS)
        yield random.standard_normal(count, dtype=np.float32) * np.float32(deviation) + np.float32(middle)
        left -= count
