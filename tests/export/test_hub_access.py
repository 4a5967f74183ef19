"""Checkpoints from the hub, pinned, offline or gated: against a cache as the client lays it out, and one that fails."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo
from tiny_models import write_drafter, write_target
from transformers import Qwen3NextConfig

from dflash_export.build_plan import BuildOptions, plan_build
from dflash_export.catalog import CATALOG, NOT_SERVED, CatalogEntry
from dflash_export.checkpoint import find_checkpoint
from dflash_export.drafter_config import read_drafter_config
from dflash_export.pair_report import examine_pair
from dflash_export.tensor_files import read_tensor_places
from dflash_runtime.errors import CheckpointError, UnsupportedModelError

OLD, NEW = "a" * 40, "b" * 40
REPO = "somebody/tiny"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with two commits of a target; `main` is the newer one."""
    root = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root))
    repo = root / "models--somebody--tiny"
    for commit, layers in ((OLD, 3), (NEW, 4)):
        write_target(repo / "snapshots" / commit, num_hidden_layers=layers)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(NEW)
    (repo / "refs" / "v1").write_text(OLD)
    return root


def find(reference: str, **options: Any) -> tuple[str | None, str]:
    found = find_checkpoint(reference, role="target", local_files_only=True, **options)
    return found.source.revision, found.folder.name


def test_a_revision_is_pinned_and_recorded(cache: Path) -> None:
    assert find(REPO) == (NEW, NEW)  # the commit behind main, so that it can be asked for again
    assert find(f"{REPO}@{OLD}") == (OLD, OLD)
    assert find(f"{REPO}@v1") == (OLD, OLD)
    plan = plan_build(BuildOptions(f"{REPO}@{OLD}", local_files_only=True))
    assert plan.target.checkpoint.source.kind == "hub"
    assert (plan.target.checkpoint.source.id, plan.target.checkpoint.source.revision) == (REPO, OLD)


def test_a_pin_of_the_catalog_is_followed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOG, "tiny", CatalogEntry(REPO, target_revision=OLD))
    assert find("tiny") == (OLD, OLD)


def test_pins_of_both_halves_are_followed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a build and by the pair checker alike."""
    repo = cache / "models--somebody--drafter"
    for commit, block_size in ((OLD, 4), (NEW, 8)):
        write_drafter(repo / "snapshots" / commit, block_size=block_size, taps=(0, 1))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(NEW)
    (cache / "models--somebody--tiny" / "refs" / "main").write_text(OLD)
    entry = CatalogEntry(REPO, "somebody/drafter", target_revision=NEW, drafter_revision=OLD)
    monkeypatch.setitem(CATALOG, "tiny", entry)
    plan = plan_build(BuildOptions("tiny", local_files_only=True))
    assert plan.drafter is not None and plan.drafter.config.block_size == 4
    assert (plan.target.checkpoint.source.revision, plan.drafter.checkpoint.source.revision) == (NEW, OLD)
    report = examine_pair("tiny", None, local_files_only=True)
    assert (report.target["revision"], report.drafter["revision"]) == (NEW, OLD)


def test_offline_takes_the_cache_alone(cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"somebody/else is not in the local Hugging Face cache"):
        find("somebody/else")
    with pytest.raises(CheckpointError, match=r"tiny@v9 is not in the local Hugging Face cache"):
        find(f"{REPO}@v9")


def test_an_interrupted_download_is_not_taken_for_a_checkpoint(cache: Path) -> None:
    (cache / "models--somebody--tiny" / "snapshots" / NEW / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file"):
        find(REPO)
    assert find(REPO, with_weights=False) == (NEW, NEW)


def test_wrong_kinds_are_refused_before_their_weights_are_fetched(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target of gigabytes with layers that cannot be rolled back, and a drafter with extra heads."""
    fetched = []
    real = huggingface_hub.snapshot_download

    def watched(repo: str, **asked: Any) -> str:
        fetched.append((repo, "*.safetensors" in asked["allow_patterns"]))
        return str(real(repo, **asked))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", watched)
    options = {"local_files_only": True}
    write_drafter(cache / "models--x--domino" / "snapshots" / OLD, dflash_config={"projector_type": "domino"})
    with pytest.raises(UnsupportedModelError, match="domino"):
        plan_build(BuildOptions(REPO, f"x/domino@{OLD}", **options))  # type: ignore[arg-type]
    assert ("x/domino", True) not in fetched and (REPO, True) in fetched
    config = cache / "models--somebody--tiny" / "snapshots" / NEW / "config.json"
    Qwen3NextConfig(num_hidden_layers=4, hidden_size=64, vocab_size=512).save_pretrained(config.parent)
    (config.parent / "model.safetensors").rename(config.parent / "model-00001-of-00002.safetensors")
    (config.parent / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'
    )
    fetched.clear()
    with pytest.raises(UnsupportedModelError, match="cannot be exported: its layers of kind linear_attention"):
        plan_build(BuildOptions(REPO, **options))  # type: ignore[arg-type]
    assert fetched == [(REPO, False)]


class Client:
    """Stands in for the client: remembers what it was asked for, and fails as told."""

    def __init__(self, error: Exception | None, folder: Path) -> None:
        self.error, self.folder, self.asked = error, folder, dict[str, Any]()

    def __call__(self, repo: str, **asked: Any) -> str:
        self.asked = asked
        if self.error is not None:
            raise self.error
        return str(self.folder)


def answer(status: int) -> Any:
    """What the client's errors keep of a server's answer."""
    return types.SimpleNamespace(status_code=status, headers={}, request=None)


FAILURES: list[tuple[Exception, str]] = [
    (
        errors.GatedRepoError("x", response=answer(403)),
        r"is gated: .*terms.*huggingface\.co/somebody/tiny.*hf auth login",
    ),
    (errors.RepositoryNotFoundError("x", response=answer(404)), r"there is no somebody/tiny on the Hugging Face hub"),
    (errors.RevisionNotFoundError("x", response=answer(404)), r"has no revision"),
    (errors.LocalEntryNotFoundError("x"), r"not in the local Hugging Face cache and the hub cannot be reached"),
    (errors.OfflineModeIsEnabled("x"), r"HF_HUB_OFFLINE forbids the hub"),
    (errors.HfHubHTTPError("503 busy\nlong", response=answer(503)), r"downloading somebody/tiny failed: 503 busy$"),
    (OSError("disk full"), r"downloading somebody/tiny failed: disk full"),
]


@pytest.mark.parametrize(("error", "words"), FAILURES, ids=lambda value: type(value).__name__)
def test_every_refusal_of_the_hub_says_what_to_do(
    error: Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Client(error, tmp_path))
    with pytest.raises(CheckpointError, match=words) as caught:
        find_checkpoint(REPO, role="target")
    assert "\n" not in str(caught.value)


def test_what_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second copies of the weights; a learned mask embedding, which is no safetensors file, is not missed."""
    write_drafter(tmp_path / NEW)
    (tmp_path / NEW / "mask_embedding.pt").touch()
    client = Client(None, tmp_path / NEW)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", client)
    found = find_checkpoint(f"{REPO}@main", role="drafter")
    assert found.source.revision == NEW and client.asked["revision"] == "main"
    assert "mask_embedding.pt" in client.asked["allow_patterns"] and "*.safetensors" in client.asked["allow_patterns"]
    assert "consolidated*.safetensors" in client.asked["ignore_patterns"]
    with pytest.raises(UnsupportedModelError, match="learned mask embedding"):
        read_drafter_config(found.folder)
    find_checkpoint(REPO, role="target", with_weights=False)
    assert not any("safetensors" in pattern for pattern in client.asked["allow_patterns"])


def test_check_pair_reads_headers_and_fetches_no_weights(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = cache / "models--x--drafter" / "snapshots" / OLD
    write_drafter(drafter)
    real, asked = huggingface_hub.snapshot_download, []

    def offline(repo: str, **options: Any) -> str:
        asked.append((repo, "*.safetensors" in options["allow_patterns"]))
        return str(real(repo, **{**options, "local_files_only": True}))

    def headers(repo: str, revision: str) -> Any:
        assert (repo, revision) == ("x/drafter", OLD)
        tensors = {
            name: TensorInfo(place.dtype, list(place.shape), (0, place.length_bytes))
            for name, place in read_tensor_places(drafter).items() if name != gone
        }  # fmt: skip
        return SafetensorsRepoMetadata(None, False, {}, {"model.safetensors": SafetensorsFileMetadata({}, tensors)})

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", headers)
    gone = ""
    assert examine_pair(REPO, f"x/drafter@{OLD}").findings == []
    assert asked == [(REPO, False), ("x/drafter", False)]
    gone = "norm.weight"
    assert "lacks 1 of" in examine_pair(REPO, f"x/drafter@{OLD}").findings[0].text

    def foreign(repo: str, revision: str) -> Any:
        raise errors.NotASafetensorsRepoError("weight files of other names")

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", foreign)
    assert examine_pair(REPO, f"x/drafter@{OLD}").findings == []
    assert asked[-1] == ("x/drafter", True)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_public_targets_out_of_reach_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{name} has a public drafter and is not exported: (its|some|Tr)"):
        find_checkpoint(name, role="target")


def test_the_catalog_contradicts_itself_nowhere() -> None:
    for name, entry in CATALOG.items():
        assert entry.drafter or entry.note or name == "demo"
        if entry.known.thinks is not None and entry.template_args:
            assert entry.template_args == {"enable_thinking": entry.known.thinks}
    assert not CATALOG.keys() & NOT_SERVED.keys()
