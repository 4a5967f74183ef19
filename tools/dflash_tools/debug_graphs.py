"""Debug engines: a bundle's graphs with inner tensors as outputs, named as the checkpoint's modules.

A tensor gets its name from the weight that makes it: what is computed with `model.layers.0.mlp.up_proj.weight` is
`model.layers.0.mlp.up_proj`, what goes into it `model.layers.0.mlp.up_proj:input`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir

from dflash_engines.half_precision import emulate_half, to_fp32
from dflash_engines.portable_graph import load_portable
from dflash_runtime.bundle import Bundle
from dflash_runtime.engine_record import engine_folder, open_engine
from dflash_runtime.weights import STORED
from dflash_runtime.window_rings import Ring
from dflash_tools.engine_precision import computes_in
from dflash_tools.int8_product_graphs import keep_activations, round_activations
from dflash_tools.ort_probe import OrtProbe, open_session, widened
from dflash_tools.reference_record import CONTEXT, DRAFTER, TARGET

INPUT = ":input"
_HIDDEN = "hidden_states."
_PRODUCTS = ("MatMul", "FusedMatMul", "Gemm", "MatMulNBits")
_PART = re.compile(r"\.(scales|zero_points|blocks|bytes|rows)\b")
"""What follows a quantised weight's name in those of its parts."""
PORTABLE = "portable"


def open_debug_probe(
    bundle: Bundle, form: str, capacity_rows: int, *, inner: bool = True, exact: bool = False,
    int8_products: bool = False, kinds: Sequence[str] = (TARGET, CONTEXT, DRAFTER),
) -> OrtProbe:
    """Opens graphs with their inner tensors in the open.

    Args:
        bundle: Whose.
        form: `portable`, or a backend whose graphs ONNX Runtime's CPU can execute.
        capacity_rows: Rows of the caches.
        inner: Show inner tensors too.
        exact: Compute in fp32: a half-precision portable graph, which is rounded as it says otherwise, and a lowered
            graph's products with quantised weights, which round their activations otherwise.
        int8_products: Round the activations of a portable graph's products with quantised weights too.
        kinds: Which graphs to open.
    """
    sessions, shown, names = dict[str, Any](), dict[str, dict[str, str]](), set[str]()
    precision, upcast, rings = bundle.manifest.precision, False, dict[str, Ring]()
    folder = bundle.path
    if form != PORTABLE:
        record = open_engine(bundle, form)
        precision = record.execution_precision if exact else computes_in(bundle, record)
        upcast, folder, rings = record.upcast, engine_folder(bundle, form), record.rings
    files = {kind: file for kind, file in bundle.manifest.graph_files().items() if kind in kinds}
    models = {k: load_portable(bundle, f) if form == PORTABLE else ir.load(folder / f) for k, f in files.items()}
    half = form == PORTABLE and precision != "fp32"
    if half:
        edit, upcast, precision = (to_fp32, True, "fp32") if exact else (emulate_half, False, precision)
    for kind, model in models.items():
        if inner:
            shown[kind] = _show(model, _named_values(bundle, files[kind], model) if form != PORTABLE else {})
        models[kind] = edit(model) if half else model
        if form != PORTABLE and exact:
            keep_activations(models[kind])
        if int8_products:
            round_activations(models[kind])
        names |= {n for n in models[kind].graph.initializers if upcast and _is_float(bundle, n)}
    wide = widened(bundle, names)
    for kind, model in models.items():
        own = {n: wide[n] for n in model.graph.initializers if n in wide}
        data: bytes = ir.to_proto(model).SerializeToString()
        sessions[kind] = open_session(data, bundle.path.resolve(), own, list(own), as_written=form == PORTABLE)
    title = f"{form} graphs" if form == PORTABLE else form
    title += ", activations in fp32" if form != PORTABLE and exact and bundle.manifest.quantized else ""
    return OrtProbe(title, precision, bundle, sessions, capacity_rows, shown, weights=wide, rings=rings)


def inner_values(model: ir.Model) -> dict[str, ir.Value]:
    """Names of inner tensors -> the values of a graph, in the graph's order; see the module."""
    found: dict[str, ir.Value] = {}
    owners: dict[int, set[str]] = {}
    for value in model.graph.initializers.values():
        outside = isinstance(value.const_value, ir.ExternalTensor)
        owners[id(value)] = {_PART.split(str(value.name))[0]} if outside else set()
    for node in model.graph:
        given = [value for value in node.inputs if value is not None]
        static = [value for value in given if id(value) in owners]
        if len(static) == len(given):
            made_of = set[str]().union(*(owners[id(value)] for value in static)) if static else set[str]()
            owners |= {id(value): made_of for value in node.outputs}
            continue
        for name, value in _named(node, given, static, owners):
            if name not in found or _is_bias(static, owners):
                found[name] = value
        found |= {value.name: value for value in node.outputs if value.name and value.name.startswith(_HIDDEN)}
    return found


def _named(
    node: ir.Node, given: list[ir.Value], static: list[ir.Value], owners: dict[int, set[str]]
) -> Iterator[tuple[str, ir.Value]]:
    weights = set[str]().union(*(owners[id(value)] for value in static)) if static else set[str]()
    modules = {weight.rpartition(".")[0] for weight in weights}
    if len(modules) != 1 or not node.outputs:
        return
    (module,) = modules
    if node.op_type in _PRODUCTS:
        yield module + INPUT, next(value for value in given if id(value) not in owners)
    yield module, node.outputs[0]


def _is_float(bundle: Bundle, name: str) -> bool:
    return name in bundle.manifest.weights and bundle.manifest.weights[name].dtype in STORED


def _is_bias(static: list[ir.Value], owners: dict[int, set[str]]) -> bool:
    return any(name.endswith(".bias") for value in static for name in owners[id(value)])


def _named_values(bundle: Bundle, file: str, lowered: ir.Model) -> dict[str, ir.Value]:
    """Inner tensors of a lowered graph that kept the name of their value in the portable one."""
    values = {value.name: value for node in lowered.graph for value in node.outputs}
    portable = inner_values(ir.load(bundle.file(file)))
    return {name: values[value.name] for name, value in portable.items() if value.name in values}


def _show(model: ir.Model, known: dict[str, ir.Value]) -> dict[str, str]:
    """Makes inner tensors outputs, by the names that are known and by those of the graph; output -> name."""
    present = {value.name for value in model.graph.outputs}
    taken = present | {value.name for value in model.graph.inputs}
    shown: dict[str, str] = {}
    for name, value in {**inner_values(model), **known}.items():
        if value.name is None or value.name in taken:
            continue
        if value.name not in shown:
            model.graph.outputs.append(value)
        shown[value.name] = value.name if value.name.startswith(_HIDDEN) else shown.get(value.name, name)
    return shown


def ancestors(model: ir.Model, names: list[str]) -> set[str]:
    """Names of all values that the given ones are computed from, themselves included."""
    values = {value.name: value for value in (*model.graph.inputs, *(v for node in model.graph for v in node.outputs))}
    waiting = [values[name] for name in names if name in values]
    seen: set[str] = set()
    while waiting:
        value = waiting.pop()
        if value.name is None or value.name in seen:
            continue
        seen.add(value.name)
        producer = value.producer()
        if producer is not None:
            waiting += [one for one in producer.inputs if one is not None]
    return seen
