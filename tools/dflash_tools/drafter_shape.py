"""The sizes of a DFlash drafter: from its config.json, or the paper's default at a target's width."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash_runtime.errors import CheckpointError, PairError
from dflash_tools.model_shape import DrafterShape, KvLayer, Matrix, ModelShape
from dflash_tools.quantized_config import HEAD, StoredForms, read_stored_forms, with_forms

DEFAULT_LAYERS = 5
DEFAULT_TAPS = 5
DEFAULT_BLOCK_SIZE = 16
COMMON_BLOCK_SIZES = (4, 8, 16)
_TAP_KEYS = ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")


def assumed_drafter(target: ModelShape, num_taps: int = DEFAULT_TAPS) -> DrafterShape:
    """The drafter of the DFlash paper (arXiv 2602.06036, five Qwen3 layers, five taps) at a target's width."""
    sizes = {
        "num_hidden_layers": DEFAULT_LAYERS,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "block_size": DEFAULT_BLOCK_SIZE,
        "target_layer_ids": list(range(min(num_taps, target.num_layers))),
    }
    return _build(sizes, {}, target, "five-layer default", assumed=True)


def read_drafter_shape(config: Mapping[str, Any], target: ModelShape, name: str) -> DrafterShape:
    """The sizes a DFlash or DFlash 2 drafter's config.json describes, in any of its layouts.

    Raises:
        UnsupportedModelError: another kind of drafter.
        CheckpointError: a size is missing or no positive number.
        PairError: its width is not the target's, or a tap lies beyond the target's layers.
    """
    from dflash_export.drafter_kinds import refuse_other_kinds
    from dflash_export.drafter_layouts import find_layout

    config = find_layout(config).to_zlab(config, name)
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"{name}: dflash_config is {type(nested).__name__} where an object is expected.")
    refuse_other_kinds(config, nested, name)
    drafter = _build(config, nested, target, name, assumed=False)
    forms = read_stored_forms(config, name)
    if forms is not None:
        drafter = _as_stored(drafter, forms)
    if drafter.body.hidden_size != target.hidden_size:
        raise PairError(
            f"{name} has hidden_size {drafter.body.hidden_size}, {target.name} has {target.hidden_size}: a drafter "
            "borrows its target's embedding. Give the drafter trained for this target."
        )
    return drafter


def _as_stored(drafter: DrafterShape, forms: StoredForms) -> DrafterShape:
    """The same drafter with its weights in the forms its checkpoint holds them in."""
    own = drafter.body
    head = forms.form(HEAD, own.hidden_size) if own.head_elements else None
    notes = tuple(f"{own.name}: {note}" for note in forms.notes)
    body = dataclasses.replace(own, matrices=with_forms(own.matrices, forms), head_form=head, notes=notes)
    return dataclasses.replace(drafter, body=body, fuse=with_forms([drafter.fuse], forms)[0])


def default_block_sizes(block_size: int) -> tuple[int, ...]:
    """The drafter's own block size and the common smaller ones, as an export takes them."""
    return tuple(sorted({block_size, *(size for size in COMMON_BLOCK_SIZES if size < block_size)}))


def _build(
    config: Mapping[str, Any], nested: Mapping[str, Any], target: ModelShape, name: str, *, assumed: bool
) -> DrafterShape:
    from dflash_export.drafter_attention import read_layer_attention

    def count(key: str, default: int | None = None) -> int:
        value = nested.get(key, config.get(key))
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{name}: {key} is {value!r} in config.json; it must be a whole number above 0.")
        return value

    H, layers, heads = count("hidden_size"), count("num_hidden_layers"), count("num_attention_heads")
    kv_heads, inner = count("num_key_value_heads", heads), count("intermediate_size")
    D, taps = count("head_dim", H // heads), _num_taps(config, nested, target, name)
    q, kv, bias = heads * D, kv_heads * D, bool(config.get("attention_bias", False))
    matrices = [
        _linear(q, H, layers, "self_attn.q_proj"), _linear(kv, H, layers, "self_attn.k_proj", "self_attn.v_proj"),
        _linear(H, q, layers, "self_attn.o_proj"), _linear(inner, H, layers, "mlp.gate_proj", "mlp.up_proj"),
        _linear(H, inner, layers, "mlp.down_proj"),
    ]  # fmt: skip
    vectors = layers * (2 * H + 2 * D + (q + 2 * kv + H if bias else 0)) + 2 * H  # hidden_norm and norm at the end
    if any(nested.get(key, config.get(key)) is not None for key in ("conv_kernel_size", "selector_rank")):
        taken, rank = count("conv_kernel_size"), count("selector_rank")  # what DFlash 2 adds
        kernel_rows = 2 * taken * (H // count("conv_group_size"))
        convs = [f"{conv}.kernel_projection" for conv in ("attention_conv", "mlp_conv")]
        matrices.append(_linear(kernel_rows, H, layers, *convs))
        matrices.append(Matrix(rank, H, modules=("candidate_selector.hidden_projection",)))
        vectors += layers * 2 * (2 * taken * H) + 2 * target.vocab_size * rank  # fixed kernels, and two codebooks
    seen = read_layer_attention(config, nested, layers, name)
    kv_layers = tuple(KvLayer(kv_heads, D, layer.window_tokens) for layer in seen)
    own_head = count("draft_vocab_size", target.vocab_size)
    head = 0 if own_head == target.vocab_size else own_head * H
    body = ModelShape(
        name=name, family="dflash", num_layers=layers, hidden_size=H, vocab_size=target.vocab_size, num_heads=heads,
        head_dim=D, num_kv_heads=kv_heads, intermediate_size=inner, matrices=tuple(matrices), vector_elements=vectors,
        embedding_elements=0, head_elements=head, kv_layers=kv_layers,
        max_position_tokens=count("max_position_embeddings", target.max_position_tokens),
    )  # fmt: skip
    width = count("target_hidden_size", H)
    fuse = Matrix(H, taps * width, quantisable=False, modules=("fc",))
    return DrafterShape(body, fuse, count("block_size", DEFAULT_BLOCK_SIZE), taps, assumed)


def _linear(rows: int, columns: int, layers: int, *names: str) -> Matrix:
    return Matrix(rows, columns, layers * len(names), modules=tuple(f"layers.{{}}.{name}" for name in names))


def _num_taps(config: Mapping[str, Any], nested: Mapping[str, Any], target: ModelShape, name: str) -> int:
    for shift, key in enumerate(_TAP_KEYS):
        ids = nested.get(key, config.get(key))
        if ids is None:
            continue
        if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
            raise CheckpointError(f"{name}: {key} is {ids!r}; it must list target layers.")
        largest = max(ids) - min(shift, 1)  # the other spellings count from the embedding
        if largest >= target.num_layers:
            last = target.num_layers - 1
            raise PairError(f"{name} taps target layer {largest}; {target.name} has layers 0 to {last}.")
        return len(ids)
    accepted = ", ".join(_TAP_KEYS)
    raise CheckpointError(f"{name} does not state which target layers are tapped. Accepted keys: {accepted}.")
