"""A drafter's own, smaller vocabulary: which of the target's tokens each row of its head stands for.

The layout is the one of speculators and EAGLE-3: `d2t` [draft vocabulary] holds the distance from each row's number
to the target's id, `t2d` [V] marks the ids that have a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dflash_export.tensor_files import TensorPlace
from dflash_runtime.errors import CheckpointError

MAPPING = ("d2t", "t2d")
_DTYPES = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}


def read_target_ids(places: Mapping[str, TensorPlace], rows: int, vocab_size: int, where: str) -> Tensor:
    """The target's id of each row of the head, int64 [rows].

    Args:
        places: The checkpoint's tensors; `t2d` may be absent.
        rows: Size of the draft vocabulary.
        vocab_size: Size of the target's.
        where: The checkpoint, for messages.

    Raises:
        CheckpointError: no mapping, or one that leads outside the vocabulary, is not ascending, or contradicts itself.
    """
    if "d2t" not in places:
        raise CheckpointError(
            f"{where} has a draft vocabulary of {rows} tokens and no tensor d2t, which says which of the target's "
            f"{vocab_size} they are. Download the checkpoint again."
        )
    offsets = _read(places["d2t"], ("I64", "I32"), rows, where)
    ids = offsets.to(torch.int64) + torch.arange(rows)
    if not ((ids >= 0) & (ids < vocab_size)).all():
        raise CheckpointError(
            f"{where}: d2t leads to the target's ids {int(ids.min())} to {int(ids.max())}, and the target has 0 to "
            f"{vocab_size - 1}. The drafter belongs to another target, or d2t holds ids instead of distances."
        )
    if (ids.diff() <= 0).any():
        raise CheckpointError(f"{where}: the target's ids that d2t leads to are not ascending; d2t is damaged.")
    if "t2d" in places:
        marked = _read(places["t2d"], ("BOOL",), vocab_size, where).nonzero().flatten()
        if not torch.equal(marked, ids):
            raise CheckpointError(
                f"{where} contradicts itself: t2d marks {len(marked)} of the target's ids, d2t leads to {rows}, and "
                "they are not the same. Download the checkpoint again."
            )
    return ids


def _read(place: TensorPlace, dtypes: tuple[str, ...], length: int, where: str) -> Tensor:
    if place.dtype not in dtypes or place.shape != (length,):
        raise CheckpointError(
            f"{where} maps its draft vocabulary by a tensor of {place.dtype} {list(place.shape)}; it must be of "
            f"{' or '.join(dtypes)} [{length}]."
        )
    return torch.frombuffer(bytearray(b"".join(place.chunks())), dtype=_DTYPES[place.dtype])
