"""The bundles of a GPU check: a tiny pair with weights, and Qwen2-7B's shape without any."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from dflash_engines import ort_cpu, ort_cuda
from dflash_runtime.backend import open_backend
from dflash_runtime.bundle import MANIFEST_NAME, Bundle, write_atomically, write_record
from dflash_runtime.decode import decode
from dflash_tools.engine_memory import DRAFTER_7B, QWEN2_7B
from dflash_tools.gpu_check_pieces import BLOCK_SIZES, MAX_CONTEXT, NEW_TOKENS, PROMPTS, TINY_DRAFTER, TINY_TARGET
from dflash_tools.hollow_bundle import write_hollow_bundle
from dflash_tools.random_bundle_weights import fill_weights

PRECISION = "fp16"
TINY_CONTEXT = 128


def write_tiny(root: Path) -> None:
    """A pair of a few hundred kilobytes with random bf16 weights, lowered for ort-cpu and ort-cuda."""
    write_hollow_bundle(root, TINY_TARGET, TINY_DRAFTER, TINY_CONTEXT)
    fill_weights(root, seed=2, likely_tokens=3)
    ort_cpu.lower_bundle(root)
    ort_cuda.lower_bundle(root, PRECISION)


def write_reference(root: Path, path: Path) -> None:
    """What the tiny pair says in fp32 on this machine's CPU, prompt by prompt."""
    bundle = Bundle.open(root)
    backend = open_backend("ort-cpu", bundle, 1, 16)
    rows = []
    for prompt in PROMPTS:
        rounds = decode(backend, prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=(), block_size_of=lambda n: 1,
                        max_context_tokens=bundle.manifest.max_context_tokens)
        rows.append({"prompt": prompt, "tokens": [token for r in rounds for token in r.committed]})
    backend.close()
    write_atomically(path, json.dumps({"precision": "fp32", "backend": "ort-cpu", "rows": rows}) + "\n")


def write_large(root: Path) -> None:
    """Qwen2-7B's shape with a five-layer drafter: graphs and manifest, lowered for ort-cuda, no weights at all."""
    write_hollow_bundle(root, QWEN2_7B, DRAFTER_7B, MAX_CONTEXT)
    manifest = dataclasses.replace(Bundle.open(root, check_files=False).manifest, block_sizes=BLOCK_SIZES)
    write_record(root / MANIFEST_NAME, manifest)
    ort_cuda.lower_bundle(Bundle.open(root, check_files=False), PRECISION)
    for name in {entry.file for entry in manifest.weights.values()}:
        (root / name).unlink()
