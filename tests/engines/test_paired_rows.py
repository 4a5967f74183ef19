"""Attention over a row alone that gives the bits it gives inside a block, and which graphs it is worth it for."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from dflash_engines.passes.paired_rows import PairedRowsPass, products_give_equal_rows

HEADS, KV_HEADS, D, T = 4, 2, 16, 48
WIDTH = (HEADS + 2 * KV_HEADS) * D
FLOAT, INT32, INT64 = ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64
RNG = np.random.default_rng(8)


def value(name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def constant(name: str, array: Any) -> ir.Value:
    tensor = ir.Tensor(array, name=name)
    return ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)


def attention(packed: bool, rotates: bool, window: int) -> ir.Model:
    """One GroupQueryAttention and what reads it."""
    widths = {"qkv": WIDTH} if packed else {"q": HEADS * D, "k": KV_HEADS * D, "v": KV_HEADS * D}
    rows = [value(name, FLOAT, 1, "S", width) for name, width in widths.items()]
    caches = [value(name, FLOAT, 1, KV_HEADS, T, D) for name in ("past_k", "past_v")]
    lengths = [value("last", INT32, 1), value("total", INT32)]
    tables = [value(name, FLOAT, "N", D // 2) for name in ("cos", "sin")] if rotates else []
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": int(rotates), "local_window_size": window}
    kernel = ir.node(
        "GroupQueryAttention", [*rows, *([None, None] if packed else []), *caches, *lengths, *tables], attributes,
        domain="com.microsoft", num_outputs=3,
    )
    shape = (1, "S", HEADS * D)
    sizes = (shape, *[(1, KV_HEADS, T, D)] * 2)
    for output, name, size in zip(kernel.outputs, ("y", "new_k", "new_v"), sizes, strict=True):
        output.name, output.type, output.shape = name, ir.TensorType(FLOAT), ir.Shape(size)
    reader = ir.node("Mul", [kernel.outputs[0], kernel.outputs[0]])
    reader.outputs[0].name, reader.outputs[0].type = "squares", ir.TensorType(FLOAT)
    reader.outputs[0].shape = ir.Shape(shape)
    made = ir.Graph([*rows, *caches, *lengths, *tables], [reader.outputs[0], *kernel.outputs[1:]],
                    nodes=[kernel, reader], name="g", opset_imports={"": 23, "com.microsoft": 1})  # fmt: skip
    return ir.Model(made, ir_version=10)


def read(model: ir.Model, past: int, parts: list[int], packed: bool, rotates: bool) -> tuple[Any, Any]:
    """Squares of so many rows at a time, and the keys' cache up to the last of them."""
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    noise = np.random.default_rng(past)
    k, v = (noise.standard_normal((1, KV_HEADS, T, D)).astype(np.float32) for _ in range(2))
    rows = noise.standard_normal((1, sum(parts), WIDTH)).astype(np.float32)
    angles = np.arange(T)[:, None] * 0.3 ** np.arange(D // 2)
    found, start = [], 0
    for count in parts:
        part, total = rows[:, start : start + count], past + start + count
        q_end, k_end = HEADS * D, (HEADS + KV_HEADS) * D
        given: dict[str, Any] = {"qkv": part} if packed else {
            "q": part[..., :q_end].copy(), "k": part[..., q_end:k_end].copy(), "v": part[..., k_end:].copy()
        }
        given |= {"past_k": k, "past_v": v, "last": np.array([total - 1], np.int32), "total": np.array(total, np.int32)}
        if rotates:
            given |= {name: np.float32(f(angles[:total])) for name, f in (("cos", np.cos), ("sin", np.sin))}
        squares, k, v = session.run(["squares", "new_k", "new_v"], given)
        found.append(squares)
        start += count
    return np.concatenate(found, 1), k[:, :, : past + start]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("window", [-1, 5])
def test_a_row_alone_is_that_of_a_block(packed: bool, rotates: bool, window: int) -> None:
    for past in (0, 7, 32, T - 8):  # of the last the added row is the last of the cache, which must be room enough
        count = 7
        model = attention(packed, rotates, window)
        block, keys = read(model, past, [count], packed, rotates)
        assert PairedRowsPass()(model).modified
        for parts in ([count], [1] * count, [1, 2, 1, 3]):
            found, cached = read(model, past, parts, packed, rotates)
            assert np.array_equal(found, block) and np.array_equal(cached, keys), (past, parts)


def products(*kinds: str) -> ir.Model:
    """Products one behind the other: `float`, or bits and inputs in a block as `4x32`."""
    current = x = value("x", FLOAT, 1, "S", 128)
    nodes, weights = [], []
    for number, kind in enumerate(kinds):
        if kind == "float":
            weights.append(constant(f"w{number}", np.zeros((128, 128), np.float32)))
            nodes.append(ir.node("MatMul", [current, weights[-1]]))
        else:
            bits, block = map(int, kind.split("x"))
            shape = (128, 128 // block, block * bits // 8)
            weights.append(constant(f"w{number}", RNG.integers(0, 256, shape, np.uint8)))
            weights.append(constant(f"s{number}", np.ones((128, 128 // block), np.float32)))
            facts = {"K": 128, "N": 128, "bits": bits, "block_size": block, "accuracy_level": 4}
            nodes.append(ir.node("MatMulNBits", [current, *weights[-2:]], facts, domain="com.microsoft"))
        current = nodes[-1].outputs[0]
        current.type, current.shape = ir.TensorType(FLOAT), x.shape
    current.name = "y"
    made = ir.Graph([x], [current], nodes=nodes, initializers=weights, name="g",
                    opset_imports={"": 23, "com.microsoft": 1})  # fmt: skip
    return ir.Model(made, ir_version=10)


@pytest.mark.parametrize(
    ("kinds", "equal"),
    [
        (("4x32", "8x32", "8x64"), True),
        (("4x16", "float"), True),  # a head: nothing is rounded behind it
        (("4x64",), False),
        (("4x32", "8x128"), False),
        (("float", "4x32"), False),
    ],
)
def test_whose_rows_have_the_same_bits(kinds: tuple[str, ...], equal: bool) -> None:
    model = products(*kinds)
    assert products_give_equal_rows(model) == equal
    if equal and "float" not in kinds:
        session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
        x = RNG.standard_normal((1, 9, 128)).astype(np.float32)
        alone = [session.run(None, {"x": x[:, row : row + 1]})[0] for row in range(9)]
        assert np.array_equal(np.concatenate(alone, 1), session.run(None, {"x": x})[0])


def test_other_graphs_stay_as_they_are() -> None:
    model = products("4x32")
    assert not PairedRowsPass()(model).modified
