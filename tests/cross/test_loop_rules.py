"""The rules of the decode loop, held on a real bundle: real caches, real kernels, real proposals."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Make
from pairs import HALF_PAIRS, MAIN, Pair

from dflash_runtime import GenerationConfig, GenerationResult, PromptError, Session
from dflash_runtime.bundle import MANIFEST_NAME

CONTEXT = MAIN.max_context_tokens or 0
PROMPT = [5, 17, 3, 60, 42, 8]
FREE = GenerationConfig(max_new_tokens=48, stop_token_ids=())
PLAIN = dataclasses.replace(FREE, plain=True)


def config(**changes: Any) -> GenerationConfig:
    return dataclasses.replace(FREE, **changes)


def essence(result: GenerationResult) -> tuple[Any, ...]:
    return result.token_ids, result.acceptance_lengths, result.proposed_ids, result.finish_reason


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(512) for _ in range(length)]


@pytest.fixture(scope="module")
def bundle(built: Make) -> Path:
    return built(MAIN)


@pytest.fixture(scope="module")
def shared(bundle: Path) -> Iterator[Session]:
    with Session.open(bundle, threads=1, prefill_chunk_tokens=32) as session:
        yield session


@pytest.fixture(scope="module")
def fresh(bundle: Path) -> Iterator[Session]:
    """Prefills everything in one piece."""
    with Session.open(bundle, threads=1, prefill_chunk_tokens=256) as session:
        yield session


class Script:
    """A drafter that is right but at chosen absolute positions; the real one runs too, as its state must live on."""

    def __init__(self, session: Session, prompt: list[int], errors_at: Iterable[int] = ()) -> None:
        self.tokens = prompt + session.generate(prompt, config(max_new_tokens=10**6, plain=True)).token_ids
        self.errors_at = set(errors_at)
        self.backend: Any = session._backend
        self.draft = self.backend.draft

    def __call__(self, anchor: int, block_size: int, position: int) -> list[int]:
        assert self.tokens[position] == anchor
        assert len(self.draft(anchor, block_size, position)) == block_size - 1
        places = range(position + 1, position + block_size)
        right = [self.tokens[p] if p < len(self.tokens) else 0 for p in places]
        return [(t + 1) % 512 if p in self.errors_at else t for p, t in zip(places, right, strict=True)]


@pytest.fixture
def scripted(shared: Session, monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(prompt: list[int], errors_at: Iterable[int] = ()) -> Script:
        script = Script(shared, prompt, errors_at)
        monkeypatch.setattr(shared._backend, "draft", script)
        return script

    return start


@pytest.mark.parametrize("pair", [MAIN, *HALF_PAIRS], ids=lambda pair: pair.name)
def test_speculative_says_what_plain_says(built: Make, exported: Make, pair: Pair) -> None:
    """Half-precision bundles are executed in fp32 here, so near ties are no excuse."""
    made = exported(pair) if pair.precision == "fp16" else built(pair)
    accepted: set[int] = set()
    with Session.open(made, threads=1) as session:
        for seed in range(20):
            prompt = prompt_of(6, seed)
            expected = session.generate(prompt, PLAIN).token_ids
            for block in (4, 7, 16):
                result = session.generate(prompt, config(block_size=block))
                assert result.token_ids == expected
                accepted |= set(result.acceptance_lengths)
    assert len(accepted) > 4  # the prompts saw many kinds of rounds


@pytest.mark.parametrize(("errors_at", "counts"), [((), [4] * 6), ((9, 14), [3, 4, 1, 4, 4, 4, 4])])
def test_rounds_commit_what_was_right(
    shared: Session, scripted: Any, errors_at: tuple[int, ...], counts: list[int]
) -> None:
    script = scripted(PROMPT, errors_at)
    result = shared.generate(PROMPT, config(max_new_tokens=25, block_size=4))
    assert result.acceptance_lengths == counts
    assert result.token_ids == script.tokens[6 : 6 + 25]


def test_a_stop_token_ends_the_output_inside_a_block(shared: Session, scripted: Any) -> None:
    tokens = scripted(PROMPT).tokens[len(PROMPT) :]
    assert shared.tokenizer is not None
    for stop in set(tokens[:12]):
        end = tokens.index(stop)
        options = config(block_size=4, stop_token_ids=[stop])
        result = shared.generate(PROMPT, options)
        assert (result.token_ids, result.finish_reason) == (tokens[: end + 1], "stop")
        assert result.text == shared.tokenizer.decode(tokens[:end])
        assert "".join(shared.stream(PROMPT, options)) == result.text


@pytest.mark.parametrize("precise", [True, False], ids=["generation-config", "config"])
def test_the_first_of_several_stop_ids_counts(built: Make, tmp_path: Path, shared: Session, precise: bool) -> None:
    """As the checkpoint states them; nothing is given with the request."""
    from dflash_export.text_files import read_text_facts

    tokens = shared.generate(PROMPT, PLAIN).token_ids
    a, b = list(dict.fromkeys(tokens))[:2]
    for stops in ([a, b], [b, a], [b], b):
        source = tmp_path / "source"
        shutil.copytree(built(MAIN).parent / "target", source, dirs_exist_ok=True)
        _edit(source / "config.json", eos_token_id=a if precise else stops)
        if precise:
            _edit(source / "generation_config.json", eos_token_id=stops)
        else:
            (source / "generation_config.json").unlink()
        facts, _ = read_text_facts(source, {})
        copy = shutil.copytree(shared.bundle.path, tmp_path / "b", dirs_exist_ok=True)
        _edit(copy / MANIFEST_NAME, text=dataclasses.asdict(facts))
        with Session.open(copy, threads=1) as session:
            end = min(tokens.index(s) for s in (stops if isinstance(stops, list) else [stops]))
            result = session.generate(PROMPT, GenerationConfig(max_new_tokens=48))
            assert (result.token_ids, result.finish_reason) == (tokens[: end + 1], "stop")


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def test_the_mask_id_may_be_a_word(shared: Session, tmp_path: Path) -> None:
    expected = shared.generate(PROMPT, PLAIN).token_ids
    copy = shutil.copytree(shared.bundle.path, tmp_path / "b")
    data = json.loads((copy / MANIFEST_NAME).read_text(encoding="utf-8"))
    _edit(copy / MANIFEST_NAME, drafter={**data["drafter"], "mask_token_id": expected[3]})
    with Session.open(copy, threads=1) as session:
        assert session.generate(PROMPT, FREE).token_ids == expected


@pytest.mark.parametrize("seed", range(3))
def test_every_round_drafts_as_if_prefilled(shared: Session, fresh: Session, seed: int) -> None:
    """No row of target or drafter is lost, doubled or late, whatever block sizes follow each other."""
    rng = random.Random(seed)
    sizes = [rng.choice([1, 4, 8, 16]) for _ in range(150)]
    prompt, new = prompt_of(9, seed), 120
    result = shared.generate(prompt, config(max_new_tokens=new, block_schedule=lambda n: sizes[n]))
    assert result.token_ids == shared.generate(prompt, config(max_new_tokens=new, plain=True)).token_ids
    tokens = prompt + result.token_ids
    rounds = iter(zip(result.proposed_ids, result.acceptance_lengths, strict=True))
    known = len(prompt) + 1
    for size in sizes:
        if known == len(tokens):
            break
        block = min(size, len(tokens) + 1 - known)
        if block == 1:
            known += 1
            continue
        proposed, committed = next(rounds)
        once = fresh.generate(tokens[: known - 1], config(max_new_tokens=block, block_size=block))
        assert once.proposed_ids[0] == proposed
        known += committed
    assert next(rounds, None) is None


def test_a_draft_after_many_plain_steps_is_as_if_prefilled(bundle: Path, fresh: Session) -> None:
    """Tap rows of plain steps wait for a draft; there are more of them than the buffer in which they wait holds."""
    prompt, steps = prompt_of(7), 90
    largest = max(fresh.bundle.manifest.block_sizes)
    assert steps > 2 * largest
    with Session.open(bundle, threads=1, prefill_chunk_tokens=4) as session:
        schedule = config(max_new_tokens=steps + 40, block_schedule=lambda n: 1 if n < steps else 8)
        result = session.generate(prompt, schedule)
    assert result.token_ids == fresh.generate(prompt, config(max_new_tokens=steps + 40, plain=True)).token_ids
    once = fresh.generate(prompt + result.token_ids[:steps], config(max_new_tokens=8, block_size=8))
    assert once.token_ids[0] == result.token_ids[steps]
    assert once.proposed_ids[0] == result.proposed_ids[0]


@pytest.mark.parametrize("length", [1, 4, 5, 8, 10, 33])
def test_prefill_in_pieces_is_prefill_in_one(bundle: Path, fresh: Session, length: int) -> None:
    prompt = prompt_of(length)
    with Session.open(bundle, threads=1, prefill_chunk_tokens=4) as session:
        assert essence(session.generate(prompt, FREE)) == essence(fresh.generate(prompt, FREE))


def test_a_request_is_alone(bundle: Path, shared: Session) -> None:
    prompts = [prompt_of(length) for length in (20, 6, 20, 40)]
    expected = []
    for prompt in prompts:
        with Session.open(bundle, threads=1, prefill_chunk_tokens=32) as opened:
            expected.append(essence(opened.generate(prompt, FREE)))
    for prompt, known in zip(prompts, expected, strict=True):
        assert essence(shared.generate(prompt, FREE)) == known
    for prompt, known in zip(reversed(prompts), reversed(expected), strict=True):
        aborted = shared.stream(prompt_of(50), FREE)
        for _ in range(3):
            next(aborted)
        aborted.close()
        assert essence(shared.generate(prompt, FREE)) == known


@pytest.mark.parametrize("fill", [1e4, np.nan, np.inf])
def test_dead_rows_do_not_matter(bundle: Path, shared: Session, fill: float) -> None:
    with Session.open(bundle, threads=1, prefill_chunk_tokens=32) as session:
        backend: Any = session._backend
        for rows in (*backend._target_state.values(), *backend._drafter_state.values()):
            rows[:] = fill
        for options in (FREE, PLAIN):
            assert essence(session.generate(PROMPT, options)) == essence(shared.generate(PROMPT, options))


@pytest.mark.parametrize("length", [CONTEXT - 20, CONTEXT - 3, CONTEXT - 1, CONTEXT])
@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("perfect", [False, True])
def test_the_context_is_used_to_its_last_row(
    shared: Session, scripted: Any, length: int, block: int, perfect: bool
) -> None:
    prompt = prompt_of(length)
    expected = shared.generate(prompt, config(max_new_tokens=100, plain=True)).token_ids
    if perfect:
        scripted(prompt)
    result = shared.generate(prompt, config(max_new_tokens=100, block_size=block))
    assert (result.token_ids, result.finish_reason) == (expected, "context")
    assert len(expected) == CONTEXT + 1 - length


def test_a_prompt_over_the_context_is_refused(shared: Session) -> None:
    with pytest.raises(PromptError, match=rf"{CONTEXT + 1} tokens.*{CONTEXT}"):
        shared.generate(prompt_of(CONTEXT + 1))


@pytest.mark.parametrize("chunk", [4, 16, 64])
def test_no_write_passes_the_buffers(bundle: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Caches lie between guards, and rows that no call may reach stay as they were."""
    from dflash_runtime import ort_cpu

    guards, buffers, ringed = [], [], []
    allocate = ort_cpu._allocate

    def guarded(state: Any, capacity: int, rings: Any) -> dict[str, Any]:
        made = {}
        for name, array in allocate(state, capacity, rings).items():
            margin = 64 * array.shape[-1]
            memory = np.full(array.size + 2 * margin, np.float32(7.25))
            guards.extend([memory[:margin], memory[-margin:]])
            made[name] = memory[margin:-margin].reshape(array.shape)
            (ringed if name in rings else buffers).append(made[name])
        return made

    monkeypatch.setattr(ort_cpu, "_allocate", guarded)
    with Session.open(bundle, threads=1, prefill_chunk_tokens=chunk) as session:
        for length in (1, CONTEXT - 17, CONTEXT - 1, CONTEXT):
            for block in (1, 4, 16):
                session.generate(prompt_of(length), config(max_new_tokens=100, block_size=block))
    assert (len(buffers), len(ringed)) == (10, 2)
    assert {rows.shape[2] for rows in ringed} == {16 + 16 - 1}
    assert all((guard == 7.25).all() for guard in guards)
    for rows in buffers:
        assert rows.shape[2] == CONTEXT + max(16, chunk)
        assert (rows[:, :, CONTEXT + 1 :] == 7.25).all()
