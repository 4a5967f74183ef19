"""A checked plan to a portable bundle: trace, store, describe."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from pathlib import Path

from dflash_export.bring_weights import bring_weights
from dflash_export.build_plan import BuildPlan, TargetPlan
from dflash_export.build_stages import BuildStages
from dflash_export.converted_places import convert_places
from dflash_export.dequantize_nodes import linear_weights
from dflash_export.drafter_build import trace_and_store_drafter
from dflash_export.graph_facts import finish_interface
from dflash_export.graph_files import write_graph
from dflash_export.hollow_model import causal_lm_class
from dflash_export.match_weights import match_weights
from dflash_export.memory_release import release_memory
from dflash_export.parity import PrecisionPasses
from dflash_export.quantization import choose_schemes
from dflash_export.quantized_formats.imported_place import ImportedPlace, imported_parts
from dflash_export.quantized_places import quantize_places
from dflash_export.range_guard import RangeGuard, is_guarded
from dflash_export.tap_rule import default_target_layer_ids
from dflash_export.taps import select_taps
from dflash_export.target_trace import TracedTarget
from dflash_export.tensor_files import FLOAT8
from dflash_export.text_files import copy_text_files, read_text_facts
from dflash_export.traced_file import trace_or_load
from dflash_export.weight_store import (
    TORCH_DTYPES,
    Progress,
    StoredWeights,
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
    write_record,
)
from dflash_runtime.errors import CheckpointError

TARGET_GRAPH = "target.onnx"
TARGET_WEIGHTS = "weights/target.safetensors"


def trace_and_store_target(
    plan: TargetPlan,
    root: Path,
    layer_ids: list[int] | None,
    progress: Progress,
    stages: BuildStages | None = None,
) -> tuple[TargetFacts, TapFacts, StoredWeights]:
    """Traces the target, streams its weights and writes `target.onnx`.

    Args:
        plan: The checked target.
        root: Bundle folder under construction.
        layer_ids: Taps the drafter wants; None for the default rule.
        progress: Called with stage, done, total.
        stages: What a killed build left.
    """
    stages = stages or BuildStages(None)
    traced = trace_or_load(plan.config, TORCH_DTYPES[plan.weight_dtype], stages, progress)
    release_memory()
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
    dtype = plan.weight_dtype
    tables = {traced.embedding_weight, traced.head_weight}
    linear = [name for name in linear_weights(traced.model) if name not in islands]
    floats = [name for name in linear if not isinstance(plan.places[name], ImportedPlace)]
    schemes, notes = choose_schemes(floats, tables, plan.quantize)
    plan.notes.extend(notes)
    imported, quantized = imported_parts(plan.places, linear, dtype)
    places, rounded = quantize_places({**plan.places, **imported}, schemes, dtype)
    quantized |= rounded
    if places[traced.embedding_weight].dtype == FLOAT8:
        given = isinstance(plan.places[traced.embedding_weight], ImportedPlace)
        raise CheckpointError(
            f"{traced.embedding_weight} {'is' if given else 'would be'} FP8, and rows are picked from it, for which "
            "ONNX has no operator. "
            + ("Give a checkpoint whose embedding, and a head tied to it, are floats." if given
               else "Leave --quantize-head at keep, or give int8 or int4.")
        )
    stored = bring_weights(root, "target", places, dtype, plan.weights_mode, progress, stages, islands)
    stored = dataclasses.replace(stored, quantized=quantized)
    if layer_ids is None:
        taps = TapFacts(default_target_layer_ids(traced.num_layers), "default")
    else:
        taps = TapFacts(list(layer_ids), "drafter")
    select_taps(traced.model, taps.layer_ids, traced.hidden_size)
    facts = _target_facts(plan, traced)
    write_graph(traced.model, stored.entries, root, TARGET_GRAPH, stored.by_name, quantized)
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
    write_record(root / MANIFEST_NAME, manifest)
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
        quantized=stored.quantized,
    )


def export_bundle(
    plan: BuildPlan,
    root: Path,
    progress: Progress,
    stages: BuildStages | None = None,
    passes: PrecisionPasses | None = None,
) -> Manifest:
    """Writes the portable bundle; it is complete but not yet checked.

    Args:
        plan: From `plan_build`.
        root: Empty folder, or one where a killed build left weights.
        progress: Called with stage, done, total.
        stages: What a killed build left.
        passes: For the fp16 guard, see `RangeGuard`; None leaves it out.

    Raises:
        ParityError: fp16 cannot hold a value, and it cannot be kept in fp32 either.
    """
    layer_ids = None if plan.drafter is None else list(plan.drafter.config.target_layer_ids)
    facts, taps, stored = trace_and_store_target(plan.target, root, layer_ids, progress, stages)
    manifest = first_manifest(plan, root, facts, taps, stored)
    known = stored.files
    guard = None
    if passes is not None and is_guarded(manifest, passes):
        guard = RangeGuard(root, passes, progress, stages)
    if guard is not None:
        manifest = guard.guard_target(manifest)
    if plan.drafter is not None:
        manifest, more = trace_and_store_drafter(plan.drafter, root, manifest, progress, stages, stored.by_name)
        known |= more
    if guard is not None:
        manifest = guard.guard_drafter(manifest)
        guard.write(manifest)
    return describe(root, manifest, known)
