"""The TensorRT backends on a device made of NumPy: real tokens, in the order and with the copies a GPU would get."""

from __future__ import annotations

import dataclasses
import itertools
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Make
from pairs import MAIN
from recorded_engines import BACKENDS, write_recorded_engines
from recording_device import RecordingDevice

from dflash_runtime import GenerationConfig, NumericsError, PromptError, Session
from dflash_runtime.bundle import Bundle
from dflash_runtime.decode import decode
from dflash_runtime.device_backend import DeviceBackend, open_engines
from dflash_runtime.device_caches import DeviceCaches
from dflash_runtime.device_engine import DeviceEngineRecord
from dflash_runtime.device_numbers import DeviceNumbers
from dflash_runtime.errors import BackendError, EngineError

CONTEXT, CHUNK, BUILT, LAYOUTS = MAIN.max_context_tokens or 0, 32, [4, 8, 16], (32, 64)
FORMS = ["fused", "primitive"]
FOUND_BYTES = 7 * 256
FREE = GenerationConfig(max_new_tokens=40, stop_token_ids=())


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(512) for _ in range(length)]


@pytest.fixture(scope="module")
def bundle(exported: Make, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    copy = Bundle.open(shutil.copytree(exported(MAIN), tmp_path_factory.mktemp("device") / "bundle"))
    for form in FORMS:
        write_recorded_engines(copy, form, BUILT, CHUNK, LAYOUTS if form == "primitive" else ())
    return copy


class Opened:
    """A session on the recording device."""

    def __init__(self, bundle: Bundle, form: str, cuda_graphs: bool | None = False) -> None:
        self.device, self.form = RecordingDevice(), form
        folder = bundle.path / "engines" / f"{BACKENDS[form]}-sm89"
        record = DeviceEngineRecord.read(folder, "none")
        self.backend = DeviceBackend(BACKENDS[form], bundle, self.device, folder, record, 128,
                                       cuda_graphs=cuda_graphs)  # fmt: skip
        self.session = Session(bundle, self.backend, None)
        self.opened = len(self.device.log)

    def tokens(self, prompt: list[int], **changes: Any) -> Any:
        result = self.session.generate(prompt, dataclasses.replace(FREE, **changes))
        return result.token_ids, result.proposed_ids, result.finish_reason

    def caches(self) -> dict[str, Any]:
        """Name -> the rows of a cache of the widest layout, [kv_heads, capacity, D]; rings apart."""
        self.device.finish()
        found = {}
        for caches in (self.backend._caches["target"], self.backend._caches["drafter"]):
            rows = caches._layouts[-1]
            sizes = {t.input: t.shape for group in caches.groups for t in group.members}
            for name, buffer in caches.tensors(rows).items():
                if name in sizes:
                    array = self.device.view(*buffer).view(np.float32)
                    found[f"{id(caches)}.{name}"] = array.reshape(sizes[name][1], rows, sizes[name][3])
        return found


@pytest.fixture(params=FORMS)
def opened(bundle: Bundle, request: pytest.FixtureRequest) -> Iterator[Opened]:
    made = Opened(bundle, request.param)
    yield made
    made.device.finish()
    made.device.check_guards()
    made.session.close()
    assert made.device.closed


@pytest.fixture(scope="module")
def expected(bundle: Bundle) -> Iterator[Callable[..., Any]]:
    """What ort-cpu says; it drafts at the sizes that are built and cuts, as the device does."""
    with Session.open(bundle.path, threads=1, prefill_chunk_tokens=CHUNK) as session:
        backend: Any = session._backend
        draft = backend.draft
        backend.draft = lambda anchor, size, position: draft(
            anchor, next(built for built in BUILT if built >= size), position)[: size - 1]  # fmt: skip

        def say(prompt: list[int], **changes: Any) -> Any:
            result = session.generate(prompt, dataclasses.replace(FREE, **changes))
            return result.token_ids, result.proposed_ids, result.finish_reason

        yield say


@pytest.mark.parametrize("block", [1, 4, 5, 16])
@pytest.mark.parametrize("length", [1, 6, 33, 77])
def test_tokens_and_proposals_are_those_of_ort_cpu(opened: Opened, expected: Any, block: int, length: int) -> None:
    prompt = prompt_of(length)
    assert opened.tokens(prompt, block_size=block) == expected(prompt, block_size=block)


@pytest.mark.parametrize("seed", range(2))
def test_block_sizes_may_change(opened: Opened, expected: Any, seed: int) -> None:
    sizes = [random.Random(seed).choice([1, 1, 4, 7, 16]) for _ in range(200)]
    options: Any = {"max_new_tokens": 120, "block_schedule": lambda n: sizes[n]}
    assert opened.tokens(prompt_of(9, seed), **options) == expected(prompt_of(9, seed), **options)


@pytest.mark.parametrize("seed", range(2))
def test_sampled_text_is_that_of_ort_cpu(opened: Opened, expected: Any, seed: int) -> None:
    """The target's logits come to the host; a request after it is greedy on the device again."""
    options: Any = {"temperature": 0.3, "top_p": 0.95, "repetition_penalty": 1.1, "seed": seed, "block_size": 4}
    assert opened.tokens(prompt_of(8), **options) == expected(prompt_of(8), **options)
    assert opened.tokens(prompt_of(8), block_size=4) == expected(prompt_of(8), block_size=4)


class Fetched:
    """Counts what a session fetches to choose tokens."""

    def __init__(self, opened: Opened, patch: pytest.MonkeyPatch) -> None:
        self.counts = Counter[str]()
        patch.setattr(opened.backend, "outputs", partial(self._count, opened.backend.outputs))

    def _count(self, true: Any, kind: str, rows: int) -> Any:
        self.counts[kind] += 1
        return true(kind, rows)


@pytest.mark.parametrize(
    "options", [{"top_k": 20}, {"top_k": 100, "top_p": 0.8}, {"top_p": 0.3, "temperature": 0.2}], ids=str
)
def test_candidates_are_enough_and_the_text_is_the_same(
    opened: Opened, expected: Any, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = Fetched(opened, monkeypatch)
    options = {"temperature": 0.8, "seed": 4, "block_size": 8, **options}
    assert opened.tokens(prompt_of(8), **options) == expected(prompt_of(8), **options)
    assert fetched.counts["candidates"] > 3 and fetched.counts["target"] == 0


@pytest.mark.parametrize("options", [{}, {"top_k": 128}, {"top_p": 0.999}], ids=str)
def test_where_candidates_are_not_enough_rows_are_fetched(
    opened: Opened, expected: Any, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a filter every token counts; behind as many as there are candidates another may be as likely."""
    fetched = Fetched(opened, monkeypatch)
    options = {"temperature": 3.0, "seed": 4, "block_size": 4, **options}
    assert opened.tokens(prompt_of(8), **options) == expected(prompt_of(8), **options)
    assert fetched.counts["candidates"] >= fetched.counts["target"] > 3


@pytest.mark.parametrize("options", [{"min_p": 0.05}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_with_other_processors_no_candidates_are_asked_for(
    opened: Opened, expected: Any, options: Any, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = Fetched(opened, monkeypatch)
    options = {"temperature": temperature, "top_k": 20, "seed": 4, "block_size": 8, **options}
    assert opened.tokens(prompt_of(8), **options) == expected(prompt_of(8), **options)
    assert fetched.counts["candidates"] == 0 < fetched.counts["target"]


@pytest.mark.parametrize("kind", ["coupled", "sampled"])
def test_drawn_proposals_are_those_of_ort_cpu(opened: Opened, expected: Any, kind: str) -> None:
    options: Any = {"temperature": 0.7, "top_k": 30, "seed": 3, "block_size": 8, "proposals": kind}
    assert opened.tokens(prompt_of(8), **options) == expected(prompt_of(8), **options)


@pytest.mark.parametrize("fault", ["total", "values", "ids"])
def test_wrong_candidates_show(opened: Opened, expected: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = opened.backend.candidates

    def wrong(rows: int, temperature: float) -> Any:
        ids, values, total = (array.copy() for array in true(rows, temperature))
        if fault == "ids":
            ids = np.roll(ids, 1, 1)
        return ids, values * (0.5 if fault == "values" else 1), total * (0.6 if fault == "total" else 1)

    monkeypatch.setattr(opened.backend, "candidates", wrong)
    options: Any = {"temperature": 0.5, "top_p": 0.3, "seed": 4, "block_size": 8}
    assert opened.tokens(prompt_of(8), **options) != expected(prompt_of(8), **options)


@pytest.mark.parametrize("length", [CONTEXT - 20, CONTEXT - 1, CONTEXT])
@pytest.mark.parametrize("block", [1, 16])
def test_the_context_is_used_to_its_last_row(opened: Opened, expected: Any, length: int, block: int) -> None:
    prompt = prompt_of(length)
    found = opened.tokens(prompt, max_new_tokens=100, block_size=block)
    assert found == expected(prompt, max_new_tokens=100, block_size=block)
    assert found[2] == "context"


def test_a_request_is_alone(opened: Opened, expected: Any) -> None:
    for length in (50, 6, 20):
        opened.backend.reset()  # a request that is left in the middle of a round
        opened.backend.prefill(prompt_of(30), 0)
        opened.backend.append_context(30, 0)
        opened.backend.draft(3, 16, 30)
        assert opened.tokens(prompt_of(length)) == expected(prompt_of(length))


def test_stop_tokens_end_the_output(opened: Opened, expected: Any) -> None:
    words = expected(prompt_of(6))[0]
    for stop in set(words[:12]):
        found = opened.tokens(prompt_of(6), stop_token_ids=(stop,))
        assert found == expected(prompt_of(6), stop_token_ids=(stop,))
        assert found[2] == "stop"


@pytest.fixture(params=FORMS)
def one_layout(bundle: Bundle, tmp_path: Path, request: pytest.FixtureRequest) -> Opened:
    """Without short layouts, whose rows lie elsewhere."""
    copy = Bundle.open(shutil.copytree(bundle.path, tmp_path / "bundle"))
    write_recorded_engines(copy, request.param, BUILT, CHUNK)
    return Opened(copy, request.param)


def rows_stay(made: Opened, expected: Any) -> None:
    for rows in made.caches().values():
        rows[:] = 7.25
    for length in (CONTEXT - 20, CONTEXT - 3):
        assert made.tokens(prompt_of(length), block_size=16) == expected(prompt_of(length), block_size=16)
    assert made.caches()
    for rows in made.caches().values():
        assert not (rows[:, :CONTEXT] == 7.25).all(axis=-1).any()
        first_free = CONTEXT + (BUILT[-1] if made.form == "fused" else 1)
        assert (rows[:, first_free:] == 7.25).all()


def test_dead_rows_do_not_matter_and_stay(one_layout: Opened, expected: Any) -> None:
    """Caches full of rubbish; rows that no call may reach keep it, and padded rows are never committed."""
    rows_stay(one_layout, expected)
    one_layout.device.check_guards()


@pytest.mark.parametrize("one_layout", ["primitive"], indirect=True)
def test_a_committed_padding_shows(one_layout: Opened, monkeypatch: pytest.MonkeyPatch, expected: Any) -> None:
    commit = DeviceCaches.commit
    monkeypatch.setattr(DeviceCaches, "commit", lambda self, new, call, rows, at: commit(self, new, call, call, at))
    with pytest.raises(AssertionError):
        rows_stay(one_layout, expected)


def cycle_of(opened: Opened, block: int) -> tuple[list[Any], list[Any]]:
    """What a cycle enqueues before the host's mark and behind it."""
    rows, manifest = {"fused": 192, "primitive": 32}[opened.form], opened.session.bundle.manifest
    assert manifest.drafter is not None
    rings = opened.backend._ring_rows.rings
    state, row_bytes = manifest.target.graph.state, 4 * int(manifest.target.graph.state[0].shape[3])
    heads = int(state[0].shape[1])
    assert rings and len(manifest.drafter.graph.state) == 4  # one layer of two has a window
    commits: list[list[Any]] = [[], []]
    if opened.form == "primitive":  # caches of the context lie behind one another without gaps, and so do rings
        commits = [[("copy", block * row_bytes, len(state) * heads)], [("copy", block * row_bytes, 2 * heads)] * 2]
    proposing = [("copy", 8, 1), ("drafter", block, rows), ("copy", 8 * (block - 1), 1)] if block > 1 else []
    before = [("copy", 8, 1), *proposing, ("target", block, rows), *commits[0], ("acceptance", block, 0),
              ("download", FOUND_BYTES)]  # fmt: skip
    return before, [("drafter_context", block, rows), *commits[1], ("copy", 8, 2)]


@pytest.mark.parametrize("block", [8, 1])
def test_the_host_says_nothing_between_cycles(opened: Opened, block: int) -> None:
    """One upload where cycles start, then each is draft, verify, accept, append: no other copy, no wait inside."""
    opened.tokens(prompt_of(6), block_size=block, max_new_tokens=20)
    log, (before, after) = opened.device.log[opened.opened :], cycle_of(opened, block)
    starts = [i for i in range(len(log)) if log[i : i + len(before)] == before]
    assert len(starts) > 2
    assert [entry for entry in log[starts[0] :] if entry[0] == "upload"] == []
    for start in starts:
        mark = start + len(before)
        assert log[mark][0] == "mark" and log[mark + 1 : mark + 1 + len(after)] == after


@pytest.mark.parametrize("block", [8, 1])
def test_the_host_reads_one_cycle_late(opened: Opened, block: int) -> None:
    """Fused: the next cycle is enqueued before one is read. Primitive: the host has to know where rows go."""
    opened.tokens(prompt_of(6), block_size=block, max_new_tokens=40)
    log, (before, _) = opened.device.log[opened.opened :], cycle_of(opened, block)
    starts = [i for i in range(len(log)) if log[i : i + len(before)] == before][:4]
    waits = [[entry for entry in log[a:b] if entry[0] == "wait"] for a, b in itertools.pairwise(starts)]
    assert waits == ([[], [("wait", 0)], [("wait", 1)]] if opened.form == "fused" else
                     [[("wait", 0)], [("wait", 1)], [("wait", 0)]])  # fmt: skip


def test_a_captured_cycle_is_one_launch_one_read_one_wait(bundle: Bundle) -> None:
    made = Opened(bundle, "fused", cuda_graphs=True)
    made.tokens(prompt_of(6), block_size=8, max_new_tokens=60)
    log = made.device.log[made.opened :]
    launches = [i for i, entry in enumerate(log) if entry == ("launch",)]
    between = [[entry[0] for entry in log[a:b]] for a, b in itertools.pairwise(launches)]
    # Near the end the host looks before it chooses a block.
    assert between[:8] == [["launch", "download", "mark", "wait"]] * 8


def test_python_does_little_in_a_cycle(bundle: Bundle) -> None:
    """Calls of Python functions from one token to the next, the device's own apart: plain steps, captured."""
    made = Opened(bundle, "fused", cuda_graphs=True)
    calls = list[str]()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and "dflash_runtime" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    rounds = decode(made.backend, prompt_of(6), max_new_tokens=80, max_context_tokens=CONTEXT, stop_token_ids=(),
                    block_size_of=lambda n: 8)  # fmt: skip
    for _ in range(6):
        next(rounds)
    sys.setprofile(count)
    for _ in range(4):
        next(rounds)
    sys.setprofile(None)
    assert 0 < len(calls) / 4 < 12, calls
    rounds.close()


def position_and_anchor(made: Opened) -> tuple[int, int]:
    made.device.finish()
    numbers = made.backend._numbers.buffers
    return tuple(int(made.device.view(*numbers[n]).view(np.int64)[0]) for n in ("position", "input_ids"))  # type: ignore[return-value]


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_late_stop_leaves_both_lengths_at_the_stop(bundle: Bundle, expected: Any, cuda_graphs: bool) -> None:
    """A cycle was on its way when the host read the stop token: it committed nothing."""
    made, prompt = Opened(bundle, "fused", cuda_graphs=cuda_graphs), prompt_of(6)
    words = expected(prompt)[0]
    for stop in sorted(set(words[2:14])):
        ids, _, reason = made.tokens(prompt, stop_token_ids=(stop,), block_size=4)
        assert (ids, reason) == (words[: words.index(stop) + 1], "stop")
        assert position_and_anchor(made) == (len(prompt) + len(ids) - 1, stop)
    made.device.check_guards()


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random_requests_say_what_ort_cpu_says(bundle: Bundle, expected: Any, seed: int, cuda_graphs: bool) -> None:
    rng, made = random.Random(seed), Opened(bundle, "fused", cuda_graphs=cuda_graphs)
    for number in range(6):
        prompt, sizes = prompt_of(rng.choice([1, 20, CONTEXT - 9]), number), [rng.choice([1, 2, 4, 7, 16])] * 4
        sizes += [rng.choice([1, 1, 4, 8, 13, 16]) for _ in range(200)]
        options: Any = {"max_new_tokens": rng.choice([1, 2, 17, 90]), "block_schedule": lambda n, s=sizes: s[n]}
        options["stop_token_ids"] = rng.choice([(), tuple(rng.sample(range(512), 20))])
        assert made.tokens(prompt, **options) == expected(prompt, **options), (number, options)
    made.device.finish()
    made.device.check_guards()


def test_more_stop_ids_than_an_engine_compares_with_are_refused(opened: Opened) -> None:
    with pytest.raises(PromptError, match="33 stop ids are given, and engines take 32"):
        opened.tokens(prompt_of(6), stop_token_ids=tuple(range(33)))
    assert len(opened.tokens(prompt_of(6), stop_token_ids=tuple(range(480, 512)), max_new_tokens=5)[0]) >= 1


def test_where_cycles_are_captured(bundle: Bundle) -> None:
    assert Opened(bundle, "fused", cuda_graphs=None).backend._captures
    assert not Opened(bundle, "primitive", cuda_graphs=None).backend._captures
    with pytest.raises(BackendError, match="primitive form"):
        Opened(bundle, "primitive", cuda_graphs=True)


def test_nothing_is_allocated_after_open(opened: Opened) -> None:
    opened.tokens(prompt_of(77), max_new_tokens=60)
    opened.tokens(prompt_of(5), max_new_tokens=60, block_size=16)
    later = {entry[0] for entry in opened.device.log[opened.opened :]}
    assert later.isdisjoint({"allocate", "host"}) and {"target", "drafter"} <= later


def test_every_weight_is_uploaded_once(opened: Opened, bundle: Bundle) -> None:
    uploads = [entry[1] for entry in opened.device.log[: opened.opened] if entry[0] == "upload"]
    block_sizes = 256  # a table of numbers
    assert sum(uploads) == sum(entry.length_bytes for entry in bundle.manifest.weights.values()) + block_sizes
    by_weight: dict[str, set[int]] = {}
    for graph in opened.backend._graphs.values():
        for context in graph.contexts.values():
            for bound in graph.facts.weights:
                by_weight.setdefault(bound.weight, set()).add(context.addresses[bound.input])  # type: ignore[attr-defined]
    assert set(by_weight) == set(bundle.manifest.weights)
    assert all(len(addresses) == 1 for addresses in by_weight.values())
    target = opened.backend._graphs["target"].facts.weights
    inputs = [bound.input for bound in target]
    assert len(inputs) > len({bound.weight for bound in target})  # a tied embedding


def test_past_and_present_are_one_and_taps_are_shared(bundle: Bundle) -> None:
    backend = Opened(bundle, "fused").backend
    context: Any = next(iter(backend._graphs["target"].contexts.values()))
    pairs = [(name, name.replace("past_key_values.", "present.")) for name in context.addresses if "past" in name]
    assert pairs and all(context.addresses[a] == context.addresses[b] for a, b in pairs)
    append: Any = next(iter(backend._graphs["drafter_context"].contexts.values()))
    assert append.addresses["taps"] == context.addresses["taps"]


def test_short_contexts_read_short_caches(bundle: Bundle) -> None:
    made = Opened(bundle, "primitive")
    made.tokens(prompt_of(6), max_new_tokens=120, block_size=4)
    rows = [entry[2] for entry in made.device.log if entry[0] == "target"]
    assert sorted(set(rows)) == [32, 64, 192] and rows == sorted(rows)
    made.tokens(prompt_of(6), max_new_tokens=4)
    assert [entry[2] for entry in made.device.log if entry[0] == "target"][-1] == 32


def test_without_a_drafter(bundle: Bundle, expected: Any) -> None:
    folder = bundle.path / "engines" / "tensorrt-rtx-sm89"
    record = DeviceEngineRecord.read(folder, "none")
    kinds = ("target", "acceptance", "candidates")
    alone = dataclasses.replace(record, engines=[engine for engine in record.engines if engine.kind in kinds])
    plain = Bundle(bundle.path, dataclasses.replace(bundle.manifest, drafter=None))
    backend = DeviceBackend("tensorrt-rtx", plain, RecordingDevice(), folder, alone, 128)
    session = Session(plain, backend, None)
    assert session.generate(prompt_of(40), FREE).token_ids == expected(prompt_of(40), plain=True)[0]
    with pytest.raises(PromptError, match="no drafter"):
        session.generate(prompt_of(40), dataclasses.replace(FREE, block_size=4))


def test_another_block_than_the_proposed_one_is_verified_anew(opened: Opened, bundle: Bundle) -> None:
    with Session.open(bundle.path, threads=1) as session:
        reference, prompt = session._backend, prompt_of(6)
        for backend in (reference, opened.backend):
            backend.reset()
            backend.prefill(prompt, 0)
            backend.append_context(6, 0)
        other = [5, 6, 7, 8]
        opened.backend.draft(5, 4, 6)
        assert opened.backend.verify(other, 6) == reference.verify(other, 6)
        for backend in (reference, opened.backend):
            backend.append_context(4, 6)
        assert opened.backend.draft(9, 4, 10) == reference.draft(9, 4, 10)


def test_nan_is_refused_and_wiped(opened: Opened, expected: Any) -> None:
    opened.tokens(prompt_of(6))
    prefill = opened.backend.prefill

    def poisoned(ids: list[int], position: int) -> int:
        token = prefill(ids, position)
        for rows in opened.caches().values():
            rows[:] = np.nan
        return token

    opened.backend.prefill = poisoned  # type: ignore[method-assign, assignment]
    with pytest.raises(NumericsError):
        opened.tokens(prompt_of(6))
    opened.backend.prefill = prefill  # type: ignore[method-assign]
    assert opened.tokens(prompt_of(20)) == expected(prompt_of(20))


def _no_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecordingDevice, "wait", lambda self, place=0: None)


def _no_copy(patch: pytest.MonkeyPatch) -> None:
    copy = DeviceNumbers.copy

    def lose(self: DeviceNumbers, to: str, source: str, index: int = 0, **places: int) -> None:
        if source != "draft_ids":
            copy(self, to, source, index, **places)

    patch.setattr(DeviceNumbers, "copy", lose)


def _stuck(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("dflash_runtime.device_numbers.DeviceNumbers.advance", lambda self: None)


def _lost_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceCaches, "commit", lambda self, *rest: None)


def _unmoved_rows(patch: pytest.MonkeyPatch) -> None:
    make_room = DeviceCaches.make_room
    patch.setattr(DeviceCaches, "make_room", lambda self, rows, committed: make_room(self, rows, 0))


@pytest.mark.parametrize(
    ("form", "fault"),
    [("fused", _no_wait), ("fused", _no_copy), ("fused", _stuck), ("primitive", _lost_rows),
     ("primitive", _unmoved_rows)],
)  # fmt: skip
def test_a_planted_fault_shows(
    bundle: Bundle, expected: Any, monkeypatch: pytest.MonkeyPatch, form: str, fault: Callable[..., None]
) -> None:
    made = Opened(bundle, form)
    fault(monkeypatch)

    def differs(length: int) -> bool:
        try:
            return bool(made.tokens(prompt_of(length)) != expected(prompt_of(length)))
        except (IndexError, ValueError):  # nothing committed, or more than there is room for
            return True

    assert any(differs(length) for length in (20, 33, 6))


def test_engines_that_do_not_fit_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    copy = Bundle.open(shutil.copytree(bundle.path, tmp_path / "bundle"))
    command = f"dflash-export engines {copy.path} --backend tensorrt-rtx"
    for device, said in (
        (RecordingDevice(compute_capability="12.0"), "compute capability 8.9, here is 12.0"),
        (RecordingDevice(tensorrt_version="1.8"), "tensorrt-rtx 1.7.1, here is 1.8"),
    ):
        with pytest.raises(EngineError, match=said) as error:
            open_engines("tensorrt-rtx", copy, device, 128)
        assert command in str(error.value)
    shutil.rmtree(copy.path / "engines" / "tensorrt-rtx-sm89")
    with pytest.raises(EngineError, match=r"no engine in .*tensorrt-rtx-sm89") as error:
        open_engines("tensorrt-rtx", copy, RecordingDevice(), 128)
    assert command in str(error.value)


def test_a_chunk_may_be_as_large_as_a_block(bundle: Bundle, tmp_path: Path, expected: Any) -> None:
    copy = Bundle.open(shutil.copytree(bundle.path, tmp_path / "bundle"))
    write_recorded_engines(copy, "fused", BUILT, 16)
    session = Session(copy, open_engines("tensorrt-rtx", copy, RecordingDevice(), 128), None)
    result = session.generate(prompt_of(33), dataclasses.replace(FREE, block_size=16))
    assert result.token_ids == expected(prompt_of(33), block_size=16)[0]


def test_sizes_that_were_not_built_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    copy = Bundle.open(shutil.copytree(bundle.path, tmp_path / "bundle"))
    write_recorded_engines(copy, "fused", [4], 8)
    backend = open_engines("tensorrt-rtx", copy, RecordingDevice(), 128)
    assert backend.prefill_chunk_tokens == 8
    with pytest.raises(EngineError, match=r"drafter engine takes \[4\].* 16 .*dflash-export engines.*--block-size 16$"):
        Session(copy, backend, None).generate(prompt_of(6), dataclasses.replace(FREE, block_size=16))
    longer = Bundle(copy.path, dataclasses.replace(copy.manifest, max_context_tokens=CONTEXT + 64))
    with pytest.raises(EngineError, match=f"do not hold a context of {CONTEXT + 64} "):
        open_engines("tensorrt-rtx", longer, RecordingDevice(), 128)
