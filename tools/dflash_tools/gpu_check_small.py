"""Stages of a GPU check that are about being right: machine, tiny pair, TensorRT where it is."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dflash_runtime.backend import Backend, open_backend
from dflash_runtime.bundle import Bundle
from dflash_runtime.decode import decode
from dflash_runtime.device_backend import DeviceBackend
from dflash_runtime.errors import ParityError
from dflash_tools.gpu_check_device import (
    pieces_folder,
    read_taps,
    require_gpu,
    require_modules,
    require_ort_cuda,
    tiny_bundle,
)
from dflash_tools.gpu_check_pieces import NEW_TOKENS, PROMPTS, REFERENCE
from dflash_tools.gpu_check_stage import Skipped
from dflash_tools.greedy_identity import first_difference
from dflash_tools.machine_probe import Machine

TAP_TOLERANCE = 1e-2
"""fp16 on the device against fp32: relative to the largest tap. The same fp16 graphs on a CPU: 1.8e-3."""
_CHUNK_TOKENS = 16
_PACKAGES = ("numpy", "torch", "transformers", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "onnxscript",
             "cuda-bindings", "cuda-python", "tensorrt", "tensorrt-rtx", "polygraphy", "dflash", "click", "tokenizers",
             "safetensors")  # fmt: skip


def machine(data: dict[str, Any]) -> None:
    """What this machine has and what it lacks."""
    from dflash_runtime.backend import AVAILABLE
    from dflash_tools.doctor_backends import backend_reports
    from dflash_tools.doctor_reading import read_facts
    from dflash_tools.doctor_traps import find_traps

    data["python"], data["kernel"] = platform.python_version(), platform.release()
    versions = {name: Machine().package_version(name) for name in _PACKAGES}
    data["packages"] = {name: version for name, version in versions.items() if version}
    data["missing_packages"] = [name for name, version in versions.items() if not version]
    facts = read_facts(Machine())
    traps = find_traps(facts)
    data["facts"] = dataclasses.asdict(facts)
    data["traps"] = [dataclasses.asdict(trap) for trap in traps]
    data["backends"] = [
        {"name": report.name, "can_run": report.can_run, "lacks": [lack.what for lack in report.lacks]}
        for report in backend_reports(facts, traps, AVAILABLE)
    ]


def tiny_golden(data: dict[str, Any]) -> None:
    """Taps of the tiny pair on the device against fp32 on this machine's CPU, prefill, steps and a rollback."""
    require_ort_cuda()
    bundle = tiny_bundle()
    from dflash_runtime.ort_cpu import OrtCpuBackend

    ours, reference = open_backend("ort-cuda", bundle, None, _CHUNK_TOKENS), OrtCpuBackend(bundle, 1, _CHUNK_TOKENS)
    assert isinstance(ours, DeviceBackend)
    ids = PROMPTS[2]
    worst, same, count = 0.0, 0, 0
    for position, rows in ((0, 8), (8, 8), (16, 4), (17, 8), (18, 1), (18, 8)):
        block = ids[position : position + rows]
        found, expected = ours.verify(block, position), reference.verify(block, position)
        one, two = read_taps(ours, rows), reference._taps[0, :rows]
        worst = max(worst, float(np.abs(one - two).max() / np.abs(two).max()))
        same, count = same + sum(a == b for a, b in zip(found, expected, strict=True)), count + rows
    data |= {"tap_deviation": worst, "same_tokens": same, "tokens": count}
    if not worst < TAP_TOLERANCE:
        raise ParityError(f"Taps on the device are {worst:.3g} from fp32 on the CPU; {TAP_TOLERANCE} is allowed.")


def tiny_identity(data: dict[str, Any]) -> None:
    """Greedy words of the tiny pair on the device: plain, with DFlash, and in fp32 where the pieces were made."""
    require_ort_cuda()
    bundle = tiny_bundle()
    compare_words(data, open_backend("ort-cuda", bundle, None, _CHUNK_TOKENS), bundle)


def tiny_built_here(data: dict[str, Any]) -> None:
    """Traces, fills and lowers a tiny pair on this machine, and compares the device with the CPU on it."""
    require_ort_cuda()
    require_modules("torch", "transformers", "onnxscript", "onnx_ir", "accelerate")
    from dflash_tools.gpu_check_bundles import write_reference, write_tiny

    with tempfile.TemporaryDirectory(prefix="dflash-gpu-check-") as folder:
        root = Path(folder) / "tiny"
        write_tiny(root)
        write_reference(root, Path(folder) / REFERENCE)
        bundle = Bundle.open(root)
        compare_words(data, open_backend("ort-cuda", bundle, None, _CHUNK_TOKENS), bundle, Path(folder) / REFERENCE)


def tensorrt(data: dict[str, Any]) -> None:
    """Engines of the tiny pair with shared and with embedded weights, for each TensorRT this machine has."""
    require_gpu()
    flavours = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
    lacking: dict[str, str] = {}
    failed: dict[str, str] = {}
    for backend, module in flavours.items():
        try:
            require_modules(module, "onnx_ir", "polygraphy")
            version = importlib.metadata.version(backend)
        except (Skipped, importlib.metadata.PackageNotFoundError) as error:
            lacking[backend] = str(error)
            continue
        for mode in ("shared", "embedded"):
            row = data.setdefault(f"{backend} {version} {mode}", {})
            try:
                _tensorrt_words(row, backend, mode)
            except Exception as error:  # one flavour says nothing about the others
                failed[f"{backend} {mode}"] = row["error"] = f"{type(error).__name__}: {error}"[:600]
    data["lacking"] = lacking
    if failed:
        raise ParityError("; ".join(f"{name}: {words}" for name, words in failed.items()))
    if len(lacking) == len(flavours):
        raise Skipped("; ".join(f"{name}: {words}" for name, words in lacking.items()))


def _tensorrt_words(data: dict[str, Any], backend: str, mode: str) -> None:
    import shutil

    from dflash_engines.tensorrt_engines import build_engines
    from dflash_engines.tensorrt_plan import EngineOptions

    with tempfile.TemporaryDirectory(prefix="dflash-gpu-check-") as folder:
        root = Path(shutil.copytree(tiny_bundle().path, Path(folder) / "tiny"))
        bundle = Bundle.open(root)
        options = EngineOptions(backend, prefill_chunk_tokens=_CHUNK_TOKENS, weights_mode=mode, precision="fp16",
                                use_cache=False)
        build_engines(bundle, options)
        compare_words(data, open_backend(backend, bundle, None, _CHUNK_TOKENS), bundle)


def compare_words(data: dict[str, Any], backend: Backend, bundle: Bundle, reference: Path | None = None) -> None:
    """Decodes plainly and with every block size; fails where DFlash and plain decoding differ.

    Raises:
        ParityError: they do. Against fp32 of elsewhere differences are counted only: another precision may decide
            ties otherwise.
    """
    path = reference or pieces_folder() / REFERENCE
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    expected = {tuple(row["prompt"]): row["tokens"] for row in rows}
    sizes = [size for size in bundle.manifest.block_sizes if size > 1]
    data |= {"precision": "fp16", "block_sizes": sizes, "new_tokens": NEW_TOKENS, "prompts": len(PROMPTS)}
    different, unlike_fp32, accepted = [], 0, 0
    for number, prompt in enumerate(PROMPTS):
        plain, _ = words(backend, bundle, prompt, 1)
        unlike_fp32 += first_difference(expected.get(tuple(prompt), plain), plain) is not None
        for size in sizes:
            found, lengths = words(backend, bundle, prompt, size)
            accepted += sum(length - 1 for length in lengths)
            place = first_difference(plain, found)
            if place is not None:
                different.append({"prompt": number, "block_size": size, "first_difference": place})
    backend.close()
    data |= {"accepted_drafts": accepted, "different": different, "prompts_unlike_fp32": unlike_fp32,
             "fp32_reference": bool(expected)}
    if different:
        total = len(PROMPTS) * len(sizes)
        raise ParityError(f"{len(different)} of {total} requests say other words with DFlash than plain: {different}")


def words(backend: Backend, bundle: Bundle, prompt: list[int], block_size: int) -> tuple[list[int], list[int]]:
    """(tokens, acceptance length of every round) of one greedy request."""
    rounds = list(decode(backend, prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=(),
                         max_context_tokens=bundle.manifest.max_context_tokens, block_size_of=lambda n: block_size))
    return [token for r in rounds for token in r.committed], [len(r.committed) for r in rounds if r.proposed]
