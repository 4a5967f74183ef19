"""Cuts a graph into pieces whose weights fit into little memory, and finds products that can be computed in parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping

import onnx
from onnx import helper

PIECE_ELEMENTS = 1 << 24
"""Weights of one piece, and of one part of a product; a weight of another use that is larger is a piece by itself."""


@dataclasses.dataclass
class Piece:
    """Nodes that are opened together."""

    nodes: list[onnx.NodeProto]
    sliced: str | None = None
    """A matrix of which a few rows at a time are given; its product is put together along the last axis."""


def reads(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """Names the nodes read, those inside bodies of control flow included."""
    for node in nodes:
        yield from filter(None, node.input)
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from reads(body.node)


def cut_graph(
    graph: onnx.GraphProto, weights: Mapping[str, onnx.TensorProto], caches: Collection[str] = ()
) -> list[Piece]:
    """Orders the nodes into pieces.

    Each piece takes every node that can run and has room. What only converts a cache comes with the node that writes
    into it, so that a cache is read and written in one piece; what only turns or converts a weight comes with the node
    that reads it, or the weights of all layers would be turned at the beginning and wait.

    Args:
        graph: Topologically sorted.
        weights: The initializers that count, by name.
        caches: Inputs that are caches.
    """
    left = _with_cache_reads(_with_products(graph, weights), caches, weights)
    known = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    pieces = []
    while left:
        piece, waiting, held = Piece([]), [], set[str]()
        for step in left:
            inputs, made = set(reads(step.nodes)), {name for node in step.nodes for name in node.output}
            wanted = held | (inputs & weights.keys())
            small = sum(math.prod(weights[name].dims) for name in wanted) <= PIECE_ELEMENTS
            fits = not piece.nodes if step.sliced else not piece.sliced and (wanted == held or not held or small)
            if fits and known >= inputs - made:
                piece.nodes, piece.sliced, held = piece.nodes + step.nodes, step.sliced, wanted
                known |= made
            else:
                waiting.append(step)
        pieces.append(piece)
        left = waiting
    return pieces


def _with_cache_reads(steps: list[Piece], caches: Collection[str], weights: Collection[str]) -> list[Piece]:
    """Puts conversions of caches and weights before the step that reads them; a size is read off the cache itself."""
    cache_of, turned = {name: name for name in caches}, set(weights)
    waiting: dict[str, onnx.NodeProto] = {}
    kept: list[Piece] = []
    for step in steps:
        node, nodes = step.nodes[0], step.nodes
        if node.op_type in ("Cast", "Identity") and node.input[0] in cache_of:
            cache_of[node.output[0]] = cache_of[node.input[0]]
            waiting[node.output[0]] = node
            continue
        if node.op_type in ("Cast", "Identity", "Transpose") and node.input[0] in turned and len(nodes) == 1:
            turned.add(node.output[0])
            waiting[node.output[0]] = node
            continue
        if node.op_type == "Shape" and node.input[0] in cache_of:
            sized = onnx.NodeProto()
            sized.CopyFrom(node)
            sized.input[0] = cache_of[node.input[0]]
            nodes = [sized]
        front: list[onnx.NodeProto] = []
        needed = [name for name in reads(nodes) if name in waiting]
        while needed:
            front.insert(0, waiting.pop(needed[-1]))
            needed = [*needed[:-1], *(name for name in front[0].input if name in waiting)]
        kept.append(Piece([*front, *nodes], step.sliced))
    return [*kept, *(Piece([node]) for node in waiting.values())]


def _with_products(graph: onnx.GraphProto, weights: Mapping[str, onnx.TensorProto]) -> list[Piece]:
    """Single nodes, but for products of large matrices, which come with what turns and converts the matrix."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in reads([node]):
            readers.setdefault(name, []).append(node)
    products: dict[int, Piece] = {}
    inside: set[int] = set()
    outputs = {value.name for value in graph.output}
    for name, tensor in weights.items():
        if math.prod(tensor.dims) > PIECE_ELEMENTS and len(tensor.dims) == 2:
            chain = _product(name, readers, outputs)
            if chain:
                products[id(chain[-1])] = Piece(chain, name)
                inside |= {id(node) for node in chain[:-1]}
    return [products.get(id(node), Piece([node])) for node in graph.node if id(node) not in inside]


def _product(name: str, readers: Mapping[str, list[onnx.NodeProto]], outputs: Collection[str]) -> list[onnx.NodeProto]:
    """The nodes from a matrix to the one product that reads it by rows; none where it is used in another way."""
    chain: list[onnx.NodeProto] = []
    by_rows = False
    while len(readers.get(name, ())) == 1 and name not in outputs:
        node = readers[name][0]
        chain.append(node)
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        if node.op_type in ("Cast", "Identity"):
            pass
        elif node.op_type == "Transpose":
            by_rows = not by_rows
        elif node.op_type in ("MatMul", "FusedMatMul") and node.input[1] == name != node.input[0]:
            return chain if by_rows != bool(attributes.get("transB", 0)) else []
        else:
            return []
        name = node.output[0]
    return []
