"""What the quantised weights of a bundle must be, found again from the checkpoints, whatever the bundle holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from dflash_export.converted_places import convert_places
from dflash_export.dequantized_weights import scaled, unpacked
from dflash_export.match_weights import match_weights
from dflash_export.quantization import Scheme
from dflash_export.quantized_formats.imported_place import imported_parts
from dflash_export.quantized_places import ROUND_TO_NEAREST, quantize_places
from dflash_export.tensor_files import FLOAT8, TensorPlace
from dflash_export.weight_store import PRECISIONS
from dflash_export.weight_values import read_converted
from dflash_runtime.bundle import Manifest, QuantizedWeight, WeightEntry
from dflash_runtime.errors import PairError


@dataclasses.dataclass(frozen=True)
class MeantWeights:
    """Quantised weights by the bundle's schemes and the checkpoints' numbers."""

    quantized: Mapping[str, QuantizedWeight]
    parts: Mapping[str, TensorPlace]
    """Values, scales and zero points by their names in a bundle; nothing is read yet."""

    def value(self, name: str) -> Tensor:
        """(value - zero point) * scale in fp32, [out, in]; value * scale of FP8."""
        facts, values = self.quantized[name], self._integers(name)
        points = None if facts.zero_points is None else self._integers(facts.zero_points)
        scales = read_converted(self.parts[facts.scales], torch.float32)
        return scaled(values, self.parts[name].dtype, scales, points, facts)

    def _integers(self, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        place = self.parts[name]
        stored = np.frombuffer(bytearray().join(place.chunks()), np.uint8)
        entry = WeightEntry(str(place.file), 0, place.length_bytes, place.dtype, list(place.shape))
        return unpacked(stored, entry)


def meant_weights(manifest: Manifest, places: Mapping[str, TensorPlace]) -> MeantWeights:
    """Rounds again what the bundle says was rounded, and takes again what it says was imported.

    Args:
        manifest: Of the bundle: which weights, by which scheme.
        places: Bundle name -> tensor of the checkpoints, for all of them.

    Raises:
        PairError: the checkpoint holds them in another way than the bundle says.
    """
    wanted, dtype = manifest.quantized, PRECISIONS[manifest.precision]
    mine = {name: places[name] for name in wanted}
    parts, facts = imported_parts(mine, wanted, dtype)
    schemes = {
        name: Scheme(one.bits, one.group_size, one.zero_points is None, manifest.weights[name].dtype == FLOAT8)
        for name, one in wanted.items()
        if one.origin == ROUND_TO_NEAREST
    }
    rounded, more = quantize_places({**mine, **parts}, schemes, dtype)
    facts |= more
    other = next((name for name in wanted if facts.get(name) != wanted[name]), None)
    if other is not None:
        raise PairError(f"{other} is {wanted[other]} in the bundle and {facts.get(other)} by its checkpoint.")
    return MeantWeights(wanted, rounded)


def target_places(
    module: nn.Module, names: Iterable[str], places: Mapping[str, TensorPlace]
) -> dict[str, TensorPlace]:
    """The checkpoint's tensors under the names a bundle has for them.

    Args:
        module: The target, as Transformers makes it.
        names: The bundle's weights; those the target lacks are left out.
        places: What the checkpoint holds, by its own names.

    Raises:
        CheckpointError: weights that are missing or left over.
    """
    state = module.state_dict(keep_vars=True)
    kept = {name: tuple(state[name].shape) for name in names if name in state}
    known = {id(state[name]): name for name in kept}
    tied = {alias: known[id(tensor)] for alias, tensor in state.items() if id(tensor) in known}
    return match_weights(type(module), kept, tied, kept, convert_places(module, dict(places)))
