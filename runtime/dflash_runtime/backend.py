"""What the decode loop needs from whatever executes the graphs, and how to open it by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import BackendError

if TYPE_CHECKING:
    import numpy.typing as npt

_EXTRAS = {"ort-cpu": "ort", "ort-cuda": "ort-gpu", "tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt-rtx"}
"""Backend -> the extra that brings what it needs."""
AVAILABLE = tuple(_EXTRAS)


class Backend(Protocol):
    """Executes target and drafter. Caches, taps and logits stay inside; only ids and positions cross.

    `position` is the number of committed rows, that is the first row a call writes. Rows at and past it are
    dead: a rejected draft needs no clean-up, the next call overwrites it.
    """

    name: str
    """`ort-cpu`, ..."""
    prefill_chunk_tokens: int
    """Most prompt tokens one `prefill` takes."""

    def reset(self, kept_rows: int = 0) -> int:
        """Begins a request: all rows but the first are dead. Returns how many are kept.

        They are 0 where NaN had to be wiped, and a window fewer where a ring has lost rows the next block sees.
        """

    def prefill(self, ids: Sequence[int], position: int) -> int:
        """Runs the target over a piece of the prompt; returns the token after it, -1 if not finite."""

    def draft(self, anchor: int, block_size: int, position: int) -> list[int]:
        """Proposes the block_size-1 tokens after `anchor`, the newest token, whose row is `position`."""

    def verify(self, block: Sequence[int], position: int) -> list[int]:
        """Runs the target over anchor and proposals; returns its token after each, -1 where not finite."""

    def outputs(self, kind: Literal["target", "drafter"], rows: int) -> dict[str, npt.NDArray[Any]]:
        """What a graph put out in its last call, [rows, ...] each, by name; its next call overwrites it.

        The target's has `logits` in fp32, of 1 row after a `prefill`; the drafter's is all that it says of a block.
        """

    def append_context(self, rows: int, position: int) -> None:
        """Gives the drafter the taps of the last target call; without a drafter there is nothing to give."""

    def close(self) -> None:
        """Frees what the backend holds."""


@runtime_checkable
class CandidateSource(Backend, Protocol):
    """A backend from which a row of logits is dear to fetch, and its likeliest tokens are not."""

    def candidates(self, rows: int, temperature: float) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """What is likeliest of the target's logits: ids and logits, [rows, K].

        The third is [rows], the sum of exp((logit - largest) / temperature) over a row; NaN where one is not finite.
        """


class Round(NamedTuple):
    """What one pass over the target committed."""

    committed: list[int]
    """Tokens that now belong to the output, oldest first."""
    proposed: list[int]
    """What the drafter proposed for them; empty for the prefill and for plain steps."""
    finish_reason: str | None = None
    """`stop`, `length` or `context` in the last round, else None."""
    kept_rows: int = 0
    """Of the prefill: tokens of the prompt whose rows were there already."""

    @property
    def block_size(self) -> int:
        """Of the pass, anchor included."""
        return len(self.proposed) + 1


@runtime_checkable
class Cycles(Protocol):
    """Greedy cycles one after another, the state between them kept by whoever runs them.

    A cycle commits up to the first stop token and never past the limit; one that starts behind either commits nothing.
    """

    cycles_ahead: int
    """Cycles that may be enqueued before the one before them is read."""

    def start_cycles(self, anchor: int, position: int, limit: int, stop_ids: Collection[int]) -> None:
        """Begins behind the prefill: the newest token, its place, the first place that must stay empty."""

    def enqueue_cycle(self, block_size: int) -> None:
        """Asks for the next cycle."""

    def read_cycle(self) -> Round:
        """The oldest cycle not read yet."""


def open_backend(name: str, bundle: Bundle, threads: int | None, prefill_chunk_tokens: int,
                 cuda_graphs: bool | None = None) -> Backend:
    """Opens the backend `name` over the bundle's engines; options and errors are those of `Session.open`."""
    if name not in AVAILABLE:
        raise BackendError(f"Backend {name!r} is unknown. Available here: {', '.join(AVAILABLE)}.")
    if threads is not None and threads < 1:
        raise BackendError(f"threads is {threads} and must be at least 1; None lets the backend choose.")
    if prefill_chunk_tokens < 1:
        raise BackendError(f"prefill_chunk_tokens is {prefill_chunk_tokens} and must be at least 1, as 128.")
    option, given, place = ("cuda_graphs", cuda_graphs, "CPU") if name == "ort-cpu" else ("threads", threads, "GPU")
    if given is not None:
        raise BackendError(f"{option} is {given} and backend {name!r} runs on the {place}. Leave it out.")
    try:
        if name == "ort-cpu":
            from dflash_runtime.ort_cpu import OrtCpuBackend

            return OrtCpuBackend(bundle, threads, prefill_chunk_tokens)
        from dflash_runtime.cuda_device import open_on_gpu

        return open_on_gpu(name, bundle, prefill_chunk_tokens, cuda_graphs=cuda_graphs)
    except ModuleNotFoundError as error:
        remedy = f"pip install dflash-export[{_EXTRAS[name]}]"
        raise BackendError(f"Backend {name!r} needs {error.name}: {remedy}") from error
