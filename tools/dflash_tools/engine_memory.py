"""Builds TensorRT-RTX engines of Qwen2-7B's shape and reports size, time and memory (Linux, no GPU needed).

    python -m dflash_tools.engine_memory
    python -m dflash_tools.engine_memory --block-size 16 --max-context 2048 --compute-capability 8.6

Memory, size and time are held against what two CPU cores are to manage; exit code 1 where one is more.
The graphs are traced from the shape alone and the weights are never read, so neither a checkpoint nor 15 GB of disk
is needed. The peak is that of the building process; the trace before it is not counted.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_runtime.bundle import Bundle
from dflash_tools.error_lines import EXIT_REFUSED, DFlashCommand, needs_extra
from dflash_tools.progress import ProgressLine
from dflash_tools.sizes import bytes_text
from dflash_tools.tensorrt_report import report_json, report_lines

if TYPE_CHECKING:
    from dflash_engines.tensorrt_engines import BuiltEngines

MOST_BUILDER_BYTES, MOST_ENGINE_BYTES, MOST_BUILD_S = 1_000_000_000, 100_000_000, 180.0
MOST_WEIGHTS_OVER_STORED = 1.02
"""Device memory of the weights by that of the bundle's: each is there once, the fusing matrix in fp32."""

# Qwen/Qwen2-7B-Instruct's config.json
QWEN2_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
# The shape of the published drafters: five layers like the target's, fed by five of its layers.
DRAFTER_7B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 5,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "num_target_layers": 28,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151665, "target_layer_ids": [1, 7, 13, 19, 25]},
}


@click.command(cls=DFlashCommand)
@click.option("--block-size", "block_sizes", type=click.IntRange(2, 16), multiple=True, default=(4, 8, 16),
              show_default=True)
@click.option("--prefill-chunk", type=click.IntRange(1), default=128, show_default=True)
@click.option("--max-context", type=click.IntRange(1), default=4096 - 128, show_default=True)
@click.option("--precision", type=click.Choice(["bf16", "fp16"]), default="bf16", show_default=True)
@click.option("--compute-capability", default="8.9", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(block_sizes: tuple[int, ...], prefill_chunk: int, max_context: int, precision: str,
         compute_capability: str, as_json: bool) -> None:
    """Builds the engines of a 7 B target and its five-layer drafter."""
    with needs_extra("export"):
        from dflash_tools.hollow_bundle import write_hollow_bundle
    with needs_extra("tensorrt-rtx"):
        from dflash_engines.tensorrt_engines import build_engines
        from dflash_engines.tensorrt_plan import EngineOptions
    with tempfile.TemporaryDirectory(prefix="dflash-engines-") as scratch, ProgressLine() as progress:
        root, started = Path(scratch) / "bundle", time.monotonic()
        progress("trace", 0, 1)
        write_hollow_bundle(root, QWEN2_7B, DRAFTER_7B, max_context)
        trace_s = time.monotonic() - started
        options = EngineOptions(
            "tensorrt-rtx", compute_capability, block_sizes, prefill_chunk, precision=precision, use_cache=False
        )
        bundle = Bundle.open(root, check_files=False)
        built = build_engines(bundle, options, progress)
    stored = sum(entry.length_bytes for entry in bundle.manifest.weights.values())
    limits = list(held_against_limits(built, stored))
    if as_json:
        facts = [{"name": name, "within": within} for name, _, within in limits]
        click.echo(json.dumps({"trace_s": round(trace_s, 1), **report_json(built), "limits": facts}))
    else:
        click.echo(f"traced in {trace_s:.0f} s; weights of the shape {bytes_text(built.weight_bytes)}")
        for line in report_lines(built):
            click.echo(line)
        for name, words, within in limits:
            click.echo(f"  {name:<14} {words}{'' if within else ': TOO MUCH'}")
    if not all(within for _, _, within in limits):
        sys.exit(EXIT_REFUSED)


def held_against_limits(built: BuiltEngines, stored_bytes: int) -> Iterator[tuple[str, str, bool]]:
    """What was measured and what it may be: name, words, whether it is within."""
    ratio = built.weight_bytes / stored_bytes
    for name, found, most in (
        ("builder peak", built.build_peak_bytes, MOST_BUILDER_BYTES),
        ("all engines", built.engine_bytes, MOST_ENGINE_BYTES),
    ):
        yield name, f"{bytes_text(found)} of at most {bytes_text(most)}", found <= most
    yield "build time", f"{built.seconds:.0f} s of at most {MOST_BUILD_S:.0f} s", built.seconds <= MOST_BUILD_S
    words = f"{ratio:.3f} times what the bundle stores, at most {MOST_WEIGHTS_OVER_STORED}"
    yield "weights once", words, ratio <= MOST_WEIGHTS_OVER_STORED


if __name__ == "__main__":
    main()
