"""The folder of engines a backend uses of a bundle on this machine, and what its record says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from dflash_runtime.bundle import Bundle, sha256_of
from dflash_runtime.engine_record import ENGINE_RECORD_NAME
from dflash_runtime.errors import EngineError
from dflash_tools.doctor_gpu import gpus_of
from dflash_tools.machine_probe import Machine


@dataclasses.dataclass(frozen=True)
class EnginePlace:
    """One folder of engines."""

    folder: Path
    precision: str
    """What its graphs compute in."""
    file_bytes: int
    """Size of all its engine files; weights are apart unless they are embedded."""
    ring_rows: dict[str, int]
    """Rows of the drafter's caches that are not as long as the context, by name."""
    record_sha256: str
    """Of its record, which names the hash of every file: another engine has another one."""


def find_engine_place(bundle: Bundle, backend: str, machine: Machine | None = None) -> EnginePlace:
    """The engines of a backend; with engines for several GPUs, those for the GPU of this machine.

    Raises:
        EngineError: there are none, or several of which none is for this GPU.
    """
    remedy = f"Run: dflash-export engines {bundle.path} --backend {backend}"
    found = [place for place in _records(bundle) if place[1].get("backend") == backend]
    if not found:
        raise EngineError(f"{bundle.path} has no engines for {backend}. {remedy}")
    if len(found) > 1:
        gpus, _ = gpus_of(machine or Machine())
        capabilities = [".".join(map(str, gpu.compute_capability)) for gpu in gpus if gpu.compute_capability]
        found = [place for place in found if place[1].get("compute_capability") in capabilities]
        found.sort(key=lambda place: place[1].get("weights_mode") != "shared")  # the order sessions look in
    if not found:
        raise EngineError(f"{bundle.path} has engines for {backend}, but none for the GPU of this machine. {remedy}")
    path, record = found[0]
    size = sum(int(facts["size_bytes"]) for facts in record["files"].values())
    rings = {name: int(ring["rows"]) for name, ring in record.get("rings", {}).items()}
    return EnginePlace(path.parent, str(record["execution_precision"]), size, rings, sha256_of(path))


def _records(bundle: Bundle) -> list[tuple[Path, dict[str, Any]]]:
    paths = sorted((bundle.path / "engines").glob(f"*/{ENGINE_RECORD_NAME}"))
    return [(path, json.loads(path.read_text(encoding="utf-8"))) for path in paths]
