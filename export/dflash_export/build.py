"""Checkpoint to portable bundle, as a story: find, check, trace, store, describe."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from dflash_export.catalog import CATALOG, drafter_template_args
from dflash_export.checkpoint import Checkpoint, find_checkpoint, read_target_config
from dflash_export.converted_places import convert_places
from dflash_export.drafter_build import DrafterPlan, default_block_sizes, plan_drafter, trace_and_store_drafter
from dflash_export.graph_facts import finish_interface
from dflash_export.graph_files import write_graph
from dflash_export.hollow_model import causal_lm_class
from dflash_export.match_weights import match_weights, untie_if_stored_apart
from dflash_export.rope_limits import exact_context_limit
from dflash_export.tap_rule import default_target_layer_ids
from dflash_export.taps import select_taps
from dflash_export.target_trace import TracedTarget, trace_target
from dflash_export.tensor_files import ITEM_BYTES, TensorPlace
from dflash_export.text_files import copy_text_files, read_text_facts
from dflash_export.weight_store import (
    PRECISIONS,
    TORCH_DTYPES,
    Progress,
    StoredWeights,
    store_weights,
)
from dflash_runtime.bundle import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    FileFacts,
    Manifest,
    Provenance,
    TapFacts,
    TargetFacts,
    file_facts,
    write_text_atomically,
)
from dflash_runtime.errors import CheckpointError, PairError

DEFAULT_CONTEXT_TOKENS = 4096
TARGET_GRAPH = "target.onnx"
TARGET_WEIGHTS = "weights/target.safetensors"


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """What to build."""

    target: str
    """Catalog name, Hugging Face id with `@revision`, or folder."""
    drafter: str | None = None
    precision: str | None = None
    """fp32, fp16, bf16; None keeps the checkpoint's own."""
    block_sizes: tuple[int, ...] = ()
    """Block sizes engines are made for; empty: the drafter's own and the common smaller ones."""
    max_context_tokens: int | None = None
    template_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    gate: str = "auto"
    """`full`, `layers`, or `auto`: full where the model fits into free memory, else layer by layer."""
    local_files_only: bool = False


@dataclasses.dataclass
class TargetPlan:
    """A target found and checked, before any work."""

    checkpoint: Checkpoint
    config: PreTrainedConfig
    precision: str
    max_context_tokens: int
    notes: list[str]
    places: dict[str, TensorPlace] = dataclasses.field(default_factory=dict)
    """State-dict name -> tensor in the checkpoint, known after the trace."""

    @property
    def weight_dtype(self) -> str:
        """Safetensors spelling of the precision."""
        return PRECISIONS[self.precision]

    @property
    def weight_bytes(self) -> int:
        """Bytes the weights take in the bundle, an upper bound where weights are tied."""
        total = 0
        for place in self.checkpoint.places.values():
            total += place.length_bytes // ITEM_BYTES.get(place.dtype, 1) * ITEM_BYTES[self.weight_dtype]
        return total


def plan_target(options: BuildOptions) -> TargetPlan:
    """Finds the target and settles precision and context.

    Raises:
        CheckpointError: not found, damaged, or options the model cannot serve.
    """
    checkpoint = find_checkpoint(options.target, role="target", local_files_only=options.local_files_only)
    config = read_target_config(checkpoint)
    notes = untie_if_stored_apart(config, checkpoint.places)
    precision = options.precision or _own_precision(checkpoint)
    if precision not in PRECISIONS:
        raise CheckpointError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}.")
    context = _context(config, options.max_context_tokens, notes)
    return TargetPlan(checkpoint, config, precision, context, notes)


def _own_precision(checkpoint: Checkpoint) -> str:
    by_dtype: dict[str, int] = {}
    for place in checkpoint.places.values():
        by_dtype[place.dtype] = by_dtype.get(place.dtype, 0) + place.length_bytes
    most = max(by_dtype, key=lambda d: by_dtype[d])
    return {"F32": "fp32", "F64": "fp32", "F16": "fp16", "BF16": "bf16"}.get(most, "bf16")


def _context(config: PreTrainedConfig, wanted: int | None, notes: list[str]) -> int:
    text = config.get_text_config()
    trained = getattr(text, "max_position_embeddings", None)
    limit, rule = (int(trained), "max_position_embeddings") if trained else (1 << 30, "")
    exact = exact_context_limit(text)
    if exact is not None and exact[0] <= limit:
        limit, rule = exact[0], f"the original range of {exact[1]} rope scaling"
    if wanted is None:
        if exact is not None and limit < DEFAULT_CONTEXT_TOKENS:
            notes.append(f"the context is limited to {limit} tokens by {rule}")
        return min(DEFAULT_CONTEXT_TOKENS, limit)
    if wanted < 2:
        raise CheckpointError(f"--max-context {wanted} leaves no room for a prompt and an answer; give 2 or more.")
    if wanted > limit:
        raise CheckpointError(f"--max-context {wanted} exceeds {limit}, {rule} of the target. Give at most {limit}.")
    return wanted


def trace_and_store_target(
    plan: TargetPlan, root: Path, layer_ids: list[int] | None, progress: Progress
) -> tuple[TargetFacts, TapFacts, StoredWeights]:
    """Traces the target, streams its weights and writes `target.onnx`.

    Args:
        plan: The checked target.
        root: Bundle folder under construction.
        layer_ids: Taps the drafter wants; None for the default rule.
        progress: Called with stage, done, total.
    """
    progress("trace target", 0, 1)
    traced = trace_target(plan.config, TORCH_DTYPES[plan.weight_dtype])
    progress("trace target", 1, 1)
    plan.places = match_weights(
        causal_lm_class(plan.config),
        list(traced.parameters),
        traced.parameter_names,
        {name: shape for name, (_, shape) in traced.parameters.items()},
        convert_places(traced.module, plan.checkpoint.places),
    )
    spelling = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    own = TORCH_DTYPES[plan.weight_dtype]
    islands = {name: spelling[dtype] for name, (dtype, _) in traced.parameters.items() if dtype != own}
    stored = store_weights(root, TARGET_WEIGHTS, plan.places, plan.weight_dtype, progress, islands)
    if layer_ids is None:
        taps = TapFacts(default_target_layer_ids(traced.num_layers), "default")
    else:
        taps = TapFacts(list(layer_ids), "drafter")
    select_taps(traced.model, taps.layer_ids, traced.hidden_size)
    facts = _target_facts(plan, traced)
    write_graph(traced.model, stored.entries, root, TARGET_GRAPH)
    return facts, taps, stored


def _target_facts(plan: TargetPlan, traced: TracedTarget) -> TargetFacts:
    text = plan.config.get_text_config()
    windows = [layer.window_tokens for layer in traced.layers]
    return TargetFacts(
        name=plan.checkpoint.name,
        source=plan.checkpoint.source,
        architecture=traced.architecture,
        model_type=str(plan.config.model_type),
        num_layers=traced.num_layers,
        hidden_size=traced.hidden_size,
        vocab_size=traced.vocab_size,
        num_parameters=traced.num_parameters,
        max_position_tokens=int(getattr(text, "max_position_embeddings", 0) or 0),
        tied_head=traced.embedding_weight == traced.head_weight,
        embedding_weight=traced.embedding_weight,
        head_weight=traced.head_weight,
        graph=finish_interface(traced.model, "target", TARGET_GRAPH, windows),
    )


def describe(root: Path, manifest: Manifest, weight_facts: dict[str, FileFacts]) -> Manifest:
    """Adds size and hash of every file to a manifest and writes `bundle.json`.

    Args:
        root: Bundle folder.
        manifest: The manifest so far; its `files` are replaced.
        weight_facts: Facts already known from writing, so that weights are not read again.
    """
    names = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.is_file() and path.name != MANIFEST_NAME and path.relative_to(root).parts[0] != "engines"
    ]
    facts = {**file_facts(root, [n for n in names if n not in weight_facts]), **weight_facts}
    manifest = dataclasses.replace(manifest, files=dict(sorted(facts.items())))
    write_text_atomically(root / MANIFEST_NAME, manifest.to_json())
    return manifest


def provenance() -> Provenance:
    """Versions and the command line that made a bundle."""
    versions = {"python": sys.version.split()[0]}
    for package in ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "onnxruntime"):
        versions[package] = importlib.metadata.version(package)
    return Provenance(importlib.metadata.version("dflash-export"), list(sys.argv), versions)


def first_manifest(plan: BuildPlan, root: Path, facts: TargetFacts, taps: TapFacts, stored: StoredWeights) -> Manifest:
    """The manifest of a bundle that holds a target alone; text files are copied here."""
    target = plan.target
    copy_text_files(target.checkpoint.folder, root)
    text, notes = read_text_facts(target.checkpoint.folder, plan.template_args())
    plan.notes.extend(notes)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        precision=target.precision,
        max_context_tokens=target.max_context_tokens,
        block_sizes=plan.block_sizes,
        target=facts,
        drafter=None,
        taps=taps,
        text=text,
        weights=stored.entries,
        files={},
        checks=[],
        provenance=provenance(),
    )


@dataclasses.dataclass
class BuildPlan:
    """A pair found and checked before any work."""

    options: BuildOptions
    target: TargetPlan
    drafter: DrafterPlan | None
    block_sizes: list[int]
    notes: list[str]

    @property
    def needed_bytes(self) -> int:
        """What the bundle will take on disk, with room for graphs and checks."""
        drafter = 0 if self.drafter is None else self.drafter.num_parameters * ITEM_BYTES[self.target.weight_dtype]
        return self.target.weight_bytes + drafter + (64 << 20)

    def template_args(self) -> dict[str, Any]:
        """Chat template arguments: what the drafter was trained with, unless the user says otherwise."""
        known = {} if self.drafter is None else drafter_template_args(self.drafter.checkpoint.source.id)
        return {**known, **self.options.template_args}


def plan_build(options: BuildOptions) -> BuildPlan:
    """Finds target and drafter and refuses everything that cannot work, before any work.

    Raises:
        CheckpointError: not found, damaged, or options out of range.
        UnsupportedModelError: a kind of model that cannot be exported.
        PairError: target and drafter do not fit each other.
    """
    wrong = [b for b in options.block_sizes if b < 2]
    if wrong:
        raise CheckpointError(f"--block-size {wrong[0]} is no block: it is the anchor and at least one draft, so >= 2.")
    entry = CATALOG.get(options.target.lower())
    reference = options.drafter or (entry.drafter if entry else None)
    target = plan_target(options)
    drafter = None
    if reference is not None:
        drafter = plan_drafter(
            reference, target.checkpoint.folder, target.config, options.block_sizes, options.local_files_only
        )
        target.max_context_tokens = _fit_drafter_context(target, drafter, options)
        target.notes.extend(drafter.config.notes)
    else:
        why = f": {entry.note}" if entry and entry.note else ""
        target.notes.append(f"no drafter{why}; the bundle decodes plainly until one is added with add-drafter")
    sizes = sorted(set(options.block_sizes)) or default_block_sizes(drafter.config if drafter else None)
    return BuildPlan(options, target, drafter, sizes, target.notes)


def _fit_drafter_context(target: TargetPlan, drafter: DrafterPlan, options: BuildOptions) -> int:
    limit = drafter.config.max_position_tokens
    if limit is None or target.max_context_tokens <= limit:
        return target.max_context_tokens
    if options.max_context_tokens is not None:
        raise PairError(
            f"--max-context {options.max_context_tokens} exceeds {limit}, the drafter's max_position_embeddings. "
            f"Give at most {limit}."
        )
    target.notes.append(f"the context is limited to {limit} tokens by the drafter's max_position_embeddings")
    return limit


def export_bundle(plan: BuildPlan, root: Path, progress: Progress) -> Manifest:
    """Writes the portable bundle; it is complete but not yet checked.

    Args:
        plan: From `plan_build`.
        root: Empty folder.
        progress: Called with stage, done, total.
    """
    layer_ids = None if plan.drafter is None else list(plan.drafter.config.target_layer_ids)
    facts, taps, stored = trace_and_store_target(plan.target, root, layer_ids, progress)
    manifest = first_manifest(plan, root, facts, taps, stored)
    known = {stored.file_name: stored.facts}
    if plan.drafter is not None:
        manifest, more = trace_and_store_drafter(plan.drafter, root, manifest, progress)
        known |= more
    return describe(root, manifest, known)
