"""The pair that ships: found by its name, small, and accepted on stories it was not trained on."""

from __future__ import annotations

import json
from pathlib import Path

from authors import Authors, differences
from pairs import quiet

from dflash_engines.ort_cpu import lower_bundle
from dflash_export.build import export_bundle
from dflash_export.build_plan import BuildOptions, plan_build
from dflash_export.catalog import CATALOG, shipped_folder
from dflash_export.checkpoint import find_checkpoint
from dflash_runtime import GenerationConfig, Session
from dflash_tools.acceptance import mean_acceptance
from dflash_tools.arithmetic_texts import questions_and_answers
from dflash_tools.make_demo_pair import NUM_TEXTS, SEED

MOST_BYTES = 4_000_000


def shipped() -> Path:
    folder = shipped_folder(CATALOG["demo"].target)
    assert folder is not None
    return folder.parent


def test_it_is_small_and_names_no_place_of_its_making() -> None:
    files = [path for path in shipped().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    assert {path.suffix for path in files} <= {".json", ".jinja", ".md", ".safetensors"}
    card = (shipped() / "drafter" / "README.md").read_text(encoding="utf-8")
    assert "dflash_tools.make_demo_pair" in card
    assert "/tmp" not in card


def test_the_name_finds_both_without_a_network() -> None:
    assert find_checkpoint("demo", role="target", local_files_only=True).name == "demo"
    assert "fc.weight" in find_checkpoint("demo", role="drafter", local_files_only=True).places
    config = json.loads((shipped() / "drafter" / "config.json").read_text(encoding="utf-8"))
    assert config["dflash_config"]["mask_token_id"] < config["vocab_size"]


def test_blocks_are_accepted_as_in_the_authors_package(tmp_path: Path) -> None:
    plan = plan_build(BuildOptions("demo", precision="fp32"))
    export_bundle(plan, tmp_path, quiet)
    lower_bundle(tmp_path)
    trained = {question for question, _ in questions_and_answers(NUM_TEXTS, SEED)}
    fresh = [question for question, _ in questions_and_answers(12, seed=91) if question not in trained]
    assert len(fresh) > 6
    authors = Authors(shipped())
    lengths, ended = [], 0
    with Session.open(tmp_path, threads=1) as session:
        for question in fresh:
            found = session.generate(question, GenerationConfig(max_new_tokens=80))
            lengths.append(found.acceptance_lengths)
            ended += found.finish_reason == "stop"
            assert session.tokenizer is not None
            prompt = session.tokenizer.encode_messages([{"role": "user", "content": question}], {})
            assert differences(found, authors.run(prompt, 80, session.bundle.manifest.text.stop_token_ids)) == []
    mean = mean_acceptance(lengths)
    assert mean is not None
    assert mean.over_rounds > 4
    assert ended > len(fresh) / 2  # it tells whole stories
