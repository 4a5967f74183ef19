"""The sparse checkpoint has the published layout, holds noise where a gate looks and holes elsewhere."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dflash_export.tensor_files import read_tensor_places
from dflash_runtime.errors import OutputError
from dflash_tools.engine_memory import QWEN2_7B
from dflash_tools.export_memory import qwen2_shapes
from dflash_tools.sparse_checkpoint import split_into_shards, write_sparse_checkpoint

TINY = {
    **QWEN2_7B,
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}


def test_qwen2_7b_is_cut_where_the_published_checkpoint_is() -> None:
    """15,231,233,024 bytes in four files of 3.95, 3.86, 3.86 and 3.56 GB."""
    shards = split_into_shards(qwen2_shapes(QWEN2_7B))
    sizes = [2 * sum(math.prod(shape) for shape in shard.values()) for shard in shards]
    assert sum(sizes) == 15_231_233_024
    assert [size // 1_000_000 for size in sizes] == [3945, 3864, 3864, 3556]


def test_noise_lies_where_it_is_asked_for_and_nothing_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    size = write_sparse_checkpoint(folder, TINY, {0, 2})
    places = read_tensor_places(folder)
    assert {name: place.shape for name, place in places.items()} == qwen2_shapes(TINY)
    assert sum(place.length_bytes for place in places.values()) == size

    def filled(name: str) -> bool:
        return any(any(piece) for piece in places[name].chunks())

    assert filled("model.layers.0.mlp.up_proj.weight") and filled("model.layers.2.self_attn.q_proj.weight")
    assert filled("model.layers.1.input_layernorm.weight") and filled("lm_head.weight")
    assert not filled("model.layers.1.mlp.up_proj.weight")
    taken = sum(path.stat().st_blocks * 512 for path in folder.glob("*.safetensors"))
    assert taken < size - 1_000_000
    with pytest.raises(OutputError, match="exists already"):
        write_sparse_checkpoint(folder, TINY, {0})
