"""Bundle -> TensorRT engines: one per graph, a static profile per block size, for one kind of GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dflash_engines.builder_memory import available_bytes, check_memory
from dflash_engines.engine_cache import EngineCache
from dflash_engines.engine_place import engines_folder, partial_folder, replace_folder
from dflash_engines.tensorrt_network import Network
from dflash_engines.tensorrt_plan import EngineOptions, EnginePlan, refuse_precision
from dflash_engines.tensorrt_versions import VersionRow, lacks_kernels, row_for
from dflash_engines.this_gpu import compute_capability_here
from dflash_runtime.bundle import Bundle, write_record
from dflash_runtime.device_engine import (
    BoundWeight,
    DeviceEngineRecord,
    EngineProfile,
    GraphEngine,
    device_tag,
)
from dflash_runtime.engine_record import ENGINE_RECORD_NAME
from dflash_runtime.errors import EngineError

Progress = Callable[[str, int, int], None]
"""Called with a stage, thousandths done, and 1000."""

_PACKAGES = {"tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"), "tensorrt-rtx": ("tensorrt-rtx",)}
_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_COPY_ALLOWANCE_BYTES = 96 << 20
"""Scratch memory TensorRT takes for the workspaces of matrix products, whatever the weights: six of 8 MiB side by
side in a drafter's context of three layers."""


@dataclasses.dataclass(frozen=True)
class BuiltEngines:
    """What `build_engines` made or found."""

    record: DeviceEngineRecord
    folder: Path
    reused: list[str]
    """Graphs whose engine was there already."""
    seconds: float
    weight_bytes: int
    """Device memory the weights take, each once; 0 where the engines hold them."""
    saved_bytes: int
    """Device memory that a copy of the weights in each engine would take on top."""
    held_bytes: int
    """int4 weights that the engine files hold, because TensorRT copies those it is given; see `signed_weights`."""
    warnings: list[str]
    """What the user should know, though the engines are good."""
    weights_reason: str = ""
    """Why the weights are shared or embedded, where nobody asked for either."""

    @property
    def engine_bytes(self) -> int:
        """Size of all engines on disk."""
        return sum(facts.size_bytes for facts in self.record.files.values())

    @property
    def build_peak_bytes(self) -> int:
        """Most memory any of the builds had resident."""
        return max(engine.build_peak_bytes for engine in self.record.engines)


def check_buildable(options: EngineOptions, bundle_precision: str) -> None:
    """Refuses before any work what `build_engines` would refuse after an export.

    Raises:
        EngineError: this TensorRT is missing or has no kernels for the GPU, or the precision has none.
    """
    _, tensorrt_version = _installed(options.backend)
    _capability(options, tensorrt_version)
    refuse_precision(bundle_precision)


def build_engines(bundle: Bundle, options: EngineOptions, progress: Progress | None = None) -> BuiltEngines:
    """Builds the engines of a bundle, and keeps those that still fit.

    Args:
        bundle: The bundle, in fp16 or bf16.
        options: What for.
        progress: Called with stage, thousandths done, 1000.

    Raises:
        EngineError: this TensorRT is missing, too old or has no kernels for the GPU; it refuses a graph or fails to
            build; the build takes more memory than allowed; or an engine would copy weights on every call.
        OutputError: neither the bundle nor the cache folder can be written.
    """
    tell = progress or (lambda stage, done, total: None)
    row, tensorrt_version = _installed(options.backend)
    capability = _capability(options, tensorrt_version)
    plan = EnginePlan(bundle, options, row, tensorrt_version, capability)
    folder = engines_folder(bundle, device_tag(options.backend, capability, options.weights_mode))
    present = _present(folder)
    reused: list[str] = []
    engines: list[GraphEngine] = []
    seconds, held_bytes = 0.0, 0
    with partial_folder(folder.parent) as partial:
        for kind in plan.kinds:
            network, profiles = plan.network(kind), plan.profiles(kind)
            key = plan.key(network, profiles)
            held_bytes += sum(part.length_bytes for part in network.embedded)
            engine = _known(plan, kind, key, present, folder, partial / f"{kind}.engine")
            if engine is not None:
                reused.append(kind)
            else:
                engine, took = _build(plan, network, profiles, key, partial / f"{kind}.engine", tell)
                seconds += took
            engines.append(engine)
        record = plan.record(engines, partial)
        write_record(partial / ENGINE_RECORD_NAME, record)
        replace_folder(partial, folder)
    return BuiltEngines(record, folder, reused, seconds, *plan.weight_bytes(engines), held_bytes, plan.warnings)


def _build(plan: EnginePlan, network: Network, profiles: list[EngineProfile], key: str, target: Path, tell: Progress
           ) -> tuple[GraphEngine, float]:
    needed, holds_int4 = plan.builder_peak_bytes(network, profiles), bool(network.embedded)
    check_memory(network.kind, needed, available_bytes(), holds_int4=holds_int4)
    built = plan.build(network, profiles, target, lambda done: tell(f"build {network.kind}", done, 1000))
    engine = GraphEngine(
        kind=network.kind,
        file=target.name,
        build_key=key,
        profiles=profiles,
        weights=[BoundWeight(w.input, w.weight, w.dtype) for w in network.weight_inputs],
        scratch_bytes=built.outcome.scratch_bytes,
        build_peak_bytes=built.peak_bytes,
    )
    _refuse_copied_weights(engine, network)
    if plan.options.use_cache and not network.embedded:  # with its weights it fits no other bundle
        EngineCache().keep(key, target, engine)
    return engine, built.seconds


def _present(folder: Path) -> DeviceEngineRecord | None:
    """The engines that lie there, if they are whole; missing, damaged or foreign ones are made anew."""
    if not (folder / ENGINE_RECORD_NAME).is_file():
        return None
    try:
        return DeviceEngineRecord.read(folder, "They are made anew.")
    except EngineError:
        return None


def _known(plan: EnginePlan, kind: str, key: str, present: DeviceEngineRecord | None, folder: Path, target: Path
           ) -> GraphEngine | None:
    """The engine wanted, copied to `target`, if it lies in the folder or was built before for another bundle."""
    for engine in present.engines if present is not None else ():
        if engine.kind == kind and engine.build_key == key:
            shutil.copyfile(folder / engine.file, target)
            return engine
    return EngineCache().fetch(key, target) if plan.options.use_cache else None


def _installed(backend: str) -> tuple[VersionRow, str]:
    if backend not in _MODULES:
        raise EngineError(f"{backend!r} is no TensorRT; known are {' and '.join(_MODULES)}.")
    if importlib.util.find_spec("polygraphy") is None:
        raise EngineError(f"Building engines needs polygraphy: pip install 'dflash-export[{backend}]'")
    for package in _PACKAGES[backend]:
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        return row_for(backend, found), found
    try:  # a Jetson's TensorRT comes from the system and has no package metadata
        module = __import__(_MODULES[backend])
    except ImportError as error:
        raise EngineError(
            f"{backend} is not installed ({error}). Run `dflash-export doctor`: it says what to type on this machine."
        ) from error
    return row_for(backend, module.__version__), str(module.__version__)


def _capability(options: EngineOptions, tensorrt_version: str) -> str:
    here = compute_capability_here()
    wanted = options.compute_capability or here
    if wanted is None:
        raise EngineError(
            "This machine has no NVIDIA GPU to build for. Name one with --compute-capability, such as 8.9 for RTX 40."
        )
    try:
        major, minor = (int(part) for part in wanted.split("."))
    except ValueError:
        raise EngineError(f"{wanted!r} is no compute capability; it is two numbers such as 8.9.") from None
    if options.backend == "tensorrt" and wanted != here:
        raise EngineError(
            f"TensorRT builds for the GPU it runs on, {here or 'and there is none here'}, not for {wanted}. Build on "
            "the device, or use --backend tensorrt-rtx."
        )
    problem = lacks_kernels(options.backend, tensorrt_version, (major, minor))
    if problem is not None:
        raise EngineError(problem)
    return wanted


def _refuse_copied_weights(engine: GraphEngine, network: Network) -> None:
    for profile, scratch in zip(engine.profiles, engine.scratch_bytes, strict=False):
        rows = max(profile.rows, profile.logit_rows)
        allowed = _COPY_ALLOWANCE_BYTES + rows * network.activation_bytes_per_row
        if scratch > allowed:
            raise EngineError(
                f"The {engine.kind} engine takes {scratch >> 20} MiB of scratch memory for {profile.rows} rows, and "
                f"its intermediate values are at most {allowed >> 20} MiB: it copies weights on every call. Build it "
                "with --weights embedded, and please report the model."
            )
