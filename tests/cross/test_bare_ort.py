"""The bundle's portable graphs are plain ONNX: they pass the checker and speak without any code of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from conftest import Make
from pairs import HALF_PAIRS, MAIN

from dflash_runtime import GenerationConfig, Session

GRAPHS = ("target.onnx", "drafter_context.onnx", "drafter.onnx")
CAPACITY, BLOCK, MASK_ID, NEW_TOKENS = 96, 8, 511, 40
PROMPT = [72, 105, 44, 32, 116, 104, 101, 114, 101]


@pytest.mark.parametrize("pair", [MAIN, HALF_PAIRS[0]], ids=lambda pair: pair.name)
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_standard(built: Make, pair: Any, name: str) -> None:
    path = built(pair) / name
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path, load_external_data=False)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 24)]
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions
    for tensor in model.graph.initializer:
        if tensor.external_data:
            where = {entry.key: entry.value for entry in tensor.external_data}
            assert where["location"].startswith("weights/")
            assert (path.parent / where["location"]).is_file()
        else:
            assert np.prod(tensor.dims) <= 64  # every weight is outside, whatever its size


class Bare:
    """One graph of the folder with its caches, as anybody would run it."""

    def __init__(self, path: Path) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # it warns of every cache that is copied
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.names = [value.name for value in self.session.get_outputs()]
        caches = [value for value in self.session.get_inputs() if value.name.startswith("past")]
        self.state = {
            value.name: np.zeros([d if isinstance(d, int) else CAPACITY for d in value.shape], np.float32)
            for value in caches
        }

    def __call__(self, position: int, **inputs: Any) -> dict[str, Any]:
        found = self.session.run(self.names, {**inputs, "position": np.array([position]), **self.state})
        outputs = dict(zip(self.names, found, strict=True))
        self.state = {name: outputs[name.replace("past_key_values", "present")] for name in self.state}
        return outputs


def test_plain_onnxruntime_says_the_same(built: Make) -> None:
    bundle = built(MAIN)
    target, context, drafter = (Bare(bundle / name) for name in GRAPHS)
    step = target(0, input_ids=np.array([PROMPT]), logit_rows=np.array([len(PROMPT) - 1]))
    context(0, taps=step["taps"])
    tokens = [int(step["token_ids"][0, 0])]
    proposals, counts = [], []
    while len(tokens) < NEW_TOKENS:
        position = len(PROMPT) + len(tokens) - 1
        drafter.state = dict(context.state)
        block = min(BLOCK, NEW_TOKENS + 1 - len(tokens))
        ids = np.array([[tokens[-1]] + [MASK_ID] * (block - 1)])
        draft = drafter(position, input_ids=ids)
        assert (draft["draft_ids"] == draft["draft_logits"].argmax(-1)).all()
        proposed = draft["draft_ids"][0].tolist()
        step = target(position, input_ids=np.array([[tokens[-1], *proposed]]), logit_rows=np.arange(block))
        assert (step["token_ids"] == step["logits"].argmax(-1)).all()
        said = step["token_ids"][0].tolist()
        right = next((i for i, token in enumerate(proposed) if token != said[i]), len(proposed))
        context(position, taps=step["taps"])  # all rows: those of rejected tokens are overwritten later
        committed = said[: right + 1][: NEW_TOKENS - len(tokens)]
        tokens += committed
        proposals.append(proposed)
        counts.append(len(committed))
    with Session.open(bundle, threads=1) as session:
        config = GenerationConfig(max_new_tokens=NEW_TOKENS, block_size=BLOCK, stop_token_ids=[])
        result = session.generate(PROMPT, config)
    assert result.token_ids == tokens
    assert result.proposed_ids == proposals
    assert result.acceptance_lengths == counts


def test_it_runs_from_any_working_directory(built: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    step = Bare(built(MAIN) / "target.onnx")(0, input_ids=np.array([PROMPT]), logit_rows=np.array([0]))
    assert step["taps"].shape == (1, len(PROMPT), 2 * 64)
    assert list(tmp_path.iterdir()) == []
