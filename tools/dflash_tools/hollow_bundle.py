"""A bundle of a shape, without its weights: real graphs, and weight files that take no room on the disk.

Engines with shared weights never read a weight while they are built, so a large shape can be built from this.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from dflash_export.build import TARGET_GRAPH, TARGET_WEIGHTS, describe, provenance
from dflash_export.drafter_build import CONTEXT_GRAPH, DRAFTER_GRAPH, DRAFTER_WEIGHTS, default_block_sizes
from dflash_export.drafter_config import parse_drafter_config
from dflash_export.drafter_trace import DrafterTables, trace_context, trace_drafter
from dflash_export.drafter_weights import EMBEDDING, HEAD, PREFIX, drafter_shapes
from dflash_export.graph_facts import finish_interface
from dflash_export.graph_files import write_graph
from dflash_export.taps import select_taps
from dflash_export.target_trace import trace_target
from dflash_runtime.bundle import (
    SCHEMA_VERSION,
    DrafterFacts,
    FileFacts,
    Manifest,
    SourceFacts,
    TapFacts,
    TargetFacts,
    TextFacts,
    WeightEntry,
)

_SOURCE = SourceFacts("folder", "hollow", None, "0" * 64)
_BF16_BYTES = 2


def write_hollow_bundle(
    root: Path, target_config: Mapping[str, Any], drafter_config: Mapping[str, Any], max_context_tokens: int
) -> Manifest:
    """Traces a target and a drafter from their configs, in bf16.

    Args:
        root: Folder to make.
        target_config: Content of the target's config.json.
        drafter_config: Content of the drafter's config.json; its taps are the bundle's.
        max_context_tokens: Rows of the caches, but for one block or chunk.

    Returns:
        The bundle's manifest. Its checks are empty: nothing can be compared without weights.
    """
    root.mkdir(parents=True)
    drafter = parse_drafter_config(drafter_config, "the drafter's config")
    config = AutoConfig.for_model(**target_config)
    config.architectures = list(target_config["architectures"])
    traced = trace_target(config, torch.bfloat16)
    shapes = {name: shape for name, (_, shape) in traced.parameters.items()}
    names = {wanted: shapes[stored] for wanted, stored in traced.parameter_names.items()}
    target_weights = _sparse_file(root, TARGET_WEIGHTS, names)
    select_taps(traced.model, list(drafter.target_layer_ids), traced.hidden_size)
    windows = [layer.window_tokens for layer in traced.layers]
    target_graph = finish_interface(traced.model, "target", TARGET_GRAPH, windows)
    write_graph(traced.model, target_weights, root, TARGET_GRAPH)
    own = drafter_shapes(drafter, traced.vocab_size)
    own = {PREFIX + name: shape for name, shape in own.items() if name not in (EMBEDDING, HEAD)}
    weights = {**target_weights, **_sparse_file(root, DRAFTER_WEIGHTS, own)}
    tables = DrafterTables(traced.embedding_weight, traced.head_weight, traced.vocab_size)
    context, draft = trace_context(drafter, torch.bfloat16), trace_drafter(drafter, tables, torch.bfloat16)
    graphs = [
        finish_interface(context, "drafter_context", CONTEXT_GRAPH, drafter.windows),
        finish_interface(draft, "drafter", DRAFTER_GRAPH, drafter.windows),
    ]
    write_graph(context, weights, root, CONTEXT_GRAPH)
    write_graph(draft, weights, root, DRAFTER_GRAPH)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        precision="bf16",
        max_context_tokens=max_context_tokens,
        block_sizes=default_block_sizes(drafter),
        target=TargetFacts(
            "hollow", _SOURCE, traced.architecture, str(target_config["model_type"]), traced.num_layers,
            traced.hidden_size, traced.vocab_size, traced.num_parameters, max_context_tokens,
            traced.embedding_weight, traced.head_weight, target_graph,
        ),
        drafter=DrafterFacts(
            "hollow", _SOURCE, drafter.architecture, drafter.num_layers, drafter.hidden_size,
            sum(math.prod(shape) for shape in own.values()), drafter.block_size, drafter.mask_token_id, *graphs,
        ),
        taps=TapFacts(list(drafter.target_layer_ids), "drafter"),
        text=TextFacts([], None, False, {}, {}),
        weights=weights,
        files={},
        checks=[],
        provenance=provenance(),
    )  # fmt: skip
    sizes = {name: FileFacts((root / name).stat().st_size, "0" * 64) for name in (TARGET_WEIGHTS, DRAFTER_WEIGHTS)}
    return describe(root, manifest, sizes)


def _sparse_file(root: Path, file: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, WeightEntry]:
    """The index of tensors that lie one after the other in a file of zeros that occupies nothing."""
    entries, offset = {}, 0
    for name, shape in shapes.items():
        length = math.prod(shape) * _BF16_BYTES
        entries[name] = WeightEntry(file, offset, length, "BF16", list(shape))
        offset += length
    path = root / file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.truncate(path, offset)
    return entries
