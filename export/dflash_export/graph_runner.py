"""Runs a portable graph in plain ONNX Runtime, with caches as ordinary arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from dflash_runtime.bundle import GraphFacts

Array = npt.NDArray[Any]


class GraphRunner:
    """One graph with its state, called with arrays by name."""

    def __init__(
        self, model: bytes, root: Path, facts: GraphFacts, capacity: int, weights: Mapping[str, Array] | None = None
    ) -> None:
        """Opens a session.

        Args:
            model: The serialised graph, of fp32 interface.
            root: Folder its weight files are relative to.
            facts: Interface and state of the graph.
            capacity: Rows T of the caches.
            weights: Values for initializers that have none in the file.
        """
        options = ort.SessionOptions()
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(root))
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Quantised weights are to be dequantised as the graph says, not computed with in another way.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.log_severity_level = 3
        self._bound = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in (weights or {}).items()}
        if self._bound:
            options.add_external_initializers(list(self._bound), list(self._bound.values()))
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.facts = facts
        self.state: dict[str, Array] = {}
        self.capacity = capacity
        self.reset()

    def reset(self) -> None:
        """Zeroes the caches."""
        for tensor in self.facts.state:
            shape = [self.capacity if d == "T" else 1 if d == "B" else int(d) for d in tensor.shape]
            self.state[tensor.input] = np.zeros(shape, dtype=np.float32)

    def run(self, **inputs: Array) -> dict[str, Array]:
        """One call; the caches move on."""
        names = [o.name for o in self.session.get_outputs()]
        results = self.session.run(names, {**inputs, **self.state})
        outputs = dict(zip(names, results, strict=True))
        for tensor in self.facts.state:
            self.state[tensor.input] = outputs[tensor.output]
        return outputs
