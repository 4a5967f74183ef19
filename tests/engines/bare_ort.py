"""Runs a graph in ONNX Runtime without our runtime: caches are buffers bound as past and present at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

Array = npt.NDArray[Any]


class BareSession:
    def __init__(self, model: ir.Model, capacity: int, fill: float = 0.0, guard_rows: int = 0,
                 weights: dict[str, Array] | None = None) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.weights = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in (weights or {}).items()}
        if self.weights:
            options.add_external_initializers(list(self.weights), list(self.weights.values()))
        data = ir.to_proto(model).SerializeToString()
        self.session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        self.state: dict[str, Array] = {}
        self.guards: list[Array] = []
        for value in self.session.get_inputs():
            if value.name.startswith("past_key_values."):
                shape = [dim if isinstance(dim, int) else capacity for dim in value.shape]
                # One flat piece of memory: guard, buffer, guard.
                size, margin = int(np.prod(shape)), guard_rows * shape[-1]
                memory = np.full(size + 2 * margin, np.float32(7.25))
                memory[margin : margin + size] = fill
                self.state[value.name] = memory[margin : margin + size].reshape(shape)
                self.guards += [memory[:margin], memory[margin + size :]]

    def __call__(self, **inputs: Array) -> dict[str, Array]:
        binding = self.session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for name, array in self.state.items():
            binding.bind_input(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        names = [value.name for value in self.session.get_outputs()]
        for name in names:
            array = self.state.get(name.replace("present.", "past_key_values."))
            if array is None:
                binding.bind_output(name, "cpu")
            else:
                binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        self.session.run_with_iobinding(binding)
        return {n: v.numpy().copy() for n, v in zip(names, binding.get_outputs(), strict=True)}


def deviation(found: Array, expected: Array) -> float:
    """Largest difference, relative to the largest expected value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
