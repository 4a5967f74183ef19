"""The `ort-cuda` backend: ONNX Runtime's CUDA provider, everything on the device and bound when it opens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import onnxruntime as ort

from dflash_runtime.bundle import Bundle, GraphFacts, StateTensor
from dflash_runtime.engine_record import engine_folder, open_engine
from dflash_runtime.errors import BackendError, EngineError
from dflash_runtime.ort_fixed_graph import CUDA, STORED, Array, FixedGraph, Place, Placed
from dflash_runtime.weights import MappedWeights, narrowed

_KINDS = ("kv", "windowed_kv")
_DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
# Older ones do not know attention that looks both ways in GroupQueryAttention, which a drafter's layers are.
_OLDEST_WITH_DRAFTER = (1, 30)
_READING = re.compile(r"(#F32|#F16|#BF16)?(#rows)?$")

WeightSource = Callable[[str, str], Placed]
"""(name in the bundle's index, dtype in safetensors' spelling) -> the weight in device memory."""


class OrtCudaBackend:
    """Executes the graphs of `engines/ort-cuda`, one session for every number of rows, all over the same memory.

    A call takes the smallest session with enough rows. The rows it pads are dead like those of a rejected draft: the
    next call overwrites them, and a cache has room for them as no call starts behind the context.

    Args:
        bundle: What is run.
        prefill_chunk_tokens: Most prompt tokens per call.
        place: Where it runs.
        weights: Gives the weights; None reads those of the bundle.
    """

    name = "ort-cuda"

    def __init__(self, bundle: Bundle, prefill_chunk_tokens: int, *, place: Place = CUDA,
                 weights: WeightSource | None = None) -> None:
        place.check()
        _check_version(bundle)
        manifest, record = bundle.manifest, open_engine(bundle, self.name)
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self._bundle, self._place = bundle, place
        self._weights = weights or DeviceWeights(bundle, place)
        self._rows = sorted({1, *manifest.block_sizes, prefill_chunk_tokens})
        self._capacity = manifest.max_context_tokens + self._rows[-1]
        self._dtype = _DTYPES[record.execution_precision]
        (tap_width,) = (int(output.shape[-1]) for output in manifest.target.graph.outputs if output.name == "taps")
        self._taps = place.zeros([1, self._rows[-1], tap_width], self._dtype)
        self._tap_width, self._position = tap_width, place.zeros([1], "I64")
        self._ids = {rows: place.zeros([1, rows], "I64") for rows in self._rows}
        self._logit_rows, self._tokens, self._drafts = (dict[int, ort.OrtValue]() for _ in range(3))
        self._target_state = self._allocate(manifest.target.graph.state)
        self._drafter_state: dict[str, ort.OrtValue] = {}
        self._targets: dict[tuple[int, int], FixedGraph] = {}
        self._contexts, self._drafters = dict[int, FixedGraph](), dict[int, FixedGraph]()
        for rows in self._rows:
            self._target(rows, 1 if rows == prefill_chunk_tokens else rows)
        if (drafter := manifest.drafter) is not None:
            self._mask_token_id = drafter.mask_token_id
            self._drafter_state = self._allocate(drafter.graph.state)
            for rows in self._rows:
                self._contexts[rows] = self._open_context(drafter.context_graph, rows)
            for rows in (n for n in self._rows if n > 1 and n <= max(manifest.block_sizes)):
                self._drafters[rows] = self._open_drafter(drafter.graph, rows)
        self._not_finite = False

    def reset(self) -> None:
        """Forgets the request before: its rows are dead. NaN is wiped, as 0 x NaN gets through a mask."""
        if self._not_finite:
            for value in (*self._target_state.values(), *self._drafter_state.values(), self._taps):
                value.update_inplace(np.zeros(value.shape(), STORED[self._dtype]))
            self._not_finite = False

    def prefill(self, ids: Sequence[int], position: int) -> int:
        """See `Backend.prefill`."""
        rows = 1 if len(ids) == 1 else self.prefill_chunk_tokens
        return self._run_target(rows, ids, position, [len(ids) - 1])[0]

    def verify(self, block: Sequence[int], position: int) -> list[int]:
        """See `Backend.verify`."""
        rows = self._fitting(len(block), self._rows)
        return self._run_target(rows, block, position, range(rows))[: len(block)]

    def draft(self, anchor: int, block_size: int, position: int) -> list[int]:
        """See `Backend.draft`. Where no session has the block's size, the next larger one drafts; the rest is cut."""
        if not self._drafters:
            raise BackendError("The bundle has no drafter, so nothing can be drafted. Use block size 1.")
        rows = self._fitting(block_size, list(self._drafters))
        ids = np.full((1, rows), self._mask_token_id, np.int64)
        ids[0, 0] = anchor
        self._ids[rows].update_inplace(ids)
        self._position.update_inplace(np.array([position], np.int64))
        self._drafters[rows].run()
        proposed: list[int] = self._drafts[rows].numpy()[0, : block_size - 1].tolist()
        return proposed

    def append_context(self, rows: int, position: int) -> None:
        """See `Backend.append_context`."""
        if self._contexts:
            self._position.update_inplace(np.array([position], np.int64))
            self._contexts[self._fitting(rows, self._rows)].run()

    def read_taps(self, rows: int) -> Array:
        """Taps [1, rows, K*H] of the last target call in float32, for checks."""
        stored = self._taps.numpy()[:, :rows]
        if self._dtype == "BF16":
            stored = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        taps: Array = stored.astype(np.float32)
        return taps

    def close(self) -> None:
        """Frees sessions and memory."""
        for graphs in (self._targets, self._contexts, self._drafters):
            graphs.clear()
        self._target_state, self._drafter_state = {}, {}
        del self._weights, self._taps, self._ids

    def _run_target(self, rows: int, ids: Sequence[int], position: int, logit_rows: Sequence[int]) -> list[int]:
        graph = self._target(rows, len(logit_rows))
        padded = np.zeros((1, rows), np.int64)  # padded rows are any token
        padded[0, : len(ids)] = ids
        self._ids[rows].update_inplace(padded)
        self._position.update_inplace(np.array([position], np.int64))
        self._logit_rows[len(logit_rows)].update_inplace(np.array(logit_rows, np.int64))
        graph.run()
        found: list[int] = self._tokens[len(logit_rows)].numpy()[0].tolist()
        self._not_finite |= min(found) < 0
        return found

    @staticmethod
    def _fitting(rows: int, known: Sequence[int]) -> int:
        fitting = [n for n in known if n >= rows]
        if not fitting:
            raise BackendError(f"{rows} rows in one call, and this backend was opened for {list(known)}. Use a "
                               "smaller block size.")
        return min(fitting)

    def _target(self, rows: int, wanted: int) -> FixedGraph:
        graph = self._targets.get((rows, wanted))
        if graph is None:
            for values, shape in ((self._logit_rows, [wanted]), (self._tokens, [1, wanted])):
                values.setdefault(wanted, self._place.zeros(shape, "I64"))
            inputs: dict[str, Placed] = {"input_ids": self._ids[rows], "position": self._position}
            inputs["logit_rows"] = self._logit_rows[wanted]
            outputs = {
                "token_ids": (self._tokens[wanted], [1, wanted]),
                "taps": (self._taps, [1, rows, self._tap_width]),
            }
            facts = self._bundle.manifest.target.graph
            graph = self._targets[rows, wanted] = self._open(facts, {"S": rows, "R": wanted}, inputs, outputs,
                                                             self._target_state)
        return graph

    def _open_context(self, facts: GraphFacts, rows: int) -> FixedGraph:
        return self._open(facts, {"S": rows}, {"taps": self._taps, "position": self._position}, {},
                          self._drafter_state)

    def _open_drafter(self, facts: GraphFacts, rows: int) -> FixedGraph:
        self._drafts[rows] = self._place.zeros([1, rows - 1], "I64")
        inputs: dict[str, Placed] = {"input_ids": self._ids[rows], "position": self._position}
        outputs = {"draft_ids": (self._drafts[rows], [1, rows - 1])}
        return self._open(facts, {"b": rows, "S": rows}, inputs, outputs, self._drafter_state)

    def _open(self, facts: GraphFacts, sizes: dict[str, int], inputs: dict[str, Placed],
              outputs: dict[str, tuple[ort.OrtValue, list[int]]], state: dict[str, ort.OrtValue]) -> FixedGraph:
        path = engine_folder(self._bundle, self.name) / facts.file
        remedy = f"Run: dflash-export engines {self._bundle.path} --backend {self.name}"
        graph = FixedGraph(path, self._place, {"B": 1, "T": self._capacity, **sizes}, remedy)
        # Past and present are the same memory: rows are written in place and nothing is copied.
        inputs = {**inputs, **{tensor.input: state[tensor.input] for tensor in facts.state}}
        outputs = {**outputs, **{t.output: (state[t.input], state[t.input].shape()) for t in facts.state}}
        for name, dtype in graph.input_types().items():
            if name not in inputs:
                inputs[name] = self._weights(_READING.sub("", name), dtype)
        graph.bind(inputs, outputs)
        return graph

    def _allocate(self, state: Sequence[StateTensor]) -> dict[str, ort.OrtValue]:
        buffers = {}
        for tensor in state:
            if tensor.kind not in _KINDS:
                raise EngineError(f"State {tensor.input} is of kind {tensor.kind!r}, {self.name} keeps "
                                  f"{' and '.join(_KINDS)}. Update it.")
            shape = [{"B": 1, "T": self._capacity}[d] if isinstance(d, str) else d for d in tensor.shape]
            buffers[tensor.input] = self._place.zeros(shape, self._dtype)
        return buffers


def _check_version(bundle: Bundle) -> None:
    numbers = tuple(int(part) for part in ort.__version__.split(".")[:2])
    if bundle.manifest.drafter is not None and numbers < _OLDEST_WITH_DRAFTER:
        needed = ".".join(map(str, _OLDEST_WITH_DRAFTER))
        raise BackendError(f"A drafter on ort-cuda needs ONNX Runtime {needed} or newer, here is {ort.__version__}. "
                           f'Run: pip install "onnxruntime-gpu>={needed}"')


class DeviceWeights:
    """A bundle's weights, each put on the device once for every type it is read in."""

    def __init__(self, bundle: Bundle, place: Place) -> None:
        self._mapped, self._place = MappedWeights(bundle), place
        self._values: dict[tuple[str, str], ort.OrtValue] = {}

    def __call__(self, name: str, dtype: str) -> ort.OrtValue:
        """The weight in device memory.

        Raises:
            BundleError: the bundle has no such weight.
            EngineError: its values do not fit fp16.
        """
        if (name, dtype) not in self._values:
            self._values[name, dtype] = self._place.put(narrowed(self._mapped.float32(name), dtype, name))
            self._mapped.drop_pages()
        return self._values[name, dtype]
