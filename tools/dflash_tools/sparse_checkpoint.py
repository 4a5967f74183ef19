"""A checkpoint with the true shapes, names, shards and dtype of a model, in sparse files that take little room (Linux).

    python -m dflash_tools.sparse_checkpoint --out FOLDER
    python -m dflash_tools.sparse_checkpoint --out FOLDER --dense-layer 3

On zeros any wrong graph agrees with any other. So the layers a parity gate looks at (first, tapped, last) hold noise,
and so do all norms, parts of the output head and the rows of the embedding it reads; the rest is holes.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import click
import numpy as np
import numpy.typing as npt

from dflash_runtime.errors import OutputError
from dflash_tools.engine_memory import QWEN2_7B
from dflash_tools.error_lines import DFlashCommand
from dflash_tools.export_memory import qwen2_shapes
from dflash_tools.sizes import bytes_text

SHARD_BYTES = 4_000_000_000
"""A shard of the published file ends before the tensor that would exceed this."""
_ITEM_BYTES = 2
_PERIOD_ELEMENTS = 1_048_583
"""Noise repeats after so many values; the number is prime, so that no two rows of a matrix are alike."""
_TABLE_ROWS = 512
"""Rows of noise at the beginning, a third, the middle and the end of embedding and head."""
_LAYER = re.compile(r"layers\.(\d+)\.")


def write_sparse_checkpoint(folder: Path, config: Mapping[str, Any], dense_layers: Collection[int]) -> int:
    """Writes config, index and shards of a Qwen2 in bf16.

    Args:
        folder: New folder.
        config: Content of config.json.
        dense_layers: Layers whose matrices hold noise.

    Returns:
        Bytes of the shards by their length; on the disk they take less.

    Raises:
        OutputError: the folder exists.
    """
    if folder.exists():
        raise OutputError(f"{folder} exists already. Choose another folder, or delete it.")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=1) + "\n", encoding="utf-8")
    shards = split_into_shards(qwen2_shapes(dict(config)))
    noise = _bf16(np.random.default_rng(0).standard_normal(_PERIOD_ELEMENTS, dtype=np.float32))
    weight_map: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / name, shapes, noise, dense_layers)
        weight_map |= dict.fromkeys(shapes, name)
        total += sum(math.prod(shape) for shape in shapes.values()) * _ITEM_BYTES
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return total


def split_into_shards(shapes: Mapping[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    """Tensors in the model's order, cut where a shard would grow too large, as `save_pretrained` does it."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * _ITEM_BYTES
        if held + size > SHARD_BYTES and shards[-1]:
            shards.append({})
            held = 0
        shards[-1][name] = shape
        held += size
    return shards


def _write_shard(
    path: Path, shapes: Mapping[str, tuple[int, ...]], noise: npt.NDArray[Any], dense_layers: Collection[int]
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(shapes):  # safetensors sorts tensors of one dtype by name
        end = offset + math.prod(shapes[name]) * _ITEM_BYTES
        header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        start = 8 + len(text)
        for name in sorted(shapes):
            _fill(stream, start, name, shapes[name], noise, dense_layers)
            start += math.prod(shapes[name]) * _ITEM_BYTES
        os.truncate(path, start)


def _fill(
    stream: BinaryIO,
    start_bytes: int,
    name: str,
    shape: tuple[int, ...],
    noise: npt.NDArray[Any],
    dense_layers: Collection[int],
) -> None:
    """Writes what is not a hole of one tensor; no two tensors begin at the same place of the noise."""
    layer = _LAYER.search(name)
    noise = np.roll(noise, -(zlib.crc32(name.encode()) % noise.size))
    if len(shape) == 1:
        wide = np.resize(_wide(noise), shape[0]) * np.float32(0.3) + np.float32(name.endswith("norm.weight"))
        stream.seek(start_bytes)
        stream.write(_bf16(wide).tobytes())
    elif layer is None:
        rows, columns = shape
        for row in {0, rows // 3, rows // 2, rows - _TABLE_ROWS}:
            count = min(_TABLE_ROWS, rows - row)
            _write_noise(stream, start_bytes + row * columns * _ITEM_BYTES, count * columns, noise, columns)
    elif int(layer[1]) in dense_layers:
        _write_noise(stream, start_bytes, math.prod(shape), noise, shape[1])


def _write_noise(stream: BinaryIO, start_bytes: int, count: int, noise: npt.NDArray[Any], fan_in: int) -> None:
    piece = np.tile(_bf16(_wide(noise) * np.float32(fan_in**-0.5)), 8)
    stream.seek(start_bytes)
    while count:
        part = piece[: min(count, piece.size)]
        stream.write(part.tobytes())
        count -= part.size


def _bf16(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The upper halves of fp32 bits: rounded towards zero, which is as good as any for random values."""
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)


def _wide(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return (values.astype(np.uint32) << 16).view(np.float32)


@click.command(cls=DFlashCommand)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to make.")
@click.option("--shape", type=click.Choice(["qwen2-7b"]), default="qwen2-7b", show_default=True)
@click.option("--dense-layer", "dense", type=int, multiple=True, help="Layer to fill. [default: first, tapped, last]")
def main(out: Path, shape: str, dense: tuple[int, ...]) -> None:
    """Writes a checkpoint of Qwen2-7B's true layout that takes a fraction of its size."""
    from dflash_export.tap_rule import default_target_layer_ids

    config = {"qwen2-7b": QWEN2_7B}[shape]
    layers = int(config["num_hidden_layers"])
    chosen = dense or sorted({0, *default_target_layer_ids(layers), layers - 1})
    size = write_sparse_checkpoint(out, config, chosen)
    taken = sum(path.stat().st_blocks * 512 for path in out.iterdir())
    click.echo(f"{out}: {bytes_text(size)} of weights that take {bytes_text(taken)}; noise in layers {chosen}")


if __name__ == "__main__":
    main()
