"""Names of tensors that only quantised weights have."""

from __future__ import annotations

from collections.abc import Iterable

from dflash_runtime.errors import CheckpointError

_ENDINGS = ("weight_scale", "weight_packed", "qweight", "qzeros", "weight_scale_inv", "input_scale")


def refuse_unexplained_parts(names: Iterable[str], where: str) -> None:
    """Refuses parts of quantised weights in a checkpoint whose config does not say how it is quantised.

    Args:
        names: Its tensors.
        where: The checkpoint, for messages.

    Raises:
        CheckpointError: naming the first of them.
    """
    found = next((name for name in sorted(names) if name.endswith(_ENDINGS)), None)
    if found is not None:
        raise CheckpointError(
            f"{where} holds {found}, which belongs to a quantised weight, and its config.json has no "
            "quantization_config that says how. Give the config the weights were written with, or the unquantised "
            "checkpoint."
        )
