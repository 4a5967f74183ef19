"""Queries, keys and values by one product, where their weights lie side by side in a file."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from dflash_engines.passes.graph_reading import dims, made_by
from dflash_engines.passes.graph_writing import MICROSOFT_DOMAIN, emit, remove_dead_nodes

_PLAIN_PRODUCT = {"alpha": 1.0, "transA": 0, "transB": 1}
_KINDS = (ir.DataType.FLOAT, ir.DataType.UINT8)


class PackProjectionsPass(ir.passes.InPlacePass):
    """Three FusedMatMul or MatMulNBits (and Add of a bias) of one input -> one that GroupQueryAttention reads as it is.

    The packed weight is the span of the file that holds the three, so nothing is copied. Weights that are not stored
    in fp32 are bound by name when a session opens, one by one; they are left alone, except that the scales of
    quantised ones are put together then. So are projections with anything
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
    if x is None or shape is None or any(product.inputs[0] is not x for product in products) or not _alike(products):
        return None
    bias = _joined(kernel, biases) if biased else None
    weight = None if biased and bias is None else _joined(kernel, [product.inputs[1] for product in products])
    if weight is None:
        return None
    shape = [*shape[:-1], *(dims(weight) or [])[:1]]
    rows = _product(kernel, products, x, weight, shape)
    return rows if bias is None else emit(kernel, "Add", [rows, bias], shape=shape)


def _product(
    kernel: ir.Node, products: list[ir.Node], x: ir.Value, weight: ir.Value, shape: list[int | str]
) -> ir.Value:
    first, domain = products[0], MICROSOFT_DOMAIN
    if first.op_type == "FusedMatMul":
        return emit(kernel, "FusedMatMul", [x, weight], _PLAIN_PRODUCT, domain=domain, shape=shape)
    parts = [list(part) for part in zip(*(product.inputs[2:] for product in products), strict=True)]
    joined = [_joined(kernel, part) or emit(kernel, "Concat", part, {"axis": 0}) for part in parts]
    attributes = {name: attribute.value for name, attribute in first.attributes.items()}
    attributes["N"] = shape[-1]
    return emit(kernel, "MatMulNBits", [x, weight, *joined], attributes, domain=domain, shape=shape)


def _alike(products: list[ir.Node]) -> bool:
    """Whether products are of one kind, so that one can do the work of all."""
    first = products[0]
    names = first.attributes.keys() - {"N"}
    return all(
        product.op_type == first.op_type
        and len(product.inputs) == len(first.inputs)
        and all(product.attributes[name].value == first.attributes[name].value for name in names)
        for product in products
    )


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
    if not _is_read_once(value):
        return None, None
    if (quantized := made_by(value, "MatMulNBits", MICROSOFT_DOMAIN)) is not None:
        return quantized, bias
    product = made_by(value, "FusedMatMul", MICROSOFT_DOMAIN)
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
        whole = tensor.dtype == first.dtype and first.dtype in _KINDS and tensor.length == tensor.nbytes
        here = (tensor.location, tensor.base_dir, tensor.offset or 0) == (first.location, first.base_dir, end)
        if not whole or not here or tensor.shape.numpy()[1:] != columns:
            return None
        rows, end = rows + tensor.shape.numpy()[0], end + tensor.nbytes
    name, shape, start = f"{first.name}.packed", ir.Shape([rows, *columns]), first.offset or 0
    span = ir.ExternalTensor(
        first.location, start, end - start, first.dtype, shape=shape, name=name, base_dir=first.base_dir
    )
    value = ir.Value(name=name, shape=shape, type=ir.TensorType(first.dtype), const_value=span)
    graph.register_initializer(value)
    return value
