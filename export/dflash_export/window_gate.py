"""Attention windows that are too wide to fill by running: one layer over a cache that is given, filled with noise."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedConfig

from dflash_export.deviation import Worst, deviation
from dflash_export.layer_gate import layer_outputs, layer_pairs
from dflash_export.layer_reference import LayerReference
from dflash_export.parity import EXACT_TOLERANCE, PrecisionPasses
from dflash_export.reference_run import Step
from dflash_export.target_parts import TargetParts
from dflash_export.tensor_files import TensorPlace
from dflash_export.weight_store import PRECISIONS, TORCH_DTYPES, Progress
from dflash_runtime.bundle import CheckRow, Manifest

NEW_ROWS = 8
EDGE_ROWS = 16
EDGE_VALUE = 64.0
"""Values in rows about the window's edge: one row too many or too few must show among thousands."""
_SEED = 57


def check_windows(
    root: Path,
    manifest: Manifest,
    config: PreTrainedConfig,
    places: dict[str, TensorPlace],
    passes: PrecisionPasses,
    progress: Progress,
    *,
    reached_tokens: int,
) -> list[CheckRow]:
    """Crosses the edge of every window that the other checks do not reach and a request can.

    For each width one layer of that width is run with `NEW_ROWS` new rows whose window begins about the cache's
    first row, in PyTorch and in ONNX Runtime, portable and lowered.

    Args:
        root: The bundle.
        manifest: Its manifest.
        config: The target's config.
        places: State-dict name -> tensor in the checkpoint.
        passes: For half precision, and the lowering.
        progress: Called with stage, done, total.
        reached_tokens: Windows up to this width have been crossed elsewhere.

    Returns:
        Rows of stage `portable` and `lowered`; none where no window is left.
    """
    layers: dict[int, int] = {}
    for number, tensor in enumerate(manifest.target.graph.state):
        width = tensor.window_tokens
        if width is not None and reached_tokens < width < manifest.max_context_tokens:
            layers.setdefault(width, number // 2)
    rows: list[CheckRow] = []
    for done, (width, index) in enumerate(sorted(layers.items())):
        progress("check windows", done, len(layers))
        rows += _check_window(root, manifest, config, places, passes, width, index)
    if layers:
        progress("check windows", len(layers), len(layers))
    return rows


def _check_window(
    root: Path,
    manifest: Manifest,
    config: PreTrainedConfig,
    places: dict[str, TensorPlace],
    passes: PrecisionPasses,
    width: int,
    index: int,
) -> list[CheckRow]:
    target, precision = manifest.target, PRECISIONS[manifest.precision]
    position = max(1, min(width - 2, manifest.max_context_tokens - NEW_ROWS))
    step = Step(position, [0] * NEW_ROWS)
    names = (target.embedding_weight, target.head_weight)
    generator = torch.Generator().manual_seed(_SEED)
    residual = torch.randn(1, NEW_ROWS, target.hidden_size, generator=generator).to(TORCH_DTYPES[precision]).float()
    keys, values = (
        torch.randn(1, int(tensor.shape[1]), position, int(tensor.shape[3]), generator=generator)
        for tensor in target.graph.state[2 * index : 2 * index + 2]
    )
    values[:, :, :EDGE_ROWS] = EDGE_VALUE
    reference = LayerReference(config, places, precision, torch.float32, names)
    entered, expected = reference.run_on_cache(index, residual, keys.clone(), values.clone())
    parts = TargetParts(root, manifest, passes, position + NEW_ROWS + 4)
    covered = f"window of {width}: layer {index}, {NEW_ROWS} rows after {position} given ones"
    rows: list[CheckRow] = []
    for stage, edit in (("portable", None), ("lowered", passes.lower)):
        if stage == "lowered" and edit is None:
            continue
        caches = parts.filled_caches(index, keys.numpy(), values.numpy())
        (outputs,) = parts.run_layer(parts.layer(index, edit), index, [step], [entered], caches)
        worst = Worst()
        for name, found, wanted in layer_pairs(index, layer_outputs(index, outputs), expected):
            worst.add(f"window {width} {name.removeprefix(f'layer {index} ')}", deviation(found, wanted))
        rows += worst.rows(stage, EXACT_TOLERANCE, covered)
    return rows
