"""What an `ort-cpu` session takes: its caches to the byte, its engine files, and the growth of resident memory."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

from dflash_runtime.backend import open_backend
from dflash_runtime.bundle import Bundle
from dflash_runtime.engine_record import engine_folder, open_engine
from dflash_tools.peak_memory import resident_bytes
from dflash_tools.plan_formulas import PREFILL_CHUNK_TOKENS

if TYPE_CHECKING:
    from dflash_runtime.ort_cpu import OrtCpuBackend


@dataclasses.dataclass(frozen=True)
class SessionBytes:
    """Measured sizes."""

    target_kv_bytes: int
    drafter_kv_bytes: int
    engine_bytes: int
    """Files of the engine's graphs; weights are apart."""
    resident_growth_bytes: int
    """Resident memory after a full prefill chunk with every cache page touched, less that before opening."""


def measure_session(bundle: Bundle, threads: int | None) -> SessionBytes:
    """Opens a bundle on `ort-cpu` as a session does, and weighs it (Linux).

    Raises:
        EngineError: the bundle has no usable engine for it.
        BackendError: ONNX Runtime cannot be used here.
    """
    record = open_engine(bundle, "ort-cpu")
    folder = engine_folder(bundle, "ort-cpu")
    engines = sum((folder / name).stat().st_size for name in record.files)
    import dflash_runtime.ort_cpu  # noqa: F401 - its own memory is no part of the session's

    before = resident_bytes()
    backend = cast("OrtCpuBackend", open_backend("ort-cpu", bundle, threads, PREFILL_CHUNK_TOKENS))
    try:
        caches = [list(state.values()) for state in (backend._target_state, backend._drafter_state)]
        for array in (*caches[0], *caches[1]):
            array.fill(0)  # memory is taken by the system only where it is written
        backend.prefill([0] * min(PREFILL_CHUNK_TOKENS, bundle.manifest.max_context_tokens), 0)
        target, drafter = (sum(array.nbytes for array in cache) for cache in caches)
        return SessionBytes(target, drafter, engines, resident_bytes() - before)
    finally:
        backend.close()
