"""Drafters with sliding windows on `ort-cpu`: rings of constant size that propose what the whole context proposes."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import Make, Once
from pairs import AUTHOR_PAIRS, MAIN, Pair

from dflash_engines import ort_cpu
from dflash_runtime import GenerationConfig, GenerationResult, Session
from dflash_runtime.bundle import MANIFEST_NAME, Bundle, write_record
from dflash_runtime.engine_record import HostEngineRecord, open_engine
from dflash_runtime.errors import EngineError
from dflash_runtime.ort_cpu import OrtCpuBackend
from dflash_runtime.window_rings import Ring, RingRows
from dflash_tools import draft_window_effect, engines_command
from dflash_tools.bundle_memory import session_memory
from dflash_tools.bundle_summary import summary_lines
from dflash_tools.engine_place import find_engine_place
from dflash_tools.ring_check import check_rings
from dflash_tools.validate_engine import BundleEngine

(BOTH_WAYS,) = (pair for pair in AUTHOR_PAIRS if pair.name == "qwen3-window-both-ways")
PAIRS = [BOTH_WAYS, MAIN]  # windows of 6 in both layers and blocks of 5; one window of 16 and blocks of 16
Ringed = Callable[[Pair], tuple[Path, Path]]


@pytest.fixture(scope="module")
def both(exported: Make, once: Once) -> Ringed:
    """A pair -> its bundle as it is lowered, and one whose engine's caches hold the whole context."""

    def whole(bundle: Path, folder: Path) -> None:
        shutil.copytree(bundle, folder / "bundle")
        lower_otherwise(folder / "bundle", lambda manifest, drafter, window=None: {})

    def make(pair: Pair) -> tuple[Path, Path]:
        bundle = exported(pair)
        return bundle, once(f"{pair.name}-without-rings", lambda folder: whole(bundle, folder)) / "bundle"

    return make


def facts_of(bundle: Path) -> tuple[int, int, int]:
    """Widest window, largest block, context, in tokens."""
    manifest = Bundle.open(bundle).manifest
    assert manifest.drafter is not None
    windows = [tensor.window_tokens for tensor in manifest.drafter.graph.state if tensor.window_tokens]
    return max(windows), max(manifest.block_sizes), manifest.max_context_tokens


def lower_otherwise(bundle: Path, rings: Callable[..., dict[str, Ring]]) -> None:
    shutil.rmtree(bundle / "engines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort_cpu, "drafter_rings", rings)
        ort_cpu.lower_bundle(bundle)


def schedule(bundle: Path, new_tokens: int, seed: int) -> GenerationConfig:
    rng, largest = random.Random(seed), facts_of(bundle)[1]
    sizes = [rng.choice([size for size in (1, 2, 4, 8, largest) if size <= largest]) for _ in range(400)]
    return GenerationConfig(
        max_new_tokens=new_tokens, stop_token_ids=(), block_schedule=lambda n: sizes[n], reuse_prefix=False
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(512) for _ in range(length)]


def essence(result: GenerationResult) -> tuple[Any, ...]:
    return result.token_ids, result.proposed_ids, result.acceptance_lengths, result.finish_reason


def said(bundle: Path, lengths: Sequence[int] = (1, 40, 41, 42), new_tokens: int | None = None) -> list[Any]:
    """Three windows of text behind each prompt; prefills in pieces of 24 tokens, more than the small ring has rows."""
    window, block, _ = facts_of(bundle)
    new_tokens = new_tokens or 3 * window + block
    with Session.open(bundle, threads=1, prefill_chunk_tokens=24) as session:
        return [
            essence(session.generate(prompt_of(length), schedule(bundle, new_tokens, length))) for length in lengths
        ]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_same_proposals_over_three_windows(both: Ringed, pair: Pair) -> None:
    ringed, whole = both(pair)
    assert open_engine(Bundle.open(ringed), "ort-cpu").rings and not open_engine(Bundle.open(whole), "ort-cpu").rings
    found = said(ringed)
    assert found == said(whole)
    assert len({n for result in found for n in result[2]}) > 1  # accepted in part
    assert sum(len(result[1]) for result in found) > 40


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_prompts_that_end_where_the_context_does(both: Ringed, pair: Pair) -> None:
    ringed, whole = both(pair)
    context = facts_of(ringed)[2]
    lengths = (context - 9, context - 2, context - 1, context)
    found = said(ringed, lengths, 99)
    assert found == said(whole, lengths, 99)
    assert [(len(one[0]), one[3]) for one in found] == [(context + 1 - length, "context") for length in lengths]


def ring_bytes(bundle: Path) -> tuple[int, int]:
    """Bytes of the drafter's caches that a session allocates, and of both models' by the facts."""
    opened = Bundle.open(bundle)
    with Session.open(bundle, threads=1) as session:
        assert isinstance(session._backend, OrtCpuBackend)
        states = (session._backend._drafter_state, session._backend._target_state)
        sizes = [sum(rows.nbytes for rows in state.values()) for state in states]
    place = find_engine_place(opened, "ort-cpu")
    assert session_memory(opened, place.precision, place.ring_rows).kv_bytes == sum(sizes)
    return sizes[0], sizes[1]


def with_context(bundle: Path, copy: Path, max_context_tokens: int) -> Path:
    shutil.copytree(bundle, copy)
    manifest = dataclasses.replace(Bundle.open(copy).manifest, max_context_tokens=max_context_tokens)
    write_record(copy / MANIFEST_NAME, manifest)
    shutil.rmtree(copy / "engines")
    ort_cpu.lower_bundle(copy)
    return copy


def test_memory_does_not_depend_on_the_context(both: Ringed, tmp_path: Path) -> None:
    ringed, whole = both(BOTH_WAYS)
    window, block, context = facts_of(ringed)
    drafter, target = ring_bytes(ringed)
    facts = Bundle.open(ringed).manifest.drafter
    assert facts is not None
    row_bytes = sum(4 * tensor.cache_shape(1)[1] * tensor.cache_shape(1)[3] for tensor in facts.graph.state)
    assert drafter == (window + block - 1) * row_bytes
    longer, longer_target = ring_bytes(with_context(ringed, tmp_path / "longer", 4 * context))
    assert longer == drafter and longer_target > target
    assert ring_bytes(whole)[0] > 5 * drafter


def test_a_context_no_longer_than_the_ring_keeps_the_whole_one(both: Ringed, tmp_path: Path) -> None:
    ringed, _ = both(BOTH_WAYS)
    window, block, _ = facts_of(ringed)
    for context, has_rings in ((window + block - 1, False), (window + block, True)):
        short = with_context(ringed, tmp_path / str(context), context)
        assert bool(open_engine(Bundle.open(short), "ort-cpu").rings) == has_rings


BACK = 40


def turns(bundle: Path, seed: int = 7) -> Iterator[tuple[GenerationResult, GenerationResult, int]]:
    """Ten turns of one session with fresh answers of another, and how far back the turn went into the text."""
    rng, text, back = random.Random(seed), prompt_of(20, seed), 0
    sizes = [size for size in (2, 4, 8, facts_of(bundle)[1]) if size <= facts_of(bundle)[1]]
    with Session.open(bundle, threads=1) as kept, Session.open(bundle, threads=1) as fresh:
        for turn in range(10):
            options: dict[str, Any] = {"max_new_tokens": 9, "stop_token_ids": ()}
            options |= {"plain": True} if turn % 4 == 3 else {"block_size": rng.choice(sizes)}
            result = kept.generate(text, GenerationConfig(**options))
            yield result, fresh.generate(text, GenerationConfig(**options, reuse_prefix=False)), back
            text, back = [*text, *result.token_ids], BACK if turn in (4, 7) else 0
            text = [*text[: len(text) - back], *prompt_of(2, turn)]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_ten_turns_are_ten_fresh_sessions(both: Ringed, pair: Pair) -> None:
    ringed, _ = both(pair)
    window, _, _ = facts_of(ringed)
    for number, (kept, fresh, back) in enumerate(turns(ringed)):
        assert essence(kept) == essence(fresh), f"turn {number}"
        if back:  # the target runs again over the rows the ring has lost
            assert kept.reused_token_count == kept.prompt_token_count - 2 - (window - 1)
        elif number:  # all rows that are there: the newest token had none
            assert kept.reused_token_count == kept.prompt_token_count - 3


def keeps_too_much(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RingRows, "keep", lambda self, rows: rows)


def runs_too_little_again(patch: pytest.MonkeyPatch) -> None:
    right = RingRows.keep
    patch.setattr(RingRows, "keep", lambda self, rows: min(rows, right(self, rows) + 4))


def counts_no_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RingRows, "wrote", lambda self, end: None)


@pytest.mark.parametrize("fault", [keeps_too_much, runs_too_little_again, counts_no_writes])
def test_a_ring_that_is_trusted_too_far_shows(
    both: Ringed, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    ringed, _ = both(BOTH_WAYS)
    fault(monkeypatch)
    assert any(essence(kept) != essence(fresh) for seed in range(6) for kept, fresh, _ in turns(ringed, seed))


def with_rings(bundle: Path, copy: Path, ring: Ring) -> Path:
    shutil.copytree(bundle, copy)
    names = open_engine(Bundle.open(bundle), "ort-cpu").rings
    lower_otherwise(copy, lambda manifest, drafter, window=None: dict.fromkeys(names, ring))
    return copy


@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one_shows(both: Ringed, tmp_path: Path, off: int) -> None:
    """In the proposals, and not in the text."""
    ringed, whole = both(BOTH_WAYS)
    window, block, _ = facts_of(ringed)
    wrong = with_rings(ringed, tmp_path / "wrong", Ring(window + off, window + block))
    lengths = range(30, 42)
    found, expected = said(wrong, lengths), said(whole, lengths)
    assert found != expected
    assert [result[0] for result in found] == [result[0] for result in expected]


def test_a_ring_one_row_short_shows_and_is_refused(
    both: Ringed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ringed, whole = both(BOTH_WAYS)
    window, block, _ = facts_of(ringed)
    wrong = with_rings(ringed, tmp_path / "wrong", Ring(window, window + block - 2))
    with pytest.raises(EngineError, match=f"is a ring of {window + block - 2} rows, a block of {block} needs"):
        Session.open(wrong)
    record = HostEngineRecord.read(wrong / "engines" / "ort-cpu", "")
    monkeypatch.setattr("dflash_runtime.ort_cpu.open_engine", lambda bundle, backend: record)
    lengths = range(30, 42)
    assert said(wrong, lengths) != said_whole(whole, monkeypatch, lengths)


def said_whole(bundle: Path, patch: pytest.MonkeyPatch, lengths: Sequence[int]) -> list[Any]:
    patch.setattr("dflash_runtime.ort_cpu.open_engine", open_engine)
    return said(bundle, lengths)


def test_a_window_for_layers_that_have_none(both: Ringed, tmp_path: Path) -> None:
    ringed, whole = both(MAIN)
    bounded = Path(shutil.copytree(ringed, tmp_path / "bounded"))
    bundle, (window, block, context) = Bundle.open(bounded), facts_of(ringed)
    record = ort_cpu.lower_bundle(bundle, draft_window_tokens=20)
    assert {(ring.window_tokens, ring.rows) for ring in record.rings.values()} == {(window, window + 15), (20, 35)}
    found, expected = said(bounded), said(whole)
    assert found != expected  # other proposals, the same text
    assert [result[0] for result in found] == [result[0] for result in expected]
    # It does not stay where none is asked for.
    assert ort_cpu.lower_bundle(bundle, draft_window_tokens=20) == record
    assert ort_cpu.lower_bundle(bundle).rings == open_engine(Bundle.open(ringed), "ort-cpu").rings
    for wrong in (block - 1, context - block + 1):
        with pytest.raises(EngineError, match=f"A draft window of {wrong} tokens is asked for"):
            ort_cpu.lower_bundle(bundle, draft_window_tokens=wrong)


def test_a_build_compares_rings_with_the_whole_context(both: Ringed, tmp_path: Path) -> None:
    ringed, whole = both(MAIN)
    rows = check_rings(Bundle.open(ringed), "ort-cpu")
    assert {row.tensor for row in rows} == {"drafter draft_logits", "drafter draft_ids"}
    assert all(row.passed and row.stage == "rings" for row in rows)
    assert check_rings(Bundle.open(whole), "ort-cpu") == []
    window, block, _ = facts_of(ringed)
    wrong = with_rings(ringed, tmp_path / "wrong", Ring(window - 1, window + block - 1))
    assert not all(row.passed for row in check_rings(Bundle.open(wrong), "ort-cpu"))


def test_the_command_says_what_it_made(both: Ringed, tmp_path: Path) -> None:
    ringed, _ = both(MAIN)
    bundle = str(shutil.copytree(ringed, tmp_path / "bundle"))
    made = CliRunner().invoke(engines_command.command, [bundle, "--draft-window", "20"])
    assert made.exit_code == 0, made.output
    assert "2 drafter layer(s) keep rings of 31, 35 rows" in made.stdout
    assert "see 20 tokens (--draft-window)" in made.stdout
    assert any("see 20 tokens (--draft-window)" in line for line in summary_lines(Bundle.open(bundle)))
    with pytest.raises(EngineError, match="sees 20 tokens"):
        BundleEngine(Bundle.open(bundle), "ort-cpu")


def test_what_a_window_costs_and_spares(both: Ringed, tmp_path: Path) -> None:
    ringed, _ = both(MAIN)
    (tmp_path / "prompts.txt").write_text("why\nand how\n", encoding="utf-8")
    before = sorted(path.name for path in ringed.parent.iterdir())
    argv = [str(ringed), "--window", "20", "--prompts", str(tmp_path / "prompts.txt"), "--context", "60"]
    argv += ["--max-new-tokens", "12", "--threads", "1", "--json"]
    done = CliRunner().invoke(draft_window_effect.main, argv)
    assert done.exit_code == 0, done.output
    without, bounded = json.loads(done.stdout)["engines"]
    assert (without["same_texts"], bounded["same_texts"]) == (2, 2)
    assert bounded["drafter_kv_bytes"] < without["drafter_kv_bytes"] and bounded["rounds"] > 0
    assert sorted(path.name for path in ringed.parent.iterdir()) == before
    assert "draft_window" not in open_engine(Bundle.open(ringed), "ort-cpu").versions
