"""Drafters with sliding windows on a device: caches of constant size that propose what the whole context proposes."""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Make
from pairs import AUTHOR_PAIRS, HALF_PAIRS, MAIN, Pair
from recorded_engines import BACKENDS, write_recorded_engines
from recording_device import RecordingDevice

from dflash_engines import tensorrt_engines
from dflash_engines.draft_windows import drafter_rings
from dflash_engines.portable_graph import load_portable
from dflash_engines.tensorrt_plan import EngineOptions, EnginePlan
from dflash_engines.tensorrt_versions import VERSIONS
from dflash_runtime import GenerationConfig, GenerationResult, Session
from dflash_runtime.bundle import MANIFEST_NAME, Bundle, write_record
from dflash_runtime.device_backend import DeviceBackend
from dflash_runtime.device_caches import DeviceCaches
from dflash_runtime.device_engine import DeviceEngineRecord
from dflash_runtime.device_numbers import DeviceNumbers
from dflash_runtime.window_rings import Ring, RingRows

(BOTH_WAYS,) = (pair for pair in AUTHOR_PAIRS if pair.name == "qwen3-window-both-ways")
CHUNKS = {BOTH_WAYS.name: 8, MAIN.name: 16}  # windows of 6 in both layers, of 16 in one of two
ENGINES = [(form, pair) for form in BACKENDS for pair in (BOTH_WAYS, MAIN)]
by_name = [f"{form}-{pair.name}" for form, pair in ENGINES]


@pytest.fixture(scope="module")
def bundles(exported: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """With engines of both forms."""
    found = {}
    for pair in (BOTH_WAYS, MAIN):
        copy = shutil.copytree(exported(pair), tmp_path_factory.mktemp("rings") / pair.name)
        found[pair.name] = bundle = Bundle.open(copy)
        for form in BACKENDS:
            write_recorded_engines(bundle, form, sizes_of(bundle), CHUNKS[pair.name],
                                   (32, 64) if form == "primitive" else ())  # fmt: skip
    return found


def sizes_of(bundle: Bundle) -> list[int]:
    """Block sizes that engines are built for."""
    largest = max(bundle.manifest.block_sizes)
    return [*(size for size in (2, 4, 8) if size < largest), largest]


class Opened:
    """A session on the recording device."""

    def __init__(self, bundle: Bundle, form: str, cuda_graphs: bool | None = None) -> None:
        self.device, folder = RecordingDevice(), bundle.path / "engines" / f"{BACKENDS[form]}-sm89"
        self.record = DeviceEngineRecord.read(folder, "none")
        self.backend = DeviceBackend(BACKENDS[form], bundle, self.device, folder, self.record, 128,
                                       cuda_graphs=cuda_graphs)  # fmt: skip
        self.session, self.opened = Session(bundle, self.backend, None), len(self.device.log)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *exception: object) -> None:
        self.device.finish()
        self.device.check_guards()
        self.session.close()


def facts_of(bundle: Bundle) -> tuple[int, int, int]:
    """Widest window, largest block, context, in tokens."""
    manifest = bundle.manifest
    assert manifest.drafter is not None
    windows = [tensor.window_tokens for tensor in manifest.drafter.graph.state if tensor.window_tokens]
    return max(windows), max(manifest.block_sizes), manifest.max_context_tokens


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(512) for _ in range(length)]


def schedule(bundle: Bundle, new_tokens: int, seed: int, sizes: tuple[int, ...] = (1, 2, 4)) -> GenerationConfig:
    rng, largest = random.Random(seed), facts_of(bundle)[1]
    chosen = [rng.choice([*sizes, largest]) for _ in range(400)]
    return GenerationConfig(max_new_tokens=new_tokens, stop_token_ids=(), block_schedule=lambda n: chosen[n],
                            reuse_prefix=False)  # fmt: skip


def essence(result: GenerationResult) -> tuple[Any, ...]:
    return result.token_ids, result.proposed_ids, result.acceptance_lengths, result.finish_reason


def as_on_the_cpu(bundle: Bundle, lengths: tuple[int, ...], new_tokens: int) -> list[Any]:
    """What `ort-cpu` says, whose rings are tested against caches of the whole context.

    It drafts at the sizes that are built and cuts, as a device does.
    """
    with Session.open(bundle.path, threads=1, prefill_chunk_tokens=24) as session:
        backend: Any = session._backend
        draft, built = backend.draft, sizes_of(bundle)
        backend.draft = lambda anchor, size, position: draft(
            anchor, next(one for one in built if one >= size), position)[: size - 1]  # fmt: skip
        return [essence(session.generate(prompt_of(n), schedule(bundle, new_tokens, n))) for n in lengths]


def said(made: Opened, bundle: Bundle, lengths: tuple[int, ...], new_tokens: int) -> list[Any]:
    return [essence(made.session.generate(prompt_of(n), schedule(bundle, new_tokens, n))) for n in lengths]


@pytest.mark.parametrize(("form", "pair"), ENGINES, ids=by_name)
def test_the_same_proposals_wherever_the_rows_lie(
    bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch, form: str, pair: Pair
) -> None:
    bundle = bundles[pair.name]
    window, _, context = facts_of(bundle)
    lengths, new_tokens = (1, window, 41, context - 70), 69
    moves, slide = list[int](), DeviceCaches.slide

    def count(self: DeviceCaches, moved: int, rows: int) -> None:
        moves.append(moved)
        slide(self, moved, rows)

    monkeypatch.setattr(DeviceCaches, "slide", count)
    with Opened(bundle, form) as made:
        assert made.record.rings
        assert said(made, bundle, lengths, new_tokens) == as_on_the_cpu(bundle, lengths, new_tokens)
    assert len(moves) > 2 and min(moves) > window  # seldom: never twice within a window


def test_cycles_as_graphs_are_the_same(bundles: dict[str, Bundle]) -> None:
    """A launch of what was recorded before the rows moved, one cycle ahead of the host."""
    bundle = bundles[BOTH_WAYS.name]
    for graphs in (False, True):
        with Opened(bundle, "fused", cuda_graphs=graphs) as made:
            assert said(made, bundle, (1, 30), 150) == as_on_the_cpu(bundle, (1, 30), 150)
            first = made.backend._ring_rows.first
            assert first > 50 and (("launch",) in made.device.log) == graphs


@pytest.mark.parametrize("form", BACKENDS)
def test_memory_does_not_depend_on_the_context(bundles: dict[str, Bundle], tmp_path: Path, form: str) -> None:
    bundle = bundles[BOTH_WAYS.name]
    window, _, context = facts_of(bundle)
    longer = Bundle.open(shutil.copytree(bundle.path, tmp_path / "longer"))
    manifest = dataclasses.replace(longer.manifest, max_context_tokens=4 * context)
    write_record(longer.path / MANIFEST_NAME, manifest)
    write_recorded_engines(Bundle(longer.path, manifest), form, [4], 8)
    sizes = []
    for one in (bundle, Bundle.open(longer.path)):
        with Opened(one, form) as made:
            groups = [group for key in ("drafter", "rings") for group in made.backend._caches[key].groups]
            sizes.append(sum(group.memory.size_bytes for group in groups))
            rows = {ring.rows for ring in made.record.rings.values()}
            assert rows == {2 * (window - 1) + 3 * made.backend.call_rows}
    assert sizes[0] == sizes[1] > 0


def test_a_ring_that_spares_nothing_is_none(bundles: dict[str, Bundle]) -> None:
    """Rows are for calls too: with long pieces of prompt a short context is the smaller of the two."""
    bundle = bundles[BOTH_WAYS.name]
    window, _, context = facts_of(bundle)
    drafter = load_portable(bundle, bundle.manifest.graph_files()["drafter"])
    for call_rows in (8, 128, 512):
        rows = 2 * (window - 1) + 3 * call_rows
        assert bool(drafter_rings(bundle.manifest, drafter, call_rows=call_rows)) == (rows < context + call_rows)


def turns(bundle: Bundle, form: str, seed: int) -> Iterator[tuple[GenerationResult, GenerationResult, int]]:
    """Ten turns of one session with fresh answers of another, and how far back the turn went into the text."""
    rng, text, back = random.Random(seed), prompt_of(20, seed), 0
    sizes = [2, 4, facts_of(bundle)[1]]
    with Opened(bundle, form) as kept, Opened(bundle, form) as fresh:
        for turn in range(10):
            options: dict[str, Any] = {"max_new_tokens": 9, "stop_token_ids": ()}
            options |= {"plain": True} if turn % 4 == 3 else {"block_size": rng.choice(sizes)}
            result = kept.session.generate(text, GenerationConfig(**options))
            yield result, fresh.session.generate(text, GenerationConfig(**options, reuse_prefix=False)), back
            text, back = [*text, *result.token_ids], 40 if turn in (4, 7) else 0
            text = [*text[: len(text) - back], *prompt_of(2, turn)]


@pytest.mark.parametrize(("form", "pair"), ENGINES, ids=by_name)
def test_ten_turns_are_ten_fresh_sessions(bundles: dict[str, Bundle], form: str, pair: Pair) -> None:
    window, _, _ = facts_of(bundles[pair.name])
    again = 0
    for number, (kept, fresh, back) in enumerate(turns(bundles[pair.name], form, 7)):
        assert essence(kept) == essence(fresh), f"turn {number}"
        run = kept.prompt_token_count - kept.reused_token_count
        if number:  # all rows that are there; behind what has moved out, the target runs again over a window
            assert run in (3, 2, 2 + window - 1) and (back or run != 2 + window - 1)
            again += run == 2 + window - 1
    assert again


def moves_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceCaches, "slide", lambda self, moved, rows: None)


def moves_too_few(patch: pytest.MonkeyPatch) -> None:
    slide = DeviceCaches.slide
    patch.setattr(DeviceCaches, "slide", lambda self, moved, rows: slide(self, moved, max(1, rows - 4)))


def says_the_row_before(patch: pytest.MonkeyPatch) -> None:
    """The rows move up by one less than is said."""
    say = DeviceNumbers.say_one
    patch.setattr(DeviceNumbers, "say_one", lambda self, name, number: say(self, name, number - (name == "first_row")))


def forgets_the_cycle_ahead(patch: pytest.MonkeyPatch) -> None:
    """Only the rows the host knows of are moved."""
    slide = DeviceCaches.slide

    def known(self: DeviceCaches, moved: int, rows: int) -> None:
        slide(self, moved, min(rows, 5))

    patch.setattr(DeviceCaches, "slide", known)


def does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """The row in the first slot is said while a cycle that was told another one has not run."""
    make_room = DeviceBackend._make_room

    def hasty(self: DeviceBackend, position: int) -> None:
        wait, self._numbers.wait = self._numbers.wait, lambda: None  # type: ignore[method-assign]
        try:
            make_room(self, position)
        finally:
            self._numbers.wait = wait  # type: ignore[method-assign]

    patch.setattr(DeviceBackend, "_make_room", hasty)


FAULTS = [("fused", moves_nothing), ("primitive", moves_nothing), ("fused", moves_too_few),
          ("fused", says_the_row_before), ("fused", forgets_the_cycle_ahead), ("fused", does_not_wait)]  # fmt: skip


@pytest.mark.parametrize(("form", "fault"), FAULTS)
def test_rows_that_are_not_where_they_should_be_show(
    bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch, form: str, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """In the proposals, and not in the text."""
    bundle, lengths = bundles[BOTH_WAYS.name], tuple(range(22, 34))
    expected = as_on_the_cpu(bundle, lengths, 90)
    fault(monkeypatch)
    with Opened(bundle, form) as made:
        found = said(made, bundle, lengths, 90)
    assert found != expected
    assert [result[0] for result in found] == [result[0] for result in expected]


def trusts_all_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RingRows, "keep", lambda self, rows: rows)


def runs_too_little_again(patch: pytest.MonkeyPatch) -> None:
    right = RingRows.keep
    patch.setattr(RingRows, "keep", lambda self, rows: min(rows, right(self, rows) + 4))


@pytest.mark.parametrize("fault", [trusts_all_rows, runs_too_little_again])
def test_a_ring_that_is_trusted_too_far_shows(
    bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    fault(monkeypatch)

    bundle = bundles[BOTH_WAYS.name]

    def differs(seed: int) -> bool:
        try:
            return any(essence(kept) != essence(fresh) for kept, fresh, _ in turns(bundle, "fused", seed))
        except RuntimeError:  # a slot before the first
            return True

    assert any(differs(seed) for seed in range(6))


def test_a_window_for_layers_that_have_none(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    """Other proposals, the same text, and no cache of the drafter grows with the context."""
    bundle = Bundle.open(shutil.copytree(bundles[MAIN.name].path, tmp_path / "bundle"))
    expected = as_on_the_cpu(bundle, (80,), 60)
    for form in BACKENDS:
        write_recorded_engines(bundle, form, [4, 8, 16], 16, draft_window_tokens=20)
        with Opened(bundle, form) as made:
            assert {ring.window_tokens for ring in made.record.rings.values()} == {16, 20}
            assert made.backend._caches["drafter"].groups == [] and made.record.versions["draft_window"] == "20"
            found = said(made, bundle, (80,), 60)
        assert found != expected and [one[0] for one in found] == [one[0] for one in expected]


@pytest.mark.parametrize("form", BACKENDS)
def test_what_was_not_finite_is_wiped_in_rings_too(bundles: dict[str, Bundle], form: str) -> None:
    bundle = bundles[BOTH_WAYS.name]
    with Opened(bundle, form) as made:
        expected = said(made, bundle, (40,), 60)
        made.device.finish()
        for caches in made.backend._caches.values():
            for group in caches.groups:
                made.device.view(*group.memory).view(np.float32)[:] = np.nan
        made.backend._not_finite = True  # as where a rejected row of a block was
        assert said(made, bundle, (40,), 60) == expected


def test_the_host_waits_only_where_rows_move(bundles: dict[str, Bundle]) -> None:
    bundle = bundles[BOTH_WAYS.name]
    with Opened(bundle, "fused") as made:
        list(made.session.stream(prompt_of(6), GenerationConfig(max_new_tokens=150, block_size=5, stop_token_ids=())))
        log = made.device.log[made.opened :]
    moves = [i for i, entry in enumerate(log) if entry[0] == "copy" and log[i - 1][0] == "wait"]
    said_again = [i for i, entry in enumerate(log) if entry[0] == "upload"]
    moved = len([i for i in said_again if any(0 < i - at < 9 for at in moves)])
    assert moved >= 2 and log.count(("upload", 256)) == moved


@pytest.mark.parametrize("form", ["fused", "primitive"])
def test_tensorrt_rtx_builds_them(exported: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """A window in one layer of two; the primitive form as it is, with TensorRT-RTX as its builder."""
    pytest.importorskip("tensorrt_rtx")
    bundle = Bundle.open(shutil.copytree(exported(HALF_PAIRS[0]), tmp_path / "bundle"))
    (row,) = [row for row in VERSIONS if (row.flavour, row.form) == (BACKENDS[form], form)]
    monkeypatch.setattr(tensorrt_engines, "row_for", lambda backend, version: row)
    monkeypatch.setattr(EnginePlan, "_capacities", lambda self: [self.capacity_rows])
    built = tensorrt_engines.build_engines(bundle, EngineOptions(
        "tensorrt-rtx", compute_capability="8.9", block_sizes=[8], prefill_chunk_tokens=16))  # fmt: skip
    assert built.record.form == form
    assert built.record.rings == dict.fromkeys(
        ["past_key_values.0.key", "past_key_values.0.value"], Ring(16, 2 * 15 + 3 * 16))  # fmt: skip


def test_what_is_kept_of_rings_of_one_size() -> None:
    rows = RingRows([Ring(6, 34), Ring(4, 34)])
    rows.first = 22
    assert rows.keep(27) == 27 and rows.first == 22  # a block at 27 sees 22 to 27
    assert rows.keep(26) == 21 and rows.first == 21  # it would see 21 to 26: run again from there
    assert rows.keep(0) == 0 and rows.first == 0
