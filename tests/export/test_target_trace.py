"""Traced targets in plain ONNX Runtime against PyTorch, and what the trace must find out about them."""

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from tiny_models import edit_json, write_target
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from dflash_export.checkpoint import find_checkpoint, read_target_config
from dflash_export.reference_run import Step, TargetReference
from dflash_export.target_trace import TracedTarget, prepare_target, trace_target
from dflash_runtime.errors import UnsupportedModelError
from dflash_tools.architecture_check import compare

# (rows kept, new tokens): filled caches, roll-backs, single tokens, and blocks that cross a window of 16.
STEPS = [(0, 6), (5, 4), (7, 1), (8, 5), (13, 4), (14, 9), (20, 20)]
SLIDING = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-window": ("qwen3", SLIDING),
    "qwen2": ("qwen2", {}),
    "llama": ("llama", {}),
    "llama-tied-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("mistral", {"num_hidden_layers": 2, "sliding_window": 16, "head_dim": 16}),
    "gemma2": (
        "gemma2",
        {"num_hidden_layers": 2, "sliding_window": 16, "head_dim": 32, "attn_logit_softcapping": 2.0},
    ),
    "mixtral": ("mixtral", {"num_hidden_layers": 2, "num_local_experts": 4, "sliding_window": None}),
}


def write(path: Path, name: str) -> None:
    kind, values = TARGETS[name]
    write_target(path, kind, tokenizer=False, **values)


def config_of(path: Path) -> PreTrainedConfig:
    return read_target_config(find_checkpoint(str(path), role="target"))


def trace(kind: str, dtype: torch.dtype = torch.float32, **values: Any) -> TracedTarget:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 512}
    return trace_target(AutoConfig.for_model(kind, **{**sizes, "num_hidden_layers": 1, **values}), dtype)


@pytest.mark.parametrize("name", TARGETS)
def test_every_output_equals_pytorch(name, tmp_path):
    write(tmp_path / "target", name)
    deviations = compare(tmp_path / "target", tmp_path / "bundle", STEPS)
    assert deviations.pop("token_ids") == 0
    assert max(deviations.values()) < 1e-4, deviations


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        (SLIDING, [None, None, 16, 16]),
        ({"sliding_window": 16}, [None] * 4),  # a number alone does not switch windows on
        ({"use_sliding_window": True, "sliding_window": 16}, [None] * 4),  # max_window_layers stays at 28
        ({**SLIDING, "layer_types": ["sliding_attention", "full_attention"] * 2}, [16, None, 16, None]),
    ],
)
def test_windows_are_those_of_the_config(values, windows):
    config = AutoConfig.for_model("qwen3", hidden_size=64, num_hidden_layers=4, vocab_size=512, **values)
    _, layers = prepare_target(config, torch.float32, FakeTensorMode(allow_non_fake_inputs=True))
    assert [layer.window_tokens for layer in layers] == windows


@pytest.mark.parametrize(
    ("kind", "values", "shape"),
    [
        ("qwen3", {"head_dim": 32, "num_key_value_heads": 2}, (2, 32)),  # head_dim is not hidden / heads
        ("qwen2", {"num_key_value_heads": 1}, (1, 16)),
        ("llama", {"num_key_value_heads": None, "head_dim": None}, (4, 16)),
    ],
)
def test_cache_shapes_are_those_of_the_model(kind, values, shape):
    traced = trace(kind, **values)
    assert [layer.key_shape for layer in traced.layers] == [shape]
    past = next(value for value in traced.model.graph.inputs if value.name == "past_key_values.0.key")
    assert [past.shape[1], past.shape[3]] == list(shape)


def test_no_axis_took_the_size_of_the_example():
    graph = trace("llama").model.graph
    by_name = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    for name, axis in (("input_ids", 1), ("logit_rows", 0), ("past_key_values.0.key", 2), ("present.0.value", 2),
                       ("logits", 1), ("hidden_states.1", 1)):  # fmt: skip
        assert not isinstance(by_name[name].shape[axis], int), name


def test_a_tap_is_the_raw_output_of_its_layer(tmp_path):
    write(tmp_path, "llama")
    ids = list(range(10, 20))
    hidden = TargetReference.load(tmp_path, torch.float32).run(Step(0, ids)).hidden[-1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    caught = []
    model.model.layers[-1].register_forward_hook(lambda module, args, output: caught.append(output))
    with torch.no_grad():
        normed = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    raw = caught[0][0] if isinstance(caught[0], tuple) else caught[0]
    torch.testing.assert_close(torch.from_numpy(hidden), raw.reshape(len(ids), -1))
    assert (torch.from_numpy(hidden) - normed).abs().max() > 0.1  # Transformers norms the last entry of its list


@pytest.mark.parametrize("tied", [True, False])
def test_one_copy_of_a_tied_table(tied):
    traced = trace("llama", tie_word_embeddings=tied)
    assert (traced.embedding_weight == traced.head_weight) == tied
    assert ("lm_head.weight" in traced.model.graph.initializers) == (not tied)


@pytest.mark.parametrize("spelling", ["flat", "rope_parameters"])
def test_theta_is_read_in_both_spellings(spelling, tmp_path):
    write_target(tmp_path, "qwen3", tokenizer=False, num_hidden_layers=1)
    if spelling == "flat":
        edit_json(tmp_path / "config.json", rope_parameters=None, rope_theta=1e6, rope_scaling=None)
    else:
        edit_json(tmp_path / "config.json", rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    assert config_of(tmp_path).rope_parameters["rope_theta"] == 1e6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_angles_norms_and_logits_in_fp32(dtype):
    graph = trace("qwen3", dtype, head_dim=32, num_key_value_heads=2).model.graph
    nodes: dict[str, list[ir.Node]] = {}
    for node in graph:
        nodes.setdefault(node.op_type, []).append(node)
    for op in ("Cos", "Sin", "Pow", "ReduceMean"):
        assert nodes[op]
        assert {node.inputs[0].dtype for node in nodes[op]} == {ir.DataType.FLOAT}, op
    angles = nodes["Cos"][0].inputs[0]
    while (producer := angles.producer()) is not None:
        assert angles.dtype in (ir.DataType.FLOAT, ir.DataType.INT64)  # nothing narrower between position and angle
        angles = producer.inputs[0]
    outputs = {value.name: value.dtype for value in graph.outputs}
    half = ir.DataType.FLOAT16 if dtype is torch.float16 else ir.DataType.BFLOAT16
    assert outputs["logits"] == ir.DataType.FLOAT
    assert {outputs["hidden_states.1"], outputs["present.0.key"]} == {half}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mamba", "recurrent"),
        ("bart", "encoder-decoder"),
        ("bert", "not causal"),
        ("qwen3_next", "linear_attention"),
        ("gpt_neo", "attention code of its own"),
        ("t5", "no causal language model"),
    ],
)
def test_other_kinds_are_refused_by_name(kind, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        trace_target(AutoConfig.for_model(kind), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["CohereConfig", "DeepseekV3Config", "Gemma3TextConfig", "GptOssConfig", "GraniteConfig", "Olmo2Config",
             "Phi3Config", "Qwen3MoeConfig", "SmolLM3Config"]
)  # fmt: skip
def test_architectures_of_the_gate_are_exact(name):
    from dflash_tools.architecture_check import check_architecture, config_classes

    verdict = check_architecture(config_classes()[name])
    assert verdict.status == "exact", verdict
