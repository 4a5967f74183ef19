"""Builds one TensorRT engine, alone in a process: `python -m dflash_engines.tensorrt_build < order.json`.

A builder may take more memory than the board has, or fall over in native code; in a process of its own neither
takes the caller along, and its memory goes back to the system when it is done. Lines of JSON on the standard output
report progress; the last one is the outcome.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

_SCRATCH = re.compile(r"Max Scratch Memory: (\d+) bytes")
_KEPT_MESSAGES = 20


@dataclasses.dataclass(frozen=True)
class BuildOrder:
    """What to build."""

    flavour: str
    """tensorrt or tensorrt-rtx."""
    onnx_path: str
    profiles: list[dict[str, list[int]]]
    """Input -> its fixed shape, for each profile."""
    compute_capability: str | None
    """`8.9`; None for the GPU of this machine."""
    timing_cache_path: str | None
    engine_path: str


@dataclasses.dataclass(frozen=True)
class BuildOutcome:
    """What came of it."""

    error: str | None
    scratch_bytes: list[int]
    messages: list[str]
    """Warnings and errors of TensorRT, in order."""


def main() -> None:
    """Reads an order, builds, reports."""
    order = BuildOrder(**json.load(sys.stdin))
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1" if order.flavour == "tensorrt-rtx" else "0"
    os.environ.setdefault("POLYGRAPHY_AUTOINSTALL_DEPS", "0")
    report = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # native code and Polygraphy print where they like; the report keeps its own channel
    outcome = _build(order, report)
    print(json.dumps({"outcome": dataclasses.asdict(outcome)}), file=report)


def _build(order: BuildOrder, report: Any) -> BuildOutcome:
    trt = _module(order.flavour)
    log = _make_log(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
                                     if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED") else 0)
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(order.onnx_path):
        errors = "; ".join(str(parser.get_error(i)).strip() for i in range(parser.num_errors))
        return BuildOutcome(f"its parser refuses the graph: {errors}", [], log.messages)
    from polygraphy.backend.trt import CreateConfig, EngineBytesFromNetwork, PostprocessConfig, Profile

    profiles = []
    for shapes in order.profiles:
        profile = Profile()
        for name, shape in shapes.items():
            profile.add(name, tuple(shape), tuple(shape), tuple(shape))
        profiles.append(profile)
    config = CreateConfig(
        profiles=profiles,
        load_timing_cache=order.timing_cache_path,
        progress_monitor=_make_monitor(trt, report),
    )

    def for_device(_builder: Any, _network: Any, made: Any) -> None:
        if order.compute_capability is not None and order.flavour == "tensorrt-rtx":
            made.num_compute_capabilities = 1
            name = f"SM{order.compute_capability.replace('.', '')}"
            made.set_compute_capability(getattr(trt.ComputeCapability, name), 0)

    build = EngineBytesFromNetwork(
        (builder, network, parser), PostprocessConfig(config, for_device), save_timing_cache=order.timing_cache_path
    )
    try:
        engine = build()
    except Exception as error:  # Polygraphy's own exception says only that the build failed
        reason = next((text for text in reversed(log.messages) if "rror" in text), str(error))
        return BuildOutcome(f"its builder failed: {reason}", log.scratch_bytes, log.messages)
    if engine is None:
        return BuildOutcome("its builder returned nothing", log.scratch_bytes, log.messages)
    Path(order.engine_path).write_bytes(memoryview(engine))
    return BuildOutcome(None, log.scratch_bytes, log.messages)


def _module(flavour: str) -> Any:
    import importlib

    return importlib.import_module({"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}[flavour])


def _make_log(trt: Any) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc]
        """Keeps what the builder says about memory and what it complains about."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.scratch_bytes: list[int] = []
            self.messages: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            found = _SCRATCH.search(text)
            if found is not None:
                self.scratch_bytes.append(int(found[1]))
            if severity <= trt.ILogger.WARNING and len(self.messages) < _KEPT_MESSAGES:
                self.messages.append(text.strip())

    return Log()


def _make_monitor(trt: Any, report: Any) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Turns nested phases into one fraction: a step of a phase is a share of its parent's step."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._phases: dict[str, tuple[str | None, int, int]] = {}
            self._told = 0

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self._phases[name] = (parent, 0, max(steps, 1))

        def phase_finish(self, name: str) -> None:
            self._phases.pop(name, None)

        def step_complete(self, name: str, step: int) -> bool:
            if name in self._phases:
                parent, _, steps = self._phases[name]
                self._phases[name] = (parent, step + 1, steps)
                self._tell(name)
            return True

        def _tell(self, name: str | None) -> None:
            fraction = 0.0
            while name is not None and name in self._phases:
                parent, done, steps = self._phases[name]
                fraction = min(1.0, (done + fraction) / steps)
                name = parent
            permille = int(1000 * fraction)
            if permille > self._told:
                self._told = permille
                print(json.dumps({"permille": permille}), file=report)

    return Monitor()


if __name__ == "__main__":
    main()
