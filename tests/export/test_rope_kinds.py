"""Every kind of rotary scaling Transformers knows, compared with PyTorch up to the length where it is exact."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import edit_json, write_target
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_export.build_plan import BuildOptions, plan_target
from dflash_export.checkpoint import find_checkpoint, read_target_config
from dflash_export.deviation import deviation
from dflash_export.hollow_model import make_hollow_model
from dflash_export.reference_run import Step, TargetReference
from dflash_export.rope_limits import exact_context_limit
from dflash_runtime.errors import CheckpointError
from dflash_tools.architecture_check import compare

FACTORS = [1.0 + 0.25 * i for i in range(8)]
KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": FACTORS,
        "long_factor": [4 * f for f in FACTORS],
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}
EXACT_UP_TO = {"dynamic": 128, "longrope": 64}
CONTEXT = 128


def write_llama(path: Path, kind: str, spelling: str = "rope_parameters") -> None:
    write_target(path, "llama", num_hidden_layers=1, max_position_embeddings=CONTEXT, tokenizer=False)
    settings = dict(KINDS[kind])
    if spelling == "rope_parameters":
        parameters = {"rope_theta": 10000.0, "rope_type": kind, **settings}
        edit_json(path / "config.json", rope_parameters=parameters)
    else:  # as Transformers 4 wrote it; `spelling` is the key that names the kind
        scaling = None if kind == "default" else {spelling: kind, **settings}
        edit_json(path / "config.json", rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)


def test_no_kind_is_forgotten():
    assert set(KINDS) - {"default"} == set(ROPE_INIT_FUNCTIONS)


@pytest.mark.parametrize("kind", KINDS)
def test_graph_equals_pytorch_up_to_the_last_exact_position(kind, tmp_path):
    write_llama(tmp_path / "target", kind)
    limit = EXACT_UP_TO.get(kind, CONTEXT)
    steps = [(0, limit - 4), (limit - 8, 8), (limit - 1, 1)]
    assert max(compare(tmp_path / "target", tmp_path / "bundle", steps).values()) < 1e-4


@pytest.mark.parametrize("kind", EXACT_UP_TO)
def test_the_limit_is_where_transformers_changes_the_frequencies(kind, tmp_path):
    write_llama(tmp_path, kind)
    limit, name = exact_context_limit(read_target_config(find_checkpoint(str(tmp_path), role="target")))
    assert (limit, name) == (EXACT_UP_TO[kind], kind)
    frozen = TargetReference.load(tmp_path, torch.float32)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = np.random.default_rng(0).integers(0, 512, limit + 1).tolist()
    for length, equal in ((limit, True), (limit + 1, False)):
        frozen.reset()
        with torch.no_grad():
            expected = own(torch.tensor([ids[:length]])).logits[0].numpy()
        assert (deviation(frozen.run(Step(0, ids[:length])).logits, expected) < 1e-4) == equal


def test_a_longer_context_is_refused_with_the_rule(tmp_path):
    write_llama(tmp_path, "longrope")
    assert plan_target(BuildOptions(target=str(tmp_path))).max_context_tokens == 64
    with pytest.raises(CheckpointError, match=r"65 exceeds 64, the original range of longrope"):
        plan_target(BuildOptions(target=str(tmp_path), max_context_tokens=65))


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "proportional"])  # newer than the older spelling
def test_older_spellings_give_the_same_frequencies(kind, spelling, tmp_path):
    tables = []
    for name in ("rope_parameters", spelling):
        write_llama(tmp_path / name, kind, name)
        config = read_target_config(find_checkpoint(str(tmp_path / name), role="target"))
        model = make_hollow_model(config, torch.float32, FakeTensorMode(allow_non_fake_inputs=True), "eager")
        rotary = model.model.rotary_emb
        tables.append((rotary.inv_freq.tolist(), rotary.attention_scaling, exact_context_limit(config)))
    assert tables[0] == tables[1]


def test_llama3_frequencies_are_the_scaled_ones(tmp_path):
    write_llama(tmp_path, "llama3", "type")
    config = read_target_config(find_checkpoint(str(tmp_path), role="target"))
    model = make_hollow_model(config, torch.float32, FakeTensorMode(allow_non_fake_inputs=True), "eager")
    expected = [1, 0.244385, 0.013042, 0.003953, 0.00125, 0.000395, 0.000125, 0.00004]
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq.numpy(), expected, rtol=2e-2)
    assert "rope_scaling" in json.loads((tmp_path / "config.json").read_text())
