"""The half-precision networks TensorRT is given, bound as the runtime binds them: every tensor has its memory."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from conftest import Make
from pairs import HALF_PAIRS
from recorded_engines import BACKENDS
from recording_device import RecordingDevice

from dflash_engines.tensorrt_plan import EngineOptions, EnginePlan
from dflash_engines.tensorrt_versions import VERSIONS
from dflash_runtime.bundle import Bundle, write_record
from dflash_runtime.device import ALIGNMENT_BYTES, Buffer
from dflash_runtime.device_backend import DeviceBackend, open_engines
from dflash_runtime.device_engine import BoundWeight, EngineProfile, GraphEngine, device_tag
from dflash_runtime.engine_record import ENGINE_RECORD_NAME
from dflash_runtime.errors import EngineError

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class BoundContext:
    """Knows its tensors by the network and checks what they are bound to."""

    def __init__(self, device: RecordingDevice, model: ir.Model, profile: EngineProfile) -> None:
        letters: dict[Any, int] = {"S": profile.rows, "b": profile.rows, "R": profile.logit_rows, "B": 1}
        letters |= {"T": profile.capacity_rows, "b-1": profile.rows - 1}
        self.device, self.sizes_bytes, self.addresses = device, dict[str, int](), dict[str, int]()
        for value in (*model.graph.inputs, *model.graph.outputs):
            assert value.name is not None and value.shape is not None and value.dtype is not None
            dims = [dim if isinstance(dim, int) else letters[str(dim)] for dim in value.shape]
            self.sizes_bytes[value.name] = int(math.prod(dims) * value.dtype.itemsize)

    def bind(self, addresses: Mapping[str, int]) -> None:
        for name, size in self.sizes_bytes.items():
            self.device.view(addresses[name], size)
            assert addresses[name] % ALIGNMENT_BYTES == 0
        self.addresses = dict(addresses)

    def enqueue(self) -> None:
        raise AssertionError("nothing here can run")


class BindingDevice(RecordingDevice):
    def open_engine(self, path: Path, profiles: Sequence[EngineProfile]) -> Any:
        model = ir.load(path)

        class Engine:
            scratch_bytes = 100

            def open_context(engine, index: int, scratch: Buffer) -> BoundContext:  # noqa: N805
                return BoundContext(self, model, profiles[index])

        return Engine()


def open_bundle(exported: Make, folder: Path, form: str, precision: str, chunk: int = 32) -> DeviceBackend:
    bundle = Bundle.open(shutil.copytree(exported(HALF_PAIRS[1]), folder / "bundle"))
    backend = BACKENDS[form]
    row = next(row for row in VERSIONS if (row.flavour, row.form) == (backend, form))
    options = EngineOptions(backend, precision=precision, prefill_chunk_tokens=chunk)
    plan = EnginePlan(bundle, options, row, "1.7.1", "8.9")
    engines_folder = bundle.path / "engines" / device_tag(backend, "8.9")
    engines_folder.mkdir(parents=True)
    engines = []
    for kind in plan.kinds:
        network = plan.network(kind)
        (engines_folder / f"{kind}.engine").write_bytes(network.onnx)
        weights = [BoundWeight(w.input, w.weight, w.dtype) for w in network.weight_inputs]
        engines.append(GraphEngine(kind, f"{kind}.engine", "key", plan.profiles(kind), weights, [], 0))
    write_record(engines_folder / ENGINE_RECORD_NAME, plan.record(engines, engines_folder))
    return open_engines(backend, bundle, BindingDevice(), 128)


@pytest.mark.parametrize("form", ["fused", "primitive"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_every_tensor_of_every_profile_has_its_memory(
    exported: Make, tmp_path: Path, form: str, precision: str
) -> None:
    backend = open_bundle(exported, tmp_path, form, precision)
    device: Any = backend.device
    device.finish()
    device.check_guards()
    graphs = list(backend._graphs.values())
    wanted = {(w.weight, w.dtype): 0 for graph in graphs for w in graph.facts.weights}
    contexts: list[Any] = [context for graph in graphs for context in graph.contexts.values()]
    assert len(contexts) >= 12 and all(context.addresses for context in contexts)
    for graph in graphs:
        for context in graph.contexts.values():
            for bound in graph.facts.weights:
                assert context.sizes_bytes[bound.input] % ITEM_BYTES[bound.dtype] == 0
                wanted[bound.weight, bound.dtype] = context.sizes_bytes[bound.input]
    uploads = sum(entry[1] for entry in device.log if entry[0] == "upload")
    assert uploads == sum(wanted.values()) + 256  # a table of block sizes
    half = {dtype for _, dtype in wanted} - {"F32"}
    assert half == {{"fp16": "F16", "bf16": "BF16"}[precision]}


def test_engines_of_another_shape_are_refused(exported: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: caches of half the size the engines read."""
    monkeypatch.setattr("dflash_runtime.device_backend._ITEM_BYTES", {"fp16": 1})
    with pytest.raises(EngineError, match=r"target engine wants \d+ bytes for past_key_values\S+ .*the bundle gives"):
        open_bundle(exported, tmp_path, "fused", "fp16")
