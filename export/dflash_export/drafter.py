"""The DFlash drafter as a PyTorch module of our own; its parameters have the names of the authors' checkpoints.

Letters: B batch, C context rows, b block tokens (anchor included), K taps, H hidden, D head dim, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash_export.drafter_attention import LayerAttention
from dflash_export.drafter_config import DrafterConfig
from dflash_export.drafter_dflash2 import CandidateSelector, DynamicConv
from dflash_export.drafter_rope import rope_frequencies

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [B, heads, b, D], block keys and values [B, kv_heads, b, D]) -> [B, heads, b, D]; the context is
the callee's own."""


class Norm(nn.Module):
    """RMS norm in fp32, rounded to the input's dtype before the weight is applied."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H, D, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = D
        self.q_proj = nn.Linear(H, config.num_heads * D, bias=bias)
        self.k_proj = nn.Linear(H, config.num_kv_heads * D, bias=bias)
        self.v_proj = nn.Linear(H, config.num_kv_heads * D, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * D, H, bias=bias)
        self.q_norm = Norm(D, config.rms_norm_eps)
        self.k_norm = Norm(D, config.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        """[B, S, heads * D] -> [B, S, heads, D]."""
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def rows(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv_heads, S, D] of rows [B, S, H]: the same for context and block."""
        key = rotate(self.k_norm(self.heads(self.k_proj(x))).transpose(1, 2), turn)
        return key, self.heads(self.v_proj(x)).transpose(1, 2)

    def query(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """[B, b, H] -> [B, heads, b, D]."""
        return rotate(self.q_norm(self.heads(self.q_proj(x))).transpose(1, 2), turn)


class _Mlp(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class _Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        added = config.dflash2
        self.attention_conv = None if added is None else DynamicConv(added, config.hidden_size)
        self.mlp_conv = None if added is None else DynamicConv(added, config.hidden_size)


class Drafter(nn.Module):
    """A drafter with the embedding table and output head it uses, usually the target's.

    Attributes:
        config: Its facts.
        embed_tokens: The raw table [V, H]; never a target's own embedding module, which may scale or normalise.
        lm_head: The output head [V, H], or [draft vocabulary, H].
        target_ids: The target's id of each row of a head over part of the vocabulary; None for the whole one.
    """

    def __init__(self, config: DrafterConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        H = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, H, bias=False)
        self.hidden_norm = Norm(H, config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = Norm(H, config.rms_norm_eps)
        self.embed_tokens = nn.Embedding(vocab_size, H)
        self.lm_head = nn.Linear(H, config.draft_vocab_size or vocab_size, bias=False)
        self.target_ids: Tensor | None
        self.register_buffer("target_ids", None, persistent=False)
        if config.dflash2 is not None:
            self.candidate_selector = CandidateSelector(config.dflash2, H, vocab_size)
        with torch.device("cpu"):  # real values even where the parameters are hollow
            frequencies, self.rope_factor = rope_frequencies(
                config.rope_parameters, config.head_dim, config.max_position_tokens, "the drafter's config"
            )
        self.inverse_frequencies: Tensor
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def context(self, taps: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The key and value rows that taps add to the drafter's context.

        Args:
            taps: [B, S, K*H] raw outputs of the tapped target layers, in the drafter's dtype or in fp32.
            positions: [B, S] absolute.

        Returns:
            Per layer keys and values [B, kv_heads, S, D].
        """
        # Real taps reach 2e4 and their fused sum leaves fp16's range, so fusing and norm stay in fp32.
        fused = functional.linear(taps.float(), self.fc.weight.float())
        fused = fused * torch.rsqrt(fused.pow(2).mean(-1, keepdim=True) + self.hidden_norm.eps)
        rows = (fused * self.hidden_norm.weight.float()).to(self.hidden_norm.weight.dtype)  # taps may be wider
        turn = self.rotation(positions, rows.dtype)
        return [layer.self_attn.rows(rows, turn) for layer in self._layers()]

    def block(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [B, b, H] of a block, after the final norm.

        Args:
            input_ids: [B, b] anchor, then mask ids.
            positions: [B, b] absolute.
            attend: Attention over context and block.
        """
        hidden = _scaled(self.embed_tokens(input_ids), self.config.input_embedding_scale)
        dtype, turn = hidden.dtype, self.rotation(positions, hidden.dtype)
        if self.config.dflash2 is not None:
            hidden = hidden.float()  # the sums between the sublayers of DFlash 2 leave fp16's range
        for i, layer in enumerate(self._layers()):
            attention = functools.partial(self._attention, i, layer, turn, attend)
            hidden = hidden + _between(layer.attention_conv, attention, layer.input_layernorm(hidden).to(dtype))
            hidden = hidden + _between(layer.mlp_conv, layer.mlp, layer.post_attention_layernorm(hidden).to(dtype))
        output: Tensor = self.norm(hidden).to(dtype)
        return output

    def _attention(self, i: int, layer: _Layer, turn: tuple[Tensor, Tensor], attend: Attend, x: Tensor) -> Tensor:
        key, value = layer.self_attn.rows(x, turn)
        seen = attend(i, layer.self_attn.query(x, turn), key, value)
        output: Tensor = layer.self_attn.o_proj(seen.transpose(1, 2).flatten(2))
        return output

    def outputs(self, hidden: Tensor, logits: Tensor, anchor_ids: Tensor) -> dict[str, Tensor]:
        """What the drafter's graph says of a block: the greedy proposals, and what others can be drawn from.

        Args:
            hidden: [B, S, H] of the slots after the anchor.
            logits: [B, S, V] from `logits`.
            anchor_ids: [B, 1]

        Returns:
            `draft_ids` [B, S], ids of the target's vocabulary, and `draft_logits`. For DFlash 2 `draft_candidates` and
            `draft_edges`, see `CandidateSelector.edges`. Where the drafter has a vocabulary of its own,
            `draft_vocabulary` [B, 1, V]: the target's id of each of its tokens.
        """
        if self.config.dflash2 is not None:
            candidates, edges = self.candidate_selector.edges(hidden, logits, anchor_ids)
            ids = self.candidate_selector.walk(candidates, edges)
            return {"draft_ids": ids, "draft_logits": logits, "draft_candidates": candidates, "draft_edges": edges}
        best = logits.argmax(-1)
        if self.target_ids is None:
            return {"draft_ids": best, "draft_logits": logits}
        # An output that depends on no input is no output to every backend.
        vocabulary = self.target_ids + 0 * anchor_ids.unsqueeze(2)
        return {"draft_ids": self.target_ids[best], "draft_logits": logits, "draft_vocabulary": vocabulary}

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, V] in fp32; V is the draft vocabulary where the drafter has one of its own."""
        logits = _scaled(self.lm_head(hidden).float(), self.config.output_multiplier)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, 1, S, D]: angles in fp32, since half precision cannot count positions."""
        angles = positions.unsqueeze(1).unsqueeze(3).float() * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.rope_factor).to(dtype), (angles.sin() * self.rope_factor).to(dtype)

    def _layers(self) -> list[_Layer]:
        return [layer for layer in self.layers if isinstance(layer, _Layer)]


def _between(conv: DynamicConv | None, sublayer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A sublayer, between its convolutions where there are any."""
    return sublayer(x) if conv is None else conv.around(sublayer, x)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [B, heads, S, D]; pair i is made of elements i and i + D/2."""
    cosine, sine = turn
    low, high = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-high, low), dim=-1) * sine


@torch.no_grad()
def proposals_by_definition(drafter: Drafter, hidden: Tensor, logits: Tensor, anchor_ids: Tensor) -> Tensor:
    """The reference of the proposals of `Drafter.outputs`: DFlash 2 walks from slot to slot.

    Args:
        drafter: With real weights.
        hidden: [B, b, H] of the whole block, as `draft_without_cache` gives it.
        logits: [B, b - 1, V] of the slots after the anchor.
        anchor_ids: [B, 1]

    Returns:
        [B, b - 1]
    """
    if drafter.config.dflash2 is not None:
        return drafter.candidate_selector.walk_slot_by_slot(hidden[:, 1:], logits, anchor_ids)
    return drafter.outputs(hidden[:, 1:], logits, anchor_ids)["draft_ids"]


@torch.no_grad()
def draft_without_cache(drafter: Drafter, taps: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The reference: one draft with everything computed anew and every mask written out.

    Args:
        drafter: With real weights.
        taps: [B, C, K*H] of all committed rows.
        input_ids: [B, b] anchor, then mask ids; the anchor is at position C.

    Returns:
        hidden [B, b, H] after the final norm, logits [B, b - 1, V] of the slots after the anchor.
    """
    positions = torch.arange(taps.shape[1])[None, :].expand(input_ids.shape[0], -1)
    return draft_on_context(drafter, drafter.context(taps, positions), input_ids)


@torch.no_grad()
def draft_on_context(
    drafter: Drafter, context: list[tuple[Tensor, Tensor]], input_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """The same over context rows that are given.

    Args:
        drafter: With real weights.
        context: Per layer keys and values [B, kv_heads, C, D].
        input_ids: [B, b] anchor, then mask ids; the anchor is at position C.

    Returns:
        As `draft_without_cache`.
    """
    C, b = context[0][0].shape[2], input_ids.shape[1]
    positions = torch.arange(C, C + b)[None, :].expand(input_ids.shape[0], -1)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys = torch.cat((context[layer][0], key), dim=2)
        values = torch.cat((context[layer][1], value), dim=2)
        return masked_attention(query, keys, values, drafter.config.layers[layer])

    hidden = drafter.block(input_ids, positions, attend)
    return hidden, drafter.logits(hidden[:, 1:])


def masked_attention(query: Tensor, keys: Tensor, values: Tensor, rule: LayerAttention) -> Tensor:
    """Softmax attention, scores in fp32, of the last b positions over all S of them.

    Args:
        query: [B, heads, b, D]
        keys: [B, kv_heads, S, D]
        values: [B, kv_heads, S, D]
        rule: What the layer sees.

    Returns:
        [B, heads, b, D]
    """
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    positions = torch.arange(keys.shape[2])
    seen = rule.sees(positions[-query.shape[2] :, None], positions[None, :])
    scores = (query @ keys.transpose(2, 3)).float() * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    output: Tensor = weights.to(values.dtype) @ values
    return output
