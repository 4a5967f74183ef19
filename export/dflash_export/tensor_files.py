"""Where every tensor of a safetensors checkpoint lies, read from the files' headers alone.

The layout is the safetensors specification: 8 bytes of header length, a JSON header, then the data without holes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_runtime.errors import CheckpointError

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
FLOAT8 = "F8_E4M3"
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HEADER_BYTES = 100 << 20


def stored_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a tensor in a file; U4 holds two integers in a byte."""
    items = math.prod(shape)
    return (items + 1) // 2 if dtype == "U4" else items * ITEM_BYTES[dtype]


@dataclasses.dataclass(frozen=True)
class TensorPlace:
    """One tensor in a file."""

    file: Path
    offset_bytes: int
    length_bytes: int
    dtype: str
    """Safetensors spelling: F32, BF16, ..."""
    shape: tuple[int, ...]

    def chunks(self, chunk_bytes: int = 1 << 22) -> Iterator[bytes]:
        """The tensor's raw bytes in pieces, so that a big tensor never lies in memory whole."""
        with self.file.open("rb") as stream:
            stream.seek(self.offset_bytes)
            left = self.length_bytes
            while left:
                piece = stream.read(min(chunk_bytes, left))
                if not piece:
                    raise CheckpointError(f"{self.file} ended early. Download the checkpoint again.")
                left -= len(piece)
                yield piece

    def rows(self, start: int, stop: int) -> TensorPlace:
        """Some rows of the tensor, as a tensor of their own."""
        row_bytes = self.length_bytes // max(1, self.shape[0])
        return TensorPlace(
            self.file,
            self.offset_bytes + start * row_bytes,
            (stop - start) * row_bytes,
            self.dtype,
            (stop - start, *self.shape[1:]),
        )


def read_tensor_places(folder: Path) -> dict[str, TensorPlace]:
    """Finds every tensor of a checkpoint folder.

    The index file decides when there is one (its `weight_map`), so shards may have any name.

    Args:
        folder: Holds `model.safetensors`, or `*.safetensors.index.json` with its shards.

    Raises:
        CheckpointError: no safetensors files, no tensors, shards missing (all are listed), a truncated or foreign
            file, an index that names a tensor its shard does not hold.
    """
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise CheckpointError(f"{folder} holds {len(indices)} index files: {[i.name for i in indices]}. Keep one.")
    places = _read_indexed(folder, indices[0]) if indices else _read_unindexed(folder)
    if not places:
        raise CheckpointError(f"{folder} holds weight files without a single tensor. Download the checkpoint again.")
    return places


def _read_unindexed(folder: Path) -> dict[str, TensorPlace]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(_no_weights_message(folder))
    if len(files) > 1 and (folder / "model.safetensors") in files:
        files = [folder / "model.safetensors"]
    places: dict[str, TensorPlace] = {}
    for file in files:
        for name, place in read_header(file).items():
            if name in places:
                raise CheckpointError(f"tensor {name} lies in both {places[name].file.name} and {file.name}.")
            places[name] = place
    return places


def _no_weights_message(folder: Path) -> str:
    pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt*"))
    if pickled:
        return (
            f"{folder} holds only pickle weights ({', '.join(pickled[:3])}), which can run code when they are read. "
            "Convert it to safetensors first."
        )
    return f"{folder} holds no *.safetensors file. Download the checkpoint again."


def _read_indexed(folder: Path, index: Path) -> dict[str, TensorPlace]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        wanted: dict[str, str] = {str(k): str(v) for k, v in weight_map.items()}
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index ({error!r}). Download it again.") from error
    outside = sorted({name for name in wanted.values() if Path(name).name != name})
    if outside:
        raise CheckpointError(f"{index} names files outside its folder: {outside}.")
    missing = sorted({name for name in wanted.values() if not (folder / name).is_file()})
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of its {len(set(wanted.values()))} weight files: {', '.join(missing)}. "
            "Download the checkpoint again."
        )
    headers = {name: read_header(folder / name) for name in sorted(set(wanted.values()))}
    absent = sorted(tensor for tensor, name in wanted.items() if tensor not in headers[name])
    if absent:
        raise CheckpointError(
            f"{index.name} names {len(absent)} tensors its files do not hold: {', '.join(absent[:5])}. "
            "The index is stale: download the checkpoint again."
        )
    return {tensor: headers[name][tensor] for tensor, name in wanted.items()}


def read_header(file: Path) -> dict[str, TensorPlace]:
    """Reads one safetensors header and checks it against the file's size.

    Raises:
        CheckpointError: not a safetensors file, truncated, or a Git LFS pointer.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if prefix.startswith(b"version "):
            raise CheckpointError(f"{file} is a Git LFS pointer, not the weights. Fetch it with `git lfs pull`.")
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{file} is not a complete safetensors file: its header should take {length} bytes and the file has "
                f"{size}. Download it again."
            )
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
        except ValueError as error:
            raise CheckpointError(f"{file} has a damaged safetensors header ({error}). Download it again.") from error
    places = {name: _place(file, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"}
    end = max((place.offset_bytes + place.length_bytes for place in places.values()), default=8 + length)
    if end > size:
        raise CheckpointError(f"{file} is truncated: it has {size} bytes and needs {end}. Download it again.")
    return places


def _place(file: Path, name: str, entry: dict[str, Any], start: int) -> TensorPlace:
    try:
        begin, end = (int(n) for n in entry["data_offsets"])
        place = TensorPlace(file, start + begin, end - begin, str(entry["dtype"]), tuple(entry["shape"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} has a damaged entry for {name} ({error!r}). Download it again.") from error
    items = 1
    for dimension in place.shape:
        items *= dimension
    item_bytes = ITEM_BYTES.get(place.dtype)
    if begin < 0 or (item_bytes is not None and items * item_bytes != place.length_bytes):
        raise CheckpointError(
            f"{file} says that {name} has shape {list(place.shape)} of {place.dtype} in {place.length_bytes} bytes, "
            "which do not agree. Download it again."
        )
    return place
