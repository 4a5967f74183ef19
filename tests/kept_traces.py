"""Keeps the traces of a test run: tracing is most of what the tests cost, and many pairs share a target or a drafter.

A trace follows from the config, the dtype and the code that traces. Builds of a run therefore get a trace that any
worker made before, as its bytes; the tests of the tracers themselves call them directly. Where a test has put
something else in place of a part of the tracing code, its trace is made anew and not kept.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import hashlib
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.onnx._internal.exporter import _registration
from transformers import PreTrainedConfig

from dflash_export import drafter_build, drafter_trace, target_trace, trace_experts, traced_file
from dflash_export.drafter_attention import LayerAttention
from dflash_export.drafter_config import DrafterConfig
from dflash_export.drafter_trace import DrafterTables
from dflash_export.hollow_model import make_hollow_model
from dflash_export.target_trace import TracedTarget
from dflash_export.trace_hooks import ATTENTION_NAME
from dflash_export.trace_share import TraceShare
from dflash_export.weight_store import Progress


def keep_traces(folder: Path) -> None:
    """Makes every build of this process take and leave its traces in `folder`."""
    traces = KeptTraces(folder)
    traced_file.trace_target = traces.target
    drafter_build.trace_context = traces.context
    drafter_build.trace_drafter = traces.drafter
    traces.know_the_code()


def read_torchlib_once() -> None:
    """Every export reads the same thousand translations of torch's operators again, which no trace alters."""
    read = _registration.ONNXRegistry.from_torchlib
    _registration.ONNXRegistry.from_torchlib = staticmethod(functools.cache(read))


class KeptTraces:
    """The three tracers, each asked once for the same."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._code: dict[tuple[str, str], object] = {}

    def know_the_code(self) -> None:
        """Takes the code of the tracers as it is now for the one that traces are kept of."""
        self._code = _code_now()

    def target(self, config: PreTrainedConfig, dtype: torch.dtype, progress: Progress | None = None) -> TracedTarget:
        """As `trace_target`."""
        made: list[TracedTarget] = []

        def make() -> tuple[ir.Model, dict[str, Any]]:
            made.append(target_trace.trace_target(config, dtype, progress))
            facts = {f.name: getattr(made[0], f.name) for f in dataclasses.fields(TracedTarget)}
            return facts.pop("model"), {name: value for name, value in facts.items() if name != "module"}

        settings = {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}
        model, facts = self._kept(make, "target", type(config).__name__, sorted(settings.items()), dtype)
        if made:
            return dataclasses.replace(made[0], model=model)
        TraceShare(progress, facts["num_layers"]).finished()
        module = make_hollow_model(config, dtype, FakeTensorMode(allow_non_fake_inputs=True), ATTENTION_NAME)
        return TracedTarget(model=model, module=module, **facts)

    def context(self, config: DrafterConfig, dtype: torch.dtype, taps_dtype: torch.dtype | None = None) -> ir.Model:
        """As `trace_context`; a context is rows of keys and values, whatever the block's tokens see and say of it."""
        layers = (LayerAttention(causal=False, window_tokens=None),) * config.num_layers
        config = dataclasses.replace(
            _what_is_traced(config), layers=layers, input_embedding_scale=1.0, output_multiplier=1.0,
            final_logit_softcapping=None, draft_vocab_size=None,
        )  # fmt: skip
        return self._kept(
            lambda: (drafter_trace.trace_context(config, dtype, taps_dtype), {}), "context", config, dtype, taps_dtype
        )[0]

    def drafter(self, config: DrafterConfig, tables: DrafterTables, dtype: torch.dtype) -> ir.Model:
        """As `trace_drafter`."""
        config = _what_is_traced(config)
        ids = None if tables.target_ids is None else tables.target_ids.tolist()
        return self._kept(
            lambda: (drafter_trace.trace_drafter(config, tables, dtype), {}),
            "drafter", config, tables.embedding_weight, tables.head_weight, tables.vocab_size, ids, dtype,
        )[0]  # fmt: skip

    def _kept(self, make: Callable[[], tuple[ir.Model, dict[str, Any]]], *key: Any) -> tuple[ir.Model, dict[str, Any]]:
        now = _code_now()
        if any(now.get(name) is not value for name, value in self._code.items()):
            return make()
        file = self._folder / hashlib.sha256(repr(key).encode()).hexdigest()
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                model, facts = make()
                temporary = file.with_suffix(".partial")
                temporary.write_bytes(pickle.dumps((pack(model), facts)))
                temporary.replace(file)
        packed, facts = pickle.loads(file.read_bytes())
        return unpack(*packed), facts


def _what_is_traced(config: DrafterConfig) -> DrafterConfig:
    """The drafter without the facts that are of no concern to its graphs; the tracer gets no more than this."""
    return dataclasses.replace(
        config, layout="", architecture="", num_target_layers=None, mask_token_id=0, block_size=0, made_for=None,
        unknown_keys=(), notes=(),
    )  # fmt: skip


def _code_now() -> dict[tuple[str, str], object]:
    """Every function, class, part of a class and constant of the tracers and of what they use of the project."""
    found: dict[str, ModuleType] = {}
    waiting = {module.__name__ for module in (target_trace, drafter_trace, trace_experts)}
    while waiting:
        module = sys.modules[waiting.pop()]
        found[module.__name__] = module
        used = {getattr(value, "__module__", None) or "" for value in vars(module).values()}
        waiting |= {name for name in used if name.startswith("dflash_export.")} - found.keys()
    return {(module.__name__, name): value for module in found.values() for name, value in _definitions(module)}


def _definitions(module: ModuleType) -> Iterator[tuple[str, object]]:
    for name, value in vars(module).items():
        if not name.startswith("__"):
            yield name, value
        if inspect.isclass(value) and value.__module__ == module.__name__:
            # What Python itself adds to a class, such as __slotnames__ when it copies one, cannot be called.
            yield from ((f"{name}.{p}", v) for p, v in vars(value).items() if callable(v) or not p.startswith("__"))


def pack(model: ir.Model) -> tuple[bytes, list[str], list[str]]:
    """A graph as bytes, its hollow initializers as inputs, which ONNX can write; and the order it had."""
    graph = model.graph
    order = list(graph.initializers)
    hollow = [name for name in order if graph.initializers[name].const_value is None]
    graph.inputs.extend([graph.initializers.pop(name) for name in hollow])
    return ir.to_proto(model).SerializeToString(), order, hollow


def unpack(data: bytes, order: list[str], hollow: list[str]) -> ir.Model:
    model = ir.from_proto(onnx.ModelProto.FromString(data))
    graph = model.graph
    values = {**graph.initializers, **{str(v.name): v for v in graph.inputs if v.name in set(hollow)}}
    for name in hollow:
        graph.inputs.remove(values[name])
    graph.initializers.clear()
    for name in order:
        graph.initializers[name] = values[name]
    return model

