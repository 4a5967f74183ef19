"""The table of planted faults: each with the level, the graph, the layer and the part that must be named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from faults import (
    block_sits_one_position_late,
    context_sits_one_position_late,
    full_layer_is_causal,
    last_slot_is_another_token,
    taps_are_one_layer_late,
    taps_are_swapped,
    window_is_one_narrower,
    window_is_one_wider,
)
from planting import (
    Change,
    attention_scale_is_off,
    draft_ids_are_off_by_one,
    engine,
    epsilon_is_large,
    graph,
    manifest,
    planted,
    rename_weight,
    residual_is_scaled,
    scaled_constant,
    target_sits_one_position_late,
    target_window_is_wider,
    text_file,
    token_ids_are_off_by_one,
    weight,
)


class Fault(NamedTuple):
    """A fault and how it must be named."""

    name: str
    change: Change
    level: str
    graph: str
    layer: int | None
    part: str
    tensor: str = ""
    """Part of the tensor's name."""
    cause: str = ""
    """Part of the stated cause."""


def swap_heads(values: Any) -> Any:
    return np.concatenate([values[32:64], values[:32], values[64:]])


def scale_channel(values: Any) -> Any:
    values[5] *= 1.1
    return values


def one_nan(values: Any) -> Any:
    values.flat[7] = np.nan
    return values


def used_row(values: Any) -> Any:
    values[ord("s"), 3] += 0.5
    return values


def in_target(name: str, layer: int | None, part: str, change: Change, tensor: str = "", cause: str = "") -> Fault:
    return Fault(name, change, "graph", "target", layer, part, tensor, cause)


def in_context(name: str, layer: int | None, part: str, change: Change, tensor: str = "") -> Fault:
    return Fault(name, change, "graph", "drafter_context", layer, part, tensor)


def in_drafter(name: str, layer: int | None, part: str, change: Change, tensor: str = "", cause: str = "") -> Fault:
    return Fault(name, change, "graph", "drafter", layer, part, tensor, cause)


def of_pair(name: str, level: str, part: str, change: Change, tensor: str = "") -> Fault:
    return Fault(name, change, level, "", None, part, tensor)


def layer(number: int, name: str, change: Callable[[Any], Any] | None = None) -> Change:
    return weight(f"model.layers.{number}.{name}", change)


def drafter(name: str) -> Change:
    return weight(f"drafter.{name}")


def of_target(change: Callable[[ir.Model], None]) -> Change:
    return graph("target.onnx", change)


def other_weight(name: str, layer: int, other: int) -> Callable[[ir.Model], None]:
    return rename_weight(f"model.layers.{layer}.{name}", f"model.layers.{other}.{name}")


EMBEDDING, HEAD, THINKING = "model.embed_tokens.weight", "lm_head.weight", "template or thinking mode"
V_AND_U = {'"u": 117': '"u": 118', '"v": 118': '"v": 117'}


def swap_two_letters(text: str) -> str:
    for one, other in V_AND_U.items():
        text = text.replace(one, other)
    return text


WEIGHTS = [
    in_target("one number of the embedding", None, "embedding", weight(EMBEDDING, used_row), "hidden_states.0"),
    in_target("one number of a first norm", 0, "norm", layer(0, "input_layernorm.weight")),
    in_target("one number of q", 1, "q", layer(1, "self_attn.q_proj.weight")),
    in_target("one number of k", 2, "k", layer(2, "self_attn.k_proj.weight"), "k_proj"),
    in_target("one number of v", 0, "v", layer(0, "self_attn.v_proj.weight"), "v_proj"),
    in_target("one bias of q", 1, "q", layer(1, "self_attn.q_proj.bias")),
    in_target("one bias of k", 3, "k", layer(3, "self_attn.k_proj.bias")),
    in_target("no biases of v", 2, "v", layer(2, "self_attn.v_proj.bias", np.zeros_like)),
    in_target("one number of o", 1, "attention output", layer(1, "self_attn.o_proj.weight")),
    in_target("one bias of o", 0, "attention output", layer(0, "self_attn.o_proj.bias")),
    in_target("one number of a q norm", 2, "norm", layer(2, "self_attn.q_norm.weight"), "q_norm"),
    in_target("one number of a k norm", 0, "norm", layer(0, "self_attn.k_norm.weight"), "k_norm"),
    in_target("one number of a second norm", 1, "norm", layer(1, "post_attention_layernorm.weight")),
    in_target("one number of gate", 0, "MLP", layer(0, "mlp.gate_proj.weight"), "gate_proj"),
    in_target("one number of up", 2, "MLP", layer(2, "mlp.up_proj.weight"), "up_proj"),
    in_target("one number of down", 3, "MLP", layer(3, "mlp.down_proj.weight"), "down_proj"),
    in_target("one number of the last norm", None, "norm", weight("model.norm.weight"), "model.norm"),
    in_target("one number of the head", None, "head", weight(HEAD), "logits"),
    in_target("two heads swapped", 1, "q", layer(1, "self_attn.q_proj.weight", swap_heads)),
    in_target("a channel's quantisation scale", 1, "MLP", layer(1, "mlp.gate_proj.weight", scale_channel)),
    in_target("a matrix's quantisation scale", 3, "v", layer(3, "self_attn.v_proj.weight", lambda v: v * 1.02)),
    in_target("a NaN", 2, "MLP", layer(2, "mlp.up_proj.weight", one_nan), "up_proj", "NaN"),
    in_context("one number of fc", None, "context", drafter("fc.weight"), "fc"),
    in_context("one number of the context's norm", None, "context", drafter("hidden_norm.weight"), "hidden_norm"),
    in_context("one number of the drafter's k", 0, "k", drafter("layers.0.self_attn.k_proj.weight")),
    in_context("one bias of the drafter's v", 1, "v", drafter("layers.1.self_attn.v_proj.bias")),
    in_drafter("one number of the drafter's q", 0, "q", drafter("layers.0.self_attn.q_proj.weight")),
    in_drafter("one number of the drafter's o", 1, "attention output", drafter("layers.1.self_attn.o_proj.weight")),
    in_drafter("one number of the drafter's MLP", 1, "MLP", drafter("layers.1.mlp.down_proj.weight")),
    in_drafter("one number of the drafter's last norm", None, "norm", drafter("norm.weight")),
]
ROPE = scaled_constant("model.model.rotary_emb.inv_freq", 1.001)
GRAPHS = [
    in_target("taps swapped", 0, "tap", planted(taps_are_swapped), "taps.0", "output of layer 2"),
    in_target("taps one layer late", 0, "tap", planted(taps_are_one_layer_late), "taps.0", "output of layer 1"),
    in_target("another rope base", 0, "rope", of_target(ROPE), "present.0.key"),
    in_target("the target one position late", 0, "rope", of_target(target_sits_one_position_late)),
    in_context("the context one position late", 0, "rope", planted(context_sits_one_position_late)),
    in_drafter("the block one position late", 0, "rope", planted(block_sits_one_position_late)),
    in_drafter("causal in place of bidirectional", 1, "attention", planted(full_layer_is_causal)),
    in_drafter("the drafter's window wider", 0, "attention", planted(window_is_one_wider), "", "window"),
    in_drafter("the drafter's window narrower", 0, "attention", planted(window_is_one_narrower)),
    in_target("the target's window wider", 2, "attention", of_target(target_window_is_wider)),
    in_target("another scale of scores", 1, "attention", of_target(attention_scale_is_off(1))),
    in_target("another epsilon", 0, "norm", of_target(epsilon_is_large)),
    in_target("a scaled residual", 1, "residual", of_target(residual_is_scaled)),
    in_drafter("a mask id inside the graph", None, "embedding", planted(last_slot_is_another_token)),
    in_target("the target's argmax off", None, "argmax", of_target(token_ids_are_off_by_one)),
    in_drafter("the drafter's argmax off", None, "argmax", graph("drafter.onnx", draft_ids_are_off_by_one)),
    in_drafter("an engine whose drafter reads the embedding as head", None, "head",
               engine("drafter.onnx", rename_weight(HEAD, EMBEDDING)), "draft_logits"),
    in_target("an engine that reads another layer's MLP", 1, "MLP",
              engine("target.onnx", other_weight("mlp.up_proj.weight", 1, 2)), "up_proj"),
]  # fmt: skip
FACTS = [
    of_pair("a stop id", "tokens", "stop ids", manifest(lambda d: d["text"].update(stop_token_ids=[257]))),
    of_pair("a template", "tokens", THINKING, text_file("chat_template.jinja", lambda t: t.replace("t: ", "t:"))),
    of_pair("a tokenizer", "tokens", "tokenizer", text_file("tokenizer.json", swap_two_letters), "ids of prompt"),
    of_pair("thinking mode", "acceptance", THINKING,
            manifest(lambda d: d["text"].update(template_args={"enable_thinking": True})), "template arguments"),
    of_pair("the mask id", "acceptance", "mask id", manifest(lambda d: d["drafter"].update(mask_token_id=510))),
    of_pair("tap ids", "acceptance", "taps", manifest(lambda d: d["taps"].update(layer_ids=[1, 3]))),
    of_pair("block size", "acceptance", "block size", manifest(lambda d: d["drafter"].update(block_size=4))),
]  # fmt: skip
FAULTS = [*WEIGHTS, *GRAPHS, *FACTS]
