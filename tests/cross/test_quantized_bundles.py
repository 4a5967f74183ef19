"""Bundles with quantised weights, built in full: every scheme, every precision, target and drafter."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from pairs import MAIN, Pair, quiet

from dflash_export.quantization import quantize_options
from dflash_runtime.bundle import Bundle
from dflash_runtime.generation import GenerationConfig
from dflash_runtime.session import Session
from dflash_tools import greedy_check
from dflash_tools.pipeline import build

UNTIED = {"tie_word_embeddings": False}


@dataclasses.dataclass(frozen=True)
class Case:
    layers: str
    head: str
    drafter: str
    precision: str = "fp32"
    group_size: int = 32
    symmetric: bool = True
    tied: bool = True

    def build(self, folder: Path) -> Bundle:
        pair = dataclasses.replace(MAIN, target={} if self.tied else UNTIED, precision=self.precision)
        return build_quantized(pair, folder, self)


def build_quantized(pair: Pair, folder: Path, case: Case) -> Bundle:
    pair.write(folder)
    quantize = quantize_options(case.layers, case.head, case.drafter, case.group_size, symmetric=case.symmetric)
    options = dataclasses.replace(pair.options(folder), quantize=quantize)
    build(options, folder / "bundle", "ort-cpu", quiet)
    return Bundle.open(folder / "bundle")


CASES = {
    "int4-fp32": Case("int4", "int4", "int4"),
    "int4-asymmetric-untied": Case("int4", "keep", "keep", symmetric=False, group_size=64, tied=False),
    "int8-bf16": Case("int8", "int8", "int4", precision="bf16"),
    "fp8-fp16-untied": Case("fp8", "fp8", "fp8", precision="fp16", tied=False),
}


_SLOW = ("int4-asymmetric-untied", "fp8-fp16-untied")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in CASES],
)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return CASES[request.param].build(tmp_path_factory.mktemp(request.param))


def test_every_check_of_the_build_passed(bundle: Bundle) -> None:
    checks = bundle.manifest.checks
    assert all(row.passed for row in checks)
    stages = {row.stage for row in checks}
    assert {"portable", "lowered", "int8 products", "quantised", "quality", "tokens"} <= stages
    quality = {row.tensor for row in checks if row.stage == "quality"}
    assert quality == {"perplexity", "perplexity ort-cpu", "acceptance length, block 16"}


def test_speculative_and_plain_decoding_say_the_same(bundle: Bundle) -> None:
    with Session.open(bundle.path) as session:
        said = [
            session.generate([5, 6, 7, 8], GenerationConfig(max_new_tokens=40, stop_token_ids=[], **options)).token_ids
            for options in ({"plain": True}, {"block_size": 4}, {"block_size": 16})
        ]
    assert said[0] == said[1] == said[2]


def test_a_token_that_rounding_does_not_explain_is_found(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = greedy_check.check_own_tokens(bundle.path, bundle.manifest, "ort-cpu")
    assert [row.tensor for row in rows][:2] == ["plain", "block size 4"] and all(row.passed for row in rows)
    said = greedy_check._say

    def with_another_token(*arguments: Any) -> dict[str, list[list[int]]]:
        texts = said(*arguments)
        texts["block size 4"][1][5] = bundle.manifest.target.vocab_size - 1  # never among the few likely ones
        return texts

    monkeypatch.setattr(greedy_check, "_say", with_another_token)
    rows = greedy_check.check_own_tokens(bundle.path, bundle.manifest, "ort-cpu")
    assert {row.tensor: row.passed for row in rows}["block size 4"] is False
    assert all(row.passed for row in rows if row.tensor != "block size 4")


def test_which_engines_round(bundle: Bundle) -> None:
    floats = {weight.dtype for name, weight in bundle.manifest.weights.items() if name in bundle.manifest.quantized}
    assert greedy_check.rounds_activations(bundle, "ort-cpu") == (floats != {"F8_E4M3"})


@pytest.mark.slow
def test_a_bundle_is_checked_part_by_part_too(tmp_path: Path) -> None:
    pair = dataclasses.replace(MAIN, precision="bf16")
    pair.write(tmp_path)
    quantize = quantize_options("int4", "int8", "int4")
    options = dataclasses.replace(pair.options(tmp_path), quantize=quantize, gate="layers")
    notes = build(options, tmp_path / "bundle", "ort-cpu", quiet).notes
    assert any("perplexity and acceptance length was not measured" in note and "--gate full" in note for note in notes)
    bundle = Bundle.open(tmp_path / "bundle")
    portable = [row for row in bundle.manifest.checks if row.stage == "portable"]
    assert {"layer 0 output", "embedding", "logits", "draft_logits"} <= {row.tensor for row in portable}
    assert all("quantised weights as floats" in row.covered for row in portable if row.tensor == "logits")


def test_each_weight_lies_once_in_the_file(bundle: Bundle) -> None:
    spans = sorted((e.file, e.offset_bytes, e.offset_bytes + e.length_bytes) for e in bundle.manifest.weights.values())
    assert all(one[0] != two[0] or one[2] <= two[1] for one, two in itertools.pairwise(spans))
    for file in {span[0] for span in spans}:
        held = sum(end - start for name, start, end in spans if name == file)
        assert 0 < bundle.file(file).stat().st_size - held < 1 << 16  # the header
