"""What DFlash 2 adds to the drafter: convolutions inside the block, and a choice among the likeliest candidates.

Letters: B batch, b block tokens (anchor included), H hidden, t kernel size, G groups of g channels, S slots (b - 1),
k candidates of a slot, r rank. Parameters have the names of the authors' checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dflash_export.drafter_config import DFlash2Config

DOUBLINGS = 6
MOST_SLOTS = 1 << DOUBLINGS
"""Slots after the anchor that `CandidateSelector.walk` can serve."""


class DynamicConv(nn.Module):
    """Two causal convolutions over the block, around a sublayer; part of their kernels depends on the token."""

    def __init__(self, config: DFlash2Config, hidden_size: int) -> None:
        super().__init__()
        self.kernel_size, self.groups = config.conv_kernel_size, hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * self.kernel_size * self.groups, bias=False)

    def kernels(self, x: Tensor) -> Tensor:
        """The token-dependent part of both kernels, [B, b, 2, t, G], from the sublayer's normed input [B, b, H]."""
        output: Tensor = self.kernel_projection(x).view(*x.shape[:-1], 2, self.kernel_size, self.groups)
        return output

    def around(self, sublayer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The sublayer between its two convolutions, [B, b, H] -> [B, b, H]."""
        kernels = self.kernels(x)
        return self.convolve(sublayer(self.convolve(x, kernels, 0)), kernels, 1)

    def convolve(self, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        """[B, b, H] -> [B, b, H]; side 0 is before the sublayer, 1 after it. Before the anchor lies nothing."""
        B, b, H = x.shape
        output = x.new_zeros(())
        for offset in range(self.kernel_size):
            earlier = x if offset == 0 else torch.cat((x.new_zeros(B, offset, H), x), dim=1)[:, :b]
            earlier = earlier.reshape(B, b, self.groups, H // self.groups)
            fixed = self.base_kernel[side, offset].view(self.groups, H // self.groups)
            output = output + fixed * earlier + kernels[:, :, side, offset].unsqueeze(-1) * earlier
        return output.reshape(B, b, H)


class CandidateSelector(nn.Module):
    """Chooses among each slot's likeliest tokens by what its neighbour before it is."""

    def __init__(self, config: DFlash2Config, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(hidden_size, config.selector_rank, bias=False)

    def scores(self, hidden: Tensor, logits: Tensor, predecessors: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates of every slot, and what each is worth after each possible predecessor.

        Args:
            hidden: [B, S, H] after the final norm.
            logits: [B, S, V] in fp32.
            predecessors: [B, S, p] token ids.

        Returns:
            candidates [B, S, k], scores [B, S, p, k] in fp32.
        """
        likelihood, candidates = torch.topk(logits, self.top_k, dim=-1)
        return candidates, likelihood.unsqueeze(2) + self._transitions(hidden, predecessors, candidates)

    def _transitions(self, hidden: Tensor, predecessors: Tensor, candidates: Tensor) -> Tensor:
        projected = self.hidden_projection(hidden).float().unsqueeze(2)
        context = self.predecessor_codebook[predecessors].float() * projected
        output: Tensor = context @ self.successor_codebook[candidates].float().transpose(2, 3)
        return output

    def edges(self, hidden: Tensor, logits: Tensor, anchor_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates of every slot, and what each is worth after each candidate of the slot before.

        Args:
            hidden: [B, S, H] after the final norm.
            logits: [B, S, V] in fp32.
            anchor_ids: [B, 1]

        Returns:
            candidates [B, S, k], scores [B, S, k, k] in fp32; before the first slot is the anchor, k times.
        """
        likelihood, candidates = torch.topk(logits, self.top_k, dim=-1)
        first = anchor_ids.unsqueeze(2).expand(-1, 1, self.top_k)
        predecessors = torch.cat((first, candidates), dim=1)[:, : logits.shape[1]]
        return candidates, likelihood.unsqueeze(2) + self._transitions(hidden, predecessors, candidates)

    def walk(self, candidates: Tensor, edges: Tensor) -> Tensor:
        """The chosen token of every slot, [B, S], without a loop over the slots.

        Every slot's choice is a map from its predecessor's number among the candidates to its own. The walk is the
        composition of these maps, taken over 1, 2, 4, ... neighbouring slots at a time.

        Args:
            candidates: [B, S, k] from `edges`.
            edges: [B, S, k, k] from there.

        Returns:
            [B, S]; right for up to `MOST_SLOTS` slots, which the pair check keeps to.
        """
        S = candidates.shape[1]
        chosen = edges.argmax(-1)  # [B, S, k]
        same = torch.arange(self.top_k).expand(candidates.shape[0], 1, self.top_k)
        for doubling in range(DOUBLINGS):
            before = torch.cat((same.expand(-1, 1 << doubling, -1), chosen), dim=1)[:, :S]
            chosen = chosen.gather(2, before)
        return candidates.gather(2, chosen[:, :, :1]).squeeze(2)

    def walk_slot_by_slot(self, hidden: Tensor, logits: Tensor, anchor_ids: Tensor) -> Tensor:
        """The same by its definition, for reference: one slot after the other."""
        previous, path = anchor_ids, []
        for slot in range(logits.shape[1]):
            here = slice(slot, slot + 1)
            candidates, scores = self.scores(hidden[:, here], logits[:, here], previous.unsqueeze(2))
            previous = candidates[:, 0].gather(1, scores[:, 0, 0].argmax(-1, keepdim=True))
            path.append(previous)
        return torch.cat(path, dim=1)
