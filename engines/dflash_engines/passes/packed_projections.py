"""Queries, keys and values by one product, where their weights lie side by side in a file."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from dflash_engines.passes.graph_reading import dims, made_by
from dflash_engines.passes.graph_writing import MICROSOFT_DOMAIN, emit, remove_dead_nodes

_PLAIN_PRODUCT = {"alpha": 1.0, "transA": 0, "transB": 1}


class PackProjectionsPass(ir.passes.InPlacePass):
    """Three FusedMatMul (and Add of a bias) of one input -> one, whose result GroupQueryAttention reads as it is.

    The packed weight is the span of the file that holds the three, so nothing is copied. Weights that are not stored
    in fp32 are bound by name when a session opens, one by one; they are left alone. So are projections with anything
    else, as a norm or a rotation of its own, between product and attention.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        packed = 0
        for kernel in list(model.graph):
            if kernel.op_type == "GroupQueryAttention" and kernel.domain == MICROSOFT_DOMAIN:
                rows = _packed(kernel)
                if rows is not None:
                    for index, value in enumerate((rows, None, None)):
                        kernel.replace_input_with(index, value)
                    packed += 1
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, packed > 0)


def _packed(kernel: ir.Node) -> ir.Value | None:
    """One product in front of `kernel` with all that it reads, [1, S, (heads + 2 * kv_heads) * D]."""
    found = [_product_and_bias(value) for value in kernel.inputs[:3]]
    products, biases = [product for product, _ in found if product is not None], [bias for _, bias in found]
    biased = biases != [None] * 3
    x = products[0].inputs[0] if len(products) == 3 else None
    shape = dims(x)
    if x is None or shape is None or any(product.inputs[0] is not x for product in products):
        return None
    weight = _joined(kernel, [product.inputs[1] for product in products])
    bias = _joined(kernel, biases) if biased else None
    if weight is None or (biased and bias is None):
        return None
    shape = [*shape[:-1], *(dims(weight) or [])[:1]]
    rows = emit(kernel, "FusedMatMul", [x, weight], _PLAIN_PRODUCT, domain=MICROSOFT_DOMAIN, shape=shape)
    return rows if bias is None else emit(kernel, "Add", [rows, bias], shape=shape)


def _product_and_bias(value: ir.Value | None) -> tuple[ir.Node | None, ir.Value | None]:
    """The product that makes `value` and the bias added to it, where it is made for one reader in this way."""
    bias = None
    add = made_by(value, "Add") if _is_read_once(value) else None
    if add is not None:
        stored = [v for v in add.inputs if v is not None and v.is_initializer() and len(dims(v) or ()) == 1]
        if len(stored) != 1:
            return None, None
        bias = stored[0]
        value = add.inputs[1 if add.inputs[0] is bias else 0]
    product = made_by(value, "FusedMatMul", MICROSOFT_DOMAIN) if _is_read_once(value) else None
    plain = product is not None and all(product.attributes[name].value == n for name, n in _PLAIN_PRODUCT.items())
    return (product, bias) if plain else (None, None)


def _is_read_once(value: ir.Value | None) -> bool:
    return value is not None and len(value.uses()) == 1 and not value.is_graph_output()


def _joined(kernel: ir.Node, parts: Sequence[ir.Value | None]) -> ir.Value | None:
    """One initializer over the rows of three that follow each other in a file and have no other reader."""
    graph = kernel.graph
    tensors = [part.const_value for part in parts if part is not None and _is_read_once(part)]
    stored = [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]
    assert graph is not None
    if len(stored) != len(parts):
        return None
    first = stored[0]
    columns, rows, end = first.shape.numpy()[1:], 0, first.offset or 0
    for tensor in stored:
        # A half that is only typed fp32 is shorter than its type says.
        whole = tensor.dtype == ir.DataType.FLOAT and tensor.length == tensor.nbytes
        here = (tensor.location, tensor.base_dir, tensor.offset or 0) == (first.location, first.base_dir, end)
        if not whole or not here or tensor.shape.numpy()[1:] != columns:
            return None
        rows, end = rows + tensor.shape.numpy()[0], end + tensor.nbytes
    name, shape, start = f"{first.name}.packed", ir.Shape([rows, *columns]), first.offset or 0
    span = ir.ExternalTensor(
        first.location, start, end - start, ir.DataType.FLOAT, shape=shape, name=name, base_dir=first.base_dir
    )
    value = ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.FLOAT), const_value=span)
    graph.register_initializer(value)
    return value
