"""What shall be built: target and drafter found, checked against each other, precision and context settled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from dflash_export.catalog import CATALOG, drafter_template_args
from dflash_export.checkpoint import (
    Checkpoint,
    find_checkpoint,
    notes_of_import,
    read_target_config,
    with_imported_weights,
    with_weights,
)
from dflash_export.drafter_build import DrafterPlan, default_block_sizes, plan_drafter
from dflash_export.drafter_data_record import recorded_template_args
from dflash_export.match_weights import untie_if_stored_apart
from dflash_export.pair_findings import TargetSide
from dflash_export.quantization import QuantizeOptions
from dflash_export.quantized_formats.imported_place import ImportedPlace
from dflash_export.refusals import refuse_by_config
from dflash_export.rope_limits import exact_context_limit
from dflash_export.tensor_files import FLOAT_DTYPES, ITEM_BYTES, TensorPlace
from dflash_export.text_files import read_text_facts, require_tokenizer
from dflash_export.weight_links import AUTO, COPY, refers, settle_weights
from dflash_export.weight_store import PRECISIONS
from dflash_runtime.errors import CheckpointError, PairError, UnsupportedModelError

DEFAULT_CONTEXT_TOKENS = 4096


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
    """`full`, `layers`, or `auto`: full where a model is small, else layer by layer."""
    local_files_only: bool = False
    quantize: QuantizeOptions = dataclasses.field(default_factory=QuantizeOptions)
    """What becomes small integers."""
    weights_copy: str = AUTO
    """`auto`: refer to the checkpoint's files where they are right as they are; `link`, `copy`."""


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
    quantize: QuantizeOptions = dataclasses.field(default_factory=QuantizeOptions)
    weights_mode: str = COPY
    """`clone`, `link` or `copy`: how the weights come into the bundle."""

    @property
    def weight_dtype(self) -> str:
        """Safetensors spelling of the precision."""
        return PRECISIONS[self.precision]

    @property
    def weight_bytes(self) -> int:
        """Bytes the bundle's weights take on the disk, an upper bound where weights are tied."""
        total = 0
        for place in self.checkpoint.places.values():
            if self.weights_mode != COPY and refers(place, self.weight_dtype):
                continue
            total += place.length_bytes // ITEM_BYTES.get(place.dtype, 1) * ITEM_BYTES[self.weight_dtype]
        return total


def plan_target(options: BuildOptions) -> TargetPlan:
    """Finds the target and settles precision and context.

    Raises:
        CheckpointError: not found, damaged, or options the model cannot serve.
        UnsupportedModelError: a kind of model that cannot be exported; its weights were not fetched.
    """
    local = options.local_files_only
    checkpoint = find_checkpoint(options.target, role="target", local_files_only=local, with_weights=False)
    config = read_target_config(checkpoint, quantized=True)
    try:
        refuse_by_config(config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{checkpoint.name} cannot be exported: {error}.") from error
    checkpoint = with_imported_weights(with_weights(checkpoint, local_files_only=local))
    require_tokenizer(checkpoint.folder)
    notes = notes_of_import(checkpoint) + untie_if_stored_apart(config, checkpoint.places)
    precision = options.precision or _own_precision(checkpoint)
    if precision not in PRECISIONS:
        raise CheckpointError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}.")
    context = _context(config, options.max_context_tokens, notes)
    return TargetPlan(checkpoint, config, precision, context, notes, quantize=options.quantize)


def _own_precision(checkpoint: Checkpoint) -> str:
    by_dtype: dict[str, int] = {}
    for place in checkpoint.places.values():
        if isinstance(place, ImportedPlace) or place.dtype not in FLOAT_DTYPES:
            continue
        by_dtype[place.dtype] = by_dtype.get(place.dtype, 0) + place.length_bytes
    most = max(by_dtype, key=lambda d: by_dtype[d], default="BF16")
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
        drafter = 0
        if self.drafter is not None and self.drafter.weights_mode == COPY:
            drafter = self.drafter.num_parameters * ITEM_BYTES[self.target.weight_dtype]
        return self.target.weight_bytes + drafter + (64 << 20)

    def settle_weights(self, out: Path) -> None:
        """Decides how the weights come into a bundle at `out`; see `settle_weights`."""
        wanted, dtype = self.options.weights_copy, self.target.weight_dtype
        self.target.weights_mode, note = settle_weights(wanted, self.target.checkpoint.places, dtype, out)
        self.notes += [note] if note else []
        if self.drafter is not None:
            mode, _ = settle_weights(wanted, self.drafter.checkpoint.places, dtype, out)
            self.drafter = dataclasses.replace(self.drafter, weights_mode=mode)

    def files(self) -> list[Path]:
        """Every file of the checkpoints; what else lies below their folders may be the build itself."""
        folders = [self.target.checkpoint.folder] + ([self.drafter.checkpoint.folder] if self.drafter else [])
        places = [place for folder in folders for place in (folder, folder / "additional_chat_templates")]
        return [path for place in places if place.is_dir() for path in place.iterdir() if path.is_file()]

    def template_args(self) -> dict[str, Any]:
        """Chat template arguments: what the drafter was trained with, unless the user says otherwise."""
        if self.drafter is None:
            return dict(self.options.template_args)
        found = self.drafter.checkpoint
        known = {**drafter_template_args(found.source.id), **recorded_template_args(found.folder)}
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
    reference = options.drafter or (entry.reference("drafter") if entry else None)
    target = plan_target(options)
    drafter = None
    if reference is not None:
        stops = read_text_facts(target.checkpoint.folder, {})[0].stop_token_ids
        side = TargetSide.of_checkpoint(target.checkpoint, target.config, stops)
        drafter = plan_drafter(reference, side, options.block_sizes, options.local_files_only, options.template_args)
        drafter = dataclasses.replace(drafter, scheme=options.quantize.drafter)
        target.max_context_tokens = _fit_drafter_context(target, drafter, options)
        target.notes.extend(drafter.notes)
    elif options.quantize.drafter is not None:
        raise CheckpointError("--quantize-drafter is given and there is no drafter. Give --drafter, or leave it out.")
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
