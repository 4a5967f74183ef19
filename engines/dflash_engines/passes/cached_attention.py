"""Recognises the portable form of attention over a preallocated cache."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from dflash_engines.passes.graph_reading import dims, integer_attribute, made_by
from dflash_engines.passes.head_rows import has_known_heads
from dflash_runtime.errors import EngineError


@dataclasses.dataclass(frozen=True)
class CachedAttention:
    """One Attention node that reads what two TensorScatter nodes wrote."""

    node: ir.Node
    key_scatter: ir.Node
    value_scatter: ir.Node
    length: ir.Value
    """[1] valid rows, the new ones included."""
    mask: ir.Value | None
    layer: str
    causal: bool
    window_tokens: int | None
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def query(self) -> ir.Value:
        """Queries, [1, heads, S, D]."""
        value = self.node.inputs[0]
        assert value is not None
        return value

    @property
    def needs_mask(self) -> bool:
        """The pattern is neither plain causal nor a causal window, so only the mask says it."""
        return not self.causal or (self.mask is not None and self.window_tokens is None)


def find_cached_attention(model: ir.Model) -> list[CachedAttention]:
    """All Attention nodes that read a cache as it is, in order; those over keys derived from one are left alone.

    Raises:
        EngineError: an Attention node does not have the form of the graph contract.
    """
    return [
        _read(node)
        for node in model.graph
        if node.op_type == "Attention" and node.domain == "" and "dflash.derived" not in node.metadata_props
    ]


def _read(node: ir.Node) -> CachedAttention:
    inputs = [*node.inputs, *[None] * (7 - len(node.inputs))]
    query, key, value, mask, past_key, past_value, length = inputs
    layer = node.metadata_props.get("dflash.layer", "?")
    scatters = [made_by(rows, "TensorScatter") for rows in (key, value)]
    shapes_known = all(has_known_heads(tensor) for tensor in (query, key, value))
    if past_key is not None or past_value is not None or length is None or None in scatters or not shapes_known:
        raise EngineError(
            f"Attention of layer {layer} does not read a preallocated cache written by TensorScatter. "
            "Build the bundle again with this version."
        )
    missing = [name for name in ("dflash.causal", "dflash.window") if name not in node.metadata_props]
    if missing:
        raise EngineError(f"Attention of layer {layer} lacks {missing}. Build the bundle again with this version.")
    window = node.metadata_props["dflash.window"]
    heads, kv_heads = (_number(tensor, 1) for tensor in (query, key))
    key_scatter, value_scatter = scatters
    assert key_scatter is not None and value_scatter is not None
    return CachedAttention(
        node=node,
        key_scatter=key_scatter,
        value_scatter=value_scatter,
        length=length,
        mask=mask,
        layer=layer,
        causal=node.metadata_props["dflash.causal"] == "1",
        window_tokens=int(window) if window else None,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_number(query, 3),
        value_dim=_number(value, 3),
    )


def is_node_causal(attention: CachedAttention) -> bool:
    """Whether the node itself applies the causal rule."""
    return integer_attribute(attention.node, "is_causal", 0) == 1


def read_capacity_from_past(graph: ir.Graph) -> None:
    """A cache has the same shape before and after a write; read before it, the shape does not tie up the node."""
    for node in graph:
        scatter = made_by(node.inputs[0], "TensorScatter") if node.op_type == "Shape" else None
        if scatter is not None:
            node.replace_input_with(0, scatter.inputs[0])


def writes_own_caches(attention: CachedAttention) -> bool:
    """Whether its writes go from a graph input to a graph output at `position`, and nothing else reads them."""
    scatters = (attention.key_scatter, attention.value_scatter)
    add = made_by(attention.length, "Add")
    at_position = add is not None and all(scatter.inputs[2] in add.inputs for scatter in scatters)
    return at_position and all(_is_own_cache(scatter, attention.node) for scatter in scatters)


def _is_own_cache(scatter: ir.Node, attention: ir.Node) -> bool:
    past, present = scatter.inputs[0], scatter.outputs[0]
    only_reader = all(user is attention for user in present.consumers())
    return past is not None and past.is_graph_input() and present.is_graph_output() and only_reader


def _number(value: ir.Value | None, axis: int) -> int:
    shape = dims(value)
    assert shape is not None
    number = shape[axis]
    assert isinstance(number, int)
    return number
