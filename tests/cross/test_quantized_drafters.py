"""Drafters in z-lab's format that somebody quantised, written by each format's own library: taken as targets are."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from pairs import quiet
from safetensors.torch import save_file
from tiny_models import favour_few_tokens, write_target

from dflash_engines.ort_cpu import lower_bundle
from dflash_export.build import export_bundle
from dflash_export.build_plan import BuildOptions, plan_build
from dflash_export.dequantized_weights import read_float_weight
from dflash_export.pair_report import examine_pair
from dflash_export.quantization import quantize_options
from dflash_export.quantized_formats.imported_place import imported_parts
from dflash_export.tensor_files import FLOAT_DTYPES, read_tensor_places
from dflash_export.weight_values import read_converted
from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import CheckpointError
from dflash_runtime.generation import GenerationConfig
from dflash_runtime.session import Session
from dflash_tools.pipeline import build

CHECKPOINTS = Path(__file__).parent / "quantized_checkpoints"
ORIGINS = {
    "drafter-ct-int4": "compressed-tensors", "drafter-awq": "AWQ", "drafter-gptq": "GPTQ",
    "drafter-ct-fp8": "compressed-tensors",
}  # fmt: skip
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "target"
    write_target(folder)
    favour_few_tokens(folder, 3)
    return folder


def plain_copy(name: str, bundle: Bundle, folder: Path) -> Path:
    """The same weights in floats in z-lab's format: what the library means is proved by its hashes first."""
    meant = json.loads((CHECKPOINTS / name / "meant.json").read_text())["weights"]
    tensors: dict[str, torch.Tensor] = {}
    for weight, (dtype, expected) in meant.items():
        tensors[weight] = read_float_weight(bundle.path, bundle.manifest, f"drafter.{weight}")
        values = tensors[weight].to(getattr(torch, dtype)) + 0.0
        assert hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() == expected
    places = read_tensor_places(CHECKPOINTS / name)
    tensors |= {n: read_converted(p, torch.float32) for n, p in places.items()
                if p.dtype in FLOAT_DTYPES and not n.endswith("scale") and not n.endswith("scales")}  # fmt: skip
    folder.mkdir()
    config = json.loads((CHECKPOINTS / name / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def exported(target: Path, drafter: Path, root: Path) -> Bundle:
    root.mkdir()
    export_bundle(plan_build(BuildOptions(str(target), str(drafter), precision="fp32")), root, quiet)
    lower_bundle(root, activations="fp32")
    return Bundle.open(root, check_files=False)


@pytest.mark.parametrize("name", [
    "drafter-ct-int4", *(pytest.param(n, marks=pytest.mark.slow) for n in ORIGINS if n != "drafter-ct-int4"),
])
def test_it_drafts_what_the_same_weights_in_floats_draft(name: str, target: Path, tmp_path: Path) -> None:
    quantised = exported(target, CHECKPOINTS / name, tmp_path / "quantised")
    facts = quantised.manifest.quantized
    assert {one.origin for one in facts.values()} == {ORIGINS[name]}
    assert all(weight.startswith("drafter.") for weight in facts)
    assert ("drafter.fc.weight" in facts) == (name == "drafter-ct-int4")
    plain = exported(target, plain_copy(name, quantised, tmp_path / "drafter"), tmp_path / "plain")
    said = []
    for bundle in (quantised, plain):
        with Session.open(bundle.path, threads=1) as session:
            result = session.generate(PROMPT, GenerationConfig(max_new_tokens=48, stop_token_ids=[], block_size=4))
            said.append((result.token_ids, result.acceptance_lengths))
    assert said[0] == said[1] and max(said[0][1]) > 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), [
    ("drafter-ct-int4", "bf16"), ("drafter-awq", "fp16"), ("drafter-ct-fp8", "bf16"),
])
def test_a_build_in_half_precision_passes_every_check(name: str, precision: str, target: Path, tmp_path: Path) -> None:
    options = BuildOptions(str(target), str(CHECKPOINTS / name), precision=precision)
    build(options, tmp_path / "bundle", "ort-cpu", quiet)
    checks = Bundle.open(tmp_path / "bundle").manifest.checks
    assert all(row.passed for row in checks)
    assert {"portable", "precision", "lowered", "tokens"} <= {row.stage for row in checks}
    assert not any("acceptance length" in row.tensor for row in checks)  # nobody has the original


def test_what_cannot_be_is_refused_by_name(target: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(CHECKPOINTS / "drafter-awq", drafter)
    twice = BuildOptions(str(target), str(drafter), precision="fp32", quantize=quantize_options("keep", "keep", "int8"))
    plan = plan_build(twice)
    assert plan.drafter is not None and plan.drafter.scheme is not None  # its fusing matrix is a float still
    own = plan.drafter.weights.bundle_places
    with pytest.raises(CheckpointError, match=r"scales in fp16, which bf16 cannot hold.*--precision fp16 or fp32"):
        imported_parts(own, list(own), "BF16")
    config = json.loads((drafter / "config.json").read_text())
    for quantisation, message in (
        ({"quant_method": "bitsandbytes"}, r"quantised \(bitsandbytes\); taken as they are: awq, compressed-tensors"),
        (None, r"belongs to a quantised weight, and its config.json has no quantization_config"),
    ):
        (drafter / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
        with pytest.raises(CheckpointError, match=message):
            plan_build(BuildOptions(str(target), str(drafter)))


def test_check_pair_reads_it_too(target: Path) -> None:
    report = examine_pair(str(target), str(CHECKPOINTS / "drafter-ct-int4"), local_files_only=True)
    assert not any(finding.severity == "error" for finding in report.findings), report.findings
