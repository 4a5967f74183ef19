"""Writes a random DFlash drafter for a target, in the checkpoint format of the public drafters (z-lab).

    python -m dflash_tools.random_drafter TARGET_FOLDER OUT [--layers 2] [--block-size 8]

It proposes nonsense, so it makes nothing faster. It shows that a bundle says the same words with any drafter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from dflash_runtime.errors import CheckpointError, OutputError
from dflash_tools.error_lines import DFlashCommand
from dflash_tools.random_weights import write_random_safetensors


def write_random_drafter(
    target: Path,
    out: Path,
    *,
    num_layers: int = 2,
    block_size: int = 8,
    mask_token_id: int | None = None,
    seed: int = 0,
) -> None:
    """Writes config.json and model.safetensors of a drafter that fits the target.

    Args:
        target: Checkpoint folder of the target; only its config.json is read.
        out: New folder.
        num_layers: Decoder layers of the drafter.
        block_size: Tokens in a block, anchor included.
        mask_token_id: Stands for a token not known yet; None for the last id of the vocabulary.
        seed: The same seed gives the same drafter.

    Raises:
        CheckpointError: the target has no readable config.json.
        OutputError: the folder exists.
    """
    if out.exists():
        raise OutputError(f"{out} exists already. Choose another folder, or delete it.")
    config = drafter_config(_read_config(target), num_layers, block_size, mask_token_id)
    out.mkdir(parents=True)
    write_random_safetensors(out / "model.safetensors", drafter_shapes(config), "F32", seed)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def drafter_config(
    target: dict[str, Any], num_layers: int, block_size: int, mask_token_id: int | None
) -> dict[str, Any]:
    """Config of a drafter whose layers have the target's shape."""
    from dflash_export.tap_rule import default_target_layer_ids

    hidden, heads = target["hidden_size"], target["num_attention_heads"]
    rope = target.get("rope_parameters") or {"rope_type": "default", "rope_theta": target.get("rope_theta", 10000.0)}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "hidden_size": hidden,
        "intermediate_size": target["intermediate_size"],
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": target.get("num_key_value_heads") or heads,
        "head_dim": target.get("head_dim") or hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": target.get("rms_norm_eps", 1e-6),
        "attention_bias": False,
        "layer_types": ["full_attention"] * num_layers,
        "max_position_embeddings": target["max_position_embeddings"],
        "rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]},
        "vocab_size": target["vocab_size"],
        "num_target_layers": target["num_hidden_layers"],
        "block_size": block_size,
        "dflash_config": {
            "block_size": block_size,
            "mask_token_id": target["vocab_size"] - 1 if mask_token_id is None else mask_token_id,
            "target_layer_ids": default_target_layer_ids(target["num_hidden_layers"]),
        },
    }


def drafter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a drafter and its shape, [out, in] for matrices."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    taps = len(config["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, taps * hidden), "hidden_norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, query),
            "self_attn.q_norm": (head_dim,),
            "self_attn.k_norm": (head_dim,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes.update({f"layers.{i}.{name}.weight": shape for name, shape in layer.items()})
    return {**shapes, "norm.weight": (hidden,)}


def _read_config(target: Path) -> dict[str, Any]:
    path = target / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Give the folder of a Hugging Face model.") from error
    return dict(config.get("text_config", config))


@click.command(cls=DFlashCommand)
@click.argument("target", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--layers", type=click.IntRange(1), default=2, show_default=True, help="Decoder layers.")
@click.option("--block-size", type=click.IntRange(2), default=8, show_default=True, help="Anchor included.")
@click.option("--mask-token-id", type=int, help="[default: the last id of the vocabulary]")
@click.option("--seed", type=int, default=0, show_default=True)
def main(target: Path, out: Path, layers: int, block_size: int, mask_token_id: int | None, seed: int) -> None:
    """Writes a random drafter for the model in folder TARGET into the new folder OUT."""
    write_random_drafter(target, out, num_layers=layers, block_size=block_size, mask_token_id=mask_token_id, seed=seed)
    click.echo(f"{out}: a random drafter. It proposes nonsense; the target's words stay the same.")


if __name__ == "__main__":
    main()
