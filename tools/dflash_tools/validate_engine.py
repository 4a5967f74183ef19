"""The engine under validation: as the runtime opens it, and the same graphs with every tensor in the open."""

from __future__ import annotations

from typing import Protocol

from dflash_runtime.backend import AVAILABLE, Backend, open_backend
from dflash_runtime.bundle import Bundle
from dflash_runtime.device_backend import DeviceBackend
from dflash_runtime.device_engine import DeviceEngineRecord
from dflash_runtime.engine_record import open_engine
from dflash_runtime.errors import BackendError, EngineError
from dflash_tools.device_probe import DeviceProbe, engines_of
from dflash_tools.engine_precision import computes_in
from dflash_tools.error_lines import needs_extra
from dflash_tools.graph_probe import GraphProbe, ProbeBackend
from dflash_tools.ring_lines import DRAFT_WINDOW

PORTABLE = "portable"
"""The portable graphs, in place of a backend."""
CHOICES = (*AVAILABLE, PORTABLE)
PREFILL_CHUNK_TOKENS = 16
"""Small, so that prompts are prefilled in several pieces."""


class Engine(Protocol):
    """What can be validated."""

    name: str
    precision: str
    """fp32, fp16, bf16 or `int8 products`: what it computes in."""

    def backend(self) -> Backend:
        """As the runtime executes it."""

    def probe(self, capacity_rows: int) -> GraphProbe:
        """Its graphs with every output in the open."""

    def can_draft(self, size: int) -> bool:
        """Whether it drafts blocks of this size as such, and not as a larger block that is cut."""

    def close(self) -> None:
        """Frees what probes hold."""


class BundleEngine:
    """An engine of a bundle, by the name of its backend or `portable`."""

    def __init__(self, bundle: Bundle, name: str, threads: int | None = None) -> None:
        self.bundle, self.name, self._threads = bundle, name, threads
        if name not in CHOICES:
            raise BackendError(f"Backend {name!r} is unknown. There are: {', '.join(CHOICES)}.")
        self.precision = bundle.manifest.precision
        if name == "ort-cpu":
            record = open_engine(bundle, name)
            if (window := record.versions.get(DRAFT_WINDOW)) is not None:
                raise EngineError(
                    f"The engine's drafter sees {window} tokens (--draft-window), the reference's the whole context: "
                    f"their proposals differ. Make it without: dflash-export engines {bundle.path}"
                )
            self.precision = computes_in(bundle, record)

    def backend(self) -> Backend:
        """See `Engine.backend`."""
        if self.name != PORTABLE:
            return open_backend(self.name, self.bundle, self._threads, PREFILL_CHUNK_TOKENS)
        manifest = self.bundle.manifest
        rows = manifest.max_context_tokens + max(PREFILL_CHUNK_TOKENS, *manifest.block_sizes)
        return ProbeBackend(self.probe(rows), manifest, PREFILL_CHUNK_TOKENS)

    def probe(self, capacity_rows: int) -> GraphProbe:
        """See `Engine.probe`."""
        if self.name == PORTABLE:
            with needs_extra("engines"):
                from dflash_tools.debug_graphs import open_debug_probe
            return open_debug_probe(self.bundle, PORTABLE, capacity_rows, inner=False)
        with needs_extra("ort"):
            from dflash_tools.ort_probe import open_engine_probe
        return open_engine_probe(self.bundle, self.name, capacity_rows, self._threads)

    def can_draft(self, size: int) -> bool:
        """See `Engine.can_draft`."""
        return True

    def close(self) -> None:
        """See `Engine.close`; probes here are plain memory."""


class DeviceEngine:
    """The engines of a GPU: tokens by the runtime's backend, tensors by a probe on the same device and weights."""

    def __init__(self, bundle: Bundle, backend: DeviceBackend) -> None:
        """Takes an open backend; it is closed with the engine.

        Args:
            bundle: What is validated.
            backend: As the runtime opened it.
        """
        self.bundle, self.name, self.precision, self._backend = bundle, backend.name, backend.precision, backend
        self._probe: DeviceProbe | None = None
        self._handed_out = False

    def backend(self) -> Backend:
        """See `Engine.backend`. Whoever takes it closes it, and the device with it."""
        self._handed_out = True
        return self._backend

    def probe(self, capacity_rows: int) -> GraphProbe:
        """See `Engine.probe`; the capacity is the engines' own, and there is one probe for all."""
        return self._opened()

    def _opened(self) -> DeviceProbe:
        if self._probe is None:
            folder = engines_of(self.bundle, self.name, self._backend.device)
            record = DeviceEngineRecord.read(folder, "Build the engines again.")
            self._probe = DeviceProbe(self._backend, folder, record)
        return self._probe

    def can_draft(self, size: int) -> bool:
        """See `Engine.can_draft`."""
        return self._opened().can_draft(size)

    def close(self) -> None:
        """See `Engine.close`."""
        if not self._handed_out:
            self._backend.close()


def open_bundle_engine(bundle: Bundle, name: str, threads: int | None = None) -> Engine:
    """The engine of a backend by name.

    Raises:
        BackendError: the backend is unknown or cannot run here.
        EngineError: the bundle has no usable engine for it.
    """
    if name in (PORTABLE, "ort-cpu"):
        return BundleEngine(bundle, name, threads)
    opened = open_backend(name, bundle, threads, PREFILL_CHUNK_TOKENS)
    if not isinstance(opened, DeviceBackend):
        opened.close()
        raise BackendError(f"The tensors of {name} cannot be looked at. There are: {', '.join(CHOICES)}.")
    return DeviceEngine(bundle, opened)
