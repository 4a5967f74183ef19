"""A pair looked at without building anything: what it is, and everything the pair check finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_export.catalog import CATALOG
from dflash_export.checkpoint import (
    Checkpoint,
    find_checkpoint,
    quantization_config,
    read_target_config,
    with_imported_weights,
    with_weights,
)
from dflash_export.drafter_config import DrafterConfig, read_drafter_config
from dflash_export.drafter_weights import match_drafter_weights
from dflash_export.hub_access import tensor_headers
from dflash_export.pair_check import config_findings
from dflash_export.pair_findings import ERROR, SEVERITIES, Finding, TargetSide
from dflash_export.pair_text_check import text_findings
from dflash_export.refusals import refuse_by_config
from dflash_export.text_files import read_text_facts
from dflash_runtime.errors import CheckpointError, DFlashError, UnsupportedModelError


@dataclasses.dataclass(frozen=True)
class PairReport:
    """What a pair is and what was found."""

    target: dict[str, Any]
    drafter: dict[str, Any]
    findings: list[Finding]
    """Worst first."""

    @property
    def worst(self) -> str | None:
        """The worst severity, None where nothing was found."""
        return self.findings[0].severity if self.findings else None


def examine_pair(
    target: str,
    drafter: str | None,
    *,
    block_sizes: Sequence[int] = (),
    max_context_tokens: int | None = None,
    template_args: Mapping[str, Any] | None = None,
    local_files_only: bool = False,
) -> PairReport:
    """Looks at target and drafter; no weights are fetched but a drafter's with its own vocabulary, or quantised.

    Args:
        target: Catalog name, Hugging Face id with `@revision`, or folder.
        drafter: The same; None for the catalog's.
        block_sizes: Block sizes that would be asked for.
        max_context_tokens: Context that would be asked for.
        template_args: Chat template arguments that would be given.
        local_files_only: Use the hub cache alone.

    Raises:
        CheckpointError: one of them cannot be found or read at all.
    """
    entry = CATALOG.get(target.lower())
    reference = drafter or (entry.reference("drafter") if entry else None)
    if reference is None:
        why = f": {entry.note}" if entry else ""
        raise CheckpointError(f"no drafter is given and the catalog knows none for {target}{why}. Name one.")
    found_target = find_checkpoint(target, role="target", local_files_only=local_files_only, with_weights=False)
    found_drafter = find_checkpoint(reference, role="drafter", local_files_only=local_files_only, with_weights=False)
    config = read_target_config(found_target, quantized=True)
    findings, facts = [], {**_source(found_target), "model_type": str(config.model_type)}
    try:
        refuse_by_config(config)
    except UnsupportedModelError as error:
        text = f"the target {found_target.name} is not exported: {error}."
        findings.append(Finding(ERROR, "target", text, "It cannot run.", "Choose another target."))
        return PairReport(facts, _source(found_drafter), findings)
    stops = read_text_facts(found_target.folder, {})[0].stop_token_ids
    if found_target.places:  # at hand
        found_target = with_imported_weights(found_target)
    side = TargetSide.of_checkpoint(found_target, config, stops)
    facts |= {"num_layers": side.num_layers, "hidden_size": side.hidden_size, "vocab_size": side.vocab_size}
    try:
        drafter_config = read_drafter_config(found_drafter.folder)
    except DFlashError as error:
        findings.append(_unreadable(error))
        return PairReport(facts, _source(found_drafter), findings)
    found_drafter = _with_tensors(found_drafter, drafter_config, local_files_only)
    findings += config_findings(
        side, drafter_config, found_drafter.places, block_sizes=block_sizes, max_context_tokens=max_context_tokens
    )
    findings += _weights_and_texts(side, found_drafter, drafter_config, template_args or {})
    findings.sort(key=lambda one: SEVERITIES.index(one.severity))
    return PairReport(facts, {**_source(found_drafter), **describe_drafter(drafter_config)}, findings)


def _with_tensors(checkpoint: Checkpoint, config: DrafterConfig, local_files_only: bool) -> Checkpoint:
    """The drafter with its tensors; of one on the hub their headers do, unless values are needed.

    Those of a vocabulary's mapping and of quantised weights are.
    """
    source, headers = checkpoint.source, None
    plain = config.draft_vocab_size is None and quantization_config(checkpoint.folder) is None
    if source.kind == "hub" and not local_files_only and plain:
        headers = tensor_headers(source.id, source.revision)
    if headers is None:
        return with_imported_weights(with_weights(checkpoint, local_files_only=local_files_only))
    return dataclasses.replace(checkpoint, places=headers)


def _weights_and_texts(
    side: TargetSide, drafter: Checkpoint, config: DrafterConfig, template_args: Mapping[str, Any]
) -> list[Finding]:
    target_ids, findings = None, []
    try:
        target_ids = match_drafter_weights(config, drafter.places, side.vocab_size, str(drafter.folder)).target_ids
    except DFlashError as error:
        findings.append(_unreadable(error))
    return findings + text_findings(side, config, drafter.folder, drafter.source.id, template_args, target_ids)


def _unreadable(error: DFlashError) -> Finding:
    return Finding(ERROR, "drafter", str(error), "", "")


def _source(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"name": checkpoint.name, **dataclasses.asdict(checkpoint.source)}


def describe_drafter(drafter: DrafterConfig) -> dict[str, Any]:
    """What a user compares with the drafter's card."""
    return {
        "layout": drafter.layout,
        "architecture": drafter.architecture,
        "num_layers": drafter.num_layers,
        "block_size": drafter.block_size,
        "num_draft_tokens": drafter.block_size - 1,
        "target_layer_ids": list(drafter.target_layer_ids),
        "mask_token_id": drafter.mask_token_id,
        "windows": drafter.windows,
        "rope": drafter.rope_parameters,
        "draft_vocab_size": drafter.draft_vocab_size,
        "notes": list(drafter.notes),
    }
