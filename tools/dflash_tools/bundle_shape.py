"""The sizes of the models in a bundle, from its manifest: exact, since it lists every weight."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from dflash_runtime.bundle import Bundle, Manifest, StateTensor, WeightEntry
from dflash_runtime.errors import BundleError
from dflash_tools.model_shape import DrafterShape, KvLayer, Matrix, ModelShape, WeightForm

_DRAFTER = "drafter."
_FUSE = "drafter.fc"
_TABLES = ("embed_tokens.weight", "lm_head.weight", "_codebook")
"""What a drafter may have of its own with a row per token."""


def model_shape_of_bundle(bundle: Bundle) -> ModelShape:
    """The target's sizes; weights that are quantised in the bundle are so here."""
    facts, weights = bundle.manifest.target, _whole_weights(bundle)
    tables = {facts.embedding_weight, facts.head_weight}
    own = {name: e for name, e in weights.items() if not name.startswith(_DRAFTER) and name not in tables}
    kv = _kv_layers(facts.graph.state)
    return ModelShape(
        name=facts.name, family=facts.model_type, num_layers=facts.num_layers, hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size, num_heads=_query_rows(own, facts.hidden_size) // kv[0].head_dim,
        head_dim=kv[0].head_dim, num_kv_heads=kv[0].kv_heads, intermediate_size=_widest(own, facts.hidden_size),
        matrices=_matrices(bundle, own),
        vector_elements=sum(_elements(e) for e in own.values() if len(e.shape) < 2),
        embedding_elements=_elements(weights[facts.embedding_weight]),
        head_elements=0 if facts.head_weight == facts.embedding_weight else _elements(weights[facts.head_weight]),
        kv_layers=kv, max_position_tokens=facts.max_position_tokens, stored_precision=bundle.manifest.precision,
        head_form=stored_form(bundle.manifest, facts.head_weight),
    )  # fmt: skip


def drafter_shape_of_bundle(bundle: Bundle, target: ModelShape) -> DrafterShape:
    """The drafter's sizes.

    Raises:
        BundleError: the bundle has no drafter.
    """
    facts, weights = bundle.manifest.drafter, _whole_weights(bundle)
    if facts is None:
        raise BundleError(f"{bundle.path} has no drafter. Add one with: dflash-export add-drafter BUNDLE DRAFTER")
    own = {name: e for name, e in weights.items() if name.startswith(_DRAFTER) and not name.startswith(_FUSE)}
    tables = {name: own.pop(name) for name in list(own) if name.endswith(_TABLES)}
    kv = _kv_layers(facts.context_graph.state)
    body = ModelShape(
        name=facts.name, family="dflash", num_layers=facts.num_layers, hidden_size=facts.hidden_size,
        vocab_size=target.vocab_size, num_heads=_query_rows(own, facts.hidden_size) // kv[0].head_dim,
        head_dim=kv[0].head_dim, num_kv_heads=kv[0].kv_heads, intermediate_size=_widest(own, facts.hidden_size),
        matrices=_matrices(bundle, own), vector_elements=sum(_elements(e) for e in own.values() if len(e.shape) < 2),
        embedding_elements=0, head_elements=sum(_elements(e) for e in tables.values()), kv_layers=kv,
        max_position_tokens=target.max_position_tokens, head_form=_one_form(bundle, tables),
    )  # fmt: skip
    (fuse,) = _matrices(bundle, {name: e for name, e in weights.items() if name.startswith(_FUSE)})
    fuse = dataclasses.replace(fuse, quantisable=False)
    return DrafterShape(body, fuse, facts.block_size, len(bundle.manifest.taps.layer_ids))


def stored_form(manifest: Manifest, weight: str) -> WeightForm | None:
    """How a bundle holds a weight that is quantised in it; None for one in floats."""
    facts = manifest.quantized.get(weight)
    if facts is None:
        return None
    kind = "fp8" if manifest.weights[weight].dtype == "F8_E4M3" else f"int{facts.bits}"
    return WeightForm(kind, facts.group_size, facts.zero_points is None)


def _one_form(bundle: Bundle, weights: Iterable[str]) -> WeightForm | None:
    """Of a drafter's own tables: that of its head, the codebooks being read by row and never quantised."""
    found = (stored_form(bundle.manifest, name) for name in weights)
    return next((form for form in found if form is not None), None)


def _whole_weights(bundle: Bundle) -> Mapping[str, WeightEntry]:
    """Every weight by its values, without the scales and zero points that belong to them."""
    facts = bundle.manifest.quantized.values()
    parts = {name for one in facts for name in (one.scales, one.zero_points)}
    return {name: entry for name, entry in bundle.manifest.weights.items() if name not in parts}


def _kv_layers(state: Iterable[StateTensor]) -> tuple[KvLayer, ...]:
    """One entry a layer; keys and values of one layer have one shape here: [B, kv_heads, T, head_dim]."""
    keys = [tensor for tensor in state if tensor.input.endswith(".key")]
    return tuple(KvLayer(int(t.shape[1]), int(t.shape[3]), t.window_tokens) for t in keys)


def _matrices(bundle: Bundle, own: Mapping[str, WeightEntry]) -> tuple[Matrix, ...]:
    """Weights of two or more axes; leading axes, such as experts, count as so many matrices."""
    return tuple(
        Matrix(
            entry.shape[-2], entry.shape[-1], math.prod(entry.shape[:-2]),
            modules=(name.removesuffix(".weight").removeprefix(_DRAFTER),), form=stored_form(bundle.manifest, name),
        )
        for name, entry in own.items() if len(entry.shape) > 1
    )  # fmt: skip


def _query_rows(own: Mapping[str, WeightEntry], hidden_size: int) -> int:
    """Width of all query heads; a model that fuses q, k and v has, as good as always, its hidden size."""
    return next((e.shape[0] for name, e in own.items() if name.endswith("q_proj.weight")), hidden_size)


def _widest(own: Mapping[str, WeightEntry], hidden_size: int) -> int:
    """The longest side of any linear weight: the MLP's inner size, and more where gate and up are fused."""
    return max((max(e.shape) for e in own.values() if len(e.shape) > 1), default=hidden_size)


def _elements(entry: WeightEntry) -> int:
    return math.prod(entry.shape)
