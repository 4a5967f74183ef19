"""Kept rows where attention has a window: all rows are there, and a mask says which are seen."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from conftest import Make
from pairs import AUTHOR_PAIRS, MAIN

from dflash_runtime import GenerationConfig, Session
from dflash_runtime.bundle import Bundle


@pytest.mark.parametrize("name", ["qwen3-target-window", MAIN.name])  # a window in the target, one in the drafter
def test_turns_that_begin_before_inside_and_behind_the_window(exported: Make, name: str) -> None:
    (pair,) = (pair for pair in (*AUTHOR_PAIRS, MAIN) if pair.name == name)
    path, rng = exported(pair), random.Random(3)
    assert "windowed_kv" in _kinds_of_state(Bundle.open(path))
    text, reused = [rng.randrange(512) for _ in range(5)], 0
    with Session.open(path, threads=1) as kept, Session.open(path, threads=1) as whole:
        for turn in range(9):
            options: Any = {"plain": True} if turn % 3 == 0 else {"block_size": (4, 3)[turn % 2]}
            config = GenerationConfig(max_new_tokens=7, stop_token_ids=(), **options)
            result = kept.generate(text, config)
            alone = whole.generate(text, dataclasses.replace(config, reuse_prefix=False))
            assert (result.token_ids, result.proposed_ids) == (alone.token_ids, alone.proposed_ids)
            reused += result.reused_token_count
            text = [*text, *result.token_ids, *(rng.randrange(512) for _ in range(3))]
            if turn == 6:
                text = text[:14]  # back to before the window's width
    assert reused > 200


def _kinds_of_state(bundle: Bundle) -> list[str]:
    manifest = bundle.manifest
    graphs = [manifest.target.graph, *([manifest.drafter.context_graph] if manifest.drafter else [])]
    return [state.kind for graph in graphs for state in graph.state]
