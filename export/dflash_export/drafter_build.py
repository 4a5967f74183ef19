"""The drafter's part of a bundle: found and checked before any work, then traced, stored and described."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from dflash_export.bring_weights import bring_weights
from dflash_export.build_stages import BuildStages
from dflash_export.checkpoint import Checkpoint, find_checkpoint, with_imported_weights, with_weights
from dflash_export.dequantize_nodes import linear_weights
from dflash_export.drafter_config import DrafterConfig, read_drafter_config
from dflash_export.drafter_trace import DrafterTables, trace_context, trace_drafter
from dflash_export.drafter_weights import DrafterWeights, borrow_equal_tables, match_drafter_weights
from dflash_export.graph_facts import finish_interface
from dflash_export.graph_files import write_graph
from dflash_export.pair_check import config_findings, embedding_scale
from dflash_export.pair_findings import WARNING, Finding, TargetSide, require_fit
from dflash_export.pair_text_check import text_findings
from dflash_export.quantization import Scheme
from dflash_export.quantized_formats.imported_place import ImportedPlace, imported_parts
from dflash_export.quantized_places import quantize_places
from dflash_export.weight_links import COPY
from dflash_export.weight_store import PRECISIONS, TORCH_DTYPES, Progress
from dflash_runtime.bundle import DrafterFacts, FileFacts, Manifest
from dflash_runtime.errors import CheckpointError, PairError

CONTEXT_GRAPH = "drafter_context.onnx"
DRAFTER_GRAPH = "drafter.onnx"
DRAFTER_WEIGHTS = "weights/drafter.safetensors"
COMMON_BLOCK_SIZES = (4, 8, 16)


@dataclasses.dataclass(frozen=True)
class DrafterPlan:
    """A drafter found and checked against its target."""

    checkpoint: Checkpoint
    config: DrafterConfig
    weights: DrafterWeights
    findings: tuple[Finding, ...] = ()
    """What the pair check had to say; no errors."""
    scheme: Scheme | None = None
    """How its matrices are quantised; None keeps them."""
    weights_mode: str = COPY
    """`clone`, `link` or `copy`: how the weights come into the bundle."""

    @property
    def notes(self) -> list[str]:
        """What the user should know of drafter and pair, warnings marked as such."""
        said = [f"warning: {one.sentence()}" if one.severity == WARNING else one.sentence() for one in self.findings]
        left = ", ".join(self.weights.ignored)
        ignored = [f"not taken from the drafter, as training's or the target's own: {left}"] if left else []
        return [*self.config.notes, *ignored, *said]

    @property
    def num_parameters(self) -> int:
        """Parameters the drafter brings itself."""
        total = 0
        for place in self.weights.places.values():
            count = 1
            for dimension in place.shape:
                count *= dimension
            total += count
        return total


def plan_drafter(
    reference: str,
    target: TargetSide,
    block_sizes: tuple[int, ...],
    local_files_only: bool,
    template_args: Mapping[str, Any] | None = None,
) -> DrafterPlan:
    """Finds a drafter and refuses a pair that does not fit.

    Args:
        reference: Catalog name, Hugging Face id with `@revision`, or folder.
        target: The target's facts.
        block_sizes: Block sizes asked for.
        local_files_only: Use the hub cache alone.
        template_args: Chat template arguments the user chose.

    Raises:
        CheckpointError: not found or damaged.
        UnsupportedModelError: another kind of drafter.
        PairError: it does not fit the target; both values are named.
    """
    checkpoint = find_checkpoint(reference, role="drafter", local_files_only=local_files_only, with_weights=False)
    config = read_drafter_config(checkpoint.folder)
    require_fit(config_findings(target, config, checkpoint.places, block_sizes=block_sizes))
    checkpoint = with_imported_weights(with_weights(checkpoint, local_files_only=local_files_only))
    findings = config_findings(target, config, checkpoint.places, block_sizes=block_sizes)
    require_fit(findings)
    weights = match_drafter_weights(config, checkpoint.places, target.vocab_size, str(checkpoint.folder))
    findings += text_findings(
        target, config, checkpoint.folder, checkpoint.source.id, template_args or {}, weights.target_ids
    )
    require_fit(findings)
    weights = borrow_equal_tables(weights, target.embedding, target.head)
    scale = config.input_embedding_scale * embedding_scale(target, config)
    return DrafterPlan(checkpoint, dataclasses.replace(config, input_embedding_scale=scale), weights, tuple(findings))


def default_block_sizes(drafter: DrafterConfig | None) -> list[int]:
    """The drafter's own block size and the common smaller ones."""
    if drafter is None:
        return list(COMMON_BLOCK_SIZES)
    return sorted({drafter.block_size, *(b for b in COMMON_BLOCK_SIZES if b < drafter.block_size)})


def trace_and_store_drafter(
    plan: DrafterPlan,
    root: Path,
    manifest: Manifest,
    progress: Progress,
    stages: BuildStages | None = None,
    by_name: frozenset[str] = frozenset(),
) -> tuple[Manifest, dict[str, FileFacts]]:
    """Adds a drafter's graphs and weights to a bundle under construction.

    Args:
        plan: The checked drafter.
        root: Bundle folder.
        manifest: The bundle so far, its taps already those of the drafter.
        progress: Called with stage, done, total.
        stages: What a killed build left.
        by_name: Weights of the target that graphs take as inputs.

    Returns:
        The manifest with the drafter, and facts of the weight files.

    Raises:
        PairError: the target's head has a bias.
    """
    dtype = PRECISIONS[manifest.precision]
    target = manifest.target
    embedding, head = plan.weights.table_names(target.embedding_weight, target.head_weight)
    bias = head.removesuffix("weight") + "bias"
    if bias in manifest.weights:
        raise PairError(
            f"the target's output head has a bias ({bias}), and a drafter borrows the head's matrix alone, so its "
            "proposals would be others than it was trained for. Export the target without a drafter."
        )
    progress("trace drafter", 0, 2)
    taps_dtype = next(tensor.dtype for tensor in target.graph.outputs if tensor.name == "taps")
    context = trace_context(plan.config, TORCH_DTYPES[dtype], TORCH_DTYPES[taps_dtype])
    progress("trace drafter", 1, 2)
    tables = DrafterTables(embedding, head, target.vocab_size, plan.weights.target_ids)
    draft = trace_drafter(plan.config, tables, TORCH_DTYPES[dtype])
    progress("trace drafter", 2, 2)
    stages = stages or BuildStages(None)
    own = plan.weights.bundle_places
    imported, quantized = imported_parts(own, _matrices(own, [context, draft], widened=True), dtype)
    places, rounded = quantize_places({**own, **imported}, _schemes(plan, [context, draft]), dtype)
    quantized |= rounded
    stored = bring_weights(root, "drafter", places, dtype, plan.weights_mode, progress, stages)
    windows = plan.config.windows
    context_facts = finish_interface(context, "drafter_context", CONTEXT_GRAPH, windows)
    draft_facts = finish_interface(draft, "drafter", DRAFTER_GRAPH, windows)
    entries = {**manifest.weights, **stored.entries}
    quantized = {**manifest.quantized, **quantized}
    by_name |= stored.by_name
    write_graph(context, entries, root, CONTEXT_GRAPH, by_name, quantized)
    write_graph(draft, entries, root, DRAFTER_GRAPH, by_name, quantized)
    facts = DrafterFacts(
        name=plan.checkpoint.name,
        source=plan.checkpoint.source,
        architecture=plan.config.architecture,
        num_layers=plan.config.num_layers,
        hidden_size=plan.config.hidden_size,
        num_parameters=plan.num_parameters,
        block_size=plan.config.block_size,
        mask_token_id=plan.config.mask_token_id,
        context_graph=context_facts,
        graph=draft_facts,
    )
    manifest = dataclasses.replace(manifest, drafter=facts, weights=entries, quantized=quantized)
    return manifest, stored.files


def _schemes(plan: DrafterPlan, graphs: list[ir.Model]) -> dict[str, Scheme]:
    """The scheme of every matrix of the drafter's own that each graph uses in products alone."""
    if plan.scheme is None:
        return {}
    places = plan.weights.bundle_places
    floats = {name: place for name, place in places.items() if not isinstance(place, ImportedPlace)}
    chosen = dict.fromkeys(_matrices(floats, graphs), plan.scheme)
    if not chosen:
        raise CheckpointError(
            f"{plan.checkpoint.name} holds no plain matrix [out, in] in floats: nothing can be quantised. Leave "
            "--quantize-drafter at keep."
        )
    return chosen


def _matrices(names: Iterable[str], graphs: list[ir.Model], *, widened: bool = False) -> list[str]:
    """Weights of the drafter's own that each graph uses in products alone; see `linear_weights`."""
    linear, elsewhere = set[str](), set[str]()
    for graph in graphs:
        found = set(linear_weights(graph, widened=widened))
        linear |= found
        elsewhere |= graph.graph.initializers.keys() - found
    return [name for name in names if name in linear - elsewhere]
