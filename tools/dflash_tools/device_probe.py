"""The engines of a device with every output in the open: the same files and weights as the backend's, other buffers.

Everything is copied to and from the device call by call: slow, and nothing is left to the backend's own bookkeeping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dflash_runtime.bundle import Bundle, GraphFacts, StateTensor
from dflash_runtime.device import Buffer, Device
from dflash_runtime.device_backend import DeviceBackend
from dflash_runtime.device_caches import DeviceCaches
from dflash_runtime.device_engine import DeviceEngineRecord, EngineProfile, device_tag, engine_folders
from dflash_runtime.device_graph import DeviceGraph
from dflash_runtime.device_weights import narrowed
from dflash_runtime.engine_record import ENGINE_RECORD_NAME
from dflash_runtime.errors import EngineError
from dflash_runtime.weights import widened
from dflash_runtime.window_rings import RingRows
from dflash_tools.device_rows import DeviceRows
from dflash_tools.reference_record import CONTEXT, DRAFTER, TARGET
from dflash_tools.reference_tensors import Array, Tensors, rows_of, split_taps

_HALF = {"fp16": "F16", "bf16": "BF16"}
_STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64}
_ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def engines_of(bundle: Bundle, name: str, device: Device) -> Path:
    """The folder a backend's engines for this device lie in.

    Raises:
        EngineError: there is none.
    """
    made_for = None if device.tensorrt_version is None else device.compute_capability
    for mode in ("shared", "embedded"):
        for folder in engine_folders(bundle, device_tag(name, made_for, mode)):
            if (folder / ENGINE_RECORD_NAME).is_file():
                return folder
    raise EngineError(f"There are no {name} engines. Run: dflash-export engines {bundle.path} --backend {name}")


def taps_dtype(backend: DeviceBackend) -> str:
    """What the target engine hands on, in safetensors' spelling: F32 where fp16 could not hold the taps."""
    outputs = backend.bundle.manifest.target.graph.outputs
    (width,) = (int(output.shape[-1]) for output in outputs if output.name == "taps")
    is_wide = backend.buffers["target"]["taps"].size_bytes == 4 * width * backend.call_rows
    return "F32" if is_wide else {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}[backend.precision]


class DeviceProbe:
    """A `GraphProbe` over the engines of an open backend, whose device and weights it uses."""

    def __init__(self, backend: DeviceBackend, folder: Path, record: DeviceEngineRecord) -> None:
        """Opens the engines a second time; the backend must stay open.

        Args:
            backend: As the runtime opened it.
            folder: Its engines.
            record: Their record.
        """
        self.name, self.precision, self._taps_dtype = backend.name, record.execution_precision, taps_dtype(backend)
        self._device, self._record = backend.device, record
        self._manifest = backend.bundle.manifest
        self._facts = {TARGET: self._manifest.target.graph}
        if self._manifest.drafter is not None:
            self._facts |= {CONTEXT: self._manifest.drafter.context_graph, DRAFTER: self._manifest.drafter.graph}
        shown = [engine for engine in record.engines if engine.kind in self._facts]  # acceptance has no tensors to show
        engines = {e.kind: self._device.open_engine(folder / e.file, e.profiles) for e in shown}
        scratch = self._device.allocate(max(1, *(engine.scratch_bytes for engine in engines.values())))
        self._graphs = {e.kind: DeviceGraph(e, engines[e.kind], scratch, "") for e in shown}
        self._capacity = max(profile.capacity_rows for e in record.engines for profile in e.profiles)
        state, rings = self._facts[CONTEXT].state if CONTEXT in self._facts else [], record.rings
        ringed, whole = ([t for t in state if (t.input in rings) == is_ring] for is_ring in (True, False))
        sizes = {"rings": next((ring.rows for ring in rings.values()), self._capacity)}
        self._caches = {
            key: DeviceCaches(self._device, of_key, _ITEM_BYTES[self.precision], [sizes.get(key, self._capacity)])
            for key, of_key in (("target", self._facts[TARGET].state), ("drafter", whole), ("rings", ringed))
        }
        self._ringed = ringed
        self.reset()
        self.shows_block_rows = record.form == "fused"
        self._buffers = {kind: self._bind(kind, backend.buffers[kind]) for kind in self._graphs}
        most = [buffer.size_bytes for own in self._buffers.values() for buffer in own.values()]
        most += [size * self._caches["rings"].layout_rows * 4 for _, _, _, size in (t.cache_shape(1) for t in ringed)]
        self._staging = self._device.host_memory(max(most))
        self._rows = DeviceRows(self._device, self.precision)

    def _bind(self, kind: str, of_backend: dict[str, Buffer]) -> dict[str, Buffer]:
        graph = self._graphs[kind]
        weights = {bound.input: of_backend[bound.input] for bound in graph.facts.weights}
        rings = self._caches["rings"]
        caches = {} if kind == TARGET else rings.tensors(rings.layout_rows)
        caches |= self._caches[_model(kind)].tensors(self._capacity)
        own = {name: self._device.allocate(size) for name, size in graph.sizes_bytes().items()
               if name not in weights and name not in caches}  # fmt: skip
        for profile in graph.facts.profiles:
            if profile.capacity_rows == self._capacity:
                graph.bind(profile, {**weights, **own, **caches})
        return own

    def can_draft(self, size: int) -> bool:
        """See `GraphProbe.can_draft`."""
        return size in self._record.block_sizes

    def reset(self) -> None:
        """See `GraphProbe.reset`."""
        self._written = {"target": 0, "drafter": 0}
        self._ring_rows = RingRows(self._record.rings.values())
        self._unrolled: Tensors = {}  # what every row of a ring was when a query could see it last
        for tensor in self._ringed:
            _, heads, rows, size = tensor.cache_shape(self._capacity)
            self._unrolled[tensor.output] = np.zeros((rows, heads * size), np.float32)

    def target(self, ids: Sequence[int], position: int) -> Tensors:
        """See `GraphProbe.target`. More rows than an engine gives logits for are run piece by piece."""
        most = max(p.rows for p in self._graphs[TARGET].facts.profiles if p.logit_rows >= p.rows)
        pieces = []
        for start in range(0, len(ids), most):
            piece = list(ids[start : start + most])
            pieces.append(self._target(piece, position + start))
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}

    def _target(self, ids: list[int], position: int) -> Tensors:
        rows = len(ids)
        profile = self._graphs[TARGET].pick(rows, rows, self._capacity)
        given = {"input_ids": _padded(ids, profile.rows), "logit_rows": _padded(range(rows), profile.logit_rows)}
        found = self._run(TARGET, profile, given, position, rows)
        taps = split_taps(found.pop("taps"), len(self._manifest.taps.layer_ids))
        return {**found, **taps}

    def context(self, taps: Array, position: int) -> Tensors:
        """See `GraphProbe.context`."""
        most = max(p.rows for p in self._graphs[CONTEXT].facts.profiles)
        pieces = []
        for start in range(0, len(taps), most):
            rows = taps[start : start + most]
            profile = self._graphs[CONTEXT].pick(len(rows), 0, self._capacity)
            whole = np.zeros((profile.rows, taps.shape[1]), np.float32)
            whole[: len(rows)] = rows
            pieces.append(self._run(CONTEXT, profile, {"taps": whole}, position + start, len(rows)))
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}

    def draft(self, ids: Sequence[int], position: int) -> Tensors:
        """See `GraphProbe.draft`."""
        profile = self._graphs[DRAFTER].pick(len(ids), 0, self._capacity)
        padded = np.array([*ids, *[ids[-1]] * (profile.rows - len(ids))], np.int64)
        return self._run(DRAFTER, profile, {"input_ids": padded}, position, len(ids))

    def cache_rows(self, model: str) -> Tensors:
        """See `GraphProbe.cache_rows`. Of a ring: each row as it was when a query could see it last."""
        kind, rows = TARGET if model == "target" else CONTEXT, self._written[model]
        state, unrolled = self._facts[kind].state, {} if model == "target" else self._unrolled
        whole = [tensor for tensor in state if tensor.output not in unrolled]
        found = self._rows.read(self._caches[model], whole, self._capacity, 0, rows)
        return {t.output: found[t.output] if t.output in found else unrolled[t.output][:rows] for t in state}

    def _run(self, kind: str, profile: EngineProfile, given: dict[str, Array], position: int, rows: int) -> Tensors:
        facts, buffers = self._facts[kind], self._buffers[kind]
        given = {**given, "position": np.array([position], np.int64)}
        if "first_row" in buffers:
            self._make_room(position, profile.rows)
            given["first_row"] = np.array([self._ring_rows.first], np.int64)
        for name, array in given.items():
            stored = array if array.dtype == np.int64 else narrowed(array, self._taps_dtype, name)
            self._upload(buffers[name], stored)
        self._graphs[kind].contexts[profile].enqueue()
        model = _model(kind)
        if "new_rows.0" in buffers:  # the primitive form; its drafter graph hands out none, as they are scratch
            count = sum(name.startswith("new_rows.") for name in buffers)
            sources = iter([buffers[f"new_rows.{i}"].address for i in range(count)])
            self._caches[model].commit(sources, profile.rows, rows, position)
            if kind == CONTEXT:
                self._caches["rings"].commit(sources, profile.rows, rows, position - self._ring_rows.first)
        self._written[model] = max(self._written[model], position + rows)
        tensors = {tensor.name: self._output(facts, tensor.name, profile, buffers[tensor.name], rows)
                   for tensor in facts.outputs}  # fmt: skip
        shown = kind != DRAFTER or self.shows_block_rows
        return {**tensors, **(self._cache_rows(kind, position, position + rows) if shown else {})}

    def _make_room(self, position: int, rows: int) -> None:
        """As the runtime does; after a way back, which it goes by running the target again, lost rows are put back."""
        rings = self._ring_rows
        if (kept := rings.keep(position)) < position:
            for tensor in self._ringed:
                self._put_back(tensor, kept, position)
        elif position + rows - rings.first > rings.fewest_rows:
            before, rings.first = rings.first, position + 1 - rings.widest_tokens
            self._caches["rings"].slide(rings.first - before, position - rings.first)

    def _put_back(self, tensor: StateTensor, start: int, end: int) -> None:
        caches = self._caches["rings"]
        _, heads, slots, size = tensor.cache_shape(caches.layout_rows)
        by_head = self._unrolled[tensor.output][start:end].reshape(end - start, heads, size).transpose(1, 0, 2)
        place = caches.tensors(slots)[tensor.output]
        for head, array in enumerate(by_head):
            piece = narrowed(np.ascontiguousarray(array), self._dtype(), tensor.output)
            self._upload(Buffer(place.address + head * place.size_bytes // heads, piece.nbytes), piece)

    def _output(self, facts: GraphFacts, name: str, profile: EngineProfile, buffer: Buffer, rows: int) -> Array:
        """The rows of an output that belong to the call, in fp32 or as ids."""
        stated = next(tensor for tensor in facts.outputs if tensor.name == name)
        sizes = {"B": 1, "S": profile.rows, "b": profile.rows, "b-1": profile.rows - 1, "R": profile.logit_rows}
        shape = [sizes[d] if isinstance(d, str) else d for d in stated.shape]
        dtype = stated.dtype if stated.dtype in ("I64", "F32") else self._dtype()
        dtype = self._taps_dtype if name == "taps" else dtype
        array = self._download(buffer.address, math.prod(shape), dtype).reshape(shape)
        return rows_of(array)[: rows - 1 if name.startswith("draft_") else rows]

    def _cache_rows(self, kind: str, start: int, end: int) -> Tensors:
        state, first = self._facts[kind].state, self._ring_rows.first
        if kind == TARGET:
            return self._rows.read(self._caches[kind], state, self._capacity, start, end)
        seen = max(first, start - self._ring_rows.widest_tokens + 1)
        rings = self._caches["rings"]
        for name, rows in self._rows.read(rings, self._ringed, rings.layout_rows, seen - first, end - first).items():
            self._unrolled[name][seen:end] = rows
        return self._rows.read_all([self._caches["drafter"], rings], state, first, start, end)

    def _dtype(self) -> str:
        return _HALF.get(self.precision, "F32")

    def _upload(self, buffer: Buffer, array: Array) -> None:
        piece = self._staging[: array.nbytes]
        piece[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._device.upload(buffer.address, piece)
        self._device.mark()
        self._device.wait()  # the staging memory is used again

    def _download(self, address: int, count: int, dtype: str) -> Array:
        stored = np.dtype(_STORED[dtype])
        piece = self._staging[: count * stored.itemsize]
        if count:
            self._device.download(piece, address)
            self._device.mark()
            self._device.wait()
        array = piece.view(stored).copy()
        return array if dtype == "I64" else widened(array, dtype)


def _model(kind: str) -> str:
    return "target" if kind == TARGET else "drafter"


def _padded(ids: Sequence[int], count: int) -> Array:
    return np.array([*ids, *[0] * (count - len(ids))], np.int64)
