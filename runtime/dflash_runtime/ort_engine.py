"""Engines that are ONNX Runtime sessions: for each profile one of fixed sizes, bound to addresses on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from dflash_runtime.device import Buffer
from dflash_runtime.device_engine import EngineProfile
from dflash_runtime.errors import BackendError
from dflash_runtime.ort_cpu import open_graph

# Older ones do not know attention that looks both ways in GroupQueryAttention, which a drafter's layers are.
_OLDEST = (1, 30)
# Type as a session names it -> (as IOBinding wants it: NumPy has no bf16, which is 16 there; bytes of an element).
_TYPES: dict[str, tuple[Any, int]] = {
    "tensor(float)": (np.float32, 4), "tensor(float16)": (np.float16, 2), "tensor(bfloat16)": (16, 2),
    "tensor(int64)": (np.int64, 8),
}  # fmt: skip
_CUDA_OPTIONS = {"device_id": "0", "use_tf32": "0", "enable_cuda_graph": "0",
                 "arena_extend_strategy": "kSameAsRequested"}  # fmt: skip


class OrtEngines:
    """Opens lowered graphs on one execution provider, whose memory ONNX Runtime calls `cuda` or `cpu`.

    Raises:
        BackendError: ONNX Runtime is too old or lacks the provider.
    """

    version: str | None = None
    captures = False
    """Its sessions record themselves; inside of a capture of ours they have not been tried on a GPU."""

    def __init__(self, provider: str = "CUDAExecutionProvider", memory: str = "cuda") -> None:
        self.provider, self.memory = provider, memory
        if tuple(int(part) for part in ort.__version__.split(".")[:2]) < _OLDEST:
            needed = ".".join(map(str, _OLDEST))
            raise BackendError(f"ort-cuda needs ONNX Runtime {needed} or newer, here is {ort.__version__}. "
                               f'Run: pip install "onnxruntime-gpu>={needed}"')
        if provider not in ort.get_available_providers():
            raise BackendError(
                f"ONNX Runtime {ort.__version__} here has {', '.join(ort.get_available_providers())} and not "
                f"{provider}. Run: pip uninstall onnxruntime; pip install onnxruntime-gpu"
            )
        if memory == "cuda" and hasattr(ort, "preload_dlls"):
            ort.preload_dlls()  # CUDA's libraries of pip packages are not on the loader's path

    def open(self, path: Path, profiles: Sequence[EngineProfile], stream: int) -> OrtEngine:
        """See `Device.open_engine`."""
        return OrtEngine(self, path, profiles, stream)

    def close(self) -> None:
        """Sessions free themselves."""


class OrtEngine:
    """A lowered graph; it is opened once for each profile."""

    scratch_bytes = 0
    """ONNX Runtime allocates for itself, at the first calls."""

    def __init__(self, engines: OrtEngines, path: Path, profiles: Sequence[EngineProfile], stream: int) -> None:
        self._engines, self._path, self._profiles, self._stream = engines, path, profiles, stream

    def open_context(self, index: int, scratch: Buffer) -> OrtContext:
        """See `Engine.open_context`; errors are those of `open_graph`."""
        profile = self._profiles[index]
        sizes = {"B": 1, "S": profile.rows, "b": profile.rows, "R": profile.logit_rows, "T": profile.capacity_rows}
        return OrtContext(self.open_session(sizes), {**sizes, "b-1": profile.rows - 1}, self._engines.memory)

    def open_session(self, sizes: Mapping[str, int]) -> Any:
        """A session of the graph at these sizes of its dimensions; errors are those of `open_graph`."""
        options, provider = ort.SessionOptions(), self._engines.provider
        options.log_severity_level = 3
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        on_gpu = self._engines.memory != "cpu"
        if on_gpu:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        for name, size in sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        stream = {**_CUDA_OPTIONS, "user_compute_stream": str(self._stream)} if on_gpu else {}
        return open_graph(self._path, options, provider, stream)


class OrtContext:
    """A session of fixed sizes: every dimension is a number or one of `sizes`."""

    def __init__(self, session: Any, sizes: Mapping[str, int], memory: str) -> None:
        self._session, self._memory, self._binding = session, memory, session.io_binding()
        tensors = [*session.get_inputs(), *session.get_outputs()]
        shapes = {value.name: [d if isinstance(d, int) else sizes[d] for d in value.shape] for value in tensors}
        self._tensors = {value.name: (_TYPES[value.type][0], shapes[value.name]) for value in tensors}
        self.sizes_bytes: Mapping[str, int] = {
            value.name: math.prod(shapes[value.name]) * _TYPES[value.type][1] for value in tensors
        }
        self._run = ort.RunOptions()
        self._run.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def bind(self, addresses: Mapping[str, int]) -> None:
        """See `Context.bind`."""
        inputs = {value.name for value in self._session.get_inputs()}
        for name, (dtype, shape) in self._tensors.items():
            bind = self._binding.bind_input if name in inputs else self._binding.bind_output
            bind(name, self._memory, 0, dtype, shape, addresses[name])

    def enqueue(self) -> None:
        """See `Context.enqueue`."""
        self._session.run_with_iobinding(self._binding, self._run)
