"""Engine builds that fail in every way a builder has: nothing is left behind, and nothing is called done."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result
from small_bundle import write_small_bundle

from dflash_engines import build_process, tensorrt_network
from dflash_engines.build_process import run_build
from dflash_engines.tensorrt_build import BuildOrder
from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import EngineError
from dflash_tools import engines_command
from dflash_tools.cli import main

pytest.importorskip("tensorrt_rtx")
_WITH_BUILDER = """
import os
os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1"
from polygraphy.backend import trt
def build():
    {}
trt.EngineBytesFromNetwork = lambda *arguments, **options: build
from dflash_engines.tensorrt_build import main
main()
"""
RETURNS_NOTHING = _WITH_BUILDER.format("return None")
RUNS_OUT_OF_MEMORY = _WITH_BUILDER.format("raise MemoryError('the builder asked for 14 GB')")
IS_KILLED = _WITH_BUILDER.format("os.kill(os.getpid(), 9)")
NEVER_ENDS = """
import json, os, sys, time
order = json.load(sys.stdin)
open(order["engine_path"], "wb").write(b"half an engine")
print(json.dumps({"permille": os.getpid()}), flush=True)
time.sleep(600)
"""


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Bundle.open(write_small_bundle(tmp_path / "bundle", "bf16"))


@pytest.fixture
def build_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has builds run this program in their process."""
    real = subprocess.Popen

    def choose(program: str) -> None:
        stub = lambda argv, **rest: real([sys.executable, "-c", program], **rest)  # noqa: E731
        monkeypatch.setattr(build_process.subprocess, "Popen", stub)

    return choose


def engines(bundle: Bundle, *arguments: str) -> Result:
    argv = ["engines", str(bundle.path), "--backend", "tensorrt-rtx", "--prefill-chunk", "32", *arguments]
    return CliRunner().invoke(main, argv, catch_exceptions=False)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (RETURNS_NOTHING, "its builder returned nothing"),
        (RUNS_OUT_OF_MEMORY, "its builder failed: the builder asked for 14 GB"),
        (IS_KILLED, "the build process was killed by signal 9"),
    ],
)
def test_a_build_that_ends_without_an_engine(
    program: str, words: str, bundle: Bundle, build_with: Callable[[str], None]
) -> None:
    build_with(program)
    done = engines(bundle, "--compute-capability", "8.9", "--weights", "shared")
    assert done.exit_code == 1
    assert f"tensorrt-rtx built no engine from target.onnx: {words}" in done.stderr
    assert "engines for compute capability" not in done.stdout and "built in" not in done.stdout
    assert not list((bundle.path / "engines").iterdir())


def test_an_interrupted_build_ends_its_process_and_leaves_nothing(
    tmp_path: Path, build_with: Callable[[str], None]
) -> None:
    """Ctrl-C comes while the builder works."""
    build_with(NEVER_ENDS)
    process_ids = list[int]()

    def interrupted(done: int) -> None:
        process_ids.append(done)
        raise KeyboardInterrupt

    order = BuildOrder("tensorrt-rtx", str(tmp_path / "x.onnx"), [], "8.9", None, str(tmp_path / "x.engine"))
    with pytest.raises(KeyboardInterrupt):
        run_build(order, None, interrupted)
    assert not (tmp_path / "x.engine").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(process_ids[0], 0)


def graph_of(*operators: str) -> ir.Model:
    """A chain of nodes, each named after its operator."""
    value = first = ir.Value(name="x", shape=ir.Shape([1, 4]), type=ir.TensorType(ir.DataType.FLOAT))
    nodes = []
    for operator in operators:
        nodes.append(ir.Node("", operator, [value], num_outputs=1, name=f"the_{operator}"))
        value = nodes[-1].outputs[0]
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, 4])
    return ir.Model(ir.Graph([first], [value], nodes=nodes, opset_imports={"": 20}, name="g"), ir_version=10)


def test_every_node_the_parser_refuses_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(ir.to_proto(graph_of("Abs", "Det", "Neg", "StringNormalizer")).SerializeToString())
    order = BuildOrder("tensorrt-rtx", str(path), [], "8.9", None, str(tmp_path / "x.engine"))
    with pytest.raises(EngineError, match=r"parser refuses the graph: .*the_Det.*; .*the_StringNormalizer"):
        run_build(order, None, lambda done: None)


def test_an_operator_outside_the_list_stops_before_the_builder(
    bundle: Bundle, build_with: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_with("raise SystemExit('nothing is to be built')")
    real = tensorrt_network.lower_fused

    def with_another_operator(model: ir.Model) -> ir.Model:
        lowered = real(model)
        node = next(node for node in lowered.graph if node.op_type == "Mul")
        node.op_type, node.name = "BitwiseXor", "layer_7_gate"
        return lowered

    monkeypatch.setattr(tensorrt_network, "lower_fused", with_another_operator)
    done = engines(bundle, "--compute-capability", "8.9", "--weights", "shared")
    assert done.exit_code == 1
    assert "This TensorRT does not take the operator BitwiseXor of node 'layer_7_gate'" in done.stderr


def test_several_gpus_at_once(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()
    monkeypatch.setattr(engines_command, "engine_builder", lambda options: lambda *given: asked.append(given[1]))
    monkeypatch.setattr(engines_command, "report_lines", lambda built: ["one set"])
    capabilities = ("8.6", "8.9", "12.0")
    done = engines(bundle, *(word for one in capabilities for word in ("--compute-capability", one)))
    assert done.exit_code == 0 and done.stdout.count("one set") == 3
    assert [options.compute_capability for options in asked] == list(capabilities)
    assert len({dataclasses.replace(options, compute_capability=None) for options in asked}) == 1
