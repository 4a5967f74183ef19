"""Builds TensorRT-RTX engines of Qwen2-7B's shape and reports size, time and memory (Linux, no GPU needed).

    python -m dflash_tools.engine_memory
    python -m dflash_tools.engine_memory --block-size 16 --max-context 2048 --compute-capability 8.6

The graphs are traced from the shape alone and the weights are never read, so neither a checkpoint nor 15 GB of disk
is needed. The peak is that of the building process; the trace before it is not counted.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from dflash_runtime.bundle import Bundle
from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.progress import ProgressLine
from dflash_tools.sizes import bytes_text
from dflash_tools.tensorrt_report import report_json, report_lines

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
        built = build_engines(Bundle.open(root, check_files=False), options, progress)
    if as_json:
        click.echo(json.dumps({"trace_s": round(trace_s, 1), **report_json(built)}))
        return
    click.echo(f"traced in {trace_s:.0f} s; weights of the shape {bytes_text(built.weight_bytes)}")
    for line in report_lines(built):
        click.echo(line)


if __name__ == "__main__":
    main()
