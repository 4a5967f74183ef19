"""`validate` and `reference`: against the authors' package, without torch, in every kind of bundle, and as commands."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from authors import Authors
from click.testing import CliRunner
from conftest import Make
from pairs import AUTHOR_PAIRS, HALF_PAIRS, Pair, export_quickly, quiet
from planted_faults import one_nan
from planting import PAIR, graph, planted, scaled_constant, weight
from tiny_models import DFLASH2, write_target
from validation_runs import TORCH, replay_without

from dflash_engines.ort_cpu import lower_bundle
from dflash_export.build import export_bundle
from dflash_export.build_plan import BuildOptions, plan_build
from dflash_runtime import BundleError, GenerationConfig, GenerationResult, OutputError, PairError, PromptError
from dflash_runtime.bundle import Bundle
from dflash_tools.architecture_check import config_classes, write_checkpoint
from dflash_tools.cli import main
from dflash_tools.portable_reference import portable_reference
from dflash_tools.reference_building import build_reference
from dflash_tools.reference_file import add_to_bundle, find_reference, read_reference, require_fitting, write_reference
from dflash_tools.reference_record import ReferenceText
from dflash_tools.tiny_configs import tiny_config
from dflash_tools.validate_comparison import Bounds
from dflash_tools.validate_engine import BundleEngine
from dflash_tools.validate_run import Validation, validate
from dflash_tools.validate_speed import check_speed
from dflash_tools.validate_verdict import judge, skipped

PROMPTS = ["sky", "2 + 2"]
UNTIMED = ("graph", "state", "tokens", "acceptance")


def opened(bundle: Path) -> Bundle:
    return Bundle.open(bundle, check_files=False)


def made(bundle: Path, **options: Any) -> Any:
    return build_reference(opened(bundle), None, None, quiet, **{"new_tokens": 10, "prompts": PROMPTS, **options})


def validated(bundle: Path, reference: Any, name: str = "ort-cpu") -> Validation:
    return validate(opened(bundle), BundleEngine(opened(bundle), name, 1), reference, quiet, UNTIMED)


@pytest.fixture
def bundle(exported: Make, tmp_path: Path) -> Path:
    return shutil.copytree(exported(PAIR), tmp_path / "bundle")


QUICK = (1, 5)
PAIRS = [pytest.param(p, id=p.name, marks=[] if i in QUICK else pytest.mark.slow) for i, p in enumerate(AUTHOR_PAIRS)]


@pytest.mark.parametrize("pair", PAIRS)
def test_the_reference_says_what_the_authors_package_says(exported: Make, pair: Pair) -> None:
    bundle = exported(pair)
    authors, reference = Authors(bundle.parent), made(bundle, new_tokens=24)
    for text in reference.facts.texts:
        theirs = authors.run(text.ids, len(text.tokens))
        assert text.tokens == theirs.token_ids
        assert [one.proposed for one in text.rounds] == theirs.proposed_ids
        assert [len(one.committed) for one in text.rounds] == theirs.acceptance_lengths
    for name in ("ort-cpu", "portable"):
        assert validated(bundle, reference, name).passed


@pytest.mark.slow
def test_dflash2_and_its_selector(tmp_path: Path) -> None:
    pair = Pair("dflash2", drafter={**DFLASH2, "block_size": 6}, likely_tokens=4, max_context_tokens=96)
    bundle = export_quickly(pair, tmp_path)
    reference = made(bundle)
    assert not reference.facts.pair.proposes_likeliest
    assert validated(bundle, reference).passed
    weight("drafter.candidate_selector.successor_codebook", lambda values: values[::-1])(bundle)
    verdicts = {one.level: one for one in validated(bundle, reference).verdicts}
    assert verdicts["graph"].first is not None and verdicts["graph"].first.tensor == "draft_ids"
    assert verdicts["tokens"].status == "passed"


def test_a_target_without_a_drafter(tmp_path: Path) -> None:
    write_target(tmp_path / "target", "llama")
    (tmp_path / "bundle").mkdir()
    export_bundle(plan_build(BuildOptions(str(tmp_path / "target"))), tmp_path / "bundle", quiet)
    lower_bundle(tmp_path / "bundle")
    found = validated(tmp_path / "bundle", made(tmp_path / "bundle"))
    states = {one.level: one.status for one in found.verdicts}
    assert states == {"graph": "passed", "state": "passed", "tokens": "passed", "acceptance": "skipped"}
    assert found.passed and found.gap is None


FAMILIES = ["bloom", "cohere", "deepseek_v3", "falcon", "gemma3_text", "gpt2", "gpt_oss", "mixtral", "phi3"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_other_architectures(tmp_path: Path, family: str) -> None:
    """Healthy ones pass on both engines; a fault in each kind of weight of a layer is named with its layer."""
    config = tiny_config(next(c for c in config_classes().values() if c.model_type == family))
    write_checkpoint(config, tmp_path / "target")
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    options = BuildOptions(str(tmp_path / "target"), precision="fp32", max_context_tokens=96)
    export_bundle(plan_build(options), bundle, quiet)
    lower_bundle(bundle)
    reference = made(bundle, prompts=())  # without a tokenizer they are ids
    for name in ("ort-cpu", "portable"):
        assert validated(bundle, reference, name).passed
    for name in [name for name in opened(bundle).manifest.weights if ".1." in name and "experts.1" not in name]:
        copy = shutil.copytree(bundle, tmp_path / "copy")
        weight(name, lambda values: values * 1.5 + 0.1)(copy)
        first = validated(copy, reference).verdicts[0].first
        shutil.rmtree(copy)
        assert first is not None and (first.graph, first.layer) == ("target", 1), name


@pytest.mark.parametrize("name", ["ort-cpu", "portable"])
def test_half_precision_is_judged_by_pytorchs_own_deviation(exported: Make, name: str) -> None:
    bundle = exported(HALF_PAIRS[0])
    reference = made(bundle)
    found = validated(bundle, reference, name)
    assert found.passed and found.precision == ("fp32" if name == "ort-cpu" else "bf16")
    own = reference.facts.own["bf16"]
    assert own.tensors["target/present.3.key"] > 0 and own.state["drafter_context/present.0.key"] > 0
    assert own.target_margin > 0 and own.draft_margin > 0
    assert own.state["drafter/draft_logits"] > 0, "proposals behind taps that are rounded too"
    with pytest.raises(BundleError, match="--precision fp16"):
        Bounds(reference, "fp16")


def test_a_margin_over_the_bound_fails_in_half_precision(exported: Make, tmp_path: Path) -> None:
    bundle = shutil.copytree(exported(HALF_PAIRS[0]), tmp_path / "b")
    reference = made(bundle)
    own = {name: dataclasses.replace(one, target_margin=0.0) for name, one in reference.facts.own.items()}
    tight = dataclasses.replace(reference, facts=dataclasses.replace(reference.facts, own=own))
    entry = opened(bundle).manifest.weights["model.layers.1.mlp.down_proj.weight"]
    with (bundle / entry.file).open("r+b") as stream:
        stream.seek(entry.offset_bytes)
        stream.write(np.full(64 * 16, 0x3F00, np.uint16).tobytes())  # some rows at 0.5
    found = {one.level: one for one in validated(bundle, tight, "portable").verdicts}
    assert found["tokens"].status == "failed" and found["tokens"].first is not None
    assert found["tokens"].first.deviation > found["tokens"].first.allowed


def test_it_travels_with_the_bundle_and_is_replaced(bundle: Path) -> None:
    first = add_to_bundle(Bundle.open(bundle), made(bundle))
    assert first.stat().st_size < 4e6
    assert validated(bundle, read_reference(first)).passed
    second = add_to_bundle(Bundle.open(bundle), made(bundle, new_tokens=6))
    assert not first.exists() and second.exists()
    again = Bundle.open(bundle)
    again.check_files(full=True)
    assert find_reference(again) == second
    assert list(again.manifest.files) == sorted(again.manifest.files)


def test_a_killed_writer_leaves_a_bundle_that_opens(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_to_bundle(Bundle.open(bundle), made(bundle))

    def killed(path: Path, record: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_tools.reference_file.write_record", killed)
    with pytest.raises(KeyboardInterrupt):
        add_to_bundle(Bundle.open(bundle), made(bundle, new_tokens=6))
    Bundle.open(bundle).check_files(full=True)


def test_a_read_only_bundle_says_where_else(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = made(bundle)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OutputError, match="--out FOLDER"):
        add_to_bundle(Bundle.open(bundle), reference)
    place = write_reference(reference, tmp_path / "beside")
    assert find_reference(Bundle.open(bundle), tmp_path / "beside") == place


def test_a_damaged_or_foreign_reference_is_refused(bundle: Path, tmp_path: Path) -> None:
    place = write_reference(made(bundle), tmp_path / "r")
    (tmp_path / "short.npz").write_bytes(place.read_bytes()[:5000])
    with pytest.raises(BundleError, match="no readable reference"):
        read_reference(tmp_path / "short.npz")
    with pytest.raises(BundleError, match="holds 0 references"):
        find_reference(Bundle.open(bundle), tmp_path)
    reference = read_reference(place)
    older = dataclasses.replace(reference.facts, drafter_config_sha256=None)
    with pytest.raises(BundleError, match="a drafter of config None"):
        validated(bundle, dataclasses.replace(reference, facts=older))
    write_target(bundle.parent / "other", "llama")
    with pytest.raises(PairError, match="sha256"):
        build_reference(Bundle.open(bundle), str(bundle.parent / "other"), None, quiet)


@pytest.mark.parametrize("blocked", [TORCH, [*TORCH, "onnx", "onnx_ir", "onnxscript"]], ids=["torch", "onnx too"])
def test_replay_without_torch(bundle: Path, blocked: list[str]) -> None:
    """As on a device: a healthy bundle passes, a damaged one is named, more closely where debug graphs can be made."""

    add_to_bundle(Bundle.open(bundle), made(bundle))
    assert replay_without(blocked, bundle)[0] == 0
    graph("target.onnx", scaled_constant("model.model.rotary_emb.inv_freq", 1.001))(bundle)
    code, found = replay_without(blocked, bundle)
    first = found["verdicts"][0]["first"]
    assert code == 1 and not found["passed"]
    assert (first["graph"], first["layer"], first["tensor"]) == ("target", 0, "present.0.key")
    assert first["part"] == ("k" if "onnx_ir" in blocked else "rope")
    assert ("finer parts need onnx_ir" in "".join(found["verdicts"][0]["notes"])) == ("onnx_ir" in blocked)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments))


def test_the_commands(bundle: Path, tmp_path: Path) -> None:
    alone = run("validate", str(bundle), "--level", "graph")  # no reference: against the portable graphs
    assert alone.exit_code == 0 and "against the portable graphs" in alone.output
    wanted = run("validate", str(bundle), "--reference")
    assert wanted.exit_code == 1 and "dflash-export reference" in wanted.output
    stored = run("reference", str(bundle), "--new-tokens", "6", "--json")
    assert stored.exit_code == 0 and json.loads(stored.output)["texts"] == 3
    page = tmp_path / "page.html"
    levels = [word for level in UNTIMED for word in ("--level", level)]
    found = run("validate", str(bundle), "--html", str(page), *levels)
    assert found.exit_code == 0 and "PASSED" in found.output and "acceptance length" in found.output
    text = page.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text and "http" not in text.replace("https://", "http").split("<style>")[0]
    live = run("validate", str(bundle), "--against", opened(bundle).manifest.target.source.id, "--level", "graph")
    assert live.exit_code == 0 and "against PyTorch" in live.output
    both = run("validate", str(bundle), "--against", "x", "--reference", "y")
    assert both.exit_code == 2
    weight("lm_head.weight")(bundle)
    bad = run("validate", str(bundle), "--level", "graph")
    assert bad.exit_code == 1


def test_a_damaged_weight_is_told_before_anything_runs_and_named_on_request(bundle: Path) -> None:
    add_to_bundle(Bundle.open(bundle), made(bundle))
    weight("model.layers.1.mlp.up_proj.weight")(bundle)
    found = run("validate", str(bundle))
    assert found.exit_code == 1 and "weights/target.safetensors" in found.output


class Timed:
    """A session that says how fast it was."""

    def __init__(self, plain_tokens_per_s: float, tokens_per_s: float) -> None:
        self.speeds = {True: plain_tokens_per_s, False: tokens_per_s}

    def generate(self, ids: list[int], config: GenerationConfig) -> GenerationResult:
        lengths = [] if config.plain else [2] * 5
        speed = self.speeds[config.plain]
        return GenerationResult("", [0] * 10, 1, "length", lengths, [], speed, 1.0, "ort-cpu", 4)


@pytest.mark.parametrize(
    ("plain", "drafting", "status"), [(100.0, 150.0, "passed"), (100.0, 9.0, "failed"), (0.0, 9.0, "failed")]
)
def test_speed_is_sanity_only(plain: float, drafting: float, status: str) -> None:
    text = ReferenceText(None, [1], [0] * 10, 4, [], 0)
    found = check_speed(Timed(plain, drafting), text, 4)  # type: ignore[arg-type]
    assert found.status == status and (found.first is None) == (status == "passed")


def test_nothing_checked_is_failed(bundle: Path) -> None:
    assert judge("graph", [], None).status == "failed"
    nothing = Validation("b", "ort-cpu", "fp32", "PyTorch", [], None)
    assert not nothing.passed
    assert not dataclasses.replace(nothing, verdicts=[skipped("graph", "no reason")]).passed


def test_the_portable_graphs_as_reference_do_not_excuse_an_engine(bundle: Path) -> None:
    reference = portable_reference(opened(bundle), quiet)
    assert validated(bundle, reference).passed


def test_a_nan_in_the_target_is_named_and_every_level_has_its_verdict(bundle: Path, tmp_path: Path) -> None:
    """As of a faulty exporter: hashes fit. The page and the JSON are written all the same."""
    add_to_bundle(Bundle.open(bundle), made(bundle, new_tokens=4, prompts=["sky"]))
    planted(weight("model.layers.1.mlp.up_proj.weight", one_nan))(bundle)
    found = run("validate", str(bundle), "--json", "--html", str(tmp_path / "page.html"))
    assert found.exit_code == 1 and "1.mlp.up_proj" in found.stderr
    verdicts = json.loads(found.stdout)["verdicts"]
    assert [one["status"] for one in verdicts] == ["failed"] * 5
    assert verdicts[0]["first"]["tensor"] == "model.layers.1.mlp.up_proj"
    assert not any("kept rows" in row["tensor"] and not row["passed"] for row in verdicts[0]["rows"])
    assert all("NaN or infinite" in one["first"]["cause"] for one in verdicts[2:])
    assert "1.mlp.up_proj" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_what_cannot_end_well_is_refused_before_anything_runs(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_place = run("validate", str(bundle), "--html", str(tmp_path / "no" / "page.html"))
    assert no_place.exit_code == 1 and "no page can be written" in no_place.output
    nothing = run("validate", str(bundle), "--reference", str(tmp_path / "no"))
    assert nothing.exit_code == 1 and "neither a reference nor a folder" in nothing.output
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"question": "sky"}\n', encoding="utf-8")
    other_key = run("reference", str(bundle), "--prompts", str(prompts))
    assert other_key.exit_code == 1 and "Call the key 'prompt' or 'messages'" in other_key.output

    def not_reached(*arguments: Any, **options: Any) -> None:
        raise AssertionError("computed before the place was looked at")

    monkeypatch.setattr("dflash_tools.reference_building.build_reference", not_reached)
    into_a_file = run("reference", str(bundle), "--out", str(prompts))
    assert into_a_file.exit_code == 1 and "no folder that can be written to" in into_a_file.output
    monkeypatch.setattr(os, "access", lambda path, mode, **how: mode != os.W_OK)
    read_only = run("reference", str(bundle))
    assert read_only.exit_code == 1 and "--out FOLDER" in read_only.output


def test_a_reference_that_reaches_further_than_the_bundle_is_refused(bundle: Path) -> None:
    reference, facts = made(bundle, new_tokens=6), opened(bundle)
    for changes, words in (
        ({"block_sizes": [4]}, "it drafts blocks of 8 tokens, the bundle of at most 4"),
        ({"max_context_tokens": 12}, "tokens, the bundle's context 12"),
    ):
        smaller = dataclasses.replace(facts, manifest=dataclasses.replace(facts.manifest, **changes))  # type: ignore[arg-type]
        with pytest.raises(BundleError, match=words):
            require_fitting(reference, smaller)


def test_prompts_that_the_checkpoint_cannot_take_are_refused(bundle: Path) -> None:
    target = Path(opened(bundle).manifest.target.source.id)
    copy = shutil.copytree(target, bundle.parent / "copy")
    facts = opened(bundle)
    text = dataclasses.replace(facts.manifest.text, has_chat_template=False)
    plain = dataclasses.replace(facts, manifest=dataclasses.replace(facts.manifest, text=text))
    with pytest.raises(PromptError, match="no chat template for messages"):
        build_reference(plain, str(copy), None, quiet, prompts=[[{"role": "user", "content": "sky"}]])
    (copy / "tokenizer.json").unlink()
    with pytest.raises(PromptError, match="has no tokenizer"):
        build_reference(facts, str(copy), None, quiet, prompts=["sky"])
