"""Checkpoint tensors under the names and in the layout of the Transformers module.

Transformers renames some tensors and merges others when it loads (a mixture of experts is stored expert by expert
and computed as one tensor). Its own table of conversions is followed here, one merged tensor in memory at a time.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from dflash_export.tensor_files import ITEM_BYTES, TensorPlace
from dflash_runtime.errors import CheckpointError

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class ConvertedPlace(TensorPlace):
    """A tensor that is computed from others; file and offset are those of the first."""

    conversion: _Conversion
    name: str

    def tensor(self) -> Tensor:
        """The whole tensor in its stored dtype."""
        return self.conversion.results(meta=False)[self.name].contiguous()

    def chunks(self, chunk_bytes: int = 1 << 22) -> Iterator[bytes]:
        """The tensor's bytes in pieces."""
        data = self.tensor().view(-1).view(torch.uint8)
        for start in range(0, data.numel(), chunk_bytes):
            yield data[start : start + chunk_bytes].numpy().tobytes()


class _Conversion:
    """One use of one entry of Transformers' table: some checkpoint tensors become one or more of the model's."""

    def __init__(self, converter: WeightConverter, target: str, model: Any) -> None:
        self.converter, self.target, self.model = converter, target, model
        self.sources: list[tuple[str, str, TensorPlace]] = []
        """Checkpoint name, the pattern it matched, place."""

    def results(self, meta: bool) -> dict[str, Tensor]:
        """Model name -> tensor; on the meta device it costs nothing and tells shapes.

        Raises:
            CheckpointError: the tensors do not fit each other, which means that some are missing.
        """
        converter = copy.deepcopy(self.converter)
        for name, pattern, place in self.sources:
            converter.add_tensor(self.target, name, pattern, _read(name, place, meta))
        try:
            made: dict[str, Any] = converter.convert(self.target, model=self.model, config=self.model.config)
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            raise CheckpointError(
                f"{self.target} cannot be put together from the {len(self.sources)} tensors of the checkpoint that "
                f"belong to it ({error}). Some are missing or have another shape: download the checkpoint again."
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def places(self) -> dict[str, TensorPlace]:
        """Where the model's tensors come from."""
        _, _, first = self.sources[0]
        found: dict[str, TensorPlace] = {}
        for name, tensor in self.results(meta=True).items():
            size = math.prod(tensor.shape) * ITEM_BYTES[first.dtype]
            found[name] = ConvertedPlace(
                first.file, first.offset_bytes, size, first.dtype, tuple(tensor.shape), self, name
            )
        return found


def _read(name: str, place: TensorPlace, meta: bool) -> Tensor:
    if place.dtype not in _DTYPES:
        raise CheckpointError(
            f"tensor {name} is stored as {place.dtype}, and nothing says which floats it means. Give the "
            "original half-precision checkpoint, or the config.json the weights were written with."
        )
    if meta:
        return torch.empty(place.shape, dtype=_DTYPES[place.dtype], device="meta")
    data = bytearray().join(place.chunks())
    return torch.frombuffer(data, dtype=_DTYPES[place.dtype]).view(place.shape)


def convert_places(model: nn.Module, places: Mapping[str, TensorPlace]) -> dict[str, TensorPlace]:
    """Applies Transformers' conversions for a model to the tensors of a checkpoint.

    Args:
        model: The Transformers module; its parameters need no data.
        places: Checkpoint name -> tensor.

    Returns:
        Model name -> tensor; a tensor that fits no name of the model keeps its own.

    Raises:
        CheckpointError: tensors that are merged do not fit each other.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    wanted = dict(model.state_dict(keep_vars=True))
    rename = functools.partial(
        rename_source_key, base_model_prefix=model.base_model_prefix, meta_state_dict=wanted
    )
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, TensorPlace] = {}
    conversions: dict[str, _Conversion] = {}
    for name in sorted(places, key=_natural):
        renamed, pattern = rename(name, renamings, converters)
        if renamed not in wanted and name in wanted:
            renamed, pattern = name, None
        if renamed not in wanted:
            found[name] = places[name]
        elif pattern is None:
            found[renamed] = places[name]
        else:
            conversion = conversions.setdefault(renamed, _Conversion(by_pattern[pattern], renamed, model))
            conversion.sources.append((name, pattern, places[name]))
    for conversion in conversions.values():
        found |= conversion.places()
    return found


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sorts expert 10 after expert 9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]
