"""Rows kept from request to request on a device: cycles that were enqueued ahead, layouts that grow and shrink."""

from __future__ import annotations

import dataclasses
import random
import shutil
from typing import Any

import numpy as np
import pytest
from conftest import Make
from pairs import MAIN
from recorded_engines import BACKENDS, write_recorded_engines
from recording_device import RecordingDevice

from dflash_runtime import GenerationConfig, PromptError, Session
from dflash_runtime.bundle import Bundle
from dflash_runtime.device_backend import DeviceBackend
from dflash_runtime.device_caches import DeviceCaches
from dflash_runtime.device_engine import DeviceEngineRecord

CONTEXT, LAYOUTS = MAIN.max_context_tokens or 0, (32, 64)
FREE = GenerationConfig(max_new_tokens=20, stop_token_ids=())


@pytest.fixture(scope="module")
def bundle(exported: Make, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    copy = Bundle.open(shutil.copytree(exported(MAIN), tmp_path_factory.mktemp("device") / "bundle"))
    for form in BACKENDS:
        write_recorded_engines(copy, form, [4, 8, 16], 32, LAYOUTS if form == "primitive" else ())
    return copy


def open_device(bundle: Bundle, form: str) -> tuple[Session, RecordingDevice]:
    device, folder = RecordingDevice(), bundle.path / "engines" / f"{BACKENDS[form]}-sm89"
    backend = DeviceBackend(BACKENDS[form], bundle, device, folder, DeviceEngineRecord.read(folder, "none"), 128)
    return Session(bundle, backend, None), device


def essence(result: Any) -> Any:
    return result.token_ids, result.proposed_ids, result.finish_reason


def random_requests(bundle: Bundle, form: str, seed: int) -> int:
    """Each against the same request run whole on another device; returns how many tokens were reused."""
    rng, reused = random.Random(seed), 0
    (kept, device), (whole, other) = open_device(bundle, form), open_device(bundle, form)
    said = [rng.randrange(512) for _ in range(20)]
    with kept, whole:
        for _ in range(8):
            prompt = said[: rng.choice([len(said), rng.randrange(1, len(said) + 1)])][: CONTEXT - 9]
            prompt += [rng.randrange(512) for _ in range(rng.choice([0, 1, 7]))]
            sizes = [rng.choice([1, 1, 4, 7, 16]) for _ in range(200)]
            options = dataclasses.replace(FREE, max_new_tokens=rng.choice([2, 17, 60]), **rng.choice([
                {"block_schedule": lambda n, s=sizes: s[n]}, {"plain": True}, {"block_size": 16},
                {"temperature": 0.4, "seed": seed}, {"stop_token_ids": tuple(rng.sample(range(512), 30))},
            ]))  # fmt: skip
            stream = kept.stream(prompt, options)
            if rng.random() < 0.4:  # left while cycles are on their way
                for _ in range(rng.randrange(1, 6)):
                    if not stream.rounds or stream.rounds[-1].finish_reason is None:
                        stream._commit(stream._next_round())
                said = prompt + [token for done in stream.rounds for token in done.committed]
                continue
            for _ in stream:
                pass
            expected = whole.generate(prompt, dataclasses.replace(options, reuse_prefix=False))
            assert essence(stream.result) == essence(expected)
            assert expected.reused_token_count == 0
            reused += stream.result.reused_token_count
            said = prompt + stream.result.token_ids
        for one in (device, other):
            one.finish()
            one.check_guards()
    return reused


@pytest.mark.parametrize("form", BACKENDS)
def test_random_requests(bundle: Bundle, form: str) -> None:
    assert sum(random_requests(bundle, form, seed) for seed in range(3)) > 200


@pytest.mark.parametrize("form", BACKENDS)
def test_only_the_new_tokens_are_run(bundle: Bundle, form: str) -> None:
    session, device = open_device(bundle, form)
    prompt = list(range(100, 120))
    with session:
        first = session.generate(prompt, FREE)
        begun = len(device.log)
        second = session.generate([*prompt, *first.token_ids, 7, 8, 9], dataclasses.replace(FREE, max_new_tokens=1))
        assert second.reused_token_count == len(prompt) + 19
        assert [entry[1] for entry in device.log[begun:] if entry[0] == "target"] == [4]


def test_a_short_request_does_not_pay_for_a_long_one_before(bundle: Bundle) -> None:
    session, device = open_device(bundle, "primitive")
    backend: Any = session._backend
    prompt = [(5 * i + 1) % 512 for i in range(70)]
    with session:
        session.generate(prompt, FREE)
        assert backend._caches["target"].layout_rows > 64
        shorter = [*prompt[:12], 7]
        again = session.generate(shorter, FREE)
        assert again.reused_token_count == 12
        assert {backend._caches[key].layout_rows for key in ("target", "drafter")} == {64}
        expected = session.generate(shorter, dataclasses.replace(FREE, reuse_prefix=False))
        assert essence(again) == essence(expected)
        device.finish()


def test_a_move_that_loses_rows_shows(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: Any, kept_rows: int = 0, *, clear: bool) -> None:
        self.layout_rows = self._layouts[0]

    monkeypatch.setattr(DeviceCaches, "reset", forget)
    with pytest.raises(AssertionError):
        for seed in range(3):
            random_requests(bundle, "primitive", seed)


@pytest.mark.parametrize("form", BACKENDS)
def test_what_was_not_finite_is_wiped_and_not_kept(bundle: Bundle, form: str) -> None:
    session, device = open_device(bundle, form)
    backend: Any = session._backend
    prompt = list(range(40, 60))
    with session:
        expected = session.generate(prompt, FREE)
        device.finish()
        for caches in backend._caches.values():
            for group in caches.groups:
                device.view(*group.memory).view(np.float32)[:] = np.nan
        backend._not_finite = True  # as where a rejected row of a block was
        result = session.generate(prompt, FREE)
        assert result.reused_token_count == 0
        assert essence(result) == essence(expected)


def test_a_refused_request_forgets(bundle: Bundle) -> None:
    """More stop ids than an engine compares with: the prompt has been run by then."""
    session, _ = open_device(bundle, "fused")
    with session:
        session.generate([1, 2, 3, 4], FREE)
        with pytest.raises(PromptError, match="stop ids"):
            session.generate([1, 2, 3, 9], dataclasses.replace(FREE, stop_token_ids=tuple(range(33))))
        assert session.generate([1, 2, 3, 4], FREE).reused_token_count == 0
