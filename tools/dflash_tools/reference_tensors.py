"""Tensors as references hold them: rows by numbers, whole where the model is small, else as a short sketch of each row.

Letters: R rows (tokens), N numbers of one row, P numbers of a sketch.
"""

from __future__ import annotations

import functools
import random
import re
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Tensors = dict[str, Array]
"""Name -> [R, N], in the order in which they are computed."""

SKETCH_WIDTH = 8
TOP_COUNT = 64
"""Likeliest tokens whose scores are kept at every place, to judge another choice by its distance."""
NEXT_COUNT = 16
"""Those of them by which it is measured how far rounding moves distances."""
_SIGN_SEED = 8128
_OUTPUT = re.compile(r"(logits|draft_logits|token_ids|draft_ids|taps\.\d+|present\.\d+\.(key|value))$")


def is_choice(name: str) -> bool:
    """Whether a tensor holds token ids."""
    return name.endswith("_ids")


def is_output(name: str) -> bool:
    """Whether engines hand a tensor out; others are seen on a debug engine only."""
    return _OUTPUT.match(name) is not None


def rows_of(array: Array) -> Array:
    """[1, R, ...] -> [R, N]."""
    return np.ascontiguousarray(array.reshape(array.shape[1], -1))


def likeliest(logits: Array) -> tuple[Array, Array]:
    """The likeliest tokens of each row and their logits, [R, k], likeliest first."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP_COUNT]
    return ids.astype(np.int64), np.take_along_axis(logits, ids, -1).astype(np.float32)


def cache_rows_of(array: Array, start: int, end: int) -> Array:
    """Rows `start` to `end` of a cache [1, heads, T, D] -> [R, heads * D]."""
    return np.ascontiguousarray(array[0, :, start:end].transpose(1, 0, 2)).reshape(end - start, -1)


def split_taps(taps: Array, count: int) -> Tensors:
    """Taps [R, K*H] -> `taps.0` to `taps.{K-1}`, [R, H] each."""
    return {f"taps.{k}": piece for k, piece in enumerate(np.split(taps, count, axis=-1))}


def sketch(matrix: Array) -> Array:
    """Signed sums of each row, [R, N] -> [R, P]: a wrong number anywhere in a row changes all of them.

    Their size is that of the row's root mean square, so a sketch is judged by the same relative deviation.
    """
    count = matrix.shape[-1]
    with np.errstate(invalid="ignore", over="ignore"):
        summed: Array = matrix.astype(np.float64) @ _signs(count) / np.sqrt(count)
    short: Array = summed.astype(np.float32)
    return short


@functools.lru_cache(maxsize=64)
def _signs(count: int) -> Array:
    """[N, P] of +1 and -1, the same on every machine."""
    bits = random.Random(_SIGN_SEED).getrandbits(8 * count).to_bytes(count, "little")
    signs: Array = np.unpackbits(np.frombuffer(bits, np.uint8)).reshape(count, SKETCH_WIDTH) * 2.0 - 1.0
    return signs
