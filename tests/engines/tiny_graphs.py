"""Small random graphs in the portable form of the exporter, built without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


@dataclasses.dataclass(frozen=True)
class Layer:
    """How one layer attends."""

    causal: bool = True
    window: int | None = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    intermediate: int = 48
    vocab: int = 61
    layers: tuple[Layer, ...] = (Layer(), Layer())
    softcap: float = 0.0
    head_norms: bool = False
    bias: bool = False
    rope_thetas: tuple[float, ...] = (10000.0,)
    """One rotary table each; layers take them in turn."""
    rope_factor: float = 1.0
    """What the rotary tables are multiplied by."""
    precision: str = "fp32"
    seed: int = 0


class GraphMaker:
    """Collects nodes of one graph; every value has its type and shape, as the exporter leaves them."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.dtype = sizes, DTYPES[sizes.precision]
        self.random = np.random.default_rng(sizes.seed)
        self.graph = ir.Graph([], [], nodes=[], name="tiny", opset_imports={"": 24})
        self.length: ir.Value | None = None

    def op(self, kind: str, inputs: Sequence[ir.Value | None], shape: Sequence[int | str] | None,
           dtype: ir.DataType | None = None, metadata: dict[str, str] | None = None, **attributes: Any) -> ir.Value:
        node = ir.node(kind, inputs, attributes, metadata_props=metadata)
        self.graph.append(node)
        output = node.outputs[0]
        output.type = ir.TensorType(dtype or next(v.dtype for v in inputs if v is not None and v.dtype is not None))
        output.shape = None if shape is None else ir.Shape(shape)
        return output

    def constant(self, value: Any, dtype: Any = np.int64) -> ir.Value:
        return self.initializer(f"constant_{len(self.graph.initializers)}", np.array(value, dtype))

    def initializer(self, name: str, array: Any) -> ir.Value:
        if name not in self.graph.initializers:
            value = ir.Value(name=name, shape=ir.Shape(array.shape), const_value=ir.Tensor(array, name=name))
            value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
            self.graph.register_initializer(value)
        return self.graph.initializers[name]

    def weight(self, name: str, *shape: int) -> ir.Value:
        array = self.random.standard_normal(shape) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        return self.initializer(name, array.astype(np.float32).astype(self.dtype.numpy()))

    def input(self, name: str, shape: Sequence[int | str], dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self.graph.inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str) -> None:
        value.name = name
        self.graph.outputs.append(value)

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        return x if x.dtype == dtype else self.op("Cast", [x], x.shape, dtype, to=dtype)

    def linear(self, x: ir.Value, name: str, inner: int, outer: int, bias: bool = False) -> ir.Value:
        turned = self.op("Transpose", [self.weight(name, outer, inner)], [inner, outer], perm=[1, 0])
        shape = [*list(x.shape)[:-1], outer]
        y = self.op("MatMul", [x, turned], shape)
        return self.op("Add", [y, self.weight(f"{name}.bias", outer)], shape) if bias else y

    def norm(self, x: ir.Value, name: str, size: int) -> ir.Value:
        shape, one = list(x.shape), [*list(x.shape)[:-1], 1]
        wide = self.cast(x, ir.DataType.FLOAT)
        square = self.op("Pow", [wide, self.constant(2.0, np.float32)], shape)
        mean = self.op("ReduceMean", [square, self.constant([-1])], one, keepdims=1)
        root = self.op("Sqrt", [self.op("Add", [mean, self.constant(1e-5, np.float32)], one)], one)
        unit = self.op("Mul", [wide, self.op("Reciprocal", [root], one)], shape)
        return self.op("Mul", [self.weight(name, size), self.cast(unit, self.dtype)], shape)

    def positions(self, rows_of: ir.Value) -> None:
        """Positions and rotary tables of this call; `rows_of` is [1, S, ...]."""
        self.rows = self.op("Shape", [rows_of], [1], ir.DataType.INT64, start=1, end=2)
        count = self.op("Squeeze", [self.rows], [])
        steps = self.op("Range", [self.constant(0), count, self.constant(1)], ["S"])
        ids = self.op("Unsqueeze", [self.op("Add", [self.position, steps], ["S"]), self.constant([0])], [1, "S"])
        self.position_ids = ids
        column = self.cast(self.op("Unsqueeze", [ids, self.constant([2])], [1, "S", 1]), ir.DataType.FLOAT)
        self.tables = [self.rotary_tables(column, theta) for theta in self.sizes.rope_thetas]

    def rotary_tables(self, column: ir.Value, theta: float) -> list[ir.Value]:
        half = self.sizes.head_dim // 2
        frequency = self.constant(1.0 / theta ** (np.arange(half) / half), np.float32)
        angle = self.op("Mul", [column, frequency], [1, "S", half])
        angle = self.op("Concat", [angle, angle], [1, "S", 2 * half], axis=-1)
        tables = [self.op(kind, [angle], [1, "S", 2 * half]) for kind in ("Cos", "Sin")]
        if self.sizes.rope_factor != 1.0:
            factor = self.constant(self.sizes.rope_factor, np.float32)
            tables = [self.op("Mul", [t, factor], [1, "S", 2 * half]) for t in tables]
        tables = [self.cast(t, self.dtype) for t in tables]
        return [self.op("Unsqueeze", [t, self.constant([1])], [1, 1, "S", 2 * half]) for t in tables]

    def rotate(self, x: ir.Value, layer: int) -> ir.Value:
        _, heads, _, size = shape = list(x.shape)
        ends, axis, step = (0, size // 2, np.iinfo(np.int64).max), self.constant([3]), self.constant([1])
        cut = [1, heads, "S", size // 2]
        low, high = (
            self.op("Slice", [x, self.constant([ends[i]]), self.constant([ends[i + 1]]), axis, step], cut)
            for i in range(2)
        )
        turned = self.op("Concat", [self.op("Neg", [high], cut), low], shape, axis=-1)
        tables = self.tables[layer % len(self.tables)]
        products = [self.op("Mul", [v, t], shape) for v, t in zip((x, turned), tables, strict=True)]
        return self.op("Add", products, shape)

    def heads(self, x: ir.Value, count: int, size: int, norm: str | None = None) -> ir.Value:
        parts = [self.constant([1]), self.rows, self.constant([count]), self.constant([size])]
        shape = self.op("Concat", parts, [4], axis=0)
        y = self.op("Reshape", [x, shape], [1, "S", count, size])
        y = self.norm(y, norm, size) if norm and self.sizes.head_norms else y
        return self.op("Transpose", [y], [1, count, "S", size], perm=[0, 2, 1, 3])

    def scatter(self, layer: int, part: str, rows: ir.Value, size: int) -> ir.Value:
        shape = [1, self.sizes.kv_heads, "T", size]
        past = self.input(f"past_key_values.{layer}.{part}", shape, self.dtype)
        present = self.op("TensorScatter", [past, rows, self.position], shape, axis=2, mode="linear")
        self.output(present, f"present.{layer}.{part}")
        return present

    def keys_and_values(self, x: ir.Value, layer: int) -> list[ir.Value]:
        s, name = self.sizes, f"layers.{layer}"
        key = self.linear(x, f"{name}.k", s.hidden, s.kv_heads * s.head_dim, s.bias)
        value = self.linear(x, f"{name}.v", s.hidden, s.kv_heads * s.value_dim, s.bias)
        key = self.rotate(self.heads(key, s.kv_heads, s.head_dim, f"{name}.k_norm"), layer)
        value = self.heads(value, s.kv_heads, s.value_dim)
        return [self.scatter(layer, "key", key, s.head_dim), self.scatter(layer, "value", value, s.value_dim)]

    def mask(self, how: Layer, capacity_of: ir.Value) -> ir.Value | None:
        if how.window is None:
            return None
        size = self.op("Squeeze", [self.op("Shape", [capacity_of], [1], ir.DataType.INT64, start=2, end=3)], [])
        keys = self.op("Range", [self.constant(0), size, self.constant(1)], ["T"])
        rows = self.op("Unsqueeze", [self.position_ids, self.constant([1, 3])], [1, 1, "S", 1])
        shape = [1, 1, "S", "T"]
        near = self.op("Sub", [rows, self.constant(how.window)], [1, 1, "S", 1])
        mask = self.op("Greater", [keys, near], shape, ir.DataType.BOOL)
        if how.causal:
            seen = self.op("LessOrEqual", [keys, rows], shape, ir.DataType.BOOL)
            mask = self.op("And", [mask, seen], shape)
        return mask

    def attention(self, x: ir.Value, layer: int) -> ir.Value:
        s, how, name = self.sizes, self.sizes.layers[layer], f"layers.{layer}"
        query = self.heads(self.linear(x, f"{name}.q", s.hidden, s.heads * s.head_dim, s.bias), s.heads, s.head_dim,
                           f"{name}.q_norm")
        key, value = self.keys_and_values(x, layer)
        if self.length is None:
            self.length = self.op("Add", [self.position, self.rows], [1])
        mask = self.mask(how, key)
        attributes: dict[str, Any] = {"scale": s.head_dim**-0.5, "softcap": s.softcap}
        if how.causal and mask is None:
            attributes["is_causal"] = 1
        metadata = {"dflash.layer": str(layer), "dflash.causal": str(int(how.causal)),
                    "dflash.window": str(how.window or "")}
        inputs = [self.rotate(query, layer), key, value, mask, None, None, self.length]
        y = self.op("Attention", inputs, [1, s.heads, "S", s.value_dim], metadata=metadata, **attributes)
        y = self.op("Transpose", [y], [1, "S", s.heads, s.value_dim], perm=[0, 2, 1, 3])
        width = s.heads * s.value_dim
        shape = self.op("Concat", [self.constant([1]), self.rows, self.constant([width])], [3], axis=0)
        y = self.op("Reshape", [y, shape], [1, "S", width])
        return self.linear(y, f"{name}.o", width, s.hidden)

    def decoder_layer(self, x: ir.Value, layer: int) -> ir.Value:
        s, name, shape = self.sizes, f"layers.{layer}", [1, "S", self.sizes.hidden]
        x = self.op("Add", [x, self.attention(self.norm(x, f"{name}.norm", s.hidden), layer)], shape)
        n = self.norm(x, f"{name}.mlp_norm", s.hidden)
        gate, up = (self.linear(n, f"{name}.{part}", s.hidden, s.intermediate) for part in ("gate", "up"))
        inner = [1, "S", s.intermediate]
        gate = self.op("Mul", [gate, self.op("Sigmoid", [gate], inner)], inner)
        down = self.linear(self.op("Mul", [gate, up], inner), f"{name}.down", s.intermediate, s.hidden)
        return self.op("Add", [x, down], shape)

    def model(self) -> ir.Model:
        return ir.Model(self.graph, ir_version=11)


def target_model(sizes: Sizes = Sizes()) -> ir.Model:
    """A target with a tied head and one tap after each layer."""
    g, s = GraphMaker(sizes), sizes
    ids = g.input("input_ids", [1, "S"])
    g.position = g.input("position", [1])
    logit_rows = g.input("logit_rows", ["R"])
    g.positions(ids)
    x = g.op("Gather", [g.weight("embed", s.vocab, s.hidden), ids], [1, "S", s.hidden], g.dtype, axis=0)
    taps = []
    for layer in range(len(s.layers)):
        x = g.decoder_layer(x, layer)
        taps.append(x)
    g.output(g.op("Concat", taps, [1, "S", len(taps) * s.hidden], axis=-1), "taps")
    x = g.norm(g.op("Gather", [x, logit_rows], [1, "R", s.hidden], g.dtype, axis=1), "norm", s.hidden)
    logits = g.cast(g.linear(x, "embed", s.hidden, s.vocab), ir.DataType.FLOAT)
    g.output(g.op("ArgMax", [logits], [1, "R"], ir.DataType.INT64, axis=-1, keepdims=0), "token_ids")
    g.output(logits, "logits")
    return g.model()


def drafter_context_model(sizes: Sizes, taps: int = 2) -> ir.Model:
    g, s = GraphMaker(sizes), sizes
    fused = g.input("taps", [1, "S", taps * s.hidden], g.dtype)
    g.position = g.input("position", [1])
    g.positions(fused)
    x = g.norm(g.linear(fused, "fc", taps * s.hidden, s.hidden), "hidden_norm", s.hidden)
    for layer in range(len(s.layers)):
        g.keys_and_values(x, layer)
    return g.model()


def drafter_model(sizes: Sizes) -> ir.Model:
    g, s = GraphMaker(sizes), sizes
    ids = g.input("input_ids", [1, "S"])
    g.position = g.input("position", [1])
    g.positions(ids)
    x = g.op("Gather", [g.weight("embed", s.vocab, s.hidden), ids], [1, "S", s.hidden], g.dtype, axis=0)
    for layer in range(len(s.layers)):
        x = g.decoder_layer(x, layer)
    logits = g.cast(g.linear(g.norm(x, "norm", s.hidden), "embed", s.hidden, s.vocab), ir.DataType.FLOAT)
    g.output(logits, "draft_logits")
    g.output(g.op("ArgMax", [logits], [1, "S"], ir.DataType.INT64, axis=-1, keepdims=0), "draft_ids")
    return g.model()
