from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_bundle import EOS, Sizes, write_bundle

from dflash_runtime import GenerationConfig, GenerationResult, NumericsError, PromptError, Session
from dflash_runtime.bundle import write_record

PROMPT = [5, 17, 3, 60, 42, 8]
FREE = GenerationConfig(max_new_tokens=60, stop_token_ids=())


def config(**changes: Any) -> GenerationConfig:
    return dataclasses.replace(FREE, **changes)


def essence(result: GenerationResult) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.acceptance_lengths, result.proposed_ids, result.finish_reason


@pytest.fixture(scope="module")
def shared(tiny: Path) -> Iterator[Session]:
    with Session.open(tiny, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("block", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 6, 33])
def test_speculative_equals_plain(shared: Session, block: int, length: int) -> None:
    prompt = [(7 * i + 3) % 256 for i in range(length)]
    plain = shared.generate(prompt, config(plain=True))
    result = shared.generate(prompt, config(block_size=block))
    assert result.token_ids == plain.token_ids
    assert result.text == plain.text
    assert sum(result.acceptance_lengths) + 1 == len(result.token_ids) == 60
    assert result.num_drafts == len(result.proposed_ids)
    assert (plain.acceptance_lengths, plain.num_drafts, plain.mean_acceptance_length) == ([], 0, 1.0)
    assert (plain.block_size, result.block_size) == (1, block)


def test_some_proposals_are_accepted(shared: Session) -> None:
    assert max(shared.generate(PROMPT, FREE).acceptance_lengths) > 1


@pytest.mark.parametrize("chunk", [1, 4, 5])
def test_prefill_chunks_change_nothing(tiny: Path, shared: Session, chunk: int) -> None:
    with Session.open(tiny, threads=1, prefill_chunk_tokens=chunk) as opened:
        for length in (1, 4, 5, 8, 10):
            prompt = [(11 * i + 2) % 256 for i in range(length)]
            assert essence(opened.generate(prompt, FREE)) == essence(shared.generate(prompt, FREE))


def test_requests_do_not_see_each_other(tiny: Path, shared: Session) -> None:
    prompts = [[(3 * i + n) % 256 for i in range(n)] for n in (20, 6, 20)]
    for prompt in prompts:
        with Session.open(tiny, threads=1) as fresh:
            expected = essence(fresh.generate(prompt, FREE))
        assert essence(shared.generate(prompt, FREE)) == expected
        aborted = shared.stream(prompt, FREE)
        next(aborted)
        aborted.close()
        assert essence(shared.generate(prompt, FREE)) == expected


def test_a_new_request_ends_the_unfinished_one(shared: Session) -> None:
    first = shared.stream(PROMPT, FREE)
    next(first)
    shared.generate(PROMPT, FREE)
    with pytest.raises(PromptError, match="another request"):
        next(first)
    with pytest.raises(PromptError, match="has not ended"):
        _ = first.result


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_draft_like_a_fresh_session(tiny: Path, seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([1, 4, 8]) for _ in range(60)]
    with Session.open(tiny, threads=1) as long, Session.open(tiny, threads=1) as fresh:
        result = long.generate(PROMPT, config(max_new_tokens=40, block_schedule=lambda n: sizes[n]))
        assert result.token_ids == long.generate(PROMPT, config(max_new_tokens=40, plain=True)).token_ids
        # replay: before every drafting round, prefill what was known by then and draft the same block
        tokens, drafted = [*PROMPT, result.token_ids[0]], iter(
            zip(result.proposed_ids, result.acceptance_lengths, strict=True)
        )
        for size in sizes:
            if len(tokens) == len(PROMPT) + 40:
                break
            if min(size, len(PROMPT) + 41 - len(tokens)) == 1:
                tokens.append(result.token_ids[len(tokens) - len(PROMPT)])
                continue
            proposed, committed = next(drafted)
            once = fresh.generate(tokens[:-1], config(max_new_tokens=1 + len(proposed), block_size=len(proposed) + 1))
            assert once.token_ids[0] == tokens[-1]
            assert once.proposed_ids[0] == proposed
            new = len(tokens) - len(PROMPT)
            tokens += result.token_ids[new : new + committed]


@pytest.mark.parametrize("extra", [-1, 0])
@pytest.mark.parametrize("plain", [False, True])
def test_prompts_at_the_end_of_the_context(shared: Session, extra: int, plain: bool) -> None:
    limit = shared.bundle.manifest.max_context_tokens
    result = shared.generate([7] * (limit + extra), config(plain=plain))
    assert len(result.token_ids) == 1 - extra
    assert result.finish_reason == "context"


def test_prompt_longer_than_the_context(shared: Session) -> None:
    limit = shared.bundle.manifest.max_context_tokens
    with pytest.raises(PromptError, match=rf"{limit + 1} tokens.*{limit}"):
        shared.generate([7] * (limit + 1))


def test_rows_past_the_context_stay_untouched(tiny: Path) -> None:
    with Session.open(tiny, threads=1) as opened:
        limit = opened.bundle.manifest.max_context_tokens
        opened.generate([7] * (limit - 5), FREE)
        opened.generate([7] * (limit - 1), config(block_size=8))
        for state in (opened._backend._target_state, opened._backend._drafter_state):  # type: ignore[attr-defined]
            for rows in state.values():
                assert rows.shape[2] == limit + 128
                assert np.abs(rows[:, :, : limit - 5]).min(axis=(0, 1, 3)).all()
                assert not rows[:, :, limit + 1 :].any()


def test_dead_rows_do_not_matter(tiny: Path, shared: Session) -> None:
    expected = essence(shared.generate(PROMPT, FREE))
    with Session.open(tiny, threads=1) as opened:
        backend: Any = opened._backend
        for rows in (*backend._target_state.values(), *backend._drafter_state.values()):
            rows[:] = 1e4
        assert essence(opened.generate(PROMPT, FREE)) == expected


def test_mask_id_in_the_output_stays(tmp_path: Path, shared: Session) -> None:
    plain = shared.generate(PROMPT, config(plain=True)).token_ids
    mask = plain[3]
    path = write_bundle(tmp_path / "b", Sizes(likely_tokens=3, mask_token=mask))
    with Session.open(path, threads=1) as opened:
        assert opened.generate(PROMPT, FREE).token_ids == plain


def test_stop_ids_of_the_bundle_and_of_the_request(tmp_path: Path, shared: Session) -> None:
    plain = shared.generate(PROMPT, config(plain=True)).token_ids
    a, b = list(dict.fromkeys(plain))[1:3]
    path = write_bundle(tmp_path / "b", Sizes(likely_tokens=3, stop_token_ids=(b, a)))
    with Session.open(path, threads=1) as opened:
        result = opened.generate(PROMPT, GenerationConfig(max_new_tokens=60))
        first = min(plain.index(a), plain.index(b))
        assert (result.token_ids, result.finish_reason) == (plain[: first + 1], "stop")
        assert result.text == opened.tokenizer.decode(plain[:first])  # type: ignore[union-attr]
        assert "".join(opened.stream(PROMPT, GenerationConfig(max_new_tokens=60))) == result.text
        assert opened.generate(PROMPT, FREE).token_ids == plain
        only = opened.generate(PROMPT, config(stop_token_ids=[plain[0]]))
        assert only.token_ids == plain[:1]


@pytest.mark.parametrize("plain", [False, True])
def test_stop_string_ends_text_and_tokens(shared: Session, plain: bool) -> None:
    whole = shared.generate(PROMPT, config(plain=plain))
    ids = whole.token_ids
    for start in range(1, 30):
        stop = shared.tokenizer.decode(ids[start : start + 3])  # type: ignore[union-attr]
        if "\ufffd" in stop:
            continue
        result = shared.generate(PROMPT, config(plain=plain, stop_strings=[stop]))
        assert result.finish_reason == "stop"
        assert result.text == whole.text[: whole.text.find(stop)]
        assert result.token_ids == ids[: len(result.token_ids)]
        assert stop in shared.tokenizer.decode(result.token_ids)  # type: ignore[union-attr]
        assert plain or sum(result.acceptance_lengths) + 1 == len(result.token_ids)


def test_stream_gives_the_text_and_then_the_result(shared: Session) -> None:
    stream = shared.stream("héllo", FREE)
    pieces = list(stream)
    assert len(pieces) == len(stream.rounds)  # one a round, so that a reader may leave where a round brings no text
    assert "".join(pieces) == stream.result.text
    assert essence(stream.result) == essence(shared.generate("héllo", FREE))
    assert list(stream) == []


def test_kinds_of_prompt(shared: Session) -> None:
    tokenizer: Any = shared.tokenizer
    message = [{"role": "user", "content": "HI"}]
    text = "<|im_start|>user\nHI<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer._tokens.encode(text, add_special_tokens=False).ids
    expected = essence(shared.generate(ids, FREE))
    assert essence(shared.generate("HI", FREE)) == essence(shared.generate(message, FREE)) == expected
    assert shared.generate("HI", config(raw=True)).prompt_token_count == 2
    assert essence(shared.generate(np.array(ids), FREE)) == expected


def test_timings_and_json(shared: Session) -> None:
    result = shared.generate(PROMPT, config(max_new_tokens=9))
    assert result.tokens_per_s > 0
    assert result.time_to_first_token_ms > 0
    assert set(result.to_json()) == {
        "text", "token_ids", "prompt_token_count", "finish_reason", "acceptance_lengths", "num_drafts",
        "mean_acceptance_length", "tokens_per_s", "time_to_first_token_ms", "backend", "block_size",
        "reused_token_count",
    }  # fmt: skip
    assert result.to_json()["backend"] == "ort-cpu"
    assert shared.generate(PROMPT, config(max_new_tokens=1)).tokens_per_s == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"max_new_tokens": 1.5}, r"max_new_tokens is 1\.5"),
        ({"block_size": 0}, "block_size is 0.*1 to 8"),
        ({"block_size": 9}, "block_size is 9.*1 to 8"),
        ({"block_size": 4, "plain": True}, "block_size and plain contradict"),
        ({"block_size": 4, "block_schedule": lambda n: 4}, "contradict"),
        ({"block_schedule": lambda n: 99}, r"block_schedule\(0\) is 99"),
        ({"plain": 1}, "plain is 1"),
        ({"stop_strings": "END"}, "stop_strings is 'END'"),
        ({"stop_strings": ["a", ""]}, "none empty"),
        ({"stop_token_ids": [3, 264]}, r"stop_token_ids\[1\] is 264.*263"),
        ({"template_args": [1]}, "template_args"),
    ],
)
def test_options_that_cannot_be_used(shared: Session, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PromptError, match=words):
        shared.generate(PROMPT, config(**changes))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "no tokens"),
        ([1, 264], r"prompt\[1\] is 264.*263"),
        ([1, -1], r"prompt\[1\] is -1"),
        ([1, "a"], r"prompt\[1\] is 'a'"),
        ([{"role": "user", "content": "a"}, "b"], "message 1"),
        ([{"content": "a"}], "message 0"),
    ],
)
def test_prompts_that_cannot_be_used(shared: Session, prompt: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        shared.generate(prompt, FREE)


def test_empty_text_without_a_template(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "b", template=None)
    with Session.open(path, threads=1) as opened:
        assert opened.generate("HI", FREE).prompt_token_count == 2  # as it is: there is no template
        with pytest.raises(PromptError, match="no tokens"):
            opened.generate("", FREE)
        with pytest.raises(PromptError, match="no chat template"):
            opened.generate([{"role": "user", "content": "a"}], FREE)


def test_without_a_drafter(tiny_plain: Path, shared: Session) -> None:
    with Session.open(tiny_plain, threads=1) as opened:
        result = opened.generate(PROMPT, FREE)
        assert result.block_size == 1
        for changes in ({"block_size": 4}, {"block_schedule": lambda n: 4}):
            with pytest.raises(PromptError, match="no drafter"):
                opened.generate(PROMPT, config(**changes))
        assert opened.generate(PROMPT, config(plain=True)).token_ids == result.token_ids


def test_without_a_tokenizer(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "b")
    for file in (path / "tokenizer").iterdir():
        file.unlink()
    _forget_files(path, "tokenizer/")
    with Session.open(path, threads=1) as opened:
        assert opened.generate(PROMPT, FREE).text == ""
        with pytest.raises(PromptError, match="no tokenizer"):
            opened.generate("HI", FREE)
        with pytest.raises(PromptError, match="no tokenizer"):
            opened.generate(PROMPT, config(stop_strings=["x"]))


def test_closed_session(tiny: Path) -> None:
    opened = Session.open(tiny, threads=1)
    opened.close()
    opened.close()
    with pytest.raises(PromptError, match="closed"):
        opened.generate(PROMPT)


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "b", Sizes(likely_tokens=3))
    with Session.open(path, threads=1) as opened:
        expected = essence(opened.generate(PROMPT, FREE))
    entry = opened.bundle.manifest.weights["positions"]
    with (path / entry.file).open("r+b") as stream:  # the position table's row 12 is NaN
        stream.seek(entry.offset_bytes + 12 * 32 * 4)
        stream.write(np.full(32, np.nan, np.float32).tobytes())
    _refresh_files(path)
    with Session.open(path, threads=1) as opened:
        with pytest.raises(NumericsError, match="position 13 "):
            opened.generate(PROMPT, config(plain=True))
        for options in (config(block_size=8), FREE):  # one bad row of a block may spoil the rows before it
            with pytest.raises(NumericsError, match="NaN or infinite"):
                opened.generate(PROMPT, options)
        short = opened.generate(PROMPT, config(max_new_tokens=4, plain=True))
        assert short.token_ids == expected[0][:4]
        with pytest.raises(NumericsError, match="position 20 "):
            opened.generate([1] * 20, FREE)


def _forget_files(path: Path, prefix: str) -> None:
    _rewrite_files(path, lambda name: not name.startswith(prefix))


def _refresh_files(path: Path) -> None:
    _rewrite_files(path, lambda name: True)


def _rewrite_files(path: Path, keep: Any) -> None:
    from dflash_runtime.bundle import Bundle, file_facts

    manifest = Bundle.open(path, check_files=False).manifest
    files = file_facts(path, [name for name in manifest.files if keep(name)])
    write_record(path / "bundle.json", dataclasses.replace(manifest, files=files))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_weights_are_widened(tmp_path: Path, precision: str) -> None:
    half = write_bundle(tmp_path / "half", Sizes(likely_tokens=3), precision=precision)
    with Session.open(half, threads=1) as opened:
        result = opened.generate(PROMPT, FREE)
        assert result.token_ids == opened.generate(PROMPT, config(plain=True)).token_ids
        backend: Any = opened._backend
        mapped = backend._weights["embed"].numpy()
        assert mapped.dtype == np.float32
        assert mapped.shape[0] > EOS


def test_paths_with_spaces_and_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Session) -> None:
    path = write_bundle(tmp_path / "模型 dir" / "é x", Sizes(likely_tokens=3))
    moved = tmp_path / "- moved é"
    path.rename(moved)
    monkeypatch.chdir(tmp_path)
    with Session.open("./- moved é/", threads=1) as opened:
        assert essence(opened.generate(PROMPT, FREE)) == essence(shared.generate(PROMPT, FREE))
