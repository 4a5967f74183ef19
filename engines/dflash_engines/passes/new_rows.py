"""KV rows a call adds, as outputs of their own instead of whole caches: the runtime commits them.

`new_rows.{g}`, [caches, kv_heads, S, D], holds the rows of all caches of one shape, in the order of the cache inputs
(layer 0 key, layer 0 value, layer 1 key ...); caches as long as the context come before rings. A model whose caches all
have one shape has one such output, and where its caches lie behind one another a commit is a single strided copy:
caches * kv_heads pieces of S * D numbers, T * D apart, to row `position`. The model's metadata entry `new_rows.{g}`
lists the cache inputs.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from dflash_engines.passes.graph_reading import dims, made_by
from dflash_engines.passes.graph_writing import remove_dead_nodes
from dflash_engines.passes.window_rows import is_position, is_ring_slot
from dflash_runtime.errors import EngineError

PREFIX = "new_rows."


@dataclasses.dataclass(frozen=True)
class NewRows:
    """One output of new rows."""

    output: str
    """`new_rows.{g}`"""
    caches: tuple[str, ...]
    """The cache inputs of the portable graph its entries belong to, in order."""
    kv_heads: int
    row_size: int
    """D, the last dimension."""


def read_new_rows(model: ir.Model) -> list[NewRows]:
    """What the outputs of a primitive graph hold; none for a drafter, whose block rows are scratch."""
    found = []
    for value in model.graph.outputs:
        name, shape = value.name or "", dims(value)
        if name.startswith(PREFIX):
            assert shape is not None and isinstance(shape[1], int) and isinstance(shape[3], int)
            caches = tuple(model.metadata_props[name].split(","))
            found.append(NewRows(name, caches, shape[1], shape[3]))
    return found


class NewRowsPass(ir.passes.InPlacePass):
    """Replaces TensorScatter and the `present` outputs by `new_rows` outputs; drops caches nobody reads any more.

    Args:
        keep: False for a drafter: its rows are overwritten by the next append, so they need not leave the graph.
    """

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.keep = keep

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class.

        Raises:
            EngineError: an output is a cache that no TensorScatter wrote at `position`, or a ring at its slot.
        """
        graph = model.graph
        presents = [value for value in graph.outputs if (value.name or "").startswith("present.")]
        groups: dict[tuple[bool, int | str, int | str], list[tuple[str, ir.Value]]] = {}
        for present in presents:
            cache, rows, is_ring = _written(present)
            shape = dims(rows)
            if shape is None or len(shape) != 4 or shape[0] != 1:
                raise EngineError(f"New rows of {cache} have shape {shape}; expected [1, kv_heads, S, D].")
            groups.setdefault((is_ring, shape[1], shape[3]), []).append((cache, rows))
            graph.outputs.remove(present)
        if self.keep:
            for index, (_, members) in enumerate(sorted(groups.items(), key=lambda group: group[0][0])):
                _add_output(model, f"{PREFIX}{index}", members)
        remove_dead_nodes(model)
        unread = [v for v in graph.inputs if (v.name or "").startswith("past_key_values.") and not v.uses()]
        for cache_input in unread:
            graph.inputs.remove(cache_input)
        return ir.passes.PassResult(model, bool(presents))


def _written(present: ir.Value) -> tuple[str, ir.Value, bool]:
    """(name of the cache input, the rows written to it, whether it is a ring)."""
    scatter = made_by(present, "TensorScatter")
    cache, rows, position = (scatter.inputs if scatter is not None else (None,) * 3)
    at_position = position is not None and (is_position(position) or is_ring_slot(position))
    linear = scatter is not None and scatter.attributes.get_string("mode", "linear") == "linear"
    axis = 0 if scatter is None else scatter.attributes.get_int("axis", -2)
    named = cache is not None and cache.is_graph_input() and cache.name
    if not named or rows is None or not at_position or not linear or axis not in (2, -2):
        raise EngineError(
            f"{present.name} is not a cache written by TensorScatter along its rows at `position`. Build the bundle "
            "again with this version."
        )
    assert cache is not None and cache.name is not None and position is not None
    return cache.name, rows, is_ring_slot(position)


def _add_output(model: ir.Model, name: str, members: list[tuple[str, ir.Value]]) -> None:
    first = members[0][1]
    shape = dims(first)
    assert shape is not None
    node = ir.node("Concat", [rows for _, rows in members], {"axis": 0}, name=name)
    model.graph.append(node)
    output = node.outputs[0]
    output.name, output.type = name, first.type
    output.shape = ir.Shape([len(members), shape[1], "S", shape[3]])
    model.graph.outputs.append(output)
    model.metadata_props[name] = ",".join(cache for cache, _ in members)
