"""What a build did not measure of the cost of quantisation, why, and what would."""

from __future__ import annotations

from dflash_export.drafter_weights import PREFIX
from dflash_export.evidence import TargetEvidence
from dflash_export.quantized_places import ROUND_TO_NEAREST
from dflash_runtime.bundle import Manifest


def unmeasured(manifest: Manifest, evidence: TargetEvidence | None, whole_bytes: float) -> list[str]:
    """Notes for the user; none where nothing is quantised, or perplexity and acceptance length are in the table.

    Args:
        manifest: Of the bundle.
        evidence: What PyTorch said; None where the whole model was not run.
        whole_bytes: What running it would take.
    """
    if not manifest.quantized:
        return []
    what = "perplexity" if manifest.drafter is None else "perplexity and acceptance length"
    if evidence is None:
        return [
            f"what quantisation costs in {what} was not measured, as the whole model was not run; the same command "
            f"with --gate full measures it, and takes about {whole_bytes / 1e9:.1f} GB of memory"
        ]
    if evidence.quantized is None:
        return [
            f"what quantisation costs in {what} was not measured: the checkpoint holds what "
            f"{_imported(manifest, drafter=False)} made of the weights, and not the original"
        ]
    notes = []
    if evidence.quantized.original.perplexity is None:
        notes.append("perplexity was not measured, as the checkpoint has no tokenizer.json for its vocabulary")
    if imported := _imported(manifest, drafter=True):
        notes.append(
            f"acceptance length beside the original's was not measured: the drafter's checkpoint holds what {imported} "
            "made of the weights, and not the original"
        )
    return notes


def _imported(manifest: Manifest, *, drafter: bool) -> str:
    """Whose quantised weights target or drafter were stored in; empty for what the build itself rounded."""
    origins = {facts.origin for name, facts in manifest.quantized.items() if name.startswith(PREFIX) == drafter}
    return ", ".join(sorted(origins - {ROUND_TO_NEAREST}))
