"""Brings a checkpoint's weights into the bundle: its files where they are right as they are, the rest converted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from dflash_export.build_stages import BuildStages
from dflash_export.tensor_files import TensorPlace
from dflash_export.weight_links import COPY, LINK, bring_file, files_to_refer, refers
from dflash_export.weight_store import Progress, StoredWeights, store_weights
from dflash_runtime.bundle import FileFacts, WeightEntry, sha256_of


def bring_weights(
    root: Path,
    stem: str,
    places: Mapping[str, TensorPlace],
    dtype: str,
    mode: str,
    progress: Progress,
    stages: BuildStages,
    islands: Mapping[str, str] | None = None,
) -> StoredWeights:
    """Makes `weights/STEM*.safetensors`.

    Args:
        root: Bundle folder under construction.
        stem: `target` or `drafter`.
        places: Bundle name -> source tensor.
        dtype: F32, F16 or BF16.
        mode: `clone`, `link` or `copy`, from `settle_weights`.
        progress: Called with bytes done and bytes in all.
        stages: What a killed build left.
        islands: Dtypes of the tensors the model keeps in another one, by bundle name.

    Raises:
        CheckpointError: a tensor is not a plain float, or a value does not fit the dtype.
        OutputError: the disk is full or not writable, or a file cannot be linked.
    """
    dtypes = {name: (islands or {}).get(name, dtype) for name in places}
    files = {} if mode == COPY else files_to_refer(places, dtypes, stem)
    entries: dict[str, WeightEntry] = {}
    for name, place in places.items():
        file = files.get(place.file.resolve())
        if file is not None and refers(place, dtypes[name]):
            entries[name] = WeightEntry(file, place.offset_bytes, place.length_bytes, place.dtype, list(place.shape))
    facts: dict[str, FileFacts] = {}
    total, done = sum(source.stat().st_size for source in files), 0
    for source, file in files.items():
        bring_file(source, root / file, mode)
        facts[file] = _hash(root / file, stages)
        done += facts[file].size_bytes
        progress("weights", done, total)
    rest = {name: place for name, place in places.items() if name not in entries}
    own = f"weights/{stem}.safetensors" if not files else f"weights/{stem}-converted.safetensors"
    stored = StoredWeights({}, own, FileFacts(0, ""))
    if rest:
        stored = store_weights(root, own, rest, dtype, progress, islands, stages.file(f"{stem} weights.json"))
    return dataclasses.replace(
        stored,
        entries={**entries, **stored.entries},
        referred=facts,
        by_name=frozenset(entries) if mode == LINK else frozenset(),
    )


def _hash(path: Path, stages: BuildStages) -> FileFacts:
    """Size and hash of a file, computed once for as long as size and time stay what they are."""
    status, name = path.stat(), f"hash of {path.name}"
    kept = stages.load(name)
    if kept is None or kept["size_bytes"] != status.st_size or kept["mtime_ns"] != status.st_mtime_ns:
        kept = {"size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256_of(path)}
        stages.save(name, kept)
    return FileFacts(kept["size_bytes"], kept["sha256"])
