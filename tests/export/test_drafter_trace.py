"""The drafter's two ONNX graphs in plain ONNX Runtime, against the module that recomputes everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import tiny_models
import torch
from test_drafter_module import FULL, SLIDING, YARN, load

from dflash_export.drafter import Drafter, draft_without_cache
from dflash_export.drafter_config import read_drafter_config
from dflash_export.drafter_trace import DrafterTables, trace_context, trace_drafter
from dflash_export.graph_facts import finish_interface

CAPACITY = 64
UNTOUCHED = 1e4
"""What rows never written hold: a mask that lets them through spoils the result."""
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"taps": (0, 2, 3)},
    "sliding-causal": {"layer_types": [SLIDING, FULL], "sliding_window": 16, "attention_bias": True},
    "sliding-bidirectional-scaled": {
        "layer_types": [SLIDING, SLIDING],
        "sliding_window": 17,
        "is_causal": False,
        "input_embedding_scale": 8.0,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 5.0,
    },
    "causal-yarn": {"is_causal": True, "rope_scaling": YARN, "num_key_value_heads": 1},
}


class Graphs:
    """A drafter's graphs with weights filled in, its cache, and the reference module."""

    def __init__(self, folder: Path, tied: bool, **config: Any) -> None:
        tiny_models.write_drafter(folder, **config)
        table = 0.2 * torch.randn(512, 64, generator=torch.Generator().manual_seed(3))
        head = table if tied else 0.2 * torch.randn(512, 64, generator=torch.Generator().manual_seed(4))
        self.drafter = load(folder, table, head)
        self.config = read_drafter_config(folder)
        names = DrafterTables(
            "model.embed_tokens.weight", "model.embed_tokens.weight" if tied else "lm_head.weight", 512
        )
        windows = self.config.windows
        self.context_model = trace_context(self.config, torch.float32)
        self.draft_model = trace_drafter(self.config, names, torch.float32)
        finish_interface(self.context_model, "drafter_context", "drafter_context.onnx", windows)
        self.facts = finish_interface(self.draft_model, "drafter", "drafter.onnx", windows)
        tables = {names.embedding_weight: table, names.head_weight: head}
        self.context_session = session(self.context_model, self.drafter, tables)
        self.draft_session = session(self.draft_model, self.drafter, tables)
        self.taps = torch.randn(1, CAPACITY, len(self.config.target_layer_ids) * 64)
        shape = (1, self.config.num_kv_heads, CAPACITY, self.config.head_dim)
        self.state = {s.input: np.full(shape, UNTOUCHED, np.float32) for s in self.facts.state}

    def append(self, position: int, count: int) -> None:
        """Appends `count` tap rows; their values depend on the position alone."""
        rows = self.taps[:, position : position + count].numpy()
        self._run(self.context_session, taps=rows, position=np.array([position]))

    def draft(self, position: int, b: int) -> None:
        """Drafts a block and compares it with the reference."""
        ids = torch.full((1, b), 511)
        ids[0, 0] = 31 * position % 500
        outputs = self._run(self.draft_session, input_ids=ids.numpy(), position=np.array([position]))
        _, expected = draft_without_cache(self.drafter, self.taps[:, :position], ids)
        np.testing.assert_allclose(outputs["draft_logits"], expected.numpy(), rtol=1e-4, atol=1e-4)
        assert outputs["draft_ids"].tolist() == expected.argmax(-1).tolist()

    def _run(self, runner: ort.InferenceSession, **inputs: Any) -> dict[str, Any]:
        names = [output.name for output in runner.get_outputs()]
        outputs = dict(zip(names, runner.run(names, {**inputs, **self.state}), strict=True))
        self.state = {s.input: outputs[s.output] for s in self.facts.state}
        return outputs


def session(model: ir.Model, drafter: Drafter, tables: dict[str, torch.Tensor]) -> ort.InferenceSession:
    own = {f"drafter.{name}": parameter for name, parameter in drafter.named_parameters(remove_duplicate=False)}
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            tensor = {**own, **tables}[name]
            assert value.dtype == ir.DataType.FLOAT and value.shape == ir.Shape(tensor.shape)
            value.const_value = ir.tensor(tensor.detach().numpy(), name=name)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module", params=CONFIGS)
def graphs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    folder = tmp_path_factory.mktemp("drafter")
    return Graphs(folder, tied=request.param != "plain", **CONFIGS[request.param])


def test_prompt_rounds_and_rejections(graphs: Graphs) -> None:
    graphs.append(0, 6)
    graphs.draft(6, 4)
    graphs.append(6, 4)  # two of the four were accepted: the next rows overwrite the rest
    graphs.draft(8, 4)
    graphs.append(8, 1)
    graphs.draft(9, 16)
    graphs.append(9, 16)
    graphs.draft(10, 2)
    graphs.append(10, 2)
    graphs.draft(12, 8)


def test_context_in_chunks_equals_one_piece(graphs: Graphs) -> None:
    states = []
    for chunks in ((10,), (4, 4, 2), (1,) * 10):
        position = 0
        for count in chunks:
            graphs.append(position, count)
            position += count
        states.append({name: rows[:, :, :10].copy() for name, rows in graphs.state.items()})
        graphs.draft(10, 4)
    for other in states[1:]:
        for name, rows in states[0].items():
            np.testing.assert_allclose(other[name], rows, rtol=1e-5, atol=1e-5)


def test_every_block_size_at_the_edges_of_a_window(graphs: Graphs) -> None:
    graphs.append(0, 40)
    for position in (1, 15, 16, 17, 18, 33):
        for b in (2, 3, 5, 16):
            graphs.append(position, 1)  # the row a draft before this one may have overwritten
            graphs.draft(position, b)
            graphs.append(position, b)


def test_a_block_may_end_at_the_last_row(graphs: Graphs) -> None:
    graphs.append(0, CAPACITY - 4)
    graphs.draft(CAPACITY - 4, 4)


def test_the_interface_is_the_contract(graphs: Graphs) -> None:
    context, draft = graphs.context_model.graph, graphs.draft_model.graph
    past = [f"past_key_values.{i}.{part}" for i in range(2) for part in ("key", "value")]
    present = [f"present.{i}.{part}" for i in range(2) for part in ("key", "value")]
    assert [v.name for v in context.inputs] == ["taps", "position", *past]
    assert [v.name for v in context.outputs] == present
    assert [v.name for v in draft.inputs] == ["input_ids", "position", *past]
    assert [v.name for v in draft.outputs] == ["draft_ids", "draft_logits", *present]
    for graph in (context, draft):
        assert {node.domain for node in graph} == {""}
    assert graphs.draft_model.opset_imports == {"": 24} == graphs.context_model.opset_imports
    rules = [
        (
            node.metadata_props["dflash.layer"],
            node.metadata_props["dflash.causal"],
            node.metadata_props["dflash.window"],
        )
        for node in draft
        if node.op_type == "Attention"
    ]
    expected = [
        (str(i), "1" if layer.causal else "0", "" if layer.window_tokens is None else str(layer.window_tokens))
        for i, layer in enumerate(graphs.config.layers)
    ]
    assert rules == expected


def test_half_precision_keeps_angles_fusing_and_logits_in_fp32(tmp_path: Path) -> None:
    tiny_models.write_drafter(tmp_path, layer_types=[SLIDING, FULL], sliding_window=8)
    config = read_drafter_config(tmp_path)
    tables = DrafterTables("model.embed_tokens.weight", "lm_head.weight", 512)
    wide = trace_context(config, torch.bfloat16)
    context, draft = trace_context(config, torch.float16), trace_drafter(config, tables, torch.float16)
    for model, half in ((wide, "BFLOAT16"), (context, "FLOAT16"), (draft, "FLOAT16")):
        angles = [node for node in model.graph if node.op_type in ("Cos", "Sin")]
        assert [node.inputs[0].dtype for node in angles] == [ir.DataType.FLOAT] * 2
        frequencies = model.graph.initializers["drafter.inverse_frequencies"].const_value.numpy()
        np.testing.assert_allclose(frequencies, 10000.0 ** -(np.arange(0, 32, 2) / 32), rtol=1e-6)
        hollow = [v for v in model.graph.initializers.values() if v.const_value is None]
        assert {v.dtype.name for v in hollow} == {half}
    for model in (wide, context):
        (cast,) = [use.node for use in model.graph.initializers["drafter.fc.weight"].uses()]
        assert (cast.op_type, cast.attributes["to"].as_int()) == ("Cast", ir.DataType.FLOAT)
    assert next(v for v in draft.graph.outputs if v.name == "draft_logits").dtype == ir.DataType.FLOAT
    masks = [node.inputs[3] for node in draft.graph if node.op_type == "Attention"]
    assert [None if mask is None else mask.dtype for mask in masks] == [ir.DataType.BOOL, None]


def test_tied_tables_are_one_initializer(tmp_path: Path) -> None:
    tiny_models.write_drafter(tmp_path)
    config = read_drafter_config(tmp_path)
    tables = DrafterTables("model.embed_tokens.weight", "model.embed_tokens.weight", 512)
    model = trace_drafter(config, tables, torch.float32)
    big = [name for name, v in model.graph.initializers.items() if v.shape == ir.Shape([512, 64])]
    assert big == ["model.embed_tokens.weight"]
    assert not any("context" in name or "fc." in name or "hidden_norm" in name for name in model.graph.initializers)
