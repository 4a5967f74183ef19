"""A pair made from nothing: trained, exported, and the same acceptance in the runtime and in the authors' package."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from training_files import few_steps, write_training_files

from dflash_engines.ort_cpu import lower_bundle
from dflash_export.build import export_bundle
from dflash_export.build_plan import BuildOptions, plan_build
from dflash_runtime import GenerationConfig, Session
from dflash_tools.acceptance import mean_acceptance
from dflash_tools.arithmetic_texts import questions_and_answers
from dflash_tools.make_demo_pair import make_pair
from dflash_tools.pipeline import build
from dflash_tools.progress import ProgressLine
from dflash_tools.tiny_target_training import ASSISTANT, END, USER, TinySizes

sys.path.append(str(Path(__file__).parent.parent / "cross"))
from authors import Authors, differences

SIZES = TinySizes(
    vocab_size=320, hidden_size=64, intermediate_size=128, num_layers=6, num_heads=2, num_kv_heads=1, head_dim=32,
    num_steps=450, batch_size=8, peak_learning_rate=5e-3,
)  # fmt: skip


def quiet(stage: str, done: int, total: int) -> None:
    """Shows nothing."""


def test_a_trained_drafter_proposes_the_same_here_and_there(tmp_path: Path) -> None:
    write_training_files(tmp_path)
    few_steps(tmp_path, tmp_path / "drafter", peak_learning_rate=1e-2, num_steps=20)
    (tmp_path / "bundle").mkdir()
    plan = plan_build(BuildOptions(str(tmp_path / "target"), str(tmp_path / "drafter")))
    export_bundle(plan, tmp_path / "bundle", quiet)
    lower_bundle(tmp_path / "bundle")
    authors = Authors(tmp_path)
    prompts = [[5, 90, 17], list(range(40, 60))]
    with Session.open(tmp_path / "bundle", threads=1) as session:
        for prompt in prompts:
            found = session.generate(prompt, GenerationConfig(max_new_tokens=24, stop_token_ids=[]))
            assert differences(found, authors.run(prompt, 24)) == []


@pytest.mark.slow
def test_a_tiny_pair_is_accepted_and_the_export_keeps_it(tmp_path: Path) -> None:
    pair = tmp_path / "pair"
    made = make_pair(
        pair, sizes=SIZES, num_texts=400, drafter_steps=700, learning_rate=5e-3, batch_size=4, max_anchors=40,
        block_size=8, num_held_out=24, progress=ProgressLine(), argv=["make"],
    )  # fmt: skip
    shutil.copytree(pair / "drafter", tmp_path / "drafter")
    shutil.copytree(pair / "target", tmp_path / "target")
    build(
        BuildOptions(str(pair / "target"), str(pair / "drafter"), precision="fp32"), tmp_path / "bundle", "ort-cpu",
        quiet,
    )  # fmt: skip
    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    fresh = [tokenizer.encode(f"{USER}{q}{ASSISTANT}").ids for q, _ in questions_and_answers(24, seed=77)]
    authors = Authors(tmp_path)
    ours, theirs = [], []
    with Session.open(tmp_path / "bundle", threads=1) as session:
        for prompt in fresh:
            found = session.generate(prompt, GenerationConfig(max_new_tokens=80, block_size=8))
            ours.append(found.acceptance_lengths)
            theirs.append(authors.run(prompt, 80, [tokenizer.token_to_id(END)]).acceptance_lengths)
    here, there = mean_acceptance(ours), mean_acceptance(theirs)
    assert here is not None
    assert there is not None
    assert made["acceptance_length"] > 3
    assert here.over_rounds > 3
    assert here.over_rounds == pytest.approx(there.over_rounds, rel=0.01)
    assert here.over_rounds == pytest.approx(made["acceptance_length"], rel=0.1)  # predicted on other texts
    assert json.loads((pair / "drafter" / "config.json").read_text(encoding="utf-8"))["block_size"] == 8
