"""What engines a bundle gets: block sizes, profiles, capacity, and the order each is built by."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from dflash_engines.acceptance_graph import ACCEPTANCE
from dflash_engines.build_process import FinishedBuild, run_build
from dflash_engines.builder_memory import builder_peak_bytes
from dflash_engines.call_profiles import call_profiles
from dflash_engines.candidates_graph import CANDIDATES
from dflash_engines.draft_windows import DRAFT_WINDOW, drafter_rings
from dflash_engines.fp16_graphs import fp16_warnings, load_for_precision
from dflash_engines.passes.signed_weights import SIGNED_FILE
from dflash_engines.portable_graph import load_portable
from dflash_engines.signed_weight_file import write_signed_weights
from dflash_engines.tensorrt_build import BuildOrder
from dflash_engines.tensorrt_network import Network, acceptance_network, candidates_network, make_network
from dflash_engines.tensorrt_versions import VersionRow, cache_layouts
from dflash_engines.timing_cache import TimingCache
from dflash_runtime.bundle import Bundle, file_facts
from dflash_runtime.device_engine import (
    DeviceEngineRecord,
    EngineProfile,
    GraphEngine,
)
from dflash_runtime.errors import EngineError
from dflash_runtime.weights import FLOAT8_TRANSPOSED, SIGNED_TRANSPOSED

FLOAT8_CAPABILITY = (8, 9)
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, SIGNED_TRANSPOSED: 1, FLOAT8_TRANSPOSED: 1}


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """What engines are made for."""

    backend: str
    """`tensorrt` or `tensorrt-rtx`."""
    compute_capability: str | None = None
    """`8.9`; None for the GPU of this machine."""
    block_sizes: Sequence[int] = ()
    """Block sizes, anchor included; empty for those of the bundle."""
    prefill_chunk_tokens: int = 128
    weights_mode: str = "shared"
    """`shared`: weights are inputs, one copy for all engines. `embedded`: each engine holds its own."""
    precision: str | None = None
    """fp16 or bf16; None for that of the bundle."""
    fp32_residuals: bool = False
    """Sum what layers add in fp32."""
    draft_window_tokens: int | None = None
    """Drafter layers without a window get this one: other proposals, the same text."""
    max_build_memory_bytes: int | None = None
    use_cache: bool = True
    """Take an engine that was built before for another bundle of the shape, and keep new ones for the next."""


def refuse_precision(bundle_precision: str) -> None:
    """An fp32 graph does not say where a half-precision engine may round.

    Raises:
        EngineError: the bundle is in fp32.
    """
    if bundle_precision == "fp32":
        raise EngineError(
            "This is an fp32 bundle and TensorRT engines compute in fp16 or bf16. Build it with --precision bf16: such "
            "a bundle says where PyTorch rounds and where it computes in fp32."
        )


def refuse_float8(bundle: Bundle, compute_capability: str) -> None:
    """FP8 weights want a GPU that knows them.

    Raises:
        EngineError: the bundle has some and the GPU is older than compute capability 8.9.
    """
    weights = bundle.manifest.weights
    found = [name for name in bundle.manifest.quantized if weights[name].dtype == "F8_E4M3"]
    if found and tuple(int(part) for part in compute_capability.split(".")) < FLOAT8_CAPABILITY:
        raise EngineError(
            f"{len(found)} weights are FP8 ({found[0]} ...), which TensorRT takes from compute capability 8.9 on; "
            f"these engines are for {compute_capability}. Build the bundle with --quantize int8 or int4, or run it "
            "with --backend ort-cpu."
        )


class EnginePlan:
    """The facts of one run of the builder, and what follows from them for each graph."""

    def __init__(self, bundle: Bundle, options: EngineOptions, row: VersionRow, tensorrt_version: str,
                 compute_capability: str) -> None:
        self.bundle, self.options, self.row = bundle, options, row
        self.tensorrt_version, self.compute_capability = tensorrt_version, compute_capability
        manifest = bundle.manifest
        self.precision = options.precision or manifest.precision
        refuse_precision(manifest.precision)
        if options.weights_mode == "embedded" and self.precision != manifest.precision:
            raise EngineError(
                f"Embedded weights keep the bundle's precision, {manifest.precision}, and {self.precision} is asked "
                "for. Use --weights shared, which converts them when they are loaded."
            )
        if options.weights_mode == "embedded" and manifest.quantized:
            raise EngineError(
                "Weights of a quantised bundle cannot all be embedded: int8 is read in place only as an input, and "
                "int4 is embedded as it is. Leave --weights at shared."
            )
        refuse_float8(bundle, compute_capability)
        self.block_sizes = sorted(set(options.block_sizes or manifest.block_sizes) - {1})
        largest = max(manifest.block_sizes)
        if manifest.drafter is None:
            self.block_sizes = []
        elif not self.block_sizes or self.block_sizes[-1] > largest or self.block_sizes[0] < 2:
            raise EngineError(
                f"Block sizes {list(options.block_sizes)} do not fit the bundle, which takes 2 to {largest}."
            )
        self.chunk = options.prefill_chunk_tokens
        self.capacity_rows = manifest.max_context_tokens + max(largest, self.chunk)
        self.graphs = {str(kind): file for kind, file in manifest.graph_files().items()}
        self.kinds = [*self.graphs, ACCEPTANCE, CANDIDATES]
        drafter = load_portable(bundle, self.graphs["drafter"]) if "drafter" in self.graphs else None
        call_rows = max(self.chunk, *self.block_sizes, 1)
        self.rings = drafter_rings(manifest, drafter, options.draft_window_tokens, call_rows)
        self.warnings = fp16_warnings(bundle, self.precision)

    def network(self, kind: str) -> Network:
        """The network of one graph."""
        if kind == ACCEPTANCE:
            return acceptance_network()
        if kind == CANDIDATES:
            return candidates_network(self.bundle.manifest.target.vocab_size)
        return make_network(
            load_for_precision(self.bundle, kind, self.graphs[kind], self.precision), kind, self.row,  # type: ignore[arg-type]
            precision=self.precision,
            capacity_rows=self.capacity_rows, share_weights=self.options.weights_mode == "shared",
            fp32_residuals=self.options.fp32_residuals, rings={} if kind == "target" else self.rings,
        )  # fmt: skip

    def profiles(self, kind: str) -> list[EngineProfile]:
        """See `call_profiles`."""
        return call_profiles(kind, self.block_sizes, self.chunk, self._capacities())

    def _capacities(self) -> list[int]:
        return cache_layouts(self.row.form, self.capacity_rows)

    def key(self, network: Network, profiles: Sequence[EngineProfile]) -> str:
        """Equal for two engines that are the same engine."""
        weights = self.bundle.manifest.weights
        held = {weights[part.weight].file for part in network.embedded}
        if self.options.weights_mode == "embedded":
            held = {entry.file for entry in weights.values()}
        embedded = [self.bundle.manifest.files[file].sha256 for file in sorted(held)]
        parts = [
            self.options.backend, self.tensorrt_version, self.compute_capability, network.sha256,
            [dataclasses.astuple(profile) for profile in profiles], embedded,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def build(self, network: Network, profiles: Sequence[EngineProfile], target: Path, tell: Callable[[int], None]
              ) -> FinishedBuild:
        """Builds into `target`."""
        shapes = []
        for profile in profiles:
            letters = {"S": profile.rows, "b": profile.rows, "R": profile.logit_rows, "T": profile.capacity_rows}
            shapes.append({
                name: [letters[dim] if isinstance(dim, str) else dim for dim in shape]
                for name, shape in network.inputs.items()
            })
        onnx_path = self._onnx_path(network, target)
        signed_path = onnx_path.with_name(SIGNED_FILE)
        try:
            onnx_path.write_bytes(network.onnx)
            if network.embedded:
                write_signed_weights(self.bundle, network.embedded, signed_path)
            timings = self._timings()
            timing_path = None if timings is None or timings.path is None else str(timings.path)
            order = BuildOrder(
                self.options.backend, str(onnx_path), shapes, self.compute_capability, timing_path, str(target)
            )
            finished = run_build(order, self.options.max_build_memory_bytes, tell)
            if timings is not None:
                timings.keep()
            return finished
        finally:
            onnx_path.unlink(missing_ok=True)
            signed_path.unlink(missing_ok=True)

    def _timings(self) -> TimingCache | None:
        """TensorRT-RTX times kernels when an engine is loaded, never when it is built."""
        if self.options.backend == "tensorrt-rtx":
            return None
        timings = TimingCache(self.options.backend, self.tensorrt_version, self.compute_capability)
        if timings.warning is not None:
            self.warnings.append(timings.warning)
        return timings

    def builder_peak_bytes(self, network: Network, profiles: Sequence[EngineProfile]) -> int:
        """About the most memory the build of a network has resident."""
        manifest = self.bundle.manifest
        num_layers = manifest.target.num_layers if network.kind == "target" else 0
        if manifest.drafter is not None and network.kind.startswith("drafter"):
            num_layers = manifest.drafter.num_layers
        int4, embedded = sum(part.length_bytes for part in network.embedded), 0
        if self.options.weights_mode == "embedded":
            embedded = sum(entry.length_bytes for entry in manifest.weights.values())
        return builder_peak_bytes(num_layers, len(profiles), embedded, int4)

    def _onnx_path(self, network: Network, target: Path) -> Path:
        """Beside the engine; with embedded weights where the bundle's weights are found from it."""
        if self.options.weights_mode == "shared":
            return target.with_suffix(".onnx")
        return self.bundle.path / f".{network.kind}.{os.getpid()}.partial.onnx"

    def record(self, engines: list[GraphEngine], folder: Path) -> DeviceEngineRecord:
        """The record of the finished engines."""
        manifest = self.bundle.manifest
        files = file_facts(folder, [engine.file for engine in engines])
        versions = {name: version(name) for name in ("dflash-export", "onnx-ir", "polygraphy")}
        if self.options.draft_window_tokens is not None:
            versions[DRAFT_WINDOW] = str(self.options.draft_window_tokens)
        if self.options.fp32_residuals:
            versions["residuals"] = "fp32"
        return DeviceEngineRecord(
            schema_version=DeviceEngineRecord.SCHEMA_VERSION,
            backend=self.options.backend,
            tensorrt_version=self.tensorrt_version,
            compute_capability=self.compute_capability,
            form=self.row.form,
            execution_precision=self.precision,
            weights_mode=self.options.weights_mode,
            capacity_rows=self.capacity_rows,
            block_sizes=self.block_sizes,
            prefill_chunk_tokens=self.chunk,
            source={name: manifest.files[name].sha256 for name in self.graphs.values()},
            engines=engines,
            files=files,
            versions=versions,
            rings=self.rings,
        )

    def weight_bytes(self, engines: Sequence[GraphEngine]) -> tuple[int, int]:
        """(bytes of all weights, each once for every dtype it is wanted in; bytes saved by sharing them)."""
        wanted = [{(w.weight, w.dtype) for w in engine.weights} for engine in engines]
        each = sum(self._bytes(*weight) for weights in wanted for weight in weights)
        once = sum(self._bytes(*weight) for weight in set[tuple[str, str]]().union(*wanted))
        return once, each - once

    def _bytes(self, weight: str, dtype: str) -> int:
        return math.prod(self.bundle.manifest.weights[weight].shape) * _ITEM_BYTES[dtype]
