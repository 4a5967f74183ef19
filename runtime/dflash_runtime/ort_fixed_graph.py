"""An ONNX Runtime session of fixed sizes whose I/O tensors are bound once, on one execution provider alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from dflash_runtime.errors import BackendError, EngineError

Array = npt.NDArray[Any]

# Type as a session names it -> (as IOBinding wants it, as NumPy stores it). NumPy has no bf16: its bits are UINT16.
_BFLOAT16 = 16
_TYPES: dict[str, tuple[Any, Any]] = {
    "tensor(float)": (np.float32, np.float32),
    "tensor(float16)": (np.float16, np.float16),
    "tensor(bfloat16)": (_BFLOAT16, np.uint16),
    "tensor(int64)": (np.int64, np.int64),
}
STORED: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64}
"""How NumPy stores a dtype in safetensors' spelling."""
_SPELLING = {"tensor(float)": "F32", "tensor(float16)": "F16", "tensor(bfloat16)": "BF16", "tensor(int64)": "I64"}


class Placed(Protocol):
    """A tensor in a place's memory: an OrtValue, or another library's seen alike."""

    def data_ptr(self) -> int:
        """Its address."""

    def shape(self) -> Sequence[int]:
        """Its shape."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where sessions execute and their memory lies."""

    provider: str
    memory: str
    """`cuda` or `cpu`, as ONNX Runtime names it."""
    options: Mapping[str, str]
    """Of the provider."""

    def check(self) -> None:
        """Refuses where ONNX Runtime does not have the provider.

        Raises:
            BackendError: it does not.
        """
        if self.provider not in ort.get_available_providers():
            raise BackendError(
                f"ONNX Runtime {ort.__version__} here has {', '.join(ort.get_available_providers())} and not "
                f"{self.provider}. Run: pip uninstall onnxruntime; pip install onnxruntime-gpu"
            )
        if self.memory == "cuda" and hasattr(ort, "preload_dlls"):
            ort.preload_dlls()  # CUDA's libraries of pip packages are not on the loader's path

    def zeros(self, shape: Sequence[int], dtype: str) -> ort.OrtValue:
        """Zeroed memory; the dtype in safetensors' spelling."""
        return self.put(np.zeros(shape, STORED[dtype]))

    def put(self, array: Array) -> ort.OrtValue:
        """A copy of the array in this place's memory.

        Raises:
            BackendError: there is too little memory.
        """
        try:
            value = ort.OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype.type, self.memory, 0)
            value.update_inplace(np.ascontiguousarray(array))
        except Exception as error:  # onnxruntime's errors share no base class
            raise BackendError(f"{array.nbytes} bytes cannot be put into {self.memory} memory: {error}") from error
        return value


CUDA = Place("CUDAExecutionProvider", "cuda", {
    "device_id": "0", "use_tf32": "0", "enable_cuda_graph": "0", "arena_extend_strategy": "kSameAsRequested",
})  # fmt: skip
CUDA_GRAPH = dataclasses.replace(CUDA, options={**CUDA.options, "enable_cuda_graph": "1"})
"""The second run of a session is recorded and repeated from then on."""


class FixedGraph:
    """One graph at one set of sizes.

    Args:
        path: The lowered graph.
        place: Where it runs; the session is refused if any node would run elsewhere.
        sizes: Symbolic dimension -> size.
        remedy: The command that makes the graph anew, for messages.

    Raises:
        EngineError: ONNX Runtime does not open the graph, or would run a node on another provider.
        BackendError: the provider is not used.
    """

    def __init__(self, path: Path, place: Place, sizes: Mapping[str, int], remedy: str) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.inter_op_num_threads = 1
        if place.memory != "cpu":
            options.intra_op_num_threads = 1
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        for name, size in sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        try:
            providers = [(place.provider, dict(place.options))]
            self._session = ort.InferenceSession(path.read_bytes(), options, providers=providers)
        except Exception as error:  # onnxruntime's errors share no base class
            raise EngineError(f"ONNX Runtime {ort.__version__} cannot open {path} on {place.provider}: {error} {remedy}"
                              ) from error
        self._session.disable_fallback()
        if self._session.get_providers()[0] != place.provider:
            raise BackendError(f"Asked ONNX Runtime for {place.provider}, got {self._session.get_providers()}.")
        self._place, self._binding = place, self._session.io_binding()
        self._inputs = {value.name: value.type for value in self._session.get_inputs()}
        self._outputs = {value.name: value.type for value in self._session.get_outputs()}

    def input_types(self) -> dict[str, str]:
        """Every input's dtype in safetensors' spelling."""
        return {name: _SPELLING[kind] for name, kind in self._inputs.items()}

    def bind(self, inputs: Mapping[str, Placed], outputs: Mapping[str, tuple[ort.OrtValue, Sequence[int]]]
             ) -> None:
        """Says where the I/O tensors lie, for good.

        Args:
            inputs: Name -> value; the value's first elements are taken where the input is smaller.
            outputs: Name -> value and the shape written, which may be smaller than the value.

        Raises:
            EngineError: an input has no value or too small a one.
        """
        self._held = (dict(inputs), dict(outputs))  # the session is given addresses alone
        shapes = {value.name: value.shape for value in self._session.get_inputs()}
        for name, kind in self._inputs.items():
            value, shape = inputs.get(name), shapes[name]
            if value is None or math.prod(value.shape()) < math.prod(shape):
                has = "nothing" if value is None else f"a value of shape {value.shape()}"
                raise EngineError(f"Input {name} {shape} of the graph is given {has}. Make the engine again.")
            self._binding.bind_input(name, self._place.memory, 0, _TYPES[kind][0], shape, value.data_ptr())
        for name, (value, written) in outputs.items():
            kind = self._outputs[name]
            self._binding.bind_output(name, self._place.memory, 0, _TYPES[kind][0], list(written), value.data_ptr())

    def run(self) -> None:
        """Runs once and waits for the end."""
        self._session.run_with_iobinding(self._binding)
