"""One process or several: `torchrun` tells each its place in the environment, and gradients are summed over all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

import torch
import torch.distributed
from torch import Tensor, nn


class Processes:
    """This process among those of one training.

    Attributes:
        rank: Its number, 0 for the one that writes and reports.
        count: How many there are.
        device: Where this one computes.
    """

    def __init__(self, rank: int, count: int, device: torch.device) -> None:
        self.rank, self.count, self.device = rank, count, device

    @property
    def first(self) -> bool:
        """Whether this process writes and reports."""
        return self.rank == 0

    def sum_gradients(self, parameters: Iterable[nn.Parameter], loss: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Sums gradients, loss and weight over all processes, then divides the gradients by the whole weight.

        Args:
            parameters: With the gradients of this process's weighted loss sum.
            loss: Weighted sum of cross-entropies here.
            weight: Sum of weights here.

        Returns:
            The sums of loss and weight.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.count > 1:
            flat = torch.cat([*(g.flatten() for g in gradients), loss[None], weight[None]])
            torch.distributed.all_reduce(flat)
            start = 0
            for gradient in gradients:
                gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
                start += gradient.numel()
            loss, weight = flat[-2], flat[-1]
        for gradient in gradients:
            gradient.div_(weight)
        return loss, weight

    def first_says(self, flag: bool) -> bool:
        """The first process's answer, the same in all of them."""
        if self.count == 1:
            return flag
        word = torch.tensor([int(flag)], device=self.device)
        torch.distributed.broadcast(word, 0)
        return bool(word.item())


@contextlib.contextmanager
def joined_processes() -> Iterator[Processes]:
    """Joins the processes `torchrun` started; alone where it did not."""
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if count > 1:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(rank, count, device)
    finally:
        if count > 1:
            torch.distributed.destroy_process_group()


def default_device() -> torch.device:
    """The first GPU where there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def half_precision_pays(device: torch.device) -> bool:
    """Whether matrix products in bf16 are done by the hardware: on every GPU meant here, and on some CPUs."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16") or found.get("arm_bf16") or found.get("bf16"))
