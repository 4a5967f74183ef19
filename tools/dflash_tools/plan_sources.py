"""Where a plan's sizes come from: config.json of a folder, a catalog name or a hub id, or a bundle. Never weights."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from dflash_runtime.bundle import MANIFEST_NAME, Bundle
from dflash_runtime.errors import CheckpointError
from dflash_tools.bundle_shape import drafter_shape_of_bundle, model_shape_of_bundle
from dflash_tools.decoder_families import read_model_shape
from dflash_tools.drafter_shape import assumed_drafter, read_drafter_shape
from dflash_tools.error_lines import needs_extra
from dflash_tools.model_shape import DrafterShape, ModelShape

_HUB_ID = re.compile(r"^(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?$")


@dataclasses.dataclass(frozen=True)
class Pair:
    """Target and drafter by their sizes, and what was assumed about them."""

    target: ModelShape
    drafter: DrafterShape
    notes: tuple[str, ...]


def find_pair(target: str, drafter: str | None) -> Pair:
    """Reads the sizes of a pair; without a drafter the catalog's, the bundle's, or the paper's default is taken.

    Args:
        target: Folder with config.json, bundle, catalog name, or Hugging Face id with `@revision`.
        drafter: The same for the drafter.

    Raises:
        CheckpointError: nothing there, or a config that cannot be read.
        UnsupportedModelError: a family or a kind of drafter the plan does not know.
        PairError: the two do not fit each other.
    """
    from dflash_export.catalog import CATALOG

    drafter = None if drafter is None else _drafter_reference(drafter)
    folder = Path(target).expanduser()
    if (folder / MANIFEST_NAME).is_file():
        return _pair_of_bundle(folder, drafter)
    entry = CATALOG.get(target.lower())
    wanted = entry.reference("target") if entry else None
    shape = read_model_shape(*read_config(wanted or target, "target"))
    reference = drafter or (entry.reference("drafter") if entry else None)
    if reference is None:
        return _assume(shape, None, f"{entry.note}; " if entry and entry.note else "")
    config, name = read_config(reference, "drafter")
    return _pair(shape, read_drafter_shape(config, shape, name))


def _pair(target: ModelShape, drafter: DrafterShape) -> Pair:
    return Pair(target, drafter, (*target.notes, *drafter.body.notes))


def read_config(reference: str, role: str) -> tuple[dict[str, Any], str]:
    """Content of a checkpoint's config.json, and what to call the checkpoint.

    Args:
        reference: Folder or Hugging Face id; of an id config.json alone is fetched.
        role: `target` or `drafter`, for messages.

    Raises:
        CheckpointError: nothing there, no JSON, or the hub refuses.
    """
    from dflash_export.json_file import read_json

    path, name = find_config(reference, role)
    return read_json(path), name


def find_config(reference: str, role: str) -> tuple[Path, str]:
    """Path of a checkpoint's config.json, and what to call the checkpoint; see `read_config`.

    Raises:
        CheckpointError: nothing there, or the hub refuses.
    """
    from dflash_export.catalog import shipped_folder

    shipped = shipped_folder(reference)
    folder = shipped or Path(reference).expanduser()
    if reference and folder.is_dir():
        path = folder / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} has no config.json and no {MANIFEST_NAME}: no checkpoint, no bundle.")
        return path, folder.parent.name if shipped else folder.resolve().name
    match = _HUB_ID.match(reference)
    if match is None or folder.exists():
        from dflash_export.catalog import CATALOG

        raise CheckpointError(
            f"{reference!r} is no {role}: not a folder with config.json, not a bundle, not a Hugging Face id like "
            f"owner/name[@revision], and not a catalog name ({', '.join(sorted(CATALOG))})."
        )
    return _fetch_config(match["id"], match["revision"]), match["id"].split("/")[1]


def _drafter_reference(drafter: str) -> str:
    """What a catalog name stands for as a drafter; anything else is taken as it is."""
    from dflash_export.catalog import CATALOG

    entry = CATALOG.get(drafter.lower())
    if entry is None:
        return drafter
    found = entry.reference("drafter")
    if found is None:
        raise CheckpointError(f"the catalog knows no drafter for {drafter}: {entry.note}.")
    return found


def _fetch_config(repo: str, revision: str | None) -> Path:
    with needs_extra("export"):
        from dflash_export.hub_access import download_config

        return download_config(repo, revision)


def _pair_of_bundle(path: Path, drafter: str | None) -> Pair:
    bundle = Bundle.open(path, check_files=False)
    shape = model_shape_of_bundle(bundle)
    if drafter is not None:
        config, name = read_config(drafter, "drafter")
        return _pair(shape, read_drafter_shape(config, shape, name))
    if bundle.manifest.drafter is not None:
        return Pair(shape, drafter_shape_of_bundle(bundle, shape), shape.notes)
    return _assume(shape, len(bundle.manifest.taps.layer_ids), "the bundle has none; ")


def _assume(shape: ModelShape, num_taps: int | None, why: str) -> Pair:
    drafter = assumed_drafter(shape) if num_taps is None else assumed_drafter(shape, num_taps)
    note = (
        f"no drafter given: {why}the paper's five layers at the target's width are assumed "
        f"({drafter.num_parameters / 1e9:.2f} B parameters)"
    )
    return Pair(shape, drafter, (*shape.notes, note))
