"""Gives a bundle its drafter later: the target is not traced again, its taps are chosen anew by a graph edit.

The target's checkpoint is not needed either. Its graph keeps every layer's raw output under its name, its weights
are in the bundle, and the checks of its build stay true: only which outputs are handed out changes.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

from dflash_export.build import describe, provenance
from dflash_export.catalog import drafter_template_args
from dflash_export.drafter_build import DrafterPlan, default_block_sizes, plan_drafter, trace_and_store_drafter
from dflash_export.drafter_data_record import recorded_template_args
from dflash_export.graph_facts import finish_interface
from dflash_export.graph_files import load_graph, weights_by_name, write_graph
from dflash_export.pair_findings import TargetSide
from dflash_export.parity import PrecisionPasses
from dflash_export.range_guard import RangeGuard, is_guarded
from dflash_export.taps import select_taps
from dflash_export.tensor_files import TensorPlace
from dflash_export.text_files import TOKENIZER_FOLDER
from dflash_export.weight_store import Progress
from dflash_runtime.bundle import Bundle, FileFacts, Manifest, TapFacts
from dflash_runtime.errors import PairError
from dflash_runtime.value_ranges import RANGES_NAME, read_ranges

_OF_TARGET = ("portable", "precision", "quality", "quantised")
"""Stages whose rows stay true when a drafter comes."""


def plan_addition(
    bundle: Bundle, drafter: str, block_sizes: tuple[int, ...] = (), local_files_only: bool = False
) -> DrafterPlan:
    """Checks that a drafter fits the bundle's target, before any work.

    Args:
        bundle: A bundle without a drafter, or with one that shall be replaced.
        drafter: Catalog name, Hugging Face id, or folder.
        block_sizes: Block sizes asked for.
        local_files_only: Use the hub cache alone.

    Raises:
        CheckpointError: the drafter cannot be read.
        PairError: it does not fit; both values are named.
    """
    manifest = bundle.manifest
    target = manifest.target
    side = TargetSide(
        name=target.source.id if target.source.kind == "hub" else target.name,
        tokenizer_folder=bundle.path / TOKENIZER_FOLDER,
        num_layers=target.num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        model_type=target.model_type,
        stop_token_ids=tuple(manifest.text.stop_token_ids),
        embedding=_place(bundle, target.embedding_weight),
        head=_place(bundle, target.head_weight),
    )
    plan = plan_drafter(drafter, side, block_sizes, local_files_only)
    limit = plan.config.max_position_tokens
    if limit is not None and limit < manifest.max_context_tokens:
        raise PairError(
            f"the bundle's context is {manifest.max_context_tokens} tokens and the drafter was made for {limit} "
            f"(max_position_embeddings). Build the bundle with --max-context {limit}."
        )
    return plan


def _place(bundle: Bundle, name: str) -> TensorPlace:
    entry = bundle.manifest.weights[name]
    file = bundle.file(entry.file)
    return TensorPlace(file, entry.offset_bytes, entry.length_bytes, entry.dtype, tuple(entry.shape))


def write_with_drafter(
    bundle: Bundle,
    plan: DrafterPlan,
    root: Path,
    progress: Progress,
    *,
    block_sizes: tuple[int, ...] = (),
    template_args: dict[str, Any] | None = None,
    passes: PrecisionPasses | None = None,
) -> Manifest:
    """Writes a new bundle that shares the old one's weights and adds the drafter.

    Args:
        bundle: The bundle without the drafter; it is only read.
        plan: From `plan_addition`.
        root: Empty folder on the same file system, so that weights are linked, not copied.
        progress: Called with stage, done, total.
        block_sizes: Block sizes asked for; empty for the drafter's own and the common smaller ones.
        template_args: Over what is known of the drafter.
        passes: For the fp16 guard, see `RangeGuard`; None leaves it out.

    Raises:
        ParityError: fp16 cannot hold a value, and it cannot be kept in fp32 either.
    """
    old = bundle.manifest
    facts: dict[str, FileFacts] = {}
    for name in old.files:
        if name not in (old.target.graph.file, RANGES_NAME) and not _of_old_drafter(old, name):
            _link(bundle.file(name), root / name)
            facts[name] = old.files[name]
    weights = {n: e for n, e in old.weights.items() if not n.startswith("drafter.")}
    quantized = {n: facts for n, facts in old.quantized.items() if not n.startswith("drafter.")}
    by_name = weights_by_name(bundle.path, weights, old.target.graph.file)
    model = load_graph(bundle.path, weights, old.target.graph.file)
    taps = TapFacts(list(plan.config.target_layer_ids), "drafter")
    select_taps(model, taps.layer_ids, old.target.hidden_size)
    windows = [tensor.window_tokens for tensor in old.target.graph.state[0::2]]
    graph = finish_interface(model, "target", old.target.graph.file, windows)
    write_graph(model, weights, root, graph.file, by_name)
    found = plan.checkpoint
    known = {**drafter_template_args(found.source.id), **recorded_template_args(found.folder)}
    manifest = dataclasses.replace(
        old,
        block_sizes=sorted(set(block_sizes)) or default_block_sizes(plan.config),
        target=dataclasses.replace(old.target, graph=graph),
        drafter=None,
        taps=taps,
        text=dataclasses.replace(old.text, template_args={**known, **old.text.template_args, **(template_args or {})}),
        weights=weights,
        quantized=quantized,
        checks=[row for row in old.checks if row.stage in _OF_TARGET and "draft" not in row.tensor],
        provenance=provenance(),
    )
    guard = RangeGuard(root, passes, progress) if passes is not None and is_guarded(manifest, passes) else None
    if guard is not None:
        manifest = guard.guard_target(manifest, read_ranges(bundle))
    manifest, more = trace_and_store_drafter(plan, root, manifest, progress, by_name=by_name)
    if guard is not None:
        manifest = guard.guard_drafter(manifest)
        guard.write(manifest)
    return describe(root, manifest, facts | more)


def _of_old_drafter(manifest: Manifest, name: str) -> bool:
    if manifest.drafter is None:
        return False
    files = {manifest.drafter.graph.file, manifest.drafter.context_graph.file}
    files |= {entry.file for weight, entry in manifest.weights.items() if weight.startswith("drafter.")}
    return name in files


def _link(source: Path, copy: Path) -> None:
    """A hard link, or a copy where the file system has none."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, copy)
    except OSError:
        shutil.copyfile(source, copy)
