"""`engines/<backend>-sm<NN>/engine.json`: what the engines of a device in that folder are and what they fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from dflash_runtime.bundle import Bundle, TensorFacts, cache_root
from dflash_runtime.engine_record import ENGINE_RECORD_NAME, EngineRecord, source_problems
from dflash_runtime.errors import EngineError

STOP_ID_SLOTS = 32
"""Stop ids that the acceptance engine compares with; -2 fills those that are not needed."""

CANDIDATES = 128
"""Likeliest tokens of a row that the candidates engine puts out."""


def row_outputs(vocab_size: int) -> list[TensorFacts]:
    """What the candidates engine puts out of each row; see `CandidateSource`."""
    rows: list[int | str] = ["B", "R"]
    shape = [*rows, min(CANDIDATES, vocab_size)]
    return [TensorFacts("candidate_ids", "I64", shape), TensorFacts("candidate_values", "F32", shape),
            TensorFacts("candidate_total", "F32", rows)]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class EngineProfile:
    """One set of fixed shapes an engine was optimised for; its place in the list is its TensorRT index."""

    rows: int
    """S or b: tokens in the call."""
    logit_rows: int
    """R: rows whose logits come out; 0 for graphs that have none."""
    capacity_rows: int
    """T: rows of the caches it reads; 0 for acceptance, which reads none."""


@dataclasses.dataclass(frozen=True)
class BoundWeight:
    """An input of an engine that takes a weight of the bundle."""

    input: str
    weight: str
    """Its name in the bundle's index; two inputs of one weight and dtype are bound to the same memory."""
    dtype: str
    """F32, F16 or BF16: what the input takes; the weight is converted when it is loaded."""


@dataclasses.dataclass(frozen=True)
class GraphEngine:
    """The engine of one graph."""

    kind: str
    """target, drafter_context, drafter, acceptance or candidates."""
    file: str
    build_key: str
    """Equal for engines that are the same: network, shapes, GPU, TensorRT. Every fine-tune of a shape shares it."""
    profiles: list[EngineProfile]
    weights: list[BoundWeight]
    """Empty where the engine holds its own copy."""
    scratch_bytes: list[int]
    """Device memory one call needs, by profile, as TensorRT states it."""
    build_peak_bytes: int
    """Most memory the building process had resident."""


@dataclasses.dataclass(frozen=True)
class DeviceEngineRecord(EngineRecord):
    """That of a folder of engines for `ort-cuda`, `tensorrt` or `tensorrt-rtx`."""

    SCHEMA_VERSION = 3

    tensorrt_version: str | None
    compute_capability: str | None
    """Of the GPU the engines run on, `8.9`; both None for graphs that ONNX Runtime opens, which fit any GPU."""
    form: str
    """`fused` or `primitive`."""
    weights_mode: str
    """`shared` (inputs) or `embedded`."""
    capacity_rows: int
    block_sizes: list[int]
    prefill_chunk_tokens: int
    engines: list[GraphEngine]


def device_tag(backend: str, compute_capability: str | None, weights_mode: str = "shared") -> str:
    """Name of the folder of engines: `tensorrt-rtx-sm89`, `tensorrt-sm87-embedded`, `ort-cuda` for any GPU."""
    tag = backend if compute_capability is None else f"{backend}-sm{compute_capability.replace('.', '')}"
    return tag if weights_mode == "shared" else f"{tag}-{weights_mode}"


def engine_folders(bundle: Bundle, tag: str) -> list[Path]:
    """Where engines of a device may lie, in order: in the bundle, or for a read-only one in the cache folder."""
    return [bundle.path / "engines" / tag, cache_root() / "engines" / bundle.cache_key() / tag]


def find_device_engine(
    name: str, bundle: Bundle, modes: Sequence[str], tensorrt_version: str | None, compute_capability: str, remedy: str
) -> tuple[Path, DeviceEngineRecord]:
    """The engines of backend `name` for a GPU: their folder and record, checked.

    Of several folders the first in the order of `modes`, how engines have their weights, is taken. The other arguments
    and the errors are those of `check_device_engine`; EngineError too where there are no engines.
    """
    made_for = None if tensorrt_version is None else compute_capability
    own = [folder for mode in modes for folder in engine_folders(bundle, device_tag(name, made_for, mode))]
    others = sorted((bundle.path / "engines").glob(f"{name}-sm*"))  # their record says what they are for
    folder = next((folder for folder in (*own, *others) if (folder / ENGINE_RECORD_NAME).is_file()), own[0])
    record = DeviceEngineRecord.read(folder, remedy)
    check_device_engine(record, bundle, tensorrt_version, compute_capability, remedy)
    return folder, record


def check_device_engine(record: DeviceEngineRecord, bundle: Bundle, tensorrt_version: str | None,
                        compute_capability: str, remedy: str) -> None:
    """Refuses engines made for another GPU, another TensorRT, or another bundle.

    Args:
        record: The record of the engines.
        bundle: What is to be run.
        tensorrt_version: Of the TensorRT that would run them.
        compute_capability: Of the GPU that would run them.
        remedy: The command that rebuilds them.

    Raises:
        EngineError: naming each difference with both values.
    """
    pairs = {"compute capability": (record.compute_capability, compute_capability),
             record.backend: (record.tensorrt_version, tensorrt_version)}  # fmt: skip
    problems = [f"they were made for {what} {made}, here is {here}"
                for what, (made, here) in pairs.items() if made is not None and made != here]  # fmt: skip
    problems += source_problems(bundle, record.source)
    if problems:
        raise EngineError(f"The {record.backend} engines do not fit: {'; '.join(problems)}. {remedy}")
