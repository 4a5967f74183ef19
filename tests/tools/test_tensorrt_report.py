"""What `engines` and `build` say of TensorRT engines: sizes, what sharing saves, scratch, and that nothing was run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx_ir")
from dflash_engines.tensorrt_engines import BuiltEngines
from dflash_runtime.device_engine import BoundWeight, DeviceEngineRecord, EngineProfile, GraphEngine
from dflash_runtime.engine_record import FileFacts
from dflash_tools.tensorrt_report import report_json, report_lines

PROFILES = [EngineProfile(1, 1, 192), EngineProfile(16, 16, 192)]


def engine(kind: str, scratch: list[int]) -> GraphEngine:
    weights = [BoundWeight("embed", "embed", "BF16")]
    return GraphEngine(kind, f"{kind}.engine", "key", PROFILES, weights, scratch, 620_000_000)


def built(**changes: Any) -> BuiltEngines:
    """Two engines of 14.5 and 9.5 MB on 17.8 GB of weights."""
    engines = [engine("target", [8_400_000, 16_800_000]), engine("drafter", [1_000_000, 2_000_000])]
    sizes = {"target.engine": 14_500_000, "drafter.engine": 9_500_000}
    record = DeviceEngineRecord(
        schema_version=DeviceEngineRecord.SCHEMA_VERSION, backend="tensorrt-rtx", tensorrt_version="1.7.1",
        compute_capability="8.9", form="fused", rings={}, execution_precision="bf16",
        weights_mode="shared", capacity_rows=192, block_sizes=[16],
        prefill_chunk_tokens=128, source={}, engines=engines,
        files={name: FileFacts(size, "0" * 64) for name, size in sizes.items()}, versions={},
    )  # fmt: skip
    record = dataclasses.replace(record, **changes.pop("record", {}))
    return dataclasses.replace(
        BuiltEngines(record, Path("b/engines/tensorrt-rtx-sm89"), ["drafter"], 24.0, 17_800_000_000, 2_200_000_000, 0,
                     ["a warning"]),
        **changes,
    )  # fmt: skip


def test_bytes_of_engines_and_weights_and_what_sharing_saves() -> None:
    text = "\n".join(report_lines(built()))
    assert "engines 24.0 MB; weights on the device 17.8 GB, each once for all engines (saves 2.2 GB)" in text
    assert "target             14.5 MB, 2 profiles, scratch 16.8 MB, peak 620.0 MB" in text
    assert "drafter             9.5 MB, 2 profiles, scratch 2.0 MB, was there" in text
    assert "built in 24.0 s, at most 620.0 MB of memory" in text
    assert "Warning: a warning" in text
    assert text.endswith("Built, not executed: no GPU has run these engines yet.")


def test_int4_that_engines_hold_is_told_apart() -> None:
    text = "\n".join(report_lines(built(held_bytes=20_000_000)))
    assert "engines 24.0 MB, of it 20.0 MB weights in int4; weights on the device" in text


def test_embedded_weights_have_no_copy_to_save() -> None:
    embedded = built(record={"weights_mode": "embedded"}, weight_bytes=0, saved_bytes=0)
    text = "\n".join(report_lines(embedded))
    assert "engines 24.0 MB, their own copies of the weights included" in text and "saves" not in text


def test_json_has_the_same() -> None:
    facts = report_json(built())
    assert (facts["engine_bytes"], facts["weight_bytes"], facts["saved_bytes"]) == (24_000_000, 17_800_000_000, 2.2e9)
    assert [one["scratch_bytes"] for one in facts["engines"]] == [[8_400_000, 16_800_000], [1_000_000, 2_000_000]]
    assert facts["build_peak_bytes"] == 620_000_000 and facts["reused"] == ["drafter"]
