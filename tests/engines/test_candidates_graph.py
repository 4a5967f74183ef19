"""The candidates graph keeps the likeliest tokens and the sum over all, and tells of rows that are not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from dflash_engines.candidates_graph import candidates_model
from dflash_engines.graph_maker import OPSET
from dflash_engines.operator_check import check_operators, check_opset
from dflash_engines.tensorrt_versions import PRIMITIVE_OPERATORS
from dflash_runtime.device_engine import CANDIDATES

NAMES = ["candidate_ids", "candidate_values", "candidate_total"]


def run(logits: Any, temperature: float) -> list[Any]:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    data = ir.to_proto(candidates_model(logits.shape[-1])).SerializeToString()
    session = ort.InferenceSession(data, options, ["CPUExecutionProvider"])
    inputs = {"logits": logits[None], "temperature": np.array([temperature], np.float32)}
    return [output[0] for output in session.run(NAMES, inputs)]


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("vocab_size", [40, 3000])
def test_the_likeliest_tokens_and_the_sum(vocab_size: int, temperature: float) -> None:
    logits = (np.random.default_rng(1).normal(size=(5, vocab_size)) * 4 + 30).astype(np.float32)
    ids, values, total = run(logits, temperature)
    assert ids.shape == values.shape == (5, min(CANDIDATES, vocab_size)) and ids.dtype == np.int64
    best = np.argsort(-logits, axis=-1, kind="stable")[:, : ids.shape[1]]
    assert (ids == best).all() and (values == np.take_along_axis(logits, best, -1)).all()
    wide = logits.astype(np.float64)
    exact = np.exp((wide - wide.max(-1, keepdims=True)) / temperature).sum(-1)
    np.testing.assert_allclose(total, exact, rtol=1e-5)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_told_of(broken: float) -> None:
    logits = np.random.default_rng(1).normal(size=(2, 300)).astype(np.float32)
    logits[1, 7] = broken
    _, _, total = run(logits, 1.0)
    assert np.isfinite(total[0]) and np.isnan(total[1])


def test_it_is_of_operators_every_tensorrt_has() -> None:
    model = candidates_model(300)
    check_opset(model, OPSET)
    check_operators(model, PRIMITIVE_OPERATORS)


def test_tensorrt_rtx_builds_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    from dflash_engines.build_process import run_build
    from dflash_engines.tensorrt_build import BuildOrder

    path, engine = tmp_path / "candidates.onnx", tmp_path / "candidates.engine"
    path.write_bytes(ir.to_proto(candidates_model(151_936)).SerializeToString())
    profiles = [{"logits": [1, rows, 151_936]} for rows in (1, 16)]
    built = run_build(BuildOrder("tensorrt-rtx", str(path), profiles, "8.9", None, str(engine)), None, lambda _: None)
    assert built.outcome.error is None, built.outcome.messages
    assert engine.stat().st_size > 1000 and max(built.outcome.scratch_bytes) < 96 << 20
