"""The KV rows a backend of the runtime holds, read out of its own buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dflash_runtime.backend import Backend
from dflash_runtime.bundle import GraphFacts, Manifest
from dflash_runtime.device_backend import DeviceBackend
from dflash_runtime.errors import BackendError
from dflash_tools.device_rows import DeviceRows
from dflash_tools.graph_probe import ProbeBackend
from dflash_tools.reference_tensors import Tensors, cache_rows_of

if TYPE_CHECKING:
    from dflash_runtime.ort_cpu import OrtCpuBackend


def cache_graphs(manifest: Manifest) -> dict[str, GraphFacts]:
    """The graph that writes the caches of `target` and, where there is one, of `drafter`."""
    drafter = manifest.drafter
    return {"target": manifest.target.graph} | ({} if drafter is None else {"drafter": drafter.context_graph})


def held_rows(backend: Backend, manifest: Manifest, rows: int) -> dict[str, Tensors]:
    """The first rows of every cache, as the next request would keep them: what waits is written before.

    Args:
        backend: As a session uses it.
        manifest: Of its bundle.
        rows: How many are committed.

    Returns:
        Model -> output name -> [rows, heads * D]; empty where the backend keeps none because something was not finite.

    Raises:
        BackendError: the buffers of this backend cannot be read.
    """
    graphs = cache_graphs(manifest)
    if isinstance(backend, ProbeBackend):
        whole = {model: backend.cache_rows(model) for model in graphs}
        return {model: {name: array[:rows] for name, array in found.items()} for model, found in whole.items()}
    if backend.reset(rows) != rows:
        return {}
    if isinstance(backend, DeviceBackend):
        # A request leaves the caches in a layout of their own; the reset above chose the one that holds these rows.
        reading = DeviceRows(backend.device, backend.precision)
        return {
            model: reading.read(backend._caches[model], facts.state, backend._caches[model].layout_rows, 0, rows)
            for model, facts in graphs.items()
        }
    if backend.name != "ort-cpu":
        raise BackendError(f"The caches of backend {backend.name!r} cannot be read.")
    return {model: _of_arrays(backend, model, facts, rows) for model, facts in graphs.items()}  # type: ignore[arg-type]


def _of_arrays(backend: OrtCpuBackend, model: str, facts: GraphFacts, rows: int) -> Tensors:
    state = backend._target_state if model == "target" else backend._drafter_state
    return {tensor.output: np.array(cache_rows_of(state[tensor.input], 0, rows)) for tensor in facts.state}
