"""A bundle's graphs in ONNX Runtime on the CPU with every output in the open: the engines of ort-cpu, or portable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from dflash_runtime.bundle import Bundle
from dflash_runtime.engine_record import engine_folder, open_engine
from dflash_runtime.errors import BackendError, EngineError
from dflash_runtime.weights import MappedWeights
from dflash_runtime.window_rings import Ring, RingRows
from dflash_tools.engine_precision import computes_in
from dflash_tools.reference_record import CONTEXT, DRAFTER, TARGET
from dflash_tools.reference_tensors import Array, Tensors, cache_rows_of, rows_of, split_taps

Weights = dict[str, ort.OrtValue]

UNWRITTEN = 3.0
"""What cache rows hold before they are written: a mask that lets them through changes the result."""


class OrtProbe:
    """Target and drafter as ONNX Runtime sessions over plain arrays."""

    shows_block_rows = True

    def __init__(self, name: str, precision: str, bundle: Bundle, sessions: Mapping[str, ort.InferenceSession],
                 capacity_rows: int, inner: Mapping[str, Mapping[str, str]] | None = None, weights: object = None,
                 rings: Mapping[str, Ring] | None = None) -> None:
        """Binds sessions to caches.

        Args:
            name: For people.
            precision: What the sessions compute in, as a reference names it.
            bundle: Whose graphs they are.
            sessions: By kind of graph, with an fp32 interface.
            capacity_rows: Rows T of the caches.
            inner: By kind of graph: output of the session -> name of the inner tensor it shows.
            weights: What the sessions read and do not own; kept as long as they are.
            rings: The drafter's caches that are not as long as the context; caches of the target have the same names.
        """
        self.name, self.precision, self._sessions, self._inner = name, precision, dict(sessions), inner or {}
        self._weights, self._rings = weights, rings or {}
        manifest = bundle.manifest
        self._facts = {TARGET: manifest.target.graph}
        if manifest.drafter is not None:
            self._facts |= {CONTEXT: manifest.drafter.context_graph, DRAFTER: manifest.drafter.graph}
        self._tap_count = len(manifest.taps.layer_ids)
        self._capacity_rows = capacity_rows
        self._caches: dict[str, dict[str, Array]] = {}
        self.reset()

    def can_draft(self, size: int) -> bool:
        """See `GraphProbe.can_draft`."""
        return True

    def reset(self) -> None:
        """See `GraphProbe.reset`."""
        self._ring_rows = RingRows(self._rings.values())
        self._caches = {"target": self._unwritten(TARGET)}
        if CONTEXT in self._facts:
            self._unrolled = self._unwritten(CONTEXT)
            self._caches["drafter"] = {
                name: rows[:, :, : self._rings[name].rows].copy() if name in self._rings else rows
                for name, rows in self._unrolled.items()
            }

    def target(self, ids: Sequence[int], position: int) -> Tensors:
        """See `GraphProbe.target`."""
        rows = len(ids)
        given = {"input_ids": np.array([ids], np.int64), "logit_rows": np.arange(rows)}
        return self._run(TARGET, given, position, rows)

    def context(self, taps: Array, position: int) -> Tensors:
        """See `GraphProbe.context`. No piece is longer than a ring, so that every row is there to be looked at."""
        most = min((ring.rows for ring in self._rings.values()), default=len(taps))
        pieces = [
            self._run(CONTEXT, {"taps": taps[None, start : start + most].astype(np.float32)}, position + start,
                      len(taps[start : start + most]))
            for start in range(0, len(taps), most)
        ]  # fmt: skip
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}

    def draft(self, ids: Sequence[int], position: int) -> Tensors:
        """See `GraphProbe.draft`."""
        return self._run(DRAFTER, {"input_ids": np.array([ids], np.int64)}, position, len(ids))

    def cache_rows(self, model: str) -> Tensors:
        """See `GraphProbe.cache_rows`. Of a ring: each row as it was when a query could see it last."""
        outputs = {t.input: t.output for t in self._facts[TARGET if model == "target" else CONTEXT].state}
        whole = {n: self._unrolled[n] if model == "drafter" and n in self._rings else a
                 for n, a in self._caches[model].items()}  # fmt: skip
        return {outputs[name]: cache_rows_of(rows, 0, self._capacity_rows) for name, rows in whole.items()}

    def _run(self, kind: str, given: dict[str, Array], position: int, rows: int) -> Tensors:
        if position + rows > self._capacity_rows:
            raise BackendError(f"A call of {rows} rows at {position} passes a capacity of {self._capacity_rows} rows.")
        session, facts = self._sessions[kind], self._facts[kind]
        caches = self._caches["target" if kind == TARGET else "drafter"]
        if kind != TARGET:
            self._refill(position)
            self._ring_rows.wrote(position + rows)
        names = [output.name for output in session.get_outputs()]
        values = session.run(names, {**given, "position": np.array([position]), **caches})
        found = dict(zip(names, values, strict=True))
        state = {tensor.output: tensor.input for tensor in facts.state}
        tensors: Tensors = {}
        inner = self._inner.get(kind, {})
        for name, value in found.items():
            if name in state:
                caches[state[name]] = value
                ring = None if kind == TARGET else self._rings.get(state[name])
                whole = value if ring is None else self._unroll(state[name], ring, position, rows)
                tensors[name] = cache_rows_of(whole, position, position + rows)
            elif name == "taps":
                tensors |= split_taps(rows_of(value), self._tap_count)
            elif name in inner:
                # Some products are over [S, N] without a batch, and some over whole caches: those are no rows.
                by_rows = value if value.ndim == 2 else rows_of(value)
                tensors |= {inner[name]: by_rows} if len(by_rows) == rows else {}
            else:
                tensors[name] = rows_of(value)
        return tensors

    def _refill(self, position: int) -> None:
        """After a long way back, which the runtime goes by running the target again: rows the rings have lost."""
        kept = self._ring_rows.keep(position)
        for cache, ring in self._rings.items() if kept < position else ():
            lost = np.arange(max(kept, position - ring.rows), position)
            self._caches["drafter"][cache][:, :, lost % ring.rows] = self._unrolled[cache][:, :, lost]
        if kept < position:
            self._ring_rows.wrote(position)

    def _unroll(self, cache: str, ring: Ring, position: int, rows: int) -> Array:
        """A ring with a place for every row; what a block at `position` sees of it, and is there, is copied."""
        end = position + rows
        seen = np.arange(max(0, position - ring.window_tokens + 1, end - ring.rows), end)
        self._unrolled[cache][:, :, seen] = self._caches["drafter"][cache][:, :, seen % ring.rows]
        return self._unrolled[cache]

    def _unwritten(self, kind: str) -> dict[str, Array]:
        """Caches with a place for every row."""
        return {
            tensor.input: np.full(tensor.cache_shape(self._capacity_rows), UNWRITTEN, np.float32)
            for tensor in self._facts[kind].state
        }


def open_engine_probe(bundle: Bundle, backend: str, capacity_rows: int, threads: int | None = None) -> OrtProbe:
    """The very graphs a backend of ONNX Runtime on the CPU executes. Needs nothing but ONNX Runtime.

    Raises:
        EngineError: no usable engine.
    """
    record = open_engine(bundle, backend)
    wide: Weights = {}
    if record.upcast:
        wide = widened(bundle, [n for n, e in bundle.manifest.weights.items() if e.dtype in ("F16", "BF16")])
    sessions = dict[str, ort.InferenceSession]()
    for kind, file in bundle.manifest.graph_files().items():
        data = (engine_folder(bundle, backend) / file).read_bytes()
        folded = record.folded_weights.get(file, []) if record.upcast else []
        sessions[kind] = open_session(data, bundle.path.resolve(), wide, folded, threads)
    return OrtProbe(backend, computes_in(bundle, record), bundle, sessions, capacity_rows, weights=wide,
                    rings=record.rings)


def widened(bundle: Bundle, names: Iterable[str]) -> Weights:
    """Weights of a bundle in fp32, for sessions to read."""
    mapped = MappedWeights(bundle)
    return {name: ort.OrtValue.ortvalue_from_numpy(mapped.float32(name)) for name in names}


def open_session(data: bytes, root: Path, wide: Weights, folded: Sequence[str], threads: int | None = None, *,
                 as_written: bool = False) -> ort.InferenceSession:
    """A session over serialised graph.

    Args:
        data: The graph.
        root: Folder its weight files are relative to.
        wide: Weights to give by name, in fp32; they must outlive the session.
        folded: Those from which constants are computed when the session opens.
        threads: CPU threads; None lets ONNX Runtime choose.
        as_written: Dequantise weights as the graph says, in place of kernels that compute with integers.

    Raises:
        EngineError: ONNX Runtime refuses the graph.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads or 0
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(root))
    if as_written:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    if folded:
        options.add_external_initializers(list(folded), [wide[name] for name in folded])
    for name, value in wide.items():
        options.add_initializer(name, value)
    try:
        return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no base class
        raise EngineError(f"ONNX Runtime {ort.__version__} cannot open a graph of {root}: {error}") from error
