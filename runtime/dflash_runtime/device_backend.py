"""The backends on a GPU, `ort-cuda`, `tensorrt`, `tensorrt-rtx`: everything is allocated and bound when they open."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dflash_runtime.backend import Round
from dflash_runtime.bundle import Bundle
from dflash_runtime.device import Array, Buffer, Device
from dflash_runtime.device_caches import DeviceCaches
from dflash_runtime.device_engine import BoundWeight, DeviceEngineRecord, find_device_engine, row_outputs
from dflash_runtime.device_graph import DeviceGraph
from dflash_runtime.device_numbers import PLACES, DeviceNumbers
from dflash_runtime.device_weights import WeightPlaces, WeightSource, upload_weights
from dflash_runtime.errors import BackendError, EngineError
from dflash_runtime.window_rings import RingRows

_ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_RENAMED = {
    "drafter": {"input_ids": "draft_input"}, "acceptance": {"block": "input_ids", "posterior": "token_ids"},
}  # fmt: skip
"""Kind -> its I/O tensors that are known under another name here."""


class DeviceBackend:
    """Executes the engines of a device.

    A call takes the smallest profile with enough rows. The rows it pads are dead like those of a rejected draft: the
    next call overwrites them, and a cache has room for them as no call starts behind the context.

    Cycles follow each other on the device: acceptance is an engine too, and what it finds is where the next cycle
    begins. In the fused form the host reads one cycle late; in the primitive form it has to know how many rows were
    committed before it can enqueue the copies of the next ones.

    Args:
        name: The backend's.
        bundle: What is run.
        device: Where; closed with the backend.
        folder: The engines.
        record: Their record, checked.
        prefill_chunk_tokens: Most prompt tokens per call; the engines may have been built for fewer.
        cuda_graphs: Enqueue a cycle as one CUDA graph from its second time on; None where the device is known to.
        weights: Brings the weights onto the device.
    """

    def __init__(self, name: str, bundle: Bundle, device: Device, folder: Path, record: DeviceEngineRecord,
                 prefill_chunk_tokens: int, *, cuda_graphs: bool | None = None,
                 weights: WeightSource = upload_weights) -> None:
        self.name, self.bundle, self.device, self._fused = name, bundle, device, record.form == "fused"
        self.precision, manifest, remedy = record.execution_precision, bundle.manifest, _remedy(name, bundle)
        self.prefill_chunk_tokens = min(prefill_chunk_tokens, record.prefill_chunk_tokens)
        if cuda_graphs and not self._fused:
            raise BackendError("cuda_graphs is True and these engines are of the primitive form, whose cycles end in "
                               "copies to a place only the host knows. Leave it out.")
        self._captures = self._fused and (device.captures if cuda_graphs is None else cuda_graphs)
        self.cycles_ahead = PLACES - 1 if self._fused else 0
        loaded = {facts.kind: (facts, device.open_engine(folder / facts.file, facts.profiles))
                  for facts in record.engines}
        wanted = {"target", "acceptance", "candidates", *(("drafter_context", "drafter") if manifest.drafter else ())}
        if missing := sorted(wanted - loaded.keys()):
            raise EngineError(f"The engines in {folder} lack {', '.join(missing)}. {remedy}")
        scratch = device.allocate(max(1, *(engine.scratch_bytes for _, engine in loaded.values())))
        self._graphs = {kind: DeviceGraph(facts, engine, scratch, remedy) for kind, (facts, engine) in loaded.items()}
        profiles = [profile for facts in record.engines for profile in facts.profiles]
        self.call_rows = rows = max(profile.rows for profile in profiles)  # most tokens in a call
        layouts = sorted({profile.capacity_rows for profile in profiles} - {0})
        if manifest.max_context_tokens + rows > layouts[-1] or any(2 * a > b for a, b in itertools.pairwise(layouts)):
            raise EngineError(
                f"Caches of {layouts} rows, each at least twice the one before, do not hold a context of "
                f"{manifest.max_context_tokens} and {rows} rows of a call. {remedy}"
            )
        states, drafter = {"target": manifest.target.graph.state, "drafter": [], "rings": []}, manifest.drafter
        for tensor in [] if drafter is None else drafter.context_graph.state:
            states["rings" if tensor.input in record.rings else "drafter"].append(tensor)
        self._numbers = DeviceNumbers(device, rows, 0 if drafter is None else drafter.mask_token_id)
        item = _ITEM_BYTES[record.execution_precision]
        self._ring_rows, sizes = RingRows(record.rings.values()), {"rings": [r.rows for r in record.rings.values()][:1]}
        self._caches = {key: DeviceCaches(device, s, item, sizes.get(key) or layouts) for key, s in states.items()}
        self.buffers = self._bind(partial(weights, device, bundle))
        outputs = {"target": [o for o in manifest.target.graph.outputs if o.name == "logits"],
                   "candidates": row_outputs(manifest.target.vocab_size),
                   "drafter": [] if drafter is None else drafter.graph.outputs}  # fmt: skip
        if narrow := [o.name for kind in outputs.values() for o in kind if o.dtype not in ("F32", "I64")]:
            raise EngineError(f"{', '.join(narrow)} are narrower than fp32, and tokens are chosen from fp32. {remedy}")
        self._fetched = {kind: [(io, device.host_memory(self.buffers[kind][io.name].size_bytes)) for io in all_of_it]
                         for kind, all_of_it in outputs.items()}  # fmt: skip
        self._captured: dict[int, Callable[[], None]] = {}
        self._unread = deque[tuple[int, int]]()  # place to read into and block size of each cycle that is enqueued
        self._position, self._enqueued, self._not_finite = 0, 0, False

    def _bind(self, load: Callable[[Iterable[BoundWeight]], WeightPlaces]) -> dict[str, dict[str, Buffer]]:
        """Binds every profile; (kind, I/O tensor) -> its memory, caches apart. The taps of two graphs are one."""
        weights = load([bound for graph in self._graphs.values() for bound in graph.facts.weights])
        rings, found = self._caches["rings"], dict[str, dict[str, Buffer]]()
        shared = {**self._numbers.buffers, **rings.tensors(rings.layout_rows)}
        for kind, graph in self._graphs.items():
            own = found[kind] = dict(shared)
            own |= {bound.input: weights[bound.weight, bound.dtype] for bound in graph.facts.weights}
            own |= {tensor: shared[name] for tensor, name in _RENAMED.get(kind, {}).items()}
            caches = self._caches["target" if kind == "target" else "drafter"]
            of_caches = caches.tensors(caches.layout_rows)
            for tensor, size in graph.sizes_bytes().items():
                if tensor not in own and tensor not in of_caches:
                    own[tensor] = self.device.allocate(size)
                    if tensor in ("taps", "logits"):
                        shared[tensor] = own[tensor]
            for profile in graph.facts.profiles:
                graph.bind(profile, {**own, **caches.tensors(profile.capacity_rows or caches.layout_rows)})
        return found

    def reset(self, kept_rows: int = 0) -> int:
        """See `Backend.reset`. What is still enqueued is waited for: it writes behind the rows that can be kept."""
        while self._unread:
            self.read_cycle()
        self._numbers.wait()
        kept_rows = self._ring_rows.keep(0 if self._not_finite else kept_rows)
        self._numbers.said["first_row"][0] = self._ring_rows.first
        for caches in self._caches.values():
            caches.reset(kept_rows, clear=self._not_finite)
        if self._not_finite:
            self.device.clear(self.buffers["target"]["taps"])
        self._not_finite = False
        return kept_rows

    def prefill(self, ids: Sequence[int], position: int) -> int:
        """See `Backend.prefill`."""
        return self._run_target(ids, position, [len(ids) - 1])[0]

    def draft(self, anchor: int, block_size: int, position: int) -> list[int]:
        """See `Backend.draft`. Where no engine has the block's size, the next larger one drafts and the rest is cut."""
        self._numbers.say([anchor], position, [0])
        self._run("drafter", block_size, 0, position)
        self._numbers.download()
        return [int(token) for token in self._numbers.read()["draft_ids"][: block_size - 1]]

    def verify(self, block: Sequence[int], position: int) -> list[int]:
        """See `Backend.verify`."""
        return self._run_target(block, position, range(len(block)))

    def outputs(self, kind: str, rows: int) -> dict[str, Array]:
        """See `Backend.outputs`."""
        found = dict[str, Array]()
        for io, host in self._fetched[kind]:
            sizes, dtype = io.array_form(rows)
            piece = host[: math.prod(sizes) * np.dtype(dtype).itemsize]
            self.device.download(piece, self.buffers[kind][io.name].address)
            found[io.name] = piece.view(dtype).reshape(sizes)
        self._numbers.wait()
        return found

    def candidates(self, rows: int, temperature: float) -> tuple[Array, Array, Array]:
        """See `CandidateSource.candidates`."""
        self._numbers.say_one("temperature", np.float32(temperature))
        graph = self._graphs["candidates"]
        graph.contexts[graph.pick(rows, 0, 0)].enqueue()
        found = self.outputs("candidates", rows)
        return found["candidate_ids"], found["candidate_values"], found["candidate_total"]

    def append_context(self, rows: int, position: int) -> None:
        """See `Backend.append_context`."""
        if "drafter_context" in self._graphs:
            self._run("drafter_context", rows, 0, position)  # the position on the device is still the target's

    def start_cycles(self, anchor: int, position: int, limit: int, stop_ids: Collection[int]) -> None:
        """See `Cycles.start_cycles`; PromptError where there are more stop ids than the engines compare with."""
        self._numbers.begin(anchor, position, limit, stop_ids)
        self._position = position

    def enqueue_cycle(self, block_size: int) -> None:
        """See `Cycles.enqueue_cycle`."""
        self._make_room(self._position)
        place, self._enqueued = self._enqueued % PLACES, self._enqueued + 1
        if block_size in self._captured:
            self._captured[block_size]()
            self._numbers.download(place)
        else:
            self._cycle(block_size, partial(self._numbers.download, place))
            if self._captures:  # only now, as libraries prepare things the first time
                self._captured[block_size] = self.device.capture(partial(self._cycle, block_size))
        self._unread.append((place, block_size))

    def read_cycle(self) -> Round:
        """See `Cycles.read_cycle`."""
        place, block_size = self._unread.popleft()
        found = self._numbers.read(place)
        count = int(found["count"][0])
        self._position += count
        self._not_finite |= bool((found["token_ids"][:block_size] < 0).any())
        return Round(found["committed"][:count].tolist(), found["draft_ids"][: block_size - 1].tolist())

    def close(self) -> None:
        """Frees the device."""
        self._captured, self._graphs = {}, {}
        self.device.close()

    def _cycle(self, block_size: int, accepted: Callable[[], None] = lambda: None) -> None:
        """Enqueues a cycle; `accepted` is called where all is found, as what follows need not be waited for."""
        numbers, position = self._numbers, self._position
        numbers.copy("rows", "sizes", block_size)
        if block_size > 1:
            numbers.copy("draft_input", "input_ids")  # the anchor, before the masks
            self._run("drafter", block_size, 0, position)
            numbers.copy("input_ids", "draft_ids", to_index=1, count=block_size - 1)
        self._run("target", block_size, block_size, position)
        self._run("acceptance", block_size, 0, position)
        accepted()
        self.append_context(block_size, position)
        numbers.advance()

    def _run_target(self, ids: Sequence[int], position: int, logit_rows: Sequence[int]) -> list[int]:
        self._numbers.say(ids, position, logit_rows)
        self._run("target", len(ids), len(logit_rows), position)
        self._numbers.download()
        found: list[int] = self._numbers.read()["token_ids"][: len(logit_rows)].tolist()
        self._not_finite |= min(found) < 0
        return found

    def _run(self, kind: str, rows: int, logit_rows: int, position: int) -> None:
        """Enqueues a graph. `position` is for the primitive form: the other one reads it on the device."""
        self._make_room(position)
        for caches in self._caches.values():
            caches.make_room(position + rows, position)
        graph = self._graphs[kind]
        profile = graph.pick(rows, logit_rows, self._caches["target"].layout_rows)
        graph.contexts[profile].enqueue()
        if not self._fused and kind in ("target", "drafter_context"):
            # The rows it handed back, never those it pads, are copied to the caches.
            sources = (self.buffers[kind][f"new_rows.{i}"].address for i in itertools.count())
            for key in ("target",) if kind == "target" else ("drafter", "rings"):
                slot = position - (self._ring_rows.first if key == "rings" else 0)
                self._caches[key].commit(sources, profile.rows, rows, slot)

    def _make_room(self, position: int) -> None:
        """In rings, moves what is seen from `position` on to the front where a call might not fit behind it.

        The rows may be further than the host knows, by the cycles it has not read.
        """
        rings, end = self._ring_rows, position + sum(dict(self._unread).values())
        if end + self.call_rows - rings.first > rings.fewest_rows:
            self._numbers.wait()  # what is said may change
            before, rings.first = rings.first, position + 1 - rings.widest_tokens
            self._caches["rings"].slide(rings.first - before, end - rings.first)
            self._numbers.say_one("first_row", np.int64(rings.first))


def open_engines(name: str, bundle: Bundle, device: Device, prefill_chunk_tokens: int,
                 modes: Sequence[str] = ("shared", "embedded"), **options: Any) -> DeviceBackend:
    """Finds the engines of a backend for this GPU and opens them; options are those of `DeviceBackend`.

    Of several folders the first in the order of `modes`, how engines have their weights, is taken.

    Raises:
        EngineError: there are none, or they were made for another GPU, TensorRT or bundle.
        BackendError: the device has too little memory.
    """
    folder, record = find_device_engine(name, bundle, modes, device.tensorrt_version, device.compute_capability,
                                        _remedy(name, bundle))
    return DeviceBackend(name, bundle, device, folder, record, prefill_chunk_tokens, **options)


def _remedy(name: str, bundle: Bundle) -> str:
    return f"Run: dflash-export engines {bundle.path} --backend {name}"
