"""A checkpoint on disk: found by catalog name, Hugging Face id or folder, and checked before any long work."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from dflash_export.catalog import CATALOG, NOT_SERVED, shipped_folder
from dflash_export.hub_access import download
from dflash_export.json_file import read_json
from dflash_export.quantized_formats import import_notes, read_quantized_places
from dflash_export.quantized_names import refuse_unexplained_parts
from dflash_export.tensor_files import TensorPlace, read_tensor_places
from dflash_runtime.bundle import SourceFacts
from dflash_runtime.errors import CheckpointError, UnsupportedModelError

_HUB_ID = re.compile(r"^(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?$")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder with config and safetensors weights."""

    folder: Path
    name: str
    """What to call it: the last part of the id, or the folder's name."""
    source: SourceFacts
    places: dict[str, TensorPlace]


def find_checkpoint(
    reference: str, *, role: str, local_files_only: bool = False, with_weights: bool = True
) -> Checkpoint:
    """Locates a checkpoint and reads its tensor headers.

    Args:
        reference: Catalog name, Hugging Face id (revision after `@`), or folder.
        role: `target` or `drafter`, for messages; a catalog name stands for either.
        local_files_only: Use the hub cache alone.
        with_weights: Weights must be there; otherwise those at hand are read, and none is downloaded.

    Raises:
        CheckpointError: nothing there, files missing or damaged, the hub refuses.
        UnsupportedModelError: a name the catalog knows to be out of reach.
    """
    reference = _of_catalog(reference, role)
    shipped = shipped_folder(reference)
    if shipped is not None and shipped.is_dir():
        return _open(shipped, shipped.parent.name, "package", reference)
    folder = Path(reference).expanduser()
    if reference and folder.is_dir():
        return _open(folder, folder.resolve().name, "folder", str(folder.resolve()), with_weights=with_weights)
    match = _HUB_ID.match(reference)
    if match is None or folder.exists():
        known = ", ".join(sorted(CATALOG))
        raise CheckpointError(
            f"{reference!r} is no {role}: not a folder, not a Hugging Face id like owner/name[@revision], and not a "
            f"catalog name ({known})."
        )
    repo = match["id"]
    path, revision = download(repo, match["revision"], local_files_only=local_files_only, with_weights=with_weights)
    return _open(path, repo.split("/")[1], "hub", repo, revision, with_weights=with_weights)


def with_weights(checkpoint: Checkpoint, *, local_files_only: bool = False) -> Checkpoint:
    """The same checkpoint, of the same commit, with its weights.

    Args:
        checkpoint: Found without them.
        local_files_only: Use the hub cache alone.

    Raises:
        CheckpointError: they are missing or damaged, or the hub refuses.
    """
    source, folder = checkpoint.source, checkpoint.folder
    if source.kind == "hub":
        folder, _ = download(source.id, source.revision, local_files_only=local_files_only)
    return dataclasses.replace(checkpoint, folder=folder, places=read_tensor_places(folder))


def _of_catalog(reference: str, role: str) -> str:
    """What a catalog name stands for, its revision after `@`; anything else is taken as it is."""
    refused = NOT_SERVED.get(reference.lower())
    if refused is not None:
        raise UnsupportedModelError(f"{reference} has a public drafter and is not exported: {refused}.")
    entry = CATALOG.get(reference.lower())
    if entry is None:
        return reference
    found = entry.reference(role)
    if found is None:
        raise CheckpointError(f"the catalog knows no drafter for {reference}: {entry.note}.")
    return found


def _open(
    folder: Path, name: str, kind: str, identity: str, revision: str | None = None, *, with_weights: bool = True
) -> Checkpoint:
    config = folder / "config.json"
    if not config.is_file():
        raise CheckpointError(f"{folder} has no config.json; it is not a Hugging Face checkpoint folder.")
    digest = hashlib.sha256(config.read_bytes()).hexdigest()
    # A hub's folder may hold the index of shards that were not fetched.
    at_hand = kind != "hub" and any(folder.glob("*.safetensors"))
    places = read_tensor_places(folder) if with_weights or at_hand else {}
    return Checkpoint(folder, name, SourceFacts(kind, identity, revision, digest), places)


def with_imported_weights(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint whose quantised weights, where it has some, stand under the names of the plain ones.

    Raises:
        CheckpointError: it is quantised in a way that is not taken.
    """
    config = quantization_config(checkpoint.folder)
    if config is None:
        refuse_unexplained_parts(checkpoint.places, str(checkpoint.folder))
        return checkpoint
    return dataclasses.replace(checkpoint, places=read_quantized_places(config, checkpoint.places, checkpoint.name))


def quantization_config(folder: Path) -> dict[str, Any] | None:
    """How a checkpoint's weights are quantised, in its config.json or ModelOpt's own file; None where they are not.

    Raises:
        CheckpointError: what stands there is no object.
    """
    config = read_json(folder / "config.json").get("quantization_config")
    beside = folder / "hf_quant_config.json"
    if not config and beside.is_file():
        config = {"quant_method": "modelopt", **read_json(beside)}
    if config is not None and not isinstance(config, dict):
        raise CheckpointError(f"{folder / 'config.json'}: quantization_config is {config!r} and no JSON object.")
    return config or None


def notes_of_import(checkpoint: Checkpoint) -> list[str]:
    """What its quantisation asks for and does not get, in words for the user."""
    config = quantization_config(checkpoint.folder)
    return [] if config is None else import_notes(config)


def read_target_config(checkpoint: Checkpoint, *, quantized: bool = False) -> PreTrainedConfig:
    """The target's configuration as Transformers reads it, never running code from the checkpoint.

    Args:
        checkpoint: The target.
        quantized: A quantised checkpoint will do, its weights being read by `with_imported_weights`.

    Raises:
        CheckpointError: config.json is no valid configuration, or one of a quantised checkpoint.
        UnsupportedModelError: the model type needs code that Transformers does not ship.
    """
    data = read_json(checkpoint.folder / "config.json")
    found = quantization_config(checkpoint.folder)
    if found is not None and not quantized:
        method = found.get("quant_method", "unknown")
        raise CheckpointError(f"{checkpoint.name} is quantised ({method}); this needs the original half-precision one.")
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        if "model_type" in data and "auto_map" in data:
            raise UnsupportedModelError(
                f"{checkpoint.name} has model_type {data['model_type']!r}, which needs code from its repository. "
                "This tool runs no code from checkpoints."
            ) from error
        raise CheckpointError(f"{checkpoint.folder / 'config.json'}: {str(error).splitlines()[0]}") from error
    # The module is made plain; what is quantised is read from the checkpoint's own tensors.
    for part in {id(one): one for one in (config, config.get_text_config())}.values():
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config
