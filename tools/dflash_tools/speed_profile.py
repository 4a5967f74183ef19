"""What `tune` measured of a pair on a device: `engines/<folder>/speed_profiles.json`, read and written here alone.

One file holds a profile for each set of conditions (power mode, clocks, threads): a board that changes its mode keeps
the profiles of both, and only the one measured in the present mode is used.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import cast

from dflash_runtime.bundle import decode, write_atomically
from dflash_runtime.errors import BundleError, EngineError
from dflash_tools.device_conditions import DeviceConditions

SCHEMA_VERSION = 1
FILE_NAME = "speed_profiles.json"


@dataclasses.dataclass(frozen=True)
class CycleCost:
    """Time of one cycle at one block size and length of context."""

    block_size: int
    """1 is plain decoding."""
    context_tokens: int
    median_ms: float
    low_ms: float
    high_ms: float
    """Quartiles."""
    stages_ms: dict[str, float]
    """Median of draft, verify, context and host."""
    cycles: int
    """How many were measured."""


@dataclasses.dataclass(frozen=True)
class BlockAcceptance:
    """What became of the proposals of one block size; another size proposes differently, so each has its own."""

    block_size: int
    reached: list[int]
    """By position: rounds in which all proposals before it were accepted and its own fate is known."""
    accepted: list[int]
    """Those in which it was accepted too."""
    histogram: list[int]
    """Rounds by accepted proposals, 0 to block size - 1."""
    tokens_per_round: float
    """Mean over all rounds, the target's own token included."""
    tokens_per_round_by_request: float
    """Mean of each request's own mean."""


@dataclasses.dataclass(frozen=True)
class ProfilePrompts:
    """The prompts acceptance was measured on."""

    name: str
    sha256: str
    count: int
    max_new_tokens: int
    thinking: str


@dataclasses.dataclass(frozen=True)
class SpeedProfile:
    """One pair on one device in one mode."""

    made: str
    """UTC, ISO 8601."""
    tool_version: str
    backend: str
    threads: int | None
    """As given; None where the backend chose."""
    engine_sha256: str
    """Of the engines' record: a profile of other engines is not used."""
    conditions: DeviceConditions
    load_average: float | None
    """Before the measurement."""
    prompts: ProfilePrompts
    costs: list[CycleCost]
    acceptance: list[BlockAcceptance]


@dataclasses.dataclass(frozen=True)
class _ProfileFile:
    schema_version: int
    profiles: list[SpeedProfile]


def read_profiles(folder: Path) -> list[SpeedProfile]:
    """All profiles beside the engines in `folder`; none where `tune` never ran.

    Raises:
        EngineError: the file is there and cannot be read.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise BundleError(f"it has schema {version}, this program reads {SCHEMA_VERSION}")
        return cast(_ProfileFile, decode(_ProfileFile, data, str(path))).profiles
    except (OSError, ValueError, BundleError) as error:
        raise EngineError(f"{path} cannot be read ({error}). Delete it and run: dflash-export tune") from error


def write_profile(folder: Path, profile: SpeedProfile) -> Path:
    """Keeps a profile beside the engines; it replaces those of other engines and the one of the same conditions."""
    kept = [
        old
        for old in read_profiles(folder)
        if old.engine_sha256 == profile.engine_sha256 and mismatches(old, profile)
    ]
    path = folder / FILE_NAME
    file = _ProfileFile(SCHEMA_VERSION, [*kept, profile])
    write_atomically(path, json.dumps(dataclasses.asdict(file), indent=1) + "\n")
    return path


def mismatches(profile: SpeedProfile, other: SpeedProfile) -> list[str]:
    """Why times of one profile do not hold where the other one was measured, in words."""
    return condition_mismatches(profile, other.backend, other.threads, other.engine_sha256, other.conditions)


def condition_mismatches(
    profile: SpeedProfile, backend: str, threads: int | None, engine_sha256: str, conditions: DeviceConditions
) -> list[str]:
    """Why a profile does not hold for these engines, threads and conditions, in words; empty where it does."""
    words = []
    if profile.backend != backend:
        words.append(f"its backend was {profile.backend} and is {backend}")
    if profile.engine_sha256 != engine_sha256:
        words.append("it was made with other engines")
    if profile.threads != threads:
        words.append(f"threads were {profile.threads or 'not given'} and are {threads or 'not given'}")
    return words + profile.conditions.differences(conditions)
