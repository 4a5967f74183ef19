"""Runs a build in a process of its own and reports the largest memory its process tree had (Linux).

    python -m dflash_tools.export_memory                 # a random checkpoint of Qwen2.5-1.5B's shape
    python -m dflash_tools.export_memory --model FOLDER  # a checkpoint of yours

Resident memory includes pages of mapped weight files, which the kernel drops when it needs room; anonymous memory
is what the build itself holds.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from dflash_runtime.errors import DFlashError
from dflash_tools.error_lines import DFlashCommand
from dflash_tools.peak_memory import run_and_watch
from dflash_tools.random_weights import write_random_safetensors
from dflash_tools.sizes import bytes_text, count_text

# Qwen/Qwen2.5-1.5B-Instruct's config.json
QWEN2_1_5B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def qwen2_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Qwen2 and its shape, in the order of its modules."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj.weight": (hidden, hidden),
            "self_attn.q_proj.bias": (hidden,),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.v_proj.bias": (kv,),
            "self_attn.o_proj.weight": (hidden, hidden),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def write_random_qwen2(folder: Path, config: dict[str, Any]) -> int:
    """Writes a random bf16 checkpoint and returns its number of parameters."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return write_random_safetensors(folder / "model.safetensors", qwen2_shapes(config), "BF16", seed=0)


@click.command(cls=DFlashCommand)
@click.option("--model", type=click.Path(path_type=Path), help="Checkpoint. [default: random, Qwen2.5-1.5B's shape]")
@click.option("--precision", type=click.Choice(["fp32", "fp16", "bf16"]), help="[default: the checkpoint's own]")
@click.option("--backend", type=click.Choice(["ort-cpu", "none"]), default="ort-cpu", show_default=True)
@click.option("--gate", type=click.Choice(["auto", "full", "layers"]), default="auto", show_default=True)
@click.option("--quantize", type=click.Choice(["int8", "int4"]), help="Layers, head and tables, rounded by the build.")
@click.option("--group-size", type=int, default=128, show_default=True, help="int4: inputs that share a scale.")
@click.option("--keep", type=click.Path(path_type=Path), help="Leave the bundle here. [default: thrown away]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    model: Path | None, precision: str | None, backend: str, gate: str, quantize: str | None, group_size: int,
    keep: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Builds a checkpoint into a throw-away bundle and reports the peak memory, sampled every 50 ms."""
    with tempfile.TemporaryDirectory(prefix="dflash-memory-", dir=Path.cwd()) as scratch:
        if model is None:
            model = Path(scratch) / "qwen2.5-1.5b-shape"
            count = write_random_qwen2(model, QWEN2_1_5B)
            click.echo(f"Wrote a random checkpoint of {count_text(count)} parameters.", err=True)
        argv = [sys.executable, "-m", "dflash_tools.cli", "build", "--target", str(model), "--json"]
        argv += ["--out", str(keep or Path(scratch) / "bundle"), "--backend", backend, "--gate", gate]
        if quantize is not None:
            argv += ["--quantize", quantize, "--quantize-head", quantize]
            argv += ["--group-size", str(group_size)] if quantize == "int4" else []
        argv += ["--precision", precision] if precision else []
        started = time.monotonic()
        code, output, peak = run_and_watch(argv)
        seconds = time.monotonic() - started
        if code != 0:
            raise DFlashError(
                f"The build of {model} ended with exit code {code} when it held {bytes_text(peak.resident_bytes)}; "
                "its message is above. Minus 9 means that the system ran out of memory and ended it."
            )
        report = json.loads(output)
        weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        beyond = bytes_beyond(Path(report["path"]), model)
    facts = {
        "model": model.name,
        "weight_bytes": weights,
        "bytes_beyond_checkpoint": beyond,
        "peak_resident_bytes": peak.resident_bytes,
        "peak_anonymous_bytes": peak.anonymous_bytes,
        "peak_reported_by_build_bytes": report["peak_memory_bytes"],
        "samples": peak.samples,
        "seconds": round(seconds, 1),
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(
        f"{model.name}: weights {bytes_text(weights)}, peak resident {bytes_text(peak.resident_bytes)} "
        f"(mapped files included), of it anonymous at most {bytes_text(peak.anonymous_bytes)}, {seconds:.0f} s; the "
        f"bundle takes {bytes_text(beyond)} beyond the checkpoint"
    )


def bytes_beyond(bundle: Path, checkpoint: Path) -> int:
    """What a bundle takes on the disk beside the checkpoint: hard links to its files take nothing.

    A clone shares its blocks too, and is counted all the same: nothing portable says that it is one.
    """
    linked = {(file.stat().st_dev, file.stat().st_ino) for file in checkpoint.rglob("*") if file.is_file()}
    files = [file.stat() for file in bundle.rglob("*") if file.is_file()]
    return sum(one.st_size for one in files if (one.st_dev, one.st_ino) not in linked)


if __name__ == "__main__":
    main()
