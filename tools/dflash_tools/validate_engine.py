"""The engine under validation: as the runtime opens it, and the same graphs with every tensor in the open."""

from __future__ import annotations

from typing import Protocol

from dflash_runtime.backend import AVAILABLE, Backend, open_backend
from dflash_runtime.bundle import Bundle
from dflash_runtime.engine_record import open_engine
from dflash_runtime.errors import BackendError
from dflash_tools.error_lines import needs_extra
from dflash_tools.graph_probe import GraphProbe, ProbeBackend
from dflash_tools.validate_state import OpenBackend

PORTABLE = "portable"
"""The portable graphs, in place of a backend."""
CHOICES = (*AVAILABLE, PORTABLE)
PREFILL_CHUNK_TOKENS = 16
"""Small, so that prompts are prefilled in several pieces."""


class Engine(Protocol):
    """What can be validated."""

    name: str
    precision: str
    """fp32, fp16 or bf16: what it computes in."""

    def backend(self) -> Backend:
        """As the runtime executes it."""

    def probe(self, capacity_rows: int) -> GraphProbe:
        """Its graphs with every output in the open."""

    def open_backend(self, capacity_rows: int) -> OpenBackend:
        """A backend whose caches can be looked at."""


class BundleEngine:
    """An engine of a bundle, by the name of its backend or `portable`."""

    def __init__(self, bundle: Bundle, name: str, threads: int | None = None) -> None:
        self.bundle, self.name, self._threads = bundle, name, threads
        if name not in CHOICES:
            raise BackendError(f"Backend {name!r} is unknown. There are: {', '.join(CHOICES)}.")
        if name == PORTABLE:
            self.precision = bundle.manifest.precision
        elif name == "ort-cpu":
            self.precision = open_engine(bundle, name).execution_precision
        else:
            raise BackendError(
                f"The tensors of {name} cannot be looked at yet. Validate ort-cpu or portable here; `run` and "
                "tools/gpu_check compare the tokens of other backends."
            )

    def backend(self) -> Backend:
        """See `Engine.backend`."""
        if self.name == PORTABLE:
            manifest = self.bundle.manifest
            rows = manifest.max_context_tokens + max(PREFILL_CHUNK_TOKENS, *manifest.block_sizes)
            return self.open_backend(rows)
        return open_backend(self.name, self.bundle, self._threads, PREFILL_CHUNK_TOKENS)

    def probe(self, capacity_rows: int) -> GraphProbe:
        """See `Engine.probe`."""
        if self.name == PORTABLE:
            with needs_extra("engines"):
                from dflash_tools.debug_graphs import open_debug_probe
            return open_debug_probe(self.bundle, PORTABLE, capacity_rows, inner=False)
        with needs_extra("ort"):
            from dflash_tools.ort_probe import open_engine_probe
        return open_engine_probe(self.bundle, self.name, capacity_rows, self._threads)

    def open_backend(self, capacity_rows: int) -> OpenBackend:
        """See `Engine.open_backend`."""
        return ProbeBackend(self.probe(capacity_rows), self.bundle.manifest, PREFILL_CHUNK_TOKENS)
