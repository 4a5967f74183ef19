"""Which layer and part a tensor belongs to, by its name, and what usually makes it wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where in a model a tensor is."""

    layer: int | None
    part: str


# First match decides; names are those of modules, `:input` marks what goes into one.
_PARTS = (
    (r"(^|\.)(o_proj|out_proj|dense|(self_)?attn\.c_proj|wo)(:input)$", "attention"),
    (r"(_conv\.|(k_proj|gate_proj):input$)", "convolution"),
    (r"candidate_selector", "selector"),
    (r"(^|\.)(mlp|feed_forward|ffn|block_sparse_moe|experts?)(\.|$)", "MLP"),
    (r"(^|\.)(gate_proj|up_proj|down_proj|gate_up_proj|fc1|fc2|c_fc)(:input)?$", "MLP"),
    (r"(^|\.)drafter\.(fc|hidden_norm)$", "context"),
    (r"norm|(^|\.)ln_", "norm"),
    (r"(^|\.)(qkv_proj|qkv|query_key_value|c_attn|kv_\w+)$", "q/k/v"),
    (r"(^|\.)(q_proj|q_[ab]_proj|query|q)$", "q"),
    (r"(^|\.)(k_proj|key|k)$", "k"),
    (r"(^|\.)(v_proj|value|v)$", "v"),
    (r"(^|\.)(o_proj|out_proj|dense|attn\.c_proj|wo)$", "attention output"),
    (r"embed|wte", "embedding"),
    (r"^(draft_)?logits$|lm_head", "head"),
    (r"_ids$", "argmax"),
)

CAUSES = {
    "embedding": "the embedding table or its scale, or other ids than expected (a mask id inside the graph)",
    "norm": "the norm's weight or epsilon, or a weight stored as 1 + w taken as w",
    "q": "the projection's weight, bias or scale, or packed rows cut at another place",
    "k": "the projection's weight, bias or scale, or packed rows cut at another place",
    "v": "the projection's weight, bias or scale, or packed rows cut at another place",
    "q/k/v": "the projection's weight, bias or scale, or packed rows cut at another place",
    "rope": "rotary base or scaling, positions off by one, halves rotated the other way round",
    "attention": "the mask (causal, bidirectional, window), the valid length, the scale of the scores, or how queries "
    "are rotated; stale or missing cache rows where only calls after others are wrong",
    "attention output": "the output projection's weight, bias or scale",
    "MLP": "a weight, bias or scale of the MLP, or its activation",
    "residual": "what is added to the residual stream (experts and routers show here), or a scale on it",
    "tap": "taps of other layers, in another order, or read before or after the wrong norm",
    "context": "the fusing matrix or its norm, or taps concatenated in another order",
    "head": "the output head's weight or bias, its tie to the embedding, soft-capping",
    "argmax": "the choice of the token: an offset, another axis, a cast before it",
    "convolution": "a kernel of DFlash 2's convolutions, or what lies before the anchor",
    "selector": "the codebooks or the walk of DFlash 2's selector",
    "cache": "a row written to the wrong place or not at all, or one that a later call overwrote",
}


def place_of(name: str, tap_layer_ids: Sequence[int] = ()) -> Place:
    """Layer and part of a tensor.

    Args:
        name: Of an output or an inner tensor.
        tap_layer_ids: Layer of each tap.
    """
    hidden = re.fullmatch(r"hidden_states\.(\d+)", name)
    if hidden is not None:
        number = int(hidden[1])
        return Place(number - 1, "residual") if number else Place(None, "embedding")
    tap = re.fullmatch(r"taps\.(\d+)", name)
    if tap is not None:
        return Place(tap_layer_ids[int(tap[1])], "tap")
    state = re.fullmatch(r"present\.(\d+)\.(key|value)", name)
    if state is not None:
        return Place(int(state[1]), "k" if state[2] == "key" else "v")
    layer = re.search(r"\.(\d+)\.", name)
    part = next((part for pattern, part in _PARTS if re.search(pattern, name)), "unknown part")
    return Place(None if layer is None else int(layer[1]), part)
