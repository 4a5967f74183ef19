from __future__ import annotations

import json
from pathlib import Path

from cli_calls import Invoke

from dflash_runtime import Bundle


def test_says_pair_sizes_and_checks(invoke: Invoke, bundle: Path) -> None:
    done = invoke("inspect", bundle)
    assert done.exit_code == 0
    manifest = Bundle.open(bundle).manifest
    assert manifest.drafter is not None
    for words in (manifest.target.name, manifest.drafter.name, "fp32", "96 tokens", "layers 0, 1", "ort-cpu"):
        assert words in done.stdout
    for name in manifest.files:
        assert name in done.stdout


def test_a_target_alone_says_how_to_add_a_drafter(invoke: Invoke, plain_bundle: Path) -> None:
    assert "add-drafter" in invoke("inspect", plain_bundle).stdout


def test_json_carries_the_manifest(invoke: Invoke, bundle: Path) -> None:
    data = json.loads(invoke("inspect", bundle, "--json").stdout)
    assert data["manifest"] == json.loads((bundle / "bundle.json").read_text())
    assert data["engines"] == ["ort-cpu"]
    assert data["verified_files"] == []
    on_disk = sum(p.stat().st_size for p in bundle.rglob("*") if p.is_file() and p.name != "bundle.json")
    assert data["total_bytes"] == on_disk


def test_verify_finds_what_size_and_time_hide(invoke: Invoke, bundle: Path) -> None:
    done = invoke("inspect", bundle, "--verify")
    assert done.exit_code == 0
    files = len(Bundle.open(bundle).manifest.files)
    assert f"sha256 of {files} files" in done.stdout
    weights = next((bundle / "weights").iterdir())
    status = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    import os

    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert invoke("inspect", bundle).exit_code == 0
    refused = invoke("inspect", bundle, "--verify")
    assert refused.exit_code == 1
    assert weights.name in refused.stderr
    assert "altered" in refused.stderr


def test_verify_checks_engines_too(invoke: Invoke, bundle: Path) -> None:
    engine = bundle / "engines" / "ort-cpu" / "target.onnx"
    engine.write_bytes(engine.read_bytes()[:-1])
    refused = invoke("inspect", bundle, "--verify")
    assert refused.exit_code == 1
    assert "target.onnx" in refused.stderr
    assert "dflash-export engines" in refused.stderr
