"""The acceptance graph says what the decode loop says, for thousands of random blocks; planted faults show."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from dflash_engines.acceptance_graph import acceptance_model
from dflash_engines.graph_maker import OPSET
from dflash_engines.operator_check import check_operators, check_opset
from dflash_engines.tensorrt_versions import PRIMITIVE_OPERATORS
from dflash_runtime.decode import accept, cut

Case = tuple[list[int], list[int], int, list[int], int, int]


def expected(block: list[int], posterior: list[int], position: int, stops: Sequence[int], limit: int, rows: int) -> Any:
    """What the decode loop does with the first `rows` of a block, in its own functions."""
    size, block, posterior = len(block), block[:rows], posterior[:rows]
    if block[0] in stops or limit - position - 1 <= 0:  # the loop has ended
        return [-1] * size, 0, position, block[0], 1
    committed = cut(accept(block[1:], posterior), limit - position - 1, stops)
    done = committed[-1] in stops or position + len(committed) + 1 == limit or committed[-1] == -1
    padded = committed + [-1] * (size - len(committed))
    return padded, len(committed), position + len(committed), max(committed[-1], 0), int(done)


def random_case(rng: random.Random) -> Case:
    size = rng.choice([1, 1, 2, 3, 4, 8, 16])
    words = rng.choice([2, 3, 50])
    posterior = [rng.randrange(words) for _ in range(size)]
    right = rng.choice([0, size - 1, rng.randrange(size)])
    proposals = [t if i < right else (t + 1) % words for i, t in enumerate(posterior[:-1])]
    if rng.random() < 0.1:
        posterior[right] = -1
    position = rng.randrange(100)
    stops = rng.choice([[-2], [rng.randrange(words)], [-2, 1, 1], list(range(words))])
    limit = position + rng.choice([0, 1, 2, 3, size, size + 1, size + 2, 10**6])
    rows = rng.choice([size, size, rng.randrange(1, size + 1)])
    return [rng.randrange(words), *proposals], posterior, position, stops, limit, rows


def session_of(model: ir.Model) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])


def found(session: ort.InferenceSession, case: Case) -> Any:
    block, posterior, position, stops, limit, rows = case
    inputs = {"block": [block], "posterior": [posterior], "position": [position], "stop_ids": stops, "limit": [limit],
              "rows": [rows]}  # fmt: skip
    names = ["committed", "count", "new_position", "anchor", "done"]
    outputs = session.run(names, {name: np.array(value, np.int64) for name, value in inputs.items()})
    assert all(output.dtype == np.int64 for output in outputs)
    return outputs[0][0].tolist(), *(int(output.reshape(())) for output in outputs[1:])


CASES = [random_case(random.Random(seed)) for seed in range(6000)]


def differing(session: ort.InferenceSession) -> int:
    return sum(found(session, case) != expected(*case) for case in CASES)


def test_it_says_what_the_loop_says() -> None:
    assert differing(session_of(acceptance_model())) == 0


def test_the_cases_are_of_every_kind() -> None:
    sizes = {(len(case[0]), expected(*case)[1]) for case in CASES}
    assert {(1, 0), (1, 1), (16, 0), (16, 1), (16, 16), (8, 3)} <= sizes
    inside = [c for c in CASES if 1 < expected(*c)[1] < len(accept(c[0][1:], c[1])) and expected(*c)[3] in c[3]]
    assert inside  # a stop token inside the accepted part
    assert {expected(*case)[4] for case in CASES} == {0, 1}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("bonus", "Add", "Sub"), ("mismatch", "And", "Or"), ("first", "ReduceMax", "ReduceMin"),
        ("cut", "Min", "Max"), ("sign", "Less", "LessOrEqual"), ("limit", "GreaterOrEqual", "Greater"),
    ],
)  # fmt: skip
def test_a_planted_fault_shows(name: str, old: str, new: str) -> None:
    counts = []
    for index, _ in enumerate([node for node in acceptance_model().graph if node.op_type == old]):
        model = acceptance_model()
        [node for node in model.graph if node.op_type == old][index].op_type = new
        try:
            counts.append(differing(session_of(model)))
        except Exception as error:  # a fault may also make the graph impossible to run
            assert "ORT" in str(error) or "onnxruntime" in type(error).__module__
            counts.append(1)
    assert counts and all(counts), (name, counts)


def test_it_is_plain_opset_20_and_small() -> None:
    model = acceptance_model()
    check_opset(model, OPSET)
    check_operators(model, PRIMITIVE_OPERATORS)
    assert len(list(model.graph)) <= 60


def test_tensorrt_rtx_builds_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    from dflash_engines.build_process import run_build
    from dflash_engines.tensorrt_build import BuildOrder

    path, engine = tmp_path / "acceptance.onnx", tmp_path / "acceptance.engine"
    path.write_bytes(ir.to_proto(acceptance_model()).SerializeToString())
    profiles = [{"block": [1, b], "posterior": [1, b], "stop_ids": [4]} for b in (1, 4, 16)]
    built = run_build(BuildOrder("tensorrt-rtx", str(path), profiles, "8.9", None, str(engine)), None, lambda _: None)
    assert built.outcome.error is None, built.outcome.messages
    assert engine.stat().st_size > 1000
