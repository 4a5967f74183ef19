"""What a reference says, without its numbers: which pair, which texts, which calls, how far PyTorch itself deviates."""

from __future__ import annotations

import dataclasses
from typing import Any

from dflash_runtime.bundle import Manifest

REFERENCE_SCHEMA_VERSION = 2
"""Since 2 PyTorch's own deviation of proposals is that behind taps which are rounded too."""
TARGET, CONTEXT, DRAFTER = "target", "drafter_context", "drafter"
INT8_PRODUCTS = "int8 products"
"""Computing in fp32 but for products with quantised weights, whose activations are rounded to int8."""


@dataclasses.dataclass(frozen=True)
class PairFacts:
    """What the checkpoints say about the pair; a bundle that says otherwise drafts or stops differently."""

    stop_token_ids: list[int]
    template_args: dict[str, Any]
    """Arguments of the chat template with which the texts became ids."""
    target_windows: list[int | None]
    """Attention window of each target layer in tokens, None for full attention."""
    has_drafter: bool
    mask_token_id: int | None
    tap_layer_ids: list[int]
    drafter_windows: list[int | None]
    trained_block_size: int | None
    """Tokens of a block, anchor included."""
    proposes_likeliest: bool
    """Proposals are the likeliest tokens of the draft logits, without a selector or a vocabulary of the drafter's."""


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of draft and verify."""

    position: int
    """Rows committed before it; the anchor's row."""
    anchor: int
    proposed: list[int]
    committed: list[int]
    """Accepted proposals and the target's own token."""


@dataclasses.dataclass(frozen=True)
class ReferenceText:
    """A prompt and what the pair says after it, greedily, stop tokens ignored."""

    prompt: Any
    """Text, messages, or None where only ids were given."""
    ids: list[int]
    tokens: list[int]
    block_size: int
    rounds: list[Round]
    """Empty without a drafter."""
    whole_call: int
    """Index of the call that ran prompt and tokens at once: its KV rows are what every cache must hold."""
    rendered: str = dataclasses.field(default_factory=str)
    """The prompt behind the chat template, which the tokenizer is given; empty where only ids were given."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One pass over one graph."""

    graph: str
    """`target`, `drafter_context` or `drafter`."""
    sequence: int
    """Calls of a sequence follow one another on the same caches; a new sequence begins with empty ones."""
    text: int
    """The text it belongs to."""
    position: int
    """Rows before it; a smaller one than before takes rows back."""
    ids: list[int]
    """Tokens of target and drafter; empty for the context."""
    rows: int
    taps_from: int
    """First row of the text's taps that the context is given, 0 for the others."""
    words: str
    """What it is, for people."""


@dataclasses.dataclass(frozen=True)
class OwnDeviation:
    """How far PyTorch that rounds what it computes is from PyTorch in fp32: what a bound is a multiple of."""

    tensors: dict[str, float]
    """`graph/name` -> largest relative deviation over all calls, the context's on the right taps."""
    state: dict[str, float]
    """The same where the drafter goes by the taps of the target that rounds: what a runtime's caches hold."""
    target_margin: float
    """Largest change of the distance between the likeliest token and a likely one, in logits."""
    draft_margin: float
    """The same for what proposals are chosen by, behind the taps of the target that rounds; 0 without a drafter."""


@dataclasses.dataclass(frozen=True)
class ReferenceFacts:
    """Everything a reference says besides its numbers."""

    schema_version: int
    oracle: str
    """What computed it, in words."""
    precision: str
    """Of the bundle it was made for: weights are rounded so; the numbers are computed in fp32."""
    config_sha256: str
    """Of the target's config.json."""
    drafter_config_sha256: str | None
    """Of the drafter's, None without one."""
    pair: PairFacts
    texts: list[ReferenceText]
    calls: list[Call]
    tensors: list[list[str]]
    """Per call the tensors that are kept, in the order in which they are computed."""
    sketched: list[str]
    """`outputs`, `inner`: kinds of which rows are sketched."""
    own: dict[str, OwnDeviation]
    """Half precision, or `int8 products` -> PyTorch's own deviation in it."""
    versions: dict[str, str]
    quantized: dict[str, str] = dataclasses.field(default_factory=dict)
    """Quantised weights of the bundle -> how they are held, in words."""


def quantization_of(manifest: Manifest) -> dict[str, str]:
    """How each quantised weight of a bundle is held, in words."""
    return {
        name: f"int{facts.bits}, {'per channel' if facts.group_size is None else f'groups of {facts.group_size}'}, "
        f"{'symmetric' if facts.zero_points is None else 'asymmetric'}, {facts.origin}"
        for name, facts in manifest.quantized.items()
    }
