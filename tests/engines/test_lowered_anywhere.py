"""Graphs lowered on one processor are those of any other: a bundle may be copied with them, from x86 to ARM."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort
import pytest
from small_bundle import write_small_bundle
from test_quantized_matmul import graph

from dflash_engines import ort_cpu
from dflash_engines.ort_cpu import lower_bundle
from dflash_engines.passes.constant_reshape import ConstantReshapePass
from dflash_engines.passes.quantized_matmul import QuantizedMatMulPass
from dflash_engines.passes.quantized_rows import QuantizedRowsPass
from dflash_runtime.bundle import Bundle
from dflash_runtime.engine_record import open_engine

Files = dict[str, bytes]


def become(machine: str, patch: pytest.MonkeyPatch) -> None:
    """Whatever asks which processor this is hears of another one; sessions, which choose kernels for it, are shut."""
    cores = {"x86_64": 2, "aarch64": 6}[machine]
    name = os.uname()
    patch.setattr(os, "uname", lambda: os.uname_result((*name[:4], machine)))
    patch.setattr(os, "cpu_count", lambda: cores)
    patch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    for ask in ("machine", "processor"):
        patch.setattr(platform, ask, lambda: machine)

    def shut(*arguments: object, **options: object) -> None:
        raise AssertionError("lowering opens no session")

    patch.setattr(ort, "InferenceSession", shut)


def on_both(lower: Callable[[], Files]) -> tuple[Files, Files]:
    found = []
    for machine in ("x86_64", "aarch64"):
        with pytest.MonkeyPatch.context() as patch:
            become(machine, patch)
            found.append(lower())
    return found[0], found[1]


def engine_files(bundle: Path) -> Files:
    """Its engine, made anew, record included."""
    shutil.rmtree(bundle / "engines", ignore_errors=True)
    lower_bundle(bundle)
    return {path.name: path.read_bytes() for path in (bundle / "engines" / "ort-cpu").iterdir()}


@pytest.fixture(params=["fp32", "bf16"])
def small_bundle(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_small_bundle(tmp_path / "bundle", request.param)


def test_an_engine_is_the_same_on_every_processor(small_bundle: Path) -> None:
    one, other = on_both(lambda: engine_files(small_bundle))
    assert len(one) == 4 and one == other
    record = open_engine(Bundle.open(small_bundle), "ort-cpu")
    with pytest.MonkeyPatch.context() as patch:  # a copy that comes from the other kind is kept
        become("aarch64", patch)
        patch.setattr(ort_cpu, "write_engine", None)
        assert lower_bundle(small_bundle) == record


@pytest.mark.parametrize(("bits", "rows"), [(4, False), (8, False), (4, True), (8, True)])
def test_so_are_products_and_rows_of_quantised_weights(tmp_path: Path, bits: int, rows: bool) -> None:
    model = graph(tmp_path, bits, 16, symmetric=False, rows=rows)

    def lower() -> Files:
        found = Files()
        for activations in ("int8", "fp32"):
            lowered = model.clone()
            for lowering in (QuantizedRowsPass(), QuantizedMatMulPass(activations)):  # type: ignore[arg-type]
                lowering(lowered)
            assert {node.domain for node in lowered.graph} >= {"com.microsoft"}
            found[activations] = ir.to_proto(lowered).SerializeToString()
        return found

    one, other = on_both(lower)
    assert one == other


def test_a_pass_that_looks_at_the_processor_shows(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: kernels chosen when a graph is lowered."""
    call = ConstantReshapePass.call

    def choosy(self: ConstantReshapePass, model: ir.Model) -> ir.passes.PassResult:
        model.graph.doc_string = platform.machine()
        return call(self, model)

    monkeypatch.setattr(ConstantReshapePass, "call", choosy)
    one, other = on_both(lambda: engine_files(bundle))
    assert one != other
