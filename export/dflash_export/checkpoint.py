"""A checkpoint on disk: found by catalog name, Hugging Face id or folder, and checked before any long work."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from dflash_export.catalog import CATALOG, shipped_folder
from dflash_export.json_file import read_json
from dflash_export.tensor_files import TensorPlace, read_tensor_places
from dflash_runtime.bundle import SourceFacts
from dflash_runtime.errors import CheckpointError, UnsupportedModelError

_HUB_ID = re.compile(r"^(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?$")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder with config and safetensors weights."""

    folder: Path
    name: str
    """What to call it: the last part of the id, or the folder's name."""
    source: SourceFacts
    places: dict[str, TensorPlace]


def find_checkpoint(reference: str, *, role: str, local_files_only: bool = False) -> Checkpoint:
    """Locates a checkpoint and reads its tensor headers.

    Args:
        reference: Catalog name, Hugging Face id (revision after `@`), or folder.
        role: `target` or `drafter`, for messages; a catalog name stands for either.
        local_files_only: Use the hub cache alone.

    Raises:
        CheckpointError: nothing there, files missing or damaged, the hub refuses.
    """
    entry = CATALOG.get(reference.lower())
    if entry is not None:
        found = entry.target if role == "target" else entry.drafter
        if found is None:
            raise CheckpointError(f"the catalog knows no drafter for {reference}: {entry.note}.")
        reference = found
    shipped = shipped_folder(reference)
    if shipped is not None and shipped.is_dir():
        return _open(shipped, shipped.parent.name, "package", reference, None)
    folder = Path(reference).expanduser()
    if reference and folder.is_dir():
        return _open(folder, folder.resolve().name, "folder", str(folder.resolve()), None)
    match = _HUB_ID.match(reference)
    if match is None or folder.exists():
        known = ", ".join(sorted(CATALOG))
        raise CheckpointError(
            f"{reference!r} is no {role}: not a folder, not a Hugging Face id like owner/name[@revision], and not a "
            f"catalog name ({known})."
        )
    repo, revision = match["id"], match["revision"]
    path = _download(repo, revision, local_files_only)
    return _open(path, repo.split("/")[1], "hub", repo, path.name if _is_commit(path.name) else revision)


def _open(folder: Path, name: str, kind: str, identity: str, revision: str | None) -> Checkpoint:
    config = folder / "config.json"
    if not config.is_file():
        raise CheckpointError(f"{folder} has no config.json; it is not a Hugging Face checkpoint folder.")
    digest = hashlib.sha256(config.read_bytes()).hexdigest()
    return Checkpoint(folder, name, SourceFacts(kind, identity, revision, digest), read_tensor_places(folder))


def _is_commit(name: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}", name) is not None


def _download(repo: str, revision: str | None, local_files_only: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    wanted = repo if revision is None else f"{repo}@{revision}"
    try:
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=_HUB_FILES, local_files_only=local_files_only
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{wanted} is gated: accept its terms at https://huggingface.co/{repo} and log in with `hf auth login`."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no revision {revision!r}. See https://huggingface.co/{repo}.") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"there is no {wanted} on the Hugging Face hub, or it is private: check the name, or `hf auth login`."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{wanted} is not in the local Hugging Face cache and the hub cannot be reached. Connect once, or give a "
            "folder."
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise CheckpointError(f"downloading {wanted} failed: {str(error).splitlines()[0]}") from error
    return Path(folder)


def read_target_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The target's configuration as Transformers reads it, never running code from the checkpoint.

    Raises:
        CheckpointError: config.json is no valid configuration, or a quantised one.
        UnsupportedModelError: the model type needs code that Transformers does not ship.
    """
    data = read_json(checkpoint.folder / "config.json")
    if data.get("quantization_config"):
        method = data["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"{checkpoint.name} is quantised ({method}); give the original half-precision checkpoint."
        )
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        if "model_type" in data and "auto_map" in data:
            raise UnsupportedModelError(
                f"{checkpoint.name} has model_type {data['model_type']!r}, which needs code from its repository. "
                "This tool runs no code from checkpoints."
            ) from error
        raise CheckpointError(f"{checkpoint.folder / 'config.json'}: {str(error).splitlines()[0]}") from error
    return config
