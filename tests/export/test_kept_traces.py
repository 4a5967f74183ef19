"""The tests' own keeper of traces: what it hands out is what the tracers make, of the code as it is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import tiny_models
import torch
from kept_traces import KeptTraces, pack
from transformers import AutoConfig

from dflash_export import drafter_trace, target_trace, trace_experts, trace_hooks
from dflash_export.drafter import Drafter
from dflash_export.drafter_config import read_drafter_config
from dflash_export.drafter_trace import DrafterTables
from dflash_export.target_trace import TracedTarget

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 512}
TABLES = DrafterTables("model.embed_tokens.weight", "lm_head.weight", 512)


@pytest.fixture
def traces(tmp_path: Path) -> KeptTraces:
    kept = KeptTraces(tmp_path / "traces")
    kept.know_the_code()
    return kept


def facts(traced: TracedTarget) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(traced) if field.name not in ("model", "module")]
    return {name: getattr(traced, name) for name in names} | {"module": str(traced.module)}


def not_again(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("traced a second time")


def test_a_target_is_handed_out_as_it_was_traced(traces: KeptTraces, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("llama", **SIZES, num_hidden_layers=1)
    direct = target_trace.trace_target(config, torch.float32)
    first = traces.target(config, torch.float32)
    monkeypatch.setattr(target_trace, "trace_target", not_again)
    traces.know_the_code()
    again = traces.target(config, torch.float32)
    assert pack(direct.model) == pack(first.model) == pack(again.model)
    assert facts(direct) == facts(first) == facts(again)
    for other, dtype in ((config, torch.bfloat16), (AutoConfig.for_model("llama", **SIZES), torch.float32)):
        with pytest.raises(AssertionError, match="second time"):
            traces.target(other, dtype)


def test_a_drafter_is_handed_out_as_it_was_traced(
    traces: KeptTraces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_models.write_drafter(tmp_path / "d", layers=1, layer_types=["sliding_attention"], sliding_window=8)
    config = read_drafter_config(tmp_path / "d")
    context = drafter_trace.trace_context(config, torch.float16, torch.float32)
    draft = drafter_trace.trace_drafter(config, TABLES, torch.float16)
    first = traces.context(config, torch.float16, torch.float32), traces.drafter(config, TABLES, torch.float16)
    for name in ("trace_context", "trace_drafter"):
        monkeypatch.setattr(drafter_trace, name, not_again)
    traces.know_the_code()
    other_block = dataclasses.replace(config, block_size=7)
    again = traces.context(other_block, torch.float16, torch.float32), traces.drafter(config, TABLES, torch.float16)
    for one, kept, third in zip((context, draft), first, again, strict=True):
        assert pack(one) == pack(kept) == pack(third)
    with pytest.raises(AssertionError, match="second time"):
        traces.context(config, torch.float16)
    tied = DrafterTables(TABLES.embedding_weight, TABLES.embedding_weight, 512)
    for tables in (tied, dataclasses.replace(TABLES, target_ids=torch.arange(8))):
        with pytest.raises(AssertionError, match="second time"):
            traces.drafter(config, tables, torch.float16)


@pytest.mark.parametrize(
    ("place", "name"),
    [(trace_hooks, "attend"), (Drafter, "block"), (drafter_trace, "EXAMPLE_ROWS"), (trace_experts, "EXPERTS_NAME")],
)
def test_altered_code_gets_a_trace_of_its_own(
    traces: KeptTraces, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    made: list[str] = []

    def tracer(word: str) -> Any:
        def make() -> tuple[ir.Model, dict[str, Any]]:
            made.append(word)
            return ir.Model(ir.Graph([], [], nodes=[], name=word), ir_version=10), {"said": word}

        return make

    with monkeypatch.context() as patch:
        patch.setattr(place, name, 3)
        assert traces._kept(tracer("altered"), "key")[1] == {"said": "altered"}
    assert traces._kept(tracer("sound"), "key")[1] == {"said": "sound"}
    with monkeypatch.context() as patch:
        patch.setattr(place, name, 3)
        assert traces._kept(tracer("altered"), "key")[1] == {"said": "altered"}
    assert traces._kept(tracer("sound"), "key")[1] == {"said": "sound"}
    assert made == ["altered", "sound", "altered"]
