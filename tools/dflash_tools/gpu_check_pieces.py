"""What a GPU check takes along to a machine without a network: bundles, reference results, packages, in small pieces.

    python -m dflash_tools.gpu_check_pieces

makes `build/gpu_check/`. Its pieces may travel one by one, in any order, to the same place in a checkout there;
`tools/gpu_check` joins the packages once all of them have arrived, and without them does what it still can.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dflash_runtime.bundle import write_atomically
from dflash_runtime.errors import DFlashError, OutputError
from dflash_tools.error_lines import DFlashCommand, needs_extra

FOLDER = Path("build") / "gpu_check"
TRIP_BYTES = 64_000_000
"""Most that travels at once: the checkout, one piece of the packages, and the bundles."""
PIECE_BYTES = 24 * 1024 * 1024
JOIN_LIMIT_S = 90.0
TINY, LARGE, REFERENCE, LIST = "tiny", "qwen2-7b", "reference.json", "packages.json"
PACKAGES, SITE, MODULES = "packages", "site", "modules"
PACKAGES_FETCHED = ("onnxruntime-gpu", "cuda-bindings==12.9.*", "cuda-pathfinder")
"""cuda-bindings of CUDA 12, as its runtime works with every newer driver."""
BLOCK_SIZES = [1, 2, 3, 4, 6, 8, 12, 16]
MAX_CONTEXT = 4096 - 128
PROMPTS = [[5], list(range(20, 37)), [(7 * n * n + 3 * n) % 512 for n in range(40)]]
NEW_TOKENS = 32

TINY_TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
}  # fmt: skip
TINY_DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu", "num_target_layers": 4,
    "rope_theta": 10000.0, "block_size": 8, "dflash_config": {"mask_token_id": 511, "target_layer_ids": [0, 2]},
}  # fmt: skip


@click.command(cls=DFlashCommand)
@click.option("--folder", type=click.Path(path_type=Path), default=FOLDER, show_default=True)
@click.option("--package", "packages", multiple=True, default=PACKAGES_FETCHED, show_default=True,
              help="Package to fetch for the other machine; repeatable.")
@click.option("--python-version", default="3.12", show_default=True, help="Of the other machine.")
@click.option("--without-packages", is_flag=True, help="Bundles and reference alone.")
def main(folder: Path, packages: tuple[str, ...], python_version: str, without_packages: bool) -> None:
    """Makes the pieces; one of the packages' and the rest travel with the checkout in less than 64 MB."""
    with needs_extra("export"):
        from dflash_tools.gpu_check_bundles import write_large, write_reference, write_tiny
    folder.mkdir(parents=True, exist_ok=True)
    for name in (TINY, LARGE):
        shutil.rmtree(folder / name, ignore_errors=True)
    write_tiny(folder / TINY)
    write_reference(folder / TINY, folder / REFERENCE)
    write_large(folder / LARGE)
    click.echo(copy_module("dflash", folder / MODULES))
    if not without_packages:
        split_packages(fetch_packages(folder / "fetched", packages, python_version), folder)
        shutil.rmtree(folder / "fetched")
    for piece in pieces(folder):
        click.echo(f"{folder_bytes(piece) / 1e6:8.2f} MB  {piece}")


def copy_module(name: str, folder: Path) -> str:
    """Takes a package of plain Python along as it is installed here; says what was done."""
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    if not places:
        return f"{name} is not installed here and is not taken along"
    shutil.rmtree(folder / name, ignore_errors=True)
    shutil.copytree(places[0], folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return f"{name} is taken along from {places[0]}"


def pieces(folder: Path) -> list[Path]:
    """What travels: each in one trip at most."""
    return sorted(path for path in folder.iterdir() if path.name != SITE)


def folder_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder, as they are stated."""
    return sum(p.stat().st_size for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file())


def fetch_packages(folder: Path, packages: Sequence[str], python_version: str) -> list[Path]:
    """Downloads wheels for another machine (Linux, x86-64), without what they depend on.

    Raises:
        DFlashError: pip does not find one.
    """
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in (28, 27, 17)]
    for package in packages:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", *platforms,
                   f"--python-version={python_version}", "--implementation=cp", "-d", str(folder), package]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DFlashError(f"pip cannot fetch {package} for Python {python_version}: {done.stderr.strip()[-400:]}")
    return sorted(folder.glob("*.whl"))


def split_packages(wheels: Sequence[Path], folder: Path, piece_bytes: int = PIECE_BYTES) -> None:
    """Cuts wheels into `packages.NN/` folders, and lists them with their sizes and hashes."""
    for old in folder.glob(f"{PACKAGES}.*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    listed, number = [], 0
    for wheel in wheels:
        parts, digest = [], hashlib.sha256()
        with wheel.open("rb") as stream:
            while data := stream.read(piece_bytes):
                part = folder / f"{PACKAGES}.{number:02}" / f"{wheel.name}.part"
                part.parent.mkdir()
                part.write_bytes(data)
                digest.update(data)
                parts.append(f"{part.parent.name}/{part.name}")
                number += 1
        listed.append({"file": wheel.name, "sha256": digest.hexdigest(), "parts": parts})
    write_atomically(folder / LIST, json.dumps(listed, indent=1) + "\n")


def join_packages(folder: Path) -> tuple[Path | None, str]:
    """Joins and installs the wheels into `folder/site`, unless they are there.

    Returns:
        (the folder for Python's path, or None; what was done, or why nothing was).
    """
    path, site = folder / LIST, folder / SITE
    if not path.is_file():
        return None, f"there is no {path}: nothing was taken along"
    listed: list[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    mark = site / ".complete"
    wanted = json.dumps(listed)
    if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
        return site, "installed before"
    missing = [part for entry in listed for part in entry["parts"] if not (folder / part).is_file()]
    if missing:
        return None, f"{len(missing)} of the packages' pieces have not arrived: {', '.join(missing)}"
    shutil.rmtree(site, ignore_errors=True)
    wheels = [_join(folder, entry) for entry in listed]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile",
               "--no-cache-dir", "--target", str(site), *map(str, wheels)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=JOIN_LIMIT_S)
    for wheel in wheels:
        wheel.unlink()
    if done.returncode:
        return None, f"pip does not install them here: {done.stderr.strip()[-400:]}"
    mark.write_text(wanted, encoding="utf-8")
    return site, f"installed {', '.join(str(entry['file']) for entry in listed)}"


def _join(folder: Path, entry: Mapping[str, Any]) -> Path:
    wheel, digest = folder / str(entry["file"]), hashlib.sha256()
    with wheel.open("wb") as stream:
        for part in entry["parts"]:
            data = (folder / part).read_bytes()
            digest.update(data)
            stream.write(data)
    if digest.hexdigest() != entry["sha256"]:
        wheel.unlink()
        raise OutputError(f"{wheel} has sha256 {digest.hexdigest()[:12]} instead of {entry['sha256'][:12]}: a piece "
                          "was altered on the way. Take them along again.")
    return wheel


if __name__ == "__main__":
    main()
