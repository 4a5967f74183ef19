"""`dflash-export plan` as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_calls import Invoke
from test_plan_parameters import QWEN2_7B, drafter_config

from dflash_runtime.bundle import Bundle
from dflash_tools import plan_sources
from dflash_tools.decoder_families import read_model_shape


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_config(tmp_path / "qwen2 7b", QWEN2_7B)


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_json(invoke: Invoke, *arguments: object) -> dict[str, Any]:
    done = invoke("plan", *arguments, "--json")
    assert done.exit_code == 0, done.output
    data: dict[str, Any] = json.loads(done.stdout)
    return data


def refused(invoke: Invoke, *arguments: object) -> str:
    done = invoke("plan", *arguments)
    assert done.exit_code == 1
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


def test_says_numbers_verdict_and_what_fits(invoke: Invoke, target: Path) -> None:
    done = invoke("plan", "--target", target, "--device", "orin-nano-8gb")
    assert done.exit_code == 0
    for words in ("7.62 B parameters", "five-layer default, assumed, 1.23 B", "DOES NOT FIT: needs 20.1 GB", "8.0 GB",
                  "--device agx-orin-32gb",
                  "not measured", "acceptance length needed to pay off", "no drafter given"):  # fmt: skip
        assert words in done.stdout
    for line in done.stdout.splitlines():
        if "weights  " in line or "KV cache" in line:
            assert line.endswith("exact")
        if line.startswith(("  engines", "  activations", "  builder", "  CUDA", "  kept")):
            assert line.endswith("predicted")
    card = invoke("plan", "--target", target, "--device", "rtx-4060").stdout
    assert "fits with weights in int4, head in int8" in card and "of the machine's own memory, predicted" in card


def test_fits_says_what_is_left(invoke: Invoke, target: Path) -> None:
    asked = ("--precision", "int4", "--quantize-drafter", "int4", "--group-size", 128)
    done = invoke("plan", "--target", target, "--device", "ORIN-NX-16GB", *asked)
    assert "stored   int4 in groups of 128, head bf16, drafter int4 in groups of 128;" in done.stdout
    assert "FITS: needs 13.2 GB, Jetson Orin NX 16GB has 16.4 GB; 3.2 GB to spare" in done.stdout
    assert "engines hold int4 weights, and are built by TensorRT 10.15" in done.stdout
    assert "fits with" not in done.stdout


def test_json_has_every_item(invoke: Invoke, target: Path) -> None:
    data = read_json(invoke, "--target", target, "--device", "orin-nano-8gb", "--block-size", 4, "--block-size", 16)
    assert set(data) == {"target", "drafter", "device", "options", "stored", "memory", "fits", "obstacles", "times",
                         "proposals", "notes"}  # fmt: skip
    memory = data["memory"]
    assert [item["name"] for item in memory["run"]] == [
        "target weights", "drafter weights", "target KV cache", "drafter KV cache", "activations and scratch",
        "engines", "CUDA context and libraries", "kept for the system",
    ]  # fmt: skip
    assert {item["basis"] for item in memory["run"]} == {"exact", "predicted"}
    assert memory["run_bytes"] == sum(item["size_bytes"] for item in memory["run"])
    assert memory["build_bytes"] == sum(item["size_bytes"] for item in memory["build"])
    assert data["fits"] is (max(memory["run_bytes"], memory["build_bytes"]) <= memory["available_bytes"]) is False
    assert data["drafter"]["assumed"] is True
    assert data["drafter"]["num_parameters"] == 1_229_499_648
    assert data["target"]["num_parameters"] == 7_615_616_512
    assert [block["block_size"] for block in data["times"]["blocks"]] == [4, 16]
    assert "not measured" in data["times"]["basis"]
    assert set(data["device"]) >= {"nominal_gb", "bandwidth_gb_per_s", "fp16_tflops", "int8_tops", "sm", "source"}
    assert set(data["proposals"][0]) == {"what", "arguments", "needed_bytes", "available_bytes"}


def test_a_drafter_that_is_given_is_taken(invoke: Invoke, target: Path, tmp_path: Path) -> None:
    config = drafter_config(read_model_shape(QWEN2_7B, "q"), num_hidden_layers=3, block_size=8)
    drafter = write_config(tmp_path / "drafter", config)
    data = read_json(invoke, "--target", target, "--drafter", drafter, "--device", "agx-orin-64gb")
    assert data["drafter"]["name"] == "drafter"
    assert data["drafter"]["assumed"] is False
    assert data["drafter"]["num_layers"] == 3
    assert data["options"]["block_sizes"] == [4, 8]
    assert data["notes"] == []


def test_a_bundle_is_planned_from_its_manifest(invoke: Invoke, bundle: Path, plain_bundle: Path) -> None:
    manifest = Bundle.open(bundle).manifest
    data = read_json(invoke, "--target", bundle, "--device", "rtx-4090", "--max-context", 96)
    assert manifest.drafter is not None
    assert data["drafter"]["assumed"] is False
    (fuse,) = [e for n, e in manifest.weights.items() if n.startswith("drafter.fc")]  # engines take it in fp32
    for role in ("target", "drafter"):
        own = [e for n, e in manifest.weights.items() if n.startswith("drafter.") == (role == "drafter")]
        elements = sum(e.length_bytes // 4 for e in own)
        fused = fuse.length_bytes // 4 if fuse in own else 0
        (item,) = [item for item in data["memory"]["run"] if item["name"] == f"{role} weights"]
        assert data[role]["num_parameters"] == elements
        fused += manifest.drafter.hidden_size if fused else 0  # its norm too
        assert item["size_bytes"] == 2 * elements + 2 * fused
    assert read_json(invoke, "--target", plain_bundle, "--device", "rtx-4090")["drafter"]["assumed"] is True


def test_weights_are_stored_as_a_build_is_told(invoke: Invoke, target: Path) -> None:
    """Without options the drafter stays in floats and int4 has groups of 32, as with `build --quantize int4`."""
    on = ("--target", target, "--device", "agx-orin-64gb")

    def sizes(*options: object) -> tuple[int, int]:
        items = {item["name"]: item["size_bytes"] for item in read_json(invoke, *on, *options)["memory"]["run"]}
        return items["target weights"], items["drafter weights"]

    floats, int4 = sizes(), sizes("--precision", "int4")
    assert int4[1] == floats[1] and int4[0] < floats[0]
    assert sizes("--precision", "int4", "--group-size", 128)[0] < int4[0]
    assert sizes("--precision", "int4", "--asymmetric")[0] > int4[0]
    for kind in ("int8", "int4"):
        assert sizes("--quantize-drafter", kind) < floats and sizes("--quantize-drafter", kind)[0] == floats[0]
    assert "--asymmetric is for int4" in refused(invoke, *on, "--asymmetric")
    fp8 = read_json(invoke, "--target", target, "--device", "rtx-4090", "--precision", "fp8", "--quantize-head", "fp8")
    assert fp8["fits"] and fp8["stored"] == "fp8, head fp8, drafter bf16"
    done = invoke("plan", *on, "--precision", "fp8")
    assert "CANNOT BE BUILT: TensorRT takes fp8 from SM 89 on, and this is SM 87" in done.stdout


def test_a_quantised_checkpoint_is_counted_as_it_is(invoke: Invoke, tmp_path: Path) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    target = write_config(tmp_path / "q", {**QWEN2_7B, "torch_dtype": "float16", "quantization_config": awq})
    config = drafter_config(read_model_shape(QWEN2_7B, "q"), quantization_config={**awq, "zero_point": False})
    drafter = write_config(tmp_path / "d", config)
    on = ("--target", target, "--drafter", drafter, "--device", "agx-orin-64gb")
    data = read_json(invoke, *on)
    assert data["stored"] == (
        "int4 in groups of 128 with zero points as q brings it, head fp16, drafter int4 in groups of 128 as d brings it"
    )
    assert data["target"]["num_parameters"] == 7_615_616_512
    assert "q is quantised already and is not rounded again to int8" in refused(invoke, *on, "--precision", "int8")
    assert "d is quantised already" in refused(invoke, *on, "--quantize-drafter", "int8")
    small = read_json(invoke, *on[:4], "--device", "orin-nano-8gb")
    assert not any("--precision" in one["arguments"] for one in small["proposals"])
    int8 = {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True}
    grouped = write_config(tmp_path / "g", {**QWEN2_7B, "quantization_config": int8})
    (reason,) = read_json(invoke, "--target", grouped, "--device", "rtx-4090")["obstacles"]
    assert "int8 with one scale an output" in reason


def test_a_tensorrt_that_no_graph_was_written_for_is_refused(invoke: Invoke, target: Path) -> None:
    assert "10.3" in refused(invoke, "--target", target, "--device", "orin-nx-16gb", "--tensorrt", "8.6")
    done = invoke("plan", "--target", target, "--device", "orin-nx-16gb", "--tensorrt", "10.3")
    assert "in primitive operators for TensorRT 10.3; a call reads 512, 2048, 4224 rows of cache" in done.stdout


def test_a_catalog_name_fetches_config_json_alone(
    invoke: Invoke, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = write_config(tmp_path / "d", drafter_config(read_model_shape(QWEN2_7B, "q")))
    asked = []

    def fetch(repo: str, revision: str | None) -> Path:
        asked.append((repo, revision))
        return (drafter if "DFlash" in repo else target) / "config.json"

    monkeypatch.setattr(plan_sources, "_fetch_config", fetch)
    data = read_json(invoke, "--target", "qwen2-7b", "--device", "agx-orin-64gb")
    assert asked == [("Qwen/Qwen2-7B-Instruct", None)]
    assert "nobody has published" in data["notes"][0]
    data = read_json(invoke, "--target", "Qwen3-4B", "--device", "agx-orin-64gb")
    assert [repo for repo, _ in asked[1:]] == ["Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"]
    assert data["drafter"]["name"] == "Qwen3-4B-DFlash-b16"
    read_json(invoke, "--target", "a/b@v1", "--drafter", "c/DFlash", "--device", "agx-orin-64gb")
    assert asked[3:] == [("a/b", "v1"), ("c/DFlash", None)]


def test_the_hub_is_asked_for_config_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def download(*arguments: Any, **options: Any) -> str:
        asked.append((arguments, options))
        return str(tmp_path / "config.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert plan_sources.find_config("a/b@v1", "target") == (tmp_path / "config.json", "b")
    assert asked == [(("a/b", "config.json"), {"revision": "v1"})]


def test_errors_say_what_to_do(invoke: Invoke, target: Path, tmp_path: Path) -> None:
    on = ("--device", "orin-nx-16gb")
    assert "orin-nano-8gb" in refused(invoke, "--target", target, "--device", "jetson")
    text = refused(invoke, "--target", tmp_path / "nothing", *on)
    assert "not a folder with config.json" in text
    assert "qwen2-7b" in text
    assert "no config.json and no bundle.json" in refused(invoke, "--target", tmp_path, *on)
    mamba = write_config(tmp_path / "m", {"model_type": "mamba"})
    assert "model_type 'mamba'" in refused(invoke, "--target", mamba, *on)
    text = refused(invoke, "--target", target, *on, "--max-context", 40000)
    assert "--max-context 40000 exceeds 32768, the most the target serves" in text
    assert "--max-context 1 leaves no room" in refused(invoke, "--target", target, *on, "--max-context", 1)
    assert "--block-size 32 exceeds 16" in refused(invoke, "--target", target, *on, "--block-size", 32)
    assert "--block-size 1 is no block" in refused(invoke, "--target", target, *on, "--block-size", 1)
    assert "architecture" in refused(invoke, "--target", target, *on, "--drafter", write_config(
        tmp_path / "q", {**QWEN2_7B, "architectures": ["Qwen2ForCausalLM"]}))  # fmt: skip
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    assert "cannot be read as JSON" in refused(invoke, "--target", tmp_path / "broken", *on)
    text = refused(invoke, "--target", target, "--drafter", "qwen2-7b", *on)
    assert "the catalog knows no drafter for qwen2-7b" in text


def test_a_local_plan_needs_neither_torch_nor_the_hub(target: Path) -> None:
    heavy = ["torch", "transformers", "huggingface_hub", "onnx", "onnxruntime", "numpy", "safetensors"]
    code = f"""
import sys
for name in {heavy!r}:
    sys.modules[name] = None  # an import of it fails
from dflash_tools.cli import main
main(["plan", "--target", {str(target)!r}, "--device", "orin-nx-16gb", "--precision", "int4"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "FITS" in done.stdout
