"""The KV rows a backend of the runtime holds, read out of its own buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash_runtime.backend import Backend
from dflash_runtime.bundle import GraphFacts, Manifest
from dflash_runtime.device_backend import DeviceBackend
from dflash_runtime.errors import BackendError
from dflash_tools.device_rows import DeviceRows
from dflash_tools.graph_probe import ProbeBackend
from dflash_tools.reference_tensors import Array, cache_rows_of

if TYPE_CHECKING:
    from dflash_runtime.ort_cpu import OrtCpuBackend


class HeldCache(NamedTuple):
    """One cache."""

    rows: Array
    """[committed rows, heads * D]; of a ring what it has lost is NaN."""
    first: int
    """The oldest row it still has."""


Held = dict[str, dict[str, HeldCache]]
"""Model -> output name -> what the cache holds."""


def cache_graphs(manifest: Manifest) -> dict[str, GraphFacts]:
    """The graph that writes the caches of `target` and, where there is one, of `drafter`."""
    drafter = manifest.drafter
    return {"target": manifest.target.graph} | ({} if drafter is None else {"drafter": drafter.context_graph})


def held_rows(backend: Backend, manifest: Manifest, rows: int) -> Held:
    """The first rows of every cache, as the next request would keep them: what waits is written before.

    Args:
        backend: As a session uses it.
        manifest: Of its bundle.
        rows: How many are committed.

    Returns:
        What every cache holds; empty where the backend keeps none because something was not finite.

    Raises:
        BackendError: the buffers of this backend cannot be read.
    """
    graphs = cache_graphs(manifest)
    if isinstance(backend, ProbeBackend):
        whole = {model: backend.cache_rows(model) for model in graphs}
        return {model: {n: HeldCache(array[:rows], 0) for n, array in found.items()} for model, found in whole.items()}
    if backend.reset(rows) != rows:
        return {}
    if isinstance(backend, DeviceBackend):
        # A request leaves the caches in a layout of their own; the reset above chose the one that holds these rows.
        return {model: _of_device(backend, model, facts, rows) for model, facts in graphs.items()}
    if backend.name != "ort-cpu":
        raise BackendError(f"The caches of backend {backend.name!r} cannot be read.")
    return {model: _of_arrays(backend, model, facts, rows) for model, facts in graphs.items()}  # type: ignore[arg-type]


def _of_device(backend: DeviceBackend, model: str, facts: GraphFacts, rows: int) -> dict[str, HeldCache]:
    reading, first_row = DeviceRows(backend.device, backend.precision), backend._ring_rows.first
    held = {}
    for key, oldest in (("target", 0),) if model == "target" else (("drafter", 0), ("rings", first_row)):
        caches = backend._caches[key]
        state = [tensor for tensor in facts.state if tensor.input in caches.tensors(caches.layout_rows)]
        for name, kept in reading.read(caches, state, caches.layout_rows, 0, rows - oldest).items():
            lost = np.full((oldest, kept.shape[1]), np.nan, np.float32)
            held[name] = HeldCache(np.concatenate([lost, kept]), oldest)
    return {tensor.output: held[tensor.output] for tensor in facts.state}


def _of_arrays(backend: OrtCpuBackend, model: str, facts: GraphFacts, rows: int) -> dict[str, HeldCache]:
    state = backend._target_state if model == "target" else backend._drafter_state
    # A ring is shorter than any cache of the whole context, so its length tells it.
    rings = [] if model == "target" else backend._ring_rows.rings
    oldest = {ring.rows: backend._ring_rows.oldest(ring) for ring in rings}
    held = {}
    for tensor in facts.state:
        array = state[tensor.input]
        size, first = array.shape[2], oldest.get(array.shape[2], 0)
        found = np.full((rows, array.shape[1] * array.shape[3]), np.nan, np.float32)
        kept = np.arange(first, rows)
        found[first:] = cache_rows_of(array[:, :, kept % size], 0, len(kept))
        held[tensor.output] = HeldCache(found, first)
    return held
