"""How TensorRT engines are made, as options of `engines` and `build`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dflash_tools.option_values import MEMORY_SIZE

if TYPE_CHECKING:
    from dflash_engines.tensorrt_plan import EngineOptions

TENSORRT = ("tensorrt", "tensorrt-rtx")
Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--prefill-chunk", type=click.IntRange(1), default=128, show_default=True,
                 help="TensorRT: prompt tokens in one call."),
    click.option("--weights", type=click.Choice(["auto", "shared", "embedded"]), default="auto", show_default=True,
                 help="TensorRT: one copy of the weights for all engines, or one in each engine; auto measures both "
                 "where the GPU is at hand, and takes shared elsewhere."),
    click.option("--fp32-residuals", is_flag=True,
                 help="TensorRT: sum in fp32 what layers add, in fp16 and bf16 engines."),
    click.option("--compute-capability", "capabilities", multiple=True, metavar="X.Y",
                 help="TensorRT-RTX: build for this kind of GPU, as 8.9; may be repeated. Default: the GPU here."),
    click.option("--max-build-memory", type=MEMORY_SIZE,
                 help="TensorRT: stop a build of engines that takes more memory, as 2GB."),
)  # fmt: skip


def tensorrt_options(command: Command) -> Command:
    """Adds the options that `engine_orders` reads."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def given_tensorrt_options(options: dict[str, Any]) -> list[str]:
    """The options of `tensorrt_options` that only a TensorRT understands and that were given."""
    flags = {"capabilities": "--compute-capability", "fp32_residuals": "--fp32-residuals",
             "max_build_memory": "--max-build-memory"}  # fmt: skip
    return [flag for name, flag in flags.items() if options[name]]


def engine_orders(
    backend: str, options: dict[str, Any], block_sizes: Sequence[int], precision: str | None,
    draft_window_tokens: int | None = None,
) -> list[EngineOptions]:
    """What engines to build, one set for each kind of GPU.

    Args:
        backend: tensorrt or tensorrt-rtx.
        options: Values of `tensorrt_options`.
        block_sizes: Block sizes, anchor included; empty for those of the bundle.
        precision: fp16 or bf16; None for that of the bundle.
        draft_window_tokens: Window of drafter layers that have none.
    """
    from dflash_engines.tensorrt_plan import EngineOptions

    return [
        EngineOptions(
            backend=backend,
            compute_capability=capability,
            block_sizes=block_sizes,
            prefill_chunk_tokens=options["prefill_chunk"],
            weights_mode="shared" if options["weights"] == "auto" else options["weights"],
            precision=precision,
            fp32_residuals=options["fp32_residuals"],
            draft_window_tokens=draft_window_tokens,
            max_build_memory_bytes=options["max_build_memory"],
        )
        for capability in options["capabilities"] or (None,)
    ]


def engine_builder(options: dict[str, Any]) -> Callable[..., Any]:
    """Builds one set: with the weights that were asked for, or with those that are measured to be faster."""
    if options["weights"] == "auto":
        from dflash_tools.weights_choice import build_faster

        return build_faster
    from dflash_engines.tensorrt_engines import build_engines

    return build_engines
