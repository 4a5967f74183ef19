"""Weights shared by all engines or embedded in each: built both ways and measured, where there is a GPU to measure on.

Shared weights take the memory once and are the choice unless embedded ones are faster by more than five percent on
this GPU: TensorRT may lay out a weight it holds for the shape of a call, and cannot do so with one it is given.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import time
from collections.abc import Callable

from dflash_engines.tensorrt_engines import BuiltEngines, Progress, build_engines
from dflash_engines.tensorrt_plan import EngineOptions
from dflash_engines.this_gpu import compute_capability_here
from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import EngineError

MARGIN = 1.05
"""Shared weights stay unless embedded ones are faster by more than this."""
_PROMPT_TOKENS, _WARM_STEPS, _STEPS = 32, 8, 48

Build = Callable[[Bundle, EngineOptions, Progress | None], BuiltEngines]
Measure = Callable[[Bundle, str, str], float]


def build_faster(
    bundle: Bundle, options: EngineOptions, progress: Progress | None = None,
    *, build: Build = build_engines, measure: Measure | None = None, here: str | None = None,
) -> BuiltEngines:
    """Builds engines with shared weights, and with embedded ones too where that can be measured; keeps the faster.

    Args:
        bundle: In fp16 or bf16.
        options: What for; its `weights_mode` is not looked at.
        progress: See `build_engines`.
        build: Builds one kind.
        measure: (bundle, backend, kind) -> milliseconds of a plain step.
        here: Compute capability of this machine's GPU; None asks the driver.

    Returns:
        The engines that were kept; `weights_reason` says why.

    Raises:
        EngineError: those with shared weights cannot be built or run.
    """  # fmt: skip
    shared = build(bundle, dataclasses.replace(options, weights_mode="shared"), progress)
    here = here or compute_capability_here()
    if here is None or shared.record.compute_capability != here:
        gpu = "there is no GPU here" if here is None else f"the GPU here is {here}"
        return _told(shared, f"Shared weights; embedded ones were not tried: {gpu}, so nothing can be measured.")
    if shared.record.execution_precision != bundle.manifest.precision:
        return _told(shared, f"Shared weights: embedded ones keep the bundle's {bundle.manifest.precision}.")
    try:
        embedded = build(bundle, dataclasses.replace(options, weights_mode="embedded"), progress)
    except EngineError as error:
        return _told(shared, f"Shared weights; engines that embed them cannot be built here: {error}")
    measure = measure or plain_step_ms
    ms = {built.record.weights_mode: measure(bundle, options.backend, built.record.weights_mode)
          for built in (shared, embedded)}  # fmt: skip
    shared_wins = ms["shared"] <= MARGIN * ms["embedded"]
    kept, dropped = (shared, embedded) if shared_wins else (embedded, shared)
    shutil.rmtree(dropped.folder)
    times = f"{ms['shared']:.2f} ms with shared and {ms['embedded']:.2f} ms with embedded ones"
    return _told(kept, f"{kept.record.weights_mode.capitalize()} weights were kept: a plain step takes {times}.")


def plain_step_ms(bundle: Bundle, backend: str, weights_mode: str) -> float:
    """Median time of a plain step behind a short prompt, on this machine's GPU."""
    from dflash_runtime.cuda_device import open_on_gpu

    opened = open_on_gpu(backend, bundle, _PROMPT_TOKENS, modes=(weights_mode,))
    try:
        opened.reset()
        for start in range(0, _PROMPT_TOKENS, opened.prefill_chunk_tokens):
            piece = [1] * min(opened.prefill_chunk_tokens, _PROMPT_TOKENS - start)
            opened.prefill(piece, start)
        times = []
        for step in range(_WARM_STEPS + _STEPS):
            started = time.perf_counter()
            opened.verify([1], _PROMPT_TOKENS + step % 8)
            times.append(1000 * (time.perf_counter() - started))
    finally:
        opened.close()
    return statistics.median(times[_WARM_STEPS:])


def _told(built: BuiltEngines, words: str) -> BuiltEngines:
    return dataclasses.replace(built, weights_reason=words)
