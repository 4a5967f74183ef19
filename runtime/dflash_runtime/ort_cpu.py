"""The `ort-cpu` backend: ONNX Runtime on the CPU, with buffers made once and caches updated in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from dflash_runtime.bundle import Bundle, GraphFacts, StateTensor
from dflash_runtime.engine_record import HostEngineRecord, engine_folder, open_engine
from dflash_runtime.errors import BackendError, EngineError
from dflash_runtime.weights import MappedWeights
from dflash_runtime.window_rings import Ring, RingRows

_PROVIDER = "CPUExecutionProvider"

Array = npt.NDArray[Any]


class OrtCpuBackend:
    """Executes the fp32 graphs of `engines/ort-cpu`."""

    name = "ort-cpu"

    def __init__(self, bundle: Bundle, threads: int | None, prefill_chunk_tokens: int) -> None:
        manifest, record = bundle.manifest, open_engine(bundle, self.name)
        self.prefill_chunk_tokens = prefill_chunk_tokens
        rows = max(*manifest.block_sizes, prefill_chunk_tokens)
        capacity = manifest.max_context_tokens + rows  # a call starts at max_context at the latest
        self._ids = np.zeros((1, rows), np.int64)
        self._position = np.zeros(1, np.int64)
        self._logit_rows = np.zeros(rows, np.int64)
        self._outputs = {"target": _arrays(manifest.target.graph, rows)}
        self._taps = self._outputs["target"]["taps"]
        self._waiting = np.zeros_like(self._taps)
        self._waiting_rows = self._waiting_end = 0  # tap rows of plain steps, not yet appended
        self._target_state = _allocate(manifest.target.graph.state, capacity, {})
        self._drafter_state: dict[str, Array] = {}
        self._ring_rows = RingRows(record.rings.values())
        # The same memory for all sessions. ONNX Runtime reads the rest itself and lets go of what it has packed.
        mapped = MappedWeights(bundle)
        self._weights = {name: ort.OrtValue.ortvalue_from_numpy(mapped.float32(name)) for name in record.given_weights}
        session_of = partial(_open, bundle, record, threads, self._weights)
        self._target = _Graph(session_of(manifest.target.graph.file), manifest.target.graph, self._target_state)
        self._context = self._drafter = None
        if (drafter := manifest.drafter) is not None:
            self._mask_token_id = drafter.mask_token_id
            self._drafter_state = _allocate(drafter.context_graph.state, capacity, record.rings)
            self._outputs["drafter"] = _arrays(drafter.graph, max(manifest.block_sizes) - 1)
            self._context = _Graph(session_of(drafter.context_graph.file), drafter.context_graph, self._drafter_state)
            self._drafter = _Graph(session_of(drafter.graph.file), drafter.graph, self._drafter_state)
        mapped.drop_pages()  # read once to be packed; only embedding rows are needed from now on
        self._not_finite = False

    def reset(self, kept_rows: int = 0) -> int:
        """See `Backend.reset`. NaN is wiped, with all rows, as 0 x NaN gets through a mask."""
        if self._not_finite:
            for array in (*self._target_state.values(), *self._drafter_state.values()):
                array.fill(0)
            self._not_finite, kept_rows = False, 0
        if kept_rows:
            self._append_waiting()  # some of them may be among the kept
        self._waiting_rows = 0
        return self._ring_rows.keep(kept_rows)

    def prefill(self, ids: Sequence[int], position: int) -> int:
        """See `Backend.prefill`."""
        return self._run_target(ids, position, [len(ids) - 1])[0]

    def verify(self, block: Sequence[int], position: int) -> list[int]:
        """See `Backend.verify`."""
        return self._run_target(block, position, range(len(block)))

    def draft(self, anchor: int, block_size: int, position: int) -> list[int]:
        """See `Backend.draft`."""
        assert self._drafter is not None, "a bundle without a drafter is decoded plainly"
        self._append_waiting()
        self._ring_rows.wrote(position + block_size)
        ids, found = self._ids[:, :block_size], {n: a[:, : block_size - 1] for n, a in self._outputs["drafter"].items()}
        ids[0, 0], ids[0, 1:], self._position[0] = anchor, self._mask_token_id, position
        self._drafter.run({"input_ids": ids, "position": self._position}, found)
        return [int(token) for token in found["draft_ids"][0]]

    def outputs(self, kind: str, rows: int) -> dict[str, Array]:
        """See `Backend.outputs`."""
        return {name: array[0, :rows] for name, array in self._outputs[kind].items()}

    def append_context(self, rows: int, position: int) -> None:
        """See `Backend.append_context`. Rows of plain steps wait for the next draft: many cost little more than one."""
        if self._context is None:
            return
        if position != self._waiting_end or self._waiting_rows + rows > self._waiting.shape[1]:
            self._append_waiting()
        first, self._waiting_rows = self._waiting_rows, self._waiting_rows + rows
        self._waiting[:, first : self._waiting_rows], self._waiting_end = self._taps[:, :rows], position + rows
        if rows > 1:
            self._append_waiting()

    def close(self) -> None:
        """Frees sessions and buffers."""
        del self._target, self._context, self._drafter
        self._target_state, self._drafter_state, self._weights = {}, {}, {}

    def _append_waiting(self) -> None:
        if (rows := self._waiting_rows) and self._context is not None:
            self._waiting_rows, self._position[0] = 0, self._waiting_end - rows
            self._ring_rows.wrote(self._waiting_end)
            self._context.run({"taps": self._waiting[:, :rows], "position": self._position}, {})

    def _run_target(self, ids: Sequence[int], position: int, logit_rows: Sequence[int]) -> list[int]:
        count, wanted, outputs = len(ids), len(logit_rows), self._outputs["target"]
        self._ids[0, :count], self._position[0], self._logit_rows[:wanted] = ids, position, logit_rows
        self._target.run(
            {"input_ids": self._ids[:, :count], "position": self._position, "logit_rows": self._logit_rows[:wanted]},
            {name: array[:, : count if name == "taps" else wanted] for name, array in outputs.items()},
        )
        found: list[int] = outputs["token_ids"][0, :wanted].tolist()
        self._not_finite |= min(found) < 0
        return found


def _open(bundle: Bundle, record: HostEngineRecord, threads: int | None, weights: Mapping[str, ort.OrtValue], file: str
          ) -> ort.InferenceSession:
    """A session of one of the engine's graphs; all have the same options and weights."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads or 0, 1
    options.log_severity_level = 3
    # Three sessions take turns: a pool that goes on spinning after its turn steals the cores from the next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    weights_root = str(bundle.path.resolve())
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", weights_root)
    if record.upcast:
        # Packing the matrices for speed would hold a second copy of what is widened already; the kernels of
        # quantised ones compute nothing fast without it, and free what they have packed.
        if not bundle.manifest.quantized:
            options.add_session_config_entry("session.disable_prepacking", "1")
        # Weights that constants are folded from must be there before the graph is optimised.
        folded = record.folded_weights.get(file, [])
        options.add_external_initializers(folded, [weights[n] for n in folded])
    for name, value in weights.items():
        options.add_initializer(name, value)
    return open_graph(engine_folder(bundle, record.backend) / file, options, _PROVIDER, {})


def open_graph(path: Path, options: ort.SessionOptions, provider: str, provider_options: Mapping[str, str]
               ) -> ort.InferenceSession:
    """A session of the graph in a file of engines, on one provider and no other.

    Raises:
        EngineError: ONNX Runtime does not open the graph, or would run a node on another provider.
        BackendError: the provider is not used.
    """
    try:
        session = ort.InferenceSession(path.read_bytes(), options, [(provider, dict(provider_options))])
    except Exception as error:  # onnxruntime's errors share no base class
        raise EngineError(f"ONNX Runtime {ort.__version__} cannot open {path} on {provider}: {error} Make the engines "
                          "again with: dflash-export engines") from error
    session.disable_fallback()
    if session.get_providers()[0] != provider:
        raise BackendError(f"Asked ONNX Runtime for {provider}, got {session.get_providers()}.")
    return session


class _Graph:
    """A session whose I/O tensors are bound to fixed buffers, once per buffer and number of rows."""

    def __init__(self, session: ort.InferenceSession, facts: GraphFacts, state: dict[str, Array]) -> None:
        self._session, self._facts, self._state = session, facts, state
        self._bindings: dict[tuple[tuple[int, ...], ...], ort.IOBinding] = {}  # by addresses and shapes

    def run(self, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
        """Runs once."""
        key = tuple((array.ctypes.data, *array.shape) for array in (*inputs.values(), *outputs.values()))
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = self._bind(inputs, outputs)
        self._session.run_with_iobinding(binding)

    def _bind(self, inputs: dict[str, Array], outputs: dict[str, Array]) -> ort.IOBinding:
        binding = self._session.io_binding()
        # Past and present are the same memory: rows are written in place and nothing is copied.
        present = {tensor.output: self._state[tensor.input] for tensor in self._facts.state}
        for bind, arrays in ((binding.bind_input, inputs | self._state), (binding.bind_output, outputs | present)):
            for name, array in arrays.items():
                bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        return binding


def _arrays(graph: GraphFacts, rows: int) -> dict[str, Array]:
    """Room for what a graph puts out for that many rows."""
    forms = {facts.name: facts.array_form(rows) for facts in graph.outputs}
    return {name: np.zeros((1, *sizes), dtype) for name, (sizes, dtype) in forms.items()}


def _allocate(state: list[StateTensor], capacity: int, rings: Mapping[str, Ring]) -> dict[str, Array]:
    """Zeroed buffers of `capacity` rows, or a ring's: memory is taken by the system only where rows are written."""
    return {t.input: np.zeros(t.cache_shape(rings.get(t.input, Ring(0, capacity)).rows), np.float32) for t in state}
