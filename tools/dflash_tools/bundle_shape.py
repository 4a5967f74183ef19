"""The sizes of the models in a bundle, from its manifest: exact, since it lists every weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from dflash_runtime.bundle import Bundle, StateTensor, WeightEntry
from dflash_runtime.errors import BundleError
from dflash_tools.model_shape import DrafterShape, KvLayer, Matrix, ModelShape

_DRAFTER = "drafter."
_FUSE = "drafter.fc"
_TABLES = ("embed_tokens.weight", "lm_head.weight", "_codebook")
"""What a drafter may have of its own with a row per token."""
_FLOATS = ("F32", "F16", "BF16")


def model_shape_of_bundle(bundle: Bundle) -> ModelShape:
    """The target's sizes.

    Raises:
        BundleError: its weights are quantised, so that their stored shapes are no longer the model's.
    """
    facts, weights = bundle.manifest.target, _float_weights(bundle)
    tables = {facts.embedding_weight, facts.head_weight}
    own = {name: e for name, e in weights.items() if not name.startswith(_DRAFTER) and name not in tables}
    kv = _kv_layers(facts.graph.state)
    return ModelShape(
        name=facts.name, family=facts.model_type, num_layers=facts.num_layers, hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size, num_heads=_query_rows(own, facts.hidden_size) // kv[0].head_dim,
        head_dim=kv[0].head_dim, num_kv_heads=kv[0].kv_heads, intermediate_size=_widest(own, facts.hidden_size),
        matrices=_matrices(own.values()),
        vector_elements=sum(_elements(e) for e in own.values() if len(e.shape) < 2),
        embedding_elements=_elements(weights[facts.embedding_weight]),
        head_elements=0 if facts.head_weight == facts.embedding_weight else _elements(weights[facts.head_weight]),
        kv_layers=kv, max_position_tokens=facts.max_position_tokens, stored_precision=bundle.manifest.precision,
    )  # fmt: skip


def drafter_shape_of_bundle(bundle: Bundle, target: ModelShape) -> DrafterShape:
    """The drafter's sizes.

    Raises:
        BundleError: the bundle has no drafter, or its weights are quantised.
    """
    facts, weights = bundle.manifest.drafter, _float_weights(bundle)
    if facts is None:
        raise BundleError(f"{bundle.path} has no drafter. Add one with: dflash-export add-drafter BUNDLE DRAFTER")
    own = {name: e for name, e in weights.items() if name.startswith(_DRAFTER) and not name.startswith(_FUSE)}
    tables = [own.pop(name) for name in list(own) if name.endswith(_TABLES)]
    kv = _kv_layers(facts.context_graph.state)
    body = ModelShape(
        name=facts.name, family="dflash", num_layers=facts.num_layers, hidden_size=facts.hidden_size,
        vocab_size=target.vocab_size, num_heads=_query_rows(own, facts.hidden_size) // kv[0].head_dim,
        head_dim=kv[0].head_dim, num_kv_heads=kv[0].kv_heads, intermediate_size=_widest(own, facts.hidden_size),
        matrices=_matrices(own.values()), vector_elements=sum(_elements(e) for e in own.values() if len(e.shape) < 2),
        embedding_elements=0, head_elements=sum(_elements(e) for e in tables), kv_layers=kv,
        max_position_tokens=target.max_position_tokens,
    )  # fmt: skip
    rows, columns = next(e.shape for name, e in weights.items() if name.startswith(_FUSE))
    taps = len(bundle.manifest.taps.layer_ids)
    return DrafterShape(body, Matrix(rows, columns, quantisable=False), facts.block_size, taps)


def _float_weights(bundle: Bundle) -> Mapping[str, WeightEntry]:
    for name, entry in bundle.manifest.weights.items():
        if entry.dtype not in _FLOATS:
            raise BundleError(
                f"{bundle.path} stores {name} as {entry.dtype}: it is quantised already. Plan from the checkpoint it "
                f"was built from, {bundle.manifest.target.source.id}."
            )
    return bundle.manifest.weights


def _kv_layers(state: Iterable[StateTensor]) -> tuple[KvLayer, ...]:
    """One entry a layer; keys and values of one layer have one shape here: [B, kv_heads, T, head_dim]."""
    keys = [tensor for tensor in state if tensor.input.endswith(".key")]
    return tuple(KvLayer(int(t.shape[1]), int(t.shape[3]), t.window_tokens) for t in keys)


def _matrices(entries: Iterable[WeightEntry]) -> tuple[Matrix, ...]:
    """Weights of two or more axes; leading axes, such as experts, count as so many matrices."""
    shapes = [entry.shape for entry in entries if len(entry.shape) > 1]
    return tuple(Matrix(shape[-2], shape[-1], math.prod(shape[:-2])) for shape in shapes)


def _query_rows(own: Mapping[str, WeightEntry], hidden_size: int) -> int:
    """Width of all query heads; a model that fuses q, k and v has, as good as always, its hidden size."""
    return next((e.shape[0] for name, e in own.items() if name.endswith("q_proj.weight")), hidden_size)


def _widest(own: Mapping[str, WeightEntry], hidden_size: int) -> int:
    """The longest side of any linear weight: the MLP's inner size, and more where gate and up are fused."""
    return max((max(e.shape) for e in own.values() if len(e.shape) > 1), default=hidden_size)


def _elements(entry: WeightEntry) -> int:
    return math.prod(entry.shape)
