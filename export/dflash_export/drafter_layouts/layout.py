"""What a layout of drafter checkpoints has to say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way of writing a drafter's config and tensors, by its differences from z-lab's."""

    name: str
    recognises: Callable[[Mapping[str, Any]], bool]
    """Whether a config.json is written in it."""
    to_zlab: Callable[[Mapping[str, Any], str], dict[str, Any]]
    """(content of config.json, its path for messages) -> the same facts under z-lab's keys."""
    unknown_keys: Callable[[Mapping[str, Any]], list[str]]
    """Keys that may change what a drafter computes and that nobody here has heard of."""
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Tensor name -> z-lab's name, where they differ."""
    of_training: frozenset[str] = frozenset()
    """Tensors that training keeps of the target and drafting does not use."""
