"""Streams weights into the bundle, tensor by tensor, and points graphs at them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import onnx_ir as ir
import torch

from dflash_export.quantized_places import QuantizedPart
from dflash_export.tensor_files import FLOAT8, FLOAT_DTYPES, TensorPlace, stored_bytes
from dflash_runtime.bundle import FileFacts, QuantizedWeight, WeightEntry, write_atomically
from dflash_runtime.errors import CheckpointError, OutputError

TORCH_DTYPES = FLOAT_DTYPES
PRECISIONS = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
_IR_DTYPES = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "U4": ir.DataType.UINT4,
    "U8": ir.DataType.UINT8,
    FLOAT8: ir.DataType.FLOAT8E4M3FN,
}
_CHUNK_BYTES = 1 << 22
_NOTE_BYTES = 256 << 20
_MOST_LOST = 0.01
"""Of a weight in another dtype, root mean square; rounding itself costs 0.2 % in bf16 and less in fp16."""

Progress = Callable[[str, int, int], None]
"""Called with a stage name, work done and work in all."""


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """What was written."""

    entries: dict[str, WeightEntry]
    file_name: str
    facts: FileFacts
    quantized: dict[str, QuantizedWeight] = dataclasses.field(default_factory=dict)
    referred: dict[str, FileFacts] = dataclasses.field(default_factory=dict)
    """Files of the checkpoint that became the bundle's."""
    by_name: frozenset[str] = frozenset()
    """Weights that graphs must not reach by a path, because their files are hard links."""

    @property
    def files(self) -> dict[str, FileFacts]:
        """Every file the weights lie in."""
        own = {self.file_name: self.facts} if any(e.file == self.file_name for e in self.entries.values()) else {}
        return {**own, **self.referred}


def store_weights(
    root: Path,
    file_name: str,
    places: Mapping[str, TensorPlace],
    dtype: str,
    progress: Progress,
    islands: Mapping[str, str] | None = None,
    record: Path | None = None,
) -> StoredWeights:
    """Writes tensors into one safetensors file, converting on the way where the dtype differs.

    At most one 4 MiB piece is in memory. Identical dtypes are copied byte for byte; parts of quantised weights are
    written as they are.

    Args:
        root: Bundle folder under construction.
        file_name: Path below it, such as `weights/target.safetensors`.
        places: Bundle name -> source tensor.
        dtype: F32, F16 or BF16.
        progress: Called with bytes done and bytes in all.
        islands: Dtypes of the tensors the model keeps in another one, by bundle name.
        record: Where to note how far the file is, so that a killed process goes on there.

    Raises:
        CheckpointError: a tensor is not a plain float, or a value does not fit the dtype.
        OutputError: the disk is full or not writable.
    """
    parts = {name: place.dtype for name, place in places.items() if isinstance(place, QuantizedPart)}
    islands = {name: own for name, own in (islands or {}).items() if name not in parts}
    places = dict(sorted(places.items(), key=lambda item: (item[0] not in islands, _section(item[1]))))
    dtypes = {name: parts.get(name) or islands.get(name) or dtype for name in places}
    head, entries, total = _lay_out(file_name, places, dtypes)
    path = root / file_name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = _Written.resume(path, record, head)
        with path.open("r+b" if written.tensors else "wb") as stream:
            if not written.tensors:
                written.add(stream, head)
            stream.seek(written.size_bytes)
            for name, place in list(places.items())[written.tensors :]:
                for piece in _converted(name, place, dtypes[name]):
                    written.add(stream, piece)
                    progress("weights", written.size_bytes - len(head), total)
                written.tensors += 1
                written.note(stream, record)
    except OSError as error:
        raise OutputError(f"writing {total + len(head)} bytes to {path} failed: {error.strerror or error}.") from error
    return StoredWeights(entries, file_name, FileFacts(len(head) + total, written.digest.hexdigest()))


class _Written:
    """How far a weight file is."""

    def __init__(self, head: bytes) -> None:
        self.tensors, self.size_bytes, self.digest = 0, 0, hashlib.sha256()
        self._head, self._noted_bytes = hashlib.sha256(head).hexdigest(), 0

    @classmethod
    def resume(cls, path: Path, record: Path | None, head: bytes) -> _Written:
        """What another process wrote and this one can prove; nothing where it cannot."""
        written = cls(head)
        if record is None or not record.is_file() or not path.is_file():
            return written
        noted = json.loads(record.read_text(encoding="utf-8"))
        if noted["head"] != written._head or path.stat().st_size < noted["size_bytes"]:
            return written
        digest, left = hashlib.sha256(), noted["size_bytes"]
        with path.open("rb") as stream:
            while left:
                piece = stream.read(min(left, _CHUNK_BYTES))
                digest.update(piece)
                left -= len(piece)
        if digest.hexdigest() != noted["sha256"]:
            return written
        os.truncate(path, noted["size_bytes"])
        written.tensors, written.size_bytes, written.digest = noted["tensors"], noted["size_bytes"], digest
        written._noted_bytes = written.size_bytes
        return written

    def add(self, stream: BinaryIO, piece: bytes) -> None:
        """Writes a piece."""
        stream.write(piece)
        self.digest.update(piece)
        self.size_bytes += len(piece)

    def note(self, stream: BinaryIO, record: Path | None) -> None:
        """Notes where the file stands, now and then."""
        if record is None or self.size_bytes - self._noted_bytes < _NOTE_BYTES:
            return
        stream.flush()
        self._noted_bytes = self.size_bytes
        noted = {"head": self._head, "tensors": self.tensors, "size_bytes": self.size_bytes}
        write_atomically(record, json.dumps({**noted, "sha256": self.digest.copy().hexdigest()}))


def _section(place: TensorPlace) -> int:
    """Where in the file a tensor belongs: matrices, scales, vectors, zero points.

    With no bias between them, the projections of one layer lie side by side, and so do their scales: an engine can
    read them as one. Zero points may end in half a byte and come last, so that all else is aligned.
    """
    if isinstance(place, QuantizedPart) and place.role != "values":
        return 1 if place.role == "scales" else 3
    return 0 if len(place.shape) >= 2 else 2


def _lay_out(
    file_name: str, places: Mapping[str, TensorPlace], dtypes: Mapping[str, str]
) -> tuple[bytes, dict[str, WeightEntry], int]:
    """The safetensors head of a file, where each tensor will lie in it, and the bytes of all tensors."""
    header: dict[str, dict[str, object]] = {}
    offset = 0
    for name, place in places.items():
        if place.dtype not in TORCH_DTYPES and not isinstance(place, QuantizedPart):
            raise CheckpointError(
                f"tensor {name} is stored as {place.dtype}, and nothing says which floats it means. Give the "
                "original half-precision checkpoint, or the config.json the weights were written with."
            )
        length = stored_bytes(place.shape, dtypes[name])
        # The format has no integers of four bits: its readers see the bytes.
        as_bytes = dtypes[name] == "U4"
        kind, shape = ("U8", [length]) if as_bytes else (dtypes[name], list(place.shape))
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56)  # data starts at a multiple of 64 bytes
    head = len(text).to_bytes(8, "little") + text
    entries, start = {}, len(head)
    for name, place in places.items():
        length = stored_bytes(place.shape, dtypes[name])
        entries[name] = WeightEntry(file_name, start, length, dtypes[name], list(place.shape))
        start += length
    return head, entries, offset


def _converted(name: str, place: TensorPlace, dtype: str) -> Iterator[bytes]:
    if place.dtype == dtype:
        yield from place.chunks(_CHUNK_BYTES)
        return
    energy = lost = 0.0
    for piece in place.chunks(_CHUNK_BYTES):
        source = torch.frombuffer(bytearray(piece), dtype=TORCH_DTYPES[place.dtype])
        result = source.to(TORCH_DTYPES[dtype])
        energy, lost = energy + _energy(source), lost + _energy(source - result)
        if not torch.isfinite(result).all() and torch.isfinite(source).all():
            raise CheckpointError(
                f"{name} holds {source.abs().max().item():.4g}, more than {dtype} can hold "
                f"({torch.finfo(TORCH_DTYPES[dtype]).max:.4g}). Build with --precision bf16 or fp32."
            )
        yield result.view(torch.uint8).numpy().tobytes()
    if lost > _MOST_LOST**2 * energy and not name.endswith(".bias"):  # one so small adds nothing to a product
        raise CheckpointError(
            f"{name} loses {(lost / energy) ** 0.5:.0%} of itself in {dtype}: its values are smaller than "
            f"{torch.finfo(TORCH_DTYPES[dtype]).smallest_normal:.3g}, below which {dtype} has ever fewer digits. Build "
            "with --precision bf16 or fp32."
        )


def _energy(values: torch.Tensor) -> float:
    flat = values.float().reshape(-1)
    return float(torch.dot(flat, flat))


def attach_weights(model: ir.Model, entries: dict[str, WeightEntry], root: Path) -> None:
    """Points a graph's hollow initializers at the bundle's weight files.

    Raises:
        CheckpointError: an initializer has no weight, or shape or dtype differ.
    """
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            continue
        entry = entries.get(name)
        if entry is None:
            raise CheckpointError(f"the graph uses {name}, which the checkpoint does not hold.")
        shape = [d if isinstance(d, int) else -1 for d in value.shape or ()]
        if shape != entry.shape or value.dtype != _IR_DTYPES[entry.dtype]:
            raise CheckpointError(
                f"{name} is {entry.dtype} {entry.shape} in the checkpoint and {value.dtype} {shape} in the model."
            )
        value.const_value = external_weight(name, entry, root)


def external_weight(name: str, entry: WeightEntry, root: Path) -> ir.ExternalTensor:
    """A weight of the bundle as a graph refers to it."""
    return ir.ExternalTensor(
        entry.file,
        entry.offset_bytes,
        entry.length_bytes,
        _IR_DTYPES[entry.dtype],
        shape=ir.Shape(entry.shape),
        name=name,
        base_dir=root,
    )
