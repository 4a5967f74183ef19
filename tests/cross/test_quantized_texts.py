"""Drafted text of quantised bundles is that of plain decoding, token for token, whatever the block sizes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from conftest import Once
from pairs import MAIN
from quantized_planting import export_quantized

from dflash_engines.ort_cpu import lower_bundle, lower_model
from dflash_engines.portable_graph import load_portable
from dflash_export.quantization import quantize_options
from dflash_runtime.bundle import Bundle
from dflash_runtime.generation import GenerationConfig
from dflash_runtime.session import Session
from dflash_tools.greedy_check import check_own_tokens
from dflash_tools.lowered_check import open_graph

PROMPTS = ([5, 6, 7, 8], [40, 3, 200, 17, 9, 9, 311])
SCHEDULES: dict[str, Callable[[int], int]] = {
    "plain at times": lambda n: (16, 1, 4)[n % 3],
    "mostly plain": lambda n: (1, 1, 1, 8)[n % 4],
    "growing": lambda n: min(1 + n, 16),
}
CASES = {"int4": (("int4", "int4", "int4"), 32), "int8": (("int8", "int8", "int8"), 32)}
WIDE = (("int4", "int4", "int4"), 64)
"""Groups of 64, whose kernel gives a row alone other bits."""


def exported(once: Once, name: str, case: tuple[tuple[str, str, str], int]) -> Path:
    words, group = case
    options = quantize_options(*words, group_size=group)
    return once(f"texts-{name}", lambda folder: export_quantized(folder, MAIN, options)) / "bundle"


@pytest.fixture(params=CASES)
def bundle(request: pytest.FixtureRequest, once: Once) -> Path:
    return exported(once, request.param, CASES[request.param])


def texts(bundle: Path, count: int = 40) -> dict[str, list[list[int]]]:
    """What each way of decoding says after each prompt."""
    sizes = {f"block {size}": {"block_size": size} for size in (2, 3, 4, 8, 15, 16)}
    schedules = {name: {"block_schedule": schedule} for name, schedule in SCHEDULES.items()}
    ways: dict[str, dict[str, Any]] = {"plain": {"plain": True}, **sizes, **schedules, "auto": {"block_size": "auto"}}
    with Session.open(bundle) as session:
        return {
            name: [
                session.generate(
                    prompt, GenerationConfig(max_new_tokens=count, stop_token_ids=[], reuse_prefix=False, **way)
                ).token_ids
                for prompt in PROMPTS
            ]
            for name, way in ways.items()
        }


def differing(found: dict[str, list[list[int]]]) -> list[str]:
    return [name for name, said in found.items() if said != found["plain"]]


def test_with_activations_in_fp32(bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle, tmp_path / "b")
    lower_bundle(copy, activations="fp32")
    assert differing(texts(copy)) == []


def test_with_rounded_activations(bundle: Path) -> None:
    assert differing(texts(bundle)) == []


def logits(bundle: Path, model: ir.Model, parts: Sequence[int]) -> np.ndarray[Any, Any]:
    """Of 48 tokens that the target reads so many at a time."""
    opened = Bundle.open(bundle, check_files=False)
    runner = open_graph(opened, model, opened.manifest.target.graph, 80)
    ids, found, position = np.random.default_rng(3).integers(0, 400, (1, 48)), [], 0
    for count in parts:
        rows = {"position": np.array([position]), "logit_rows": np.arange(count)}
        found.append(runner.run(input_ids=ids[:, position : position + count], **rows)["logits"][0].copy())
        position += count
    return np.concatenate(found)


PARTS = {"alone": [16, *[1] * 32], "blocks": [16, 4, 4, 8, 16], "mixed": [16, 1, 2, 3, 1, 1, 8, 7, 1, 8]}


def engine_graph(bundle: Path) -> ir.Model:
    return ir.load(bundle / "engines" / "ort-cpu" / "target.onnx")


def test_a_row_has_the_same_bits_alone_and_in_blocks(bundle: Path) -> None:
    expected = logits(bundle, engine_graph(bundle), [16, 16, 16])
    for name, parts in PARTS.items():
        assert np.array_equal(logits(bundle, engine_graph(bundle), parts), expected), name


def test_it_would_not_without_a_second_row(once: Once) -> None:
    """The test above can fail: this is the graph as a target without a drafter gets it."""
    bundle = exported(once, "int4", CASES["int4"])
    opened = Bundle.open(bundle, check_files=False)
    model = lower_model(load_portable(opened, opened.manifest.target.graph.file), "target")
    expected = logits(bundle, model, [16, 16, 16])
    assert np.array_equal(logits(bundle, model, PARTS["blocks"]), expected)
    assert not np.array_equal(logits(bundle, model, PARTS["alone"]), expected)


def test_wider_groups_are_judged_by_their_distance(once: Once) -> None:
    bundle = exported(once, "wide", WIDE)
    kinds = [node.op_type for node in engine_graph(bundle).graph]
    opened = Bundle.open(bundle, check_files=False)
    plain = lower_model(load_portable(opened, opened.manifest.target.graph.file), "target")
    assert kinds == [node.op_type for node in plain.graph]  # a second row would change nothing, so there is none
    rows = check_own_tokens(bundle, opened.manifest, "ort-cpu")
    assert len(rows) > 2 and all(row.passed for row in rows)
    assert all("other ones than in plain decoding" in row.covered for row in rows[1:])
