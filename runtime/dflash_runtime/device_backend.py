"""The backends on a GPU, `ort-cuda`, `tensorrt`, `tensorrt-rtx`: everything is allocated and bound when they open."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dflash_runtime.bundle import Bundle
from dflash_runtime.device import Buffer, Device, aligned
from dflash_runtime.device_caches import DeviceCaches
from dflash_runtime.device_engine import (
    BoundWeight,
    DeviceEngineRecord,
    EngineProfile,
    check_device_engine,
    device_tag,
    engine_folders,
    read_device_engine,
)
from dflash_runtime.device_graph import DeviceGraph
from dflash_runtime.device_weights import WeightPlaces, WeightSource, upload_weights
from dflash_runtime.engine_record import ENGINE_RECORD_NAME
from dflash_runtime.errors import BackendError, EngineError

_ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_ID_BYTES = 8


class DeviceBackend:
    """Executes the engines of a device.

    A call takes the smallest profile with enough rows. The rows it pads are dead like those of a rejected draft: the
    next call overwrites them, and a cache has room for them as no call starts behind the context.

    Args:
        name: The backend's.
        bundle: What is run.
        device: Where; closed with the backend.
        folder: The engines.
        record: Their record, checked.
        prefill_chunk_tokens: Most prompt tokens per call; the engines may have been built for fewer.
        capture_cycles: Enqueue the passes of a cycle as one CUDA graph from its second time on (fused form).
        weights: Brings the weights onto the device.
    """

    def __init__(self, name: str, bundle: Bundle, device: Device, folder: Path, record: DeviceEngineRecord,
                 prefill_chunk_tokens: int, *, capture_cycles: bool = False,
                 weights: WeightSource = upload_weights) -> None:
        self.name, self.bundle, self.device, self._fused = name, bundle, device, record.form == "fused"
        self.precision = record.execution_precision
        self.prefill_chunk_tokens = min(prefill_chunk_tokens, record.prefill_chunk_tokens)
        remedy, manifest = _remedy(name, bundle), bundle.manifest
        loaded = {facts.kind: (facts, device.open_engine(folder / facts.file, facts.profiles))
                  for facts in record.engines}
        scratch = device.allocate(max(1, *(engine.scratch_bytes for _, engine in loaded.values())))
        graphs = {kind: DeviceGraph(facts, engine, scratch, remedy) for kind, (facts, engine) in loaded.items()}
        self._target = graphs["target"]
        self._context, self._drafter = graphs.get("drafter_context"), graphs.get("drafter")
        profiles = [profile for facts in record.engines for profile in facts.profiles]
        rows = max(profile.rows for profile in profiles)
        layouts = sorted({profile.capacity_rows for profile in profiles})
        if manifest.max_context_tokens + rows > layouts[-1] or any(2 * a > b for a, b in itertools.pairwise(layouts)):
            raise EngineError(
                f"Caches of {layouts} rows, each at least twice the one before, do not hold a context of "
                f"{manifest.max_context_tokens} and {rows} rows of a call. {remedy}"
            )
        states, mask_token_id = {"target": manifest.target.graph.state}, 0
        if manifest.drafter is not None:
            states["drafter"], mask_token_id = manifest.drafter.context_graph.state, manifest.drafter.mask_token_id
        self._ids, item = _Ids(device, rows, mask_token_id), _ITEM_BYTES[record.execution_precision]
        self._caches = {key: DeviceCaches(device, s, layouts[-1], item, layouts) for key, s in states.items()}
        self.buffers = self._bind(list(graphs.values()), partial(weights, device, bundle))
        self._graphs: dict[int, Callable[[], None]] | None = {} if capture_cycles and self._fused else None
        self._prepared: set[int] = set()
        self._verified: tuple[list[int], int] | None = None  # block and position of a pass that ran ahead
        self._appended: tuple[int, int] | None = None
        self._not_finite = False

    def _bind(self, graphs: list[DeviceGraph], load: Callable[[Iterable[BoundWeight]], WeightPlaces]
              ) -> dict[str, dict[str, Buffer]]:
        """Binds every profile; (kind, I/O tensor) -> its memory, caches apart. The taps of two graphs are one."""
        weights = load([bound for graph in graphs for bound in graph.facts.weights])
        shared, found = dict(self._ids.buffers), dict[str, dict[str, Buffer]]()
        for graph in graphs:
            own = found[graph.facts.kind] = dict(shared)
            own |= {bound.input: weights[bound.weight, bound.dtype] for bound in graph.facts.weights}
            if graph is self._drafter:
                own["input_ids"] = shared["draft_input"]
            caches = self._caches["target" if graph is self._target else "drafter"]
            of_caches = caches.tensors(caches.layout_rows)
            for tensor, size in graph.sizes_bytes().items():
                if tensor not in own and tensor not in of_caches:
                    own[tensor] = self.device.allocate(size)
                    if tensor == "taps":
                        shared[tensor] = own[tensor]
            for profile in graph.facts.profiles:
                graph.bind(profile, {**own, **caches.tensors(profile.capacity_rows)})
        return found

    def reset(self) -> None:
        """Forgets the request before: its rows are dead."""
        self._verified = self._appended = None
        for caches in self._caches.values():
            caches.reset(clear=self._not_finite)
        if self._not_finite:
            self.device.clear(self.buffers["target"]["taps"])
        self._not_finite = False

    def prefill(self, ids: Sequence[int], position: int) -> int:
        """See `Backend.prefill`."""
        return self._run_target(ids, position, [len(ids) - 1])[0]

    def draft(self, anchor: int, block_size: int, position: int) -> list[int]:
        """See `Backend.draft`. The pass that verifies the proposals runs behind at once: the host waits only here.

        Where no engine has the block's size, the next larger one drafts and the surplus is cut.
        """
        if self._drafter is None or self._context is None:
            raise BackendError("The bundle has no drafter, so nothing can be drafted. Use block size 1.")
        profile, drafter = self._profile(self._drafter, block_size, 0, position), self._drafter
        self._verified = self._appended = None
        self._ids.say([anchor], position, range(block_size))

        def cycle() -> None:
            self._ids.upload()
            drafter.enqueue(profile)
            self._ids.drafts_into_block(block_size - 1)
            self._pass_target(block_size, block_size, position)
            self._ids.download()

        self._enqueue_cycle(block_size, cycle)
        self.device.mark()
        self.append_context(block_size, position)  # it does not depend on what will be accepted
        self.device.wait()
        proposed: list[int] = self._ids.drafts[: block_size - 1].tolist()
        self._verified = [anchor, *proposed], position
        return proposed

    def verify(self, block: Sequence[int], position: int) -> list[int]:
        """See `Backend.verify`. What `draft` proposed has been verified already."""
        if self._verified == (list(block), position):
            return self._take(len(block))
        return self._run_target(block, position, range(len(block)))

    def append_context(self, rows: int, position: int) -> None:
        """See `Backend.append_context`."""
        if self._context is None or self._appended == (rows, position):
            return
        profile = self._profile(self._context, rows, 0, position)
        self._context.enqueue(profile)  # its position is still that of the target's pass
        self._commit("drafter_context", profile, rows, position)
        self._appended = rows, position

    def close(self) -> None:
        """Frees the device."""
        self.device.close()

    def _profile(self, graph: DeviceGraph, rows: int, logit_rows: int, position: int) -> EngineProfile:
        for caches in self._caches.values():
            caches.make_room(position + rows, position)
        return graph.pick(rows, logit_rows, self._caches["target"].layout_rows)

    def _run_target(self, ids: Sequence[int], position: int, logit_rows: Sequence[int]) -> list[int]:
        self._verified = self._appended = None
        self._ids.say(ids, position, logit_rows)
        self._ids.upload()
        self._pass_target(len(ids), len(logit_rows), position)
        self._ids.download()
        self.device.mark()
        self.device.wait()
        return self._take(len(logit_rows))

    def _pass_target(self, rows: int, logit_rows: int, position: int) -> None:
        profile = self._profile(self._target, rows, logit_rows, position)
        self._target.enqueue(profile)
        self._commit("target", profile, rows, position)

    def _commit(self, kind: str, profile: EngineProfile, rows: int, position: int) -> None:
        """Of the primitive form: only rows of the call, never those it pads."""
        if not self._fused:
            caches = self._caches["target" if kind == "target" else "drafter"]
            sources = [self.buffers[kind][f"new_rows.{i}"].address for i in range(len(caches.groups))]
            caches.commit(sources, profile.rows, rows, position)

    def _enqueue_cycle(self, block_size: int, cycle: Callable[[], None]) -> None:
        """As a CUDA graph where asked for; the first time runs without, as TensorRT prepares things then."""
        if self._graphs is not None and block_size in self._prepared:
            if block_size not in self._graphs:
                self._graphs[block_size] = self.device.capture(cycle)
            cycle = self._graphs[block_size]
        self._prepared.add(block_size)
        cycle()

    def _take(self, count: int) -> list[int]:
        found: list[int] = self._ids.tokens[:count].tolist()
        self._not_finite |= min(found) < 0
        return found


class _Ids:
    """What the host says before a call and reads after it: one copy each way."""

    def __init__(self, device: Device, rows: int, mask_token_id: int) -> None:
        section = aligned(rows * _ID_BYTES)
        self._device, self._mask_token_id = device, mask_token_id
        self._said, self._found = (device.host_memory(n * section) for n in (4, 2))
        self._said_there, self._found_there = (device.allocate(n * section).address for n in (4, 2))
        self._position, self._input, self._logit_rows, self._draft_input = self._said.view(np.int64).reshape(4, -1)
        self.tokens, self.drafts = self._found.view(np.int64).reshape(2, -1)
        self.buffers = {
            name: Buffer(there + i * section, section)
            for there, names in (
                (self._said_there, ("position", "input_ids", "logit_rows", "draft_input")),
                (self._found_there, ("token_ids", "draft_ids")),
            )
            for i, name in enumerate(names)
        }

    def say(self, ids: Sequence[int], position: int, logit_rows: Sequence[int]) -> None:
        """Padded rows get any token; a drafter the first token and masks."""
        self._position[0] = position
        self._input[: len(ids)], self._input[len(ids) :] = ids, 0
        self._logit_rows[:] = logit_rows[0]
        self._logit_rows[: len(logit_rows)] = logit_rows
        self._draft_input[0], self._draft_input[1:] = ids[0], self._mask_token_id

    def upload(self) -> None:
        self._device.upload(self._said_there, self._said)

    def download(self) -> None:
        self._device.download(self._found, self._found_there)

    def drafts_into_block(self, count: int) -> None:
        """The proposals behind the anchor, on the device."""
        size, block = count * _ID_BYTES, self.buffers["input_ids"].address
        self._device.copy_rows(block + _ID_BYTES, size, self.buffers["draft_ids"].address, size, size, 1)


def open_engines(name: str, bundle: Bundle, device: Device, prefill_chunk_tokens: int, **options: Any) -> DeviceBackend:
    """Finds the engines of a backend for this GPU and opens them; options are those of `DeviceBackend`.

    Raises:
        EngineError: there are none, or they were made for another GPU, TensorRT or bundle.
        BackendError: the device has too little memory.
    """
    remedy, capability = _remedy(name, bundle), device.compute_capability
    made_for = None if device.tensorrt_version is None else capability
    own = [folder for mode in ("shared", "embedded")
           for folder in engine_folders(bundle, device_tag(name, made_for, mode))]  # fmt: skip
    others = sorted((bundle.path / "engines").glob(f"{name}-sm*"))  # their record says what they are for
    folder = next((folder for folder in (*own, *others) if (folder / ENGINE_RECORD_NAME).is_file()), own[0])
    record = read_device_engine(folder, remedy)
    check_device_engine(record, bundle, tensorrt_version=device.tensorrt_version, compute_capability=capability,
                        remedy=remedy)  # fmt: skip
    return DeviceBackend(name, bundle, device, folder, record, prefill_chunk_tokens, **options)


def _remedy(name: str, bundle: Bundle) -> str:
    return f"Run: dflash-export engines {bundle.path} --backend {name}"
