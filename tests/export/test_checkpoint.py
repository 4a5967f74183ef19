"""Targets by catalog name, hub id and folder; every mistake is one clear line, and no code from a checkpoint runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import edit_json, write_target

from dflash_export.build_plan import BuildOptions, plan_build, plan_target
from dflash_export.catalog import CATALOG, drafter_template_args
from dflash_export.checkpoint import find_checkpoint
from dflash_export.text_files import copy_text_files, read_text_facts
from dflash_runtime.errors import CheckpointError, UnsupportedModelError


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "target"
    write_target(folder)
    return folder


@pytest.fixture
def copy(target: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(target, tmp_path / "copy"))


def test_a_folder_is_named_and_hashed(target: Path) -> None:
    checkpoint = find_checkpoint(f"{target}/", role="target")
    assert checkpoint.name == "target"
    assert checkpoint.source.kind == "folder"
    assert len(checkpoint.source.config_sha256) == 64


@pytest.mark.parametrize("reference", ["no-such-model", "../elsewhere", "a/b/c", ""])
def test_unknown_targets_list_what_is_accepted(reference: str) -> None:
    with pytest.raises(CheckpointError, match=r"not a folder, not a Hugging Face id.*qwen2-7b"):
        find_checkpoint(reference, role="target")


def test_hub_ids_are_looked_up_in_the_cache_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"Qwen/Qwen2-7B-Instruct@abc is not in the local Hugging Face cache"):
        find_checkpoint("Qwen/Qwen2-7B-Instruct@abc", role="target", local_files_only=True)


def test_the_catalog_says_which_checkpoint_a_name_means_and_who_has_no_drafter() -> None:
    assert CATALOG["qwen2-7b"].target == "Qwen/Qwen2-7B-Instruct"
    with pytest.raises(CheckpointError, match="nobody has published"):
        find_checkpoint("qwen2-7b", role="drafter")
    assert drafter_template_args("z-lab/Qwen3-8B-DFlash-b16") == {"enable_thinking": False}
    assert drafter_template_args("somebody/else") == {}


def test_remote_code_is_refused_by_name_and_never_run(copy: Path) -> None:
    (copy / "modeling_evil.py").write_text("raise SystemExit('ran remote code')")
    edit_json(copy / "config.json", model_type="evil", auto_map={"AutoConfig": "modeling_evil.EvilConfig"})
    with pytest.raises(UnsupportedModelError, match=r"'evil'.*runs no code from checkpoints"):
        plan_target(BuildOptions(str(copy)))


def test_quantised_targets_are_refused_by_method(copy: Path) -> None:
    edit_json(copy / "config.json", quantization_config={"quant_method": "awq"})
    with pytest.raises(CheckpointError, match=r"quantised \(awq\)"):
        plan_target(BuildOptions(str(copy)))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7031645\n"


@pytest.mark.parametrize(("name", "text", "words"), [
    ("config.json", "{", "cannot be read as JSON"),
    ("config.json", "[]", "holds list"),
    ("config.json", "", "cannot be read as JSON"),
    ("config.json", POINTER, "is a Git LFS pointer"),
    ("tokenizer.json", POINTER, "is a Git LFS pointer"),
    ("tokenizer.json", "{}", "cannot be read as a tokenizer"),
    ("tokenizer.json", "", "cannot be read as a tokenizer"),
    ("model.safetensors", POINTER, "is a Git LFS pointer"),
])  # fmt: skip
def test_damaged_files_are_named_before_work(copy: Path, name: str, text: str, words: str) -> None:
    assert (copy / name).is_file()
    (copy / name).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{name} {words}"):
        plan_target(BuildOptions(str(copy)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_context_tokens": 513}, "513 exceeds 512"),
        ({"max_context_tokens": 1}, "leaves no room"),
        ({"precision": "int3"}, "'int3' is not one of fp32, fp16, bf16"),
        ({"block_sizes": (4, 1)}, "1 is no block"),
    ],
)
def test_options_out_of_range_are_refused_before_work(target: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        plan_build(BuildOptions(str(target), **options))  # type: ignore[arg-type]


def test_without_a_drafter_the_plan_says_so(target: Path) -> None:
    plan = plan_build(BuildOptions(str(target)))
    assert plan.drafter is None
    assert any("no drafter" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (7, {"eos_token_id": [7, 9]}, [7, 9]),
        (7, {"eos_token_id": 9}, [9]),
        ([7, 8], {}, [7, 8]),
        (7, None, [7]),
        (None, None, []),
    ],
)
def test_every_stop_token_is_kept(copy: Path, config: object, generation: object, expected: list[int]) -> None:
    edit_json(copy / "config.json", eos_token_id=config)
    if generation is None:
        (copy / "generation_config.json").unlink()
    else:
        (copy / "generation_config.json").write_text(json.dumps(generation))
    facts, notes = read_text_facts(copy, {})
    assert facts.stop_token_ids == expected
    assert bool(notes) == (not expected)


def test_the_chat_template_travels_wherever_it_is(copy: Path, tmp_path: Path) -> None:
    text = (copy / "chat_template.jinja").read_text()
    edit_json(copy / "tokenizer_config.json", chat_template="old")  # a file of its own counts first
    places: list[tuple[str, object]] = [
        ("chat_template.json", text), ("tokenizer_config.json", text),
        ("tokenizer_config.json", [{"name": "tool_use", "template": "no"}, {"name": "default", "template": text}]),
    ]  # fmt: skip
    for number, (name, value) in enumerate([("chat_template.jinja", None), *places]):
        if value is not None:
            (copy / "chat_template.json").unlink(missing_ok=True)
            (copy / name).write_text(json.dumps({"chat_template": value}))
        assert read_text_facts(copy, {})[0].has_chat_template
        assert "tokenizer/chat_template.jinja" in copy_text_files(copy, tmp_path / str(number))
        assert (tmp_path / str(number) / "tokenizer/chat_template.jinja").read_text() == text
        (copy / "chat_template.jinja").unlink(missing_ok=True)


def test_a_checkpoint_without_a_template_for_plain_conversations(copy: Path, tmp_path: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    assert not read_text_facts(copy, {})[0].has_chat_template
    assert "tokenizer/chat_template.jinja" not in copy_text_files(copy, tmp_path / "none")
    edit_json(copy / "tokenizer_config.json", chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(CheckpointError, match="default"):
        read_text_facts(copy, {})


def test_special_tokens_by_name(copy: Path) -> None:
    (copy / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<old>", "pad_token": "<pad>"}))
    (copy / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": None}))
    assert read_text_facts(copy, {})[0].special_tokens == {"bos_token": "<s>", "pad_token": "<pad>"}
