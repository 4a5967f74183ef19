"""A record of what a drafter gets right tells what any choice of block sizes would have done."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash_runtime import GenerationConfig, Session
from dflash_runtime.backend import open_backend
from dflash_runtime.bundle import Bundle
from dflash_tools.block_size_choices import main
from dflash_tools.choices_chart import ChosenRound, choices_chart
from dflash_tools.recorded_acceptance import RecordedText, compare_choices, join_texts, play, record_text

PROMPT = [5, 17, 3]


@pytest.fixture
def recorded(bundle: Path) -> tuple[RecordedText, Session]:
    session = Session.open(bundle, threads=1)
    config = GenerationConfig(max_new_tokens=60, stop_token_ids=(), plain=True)
    tokens = session.generate(PROMPT, config).token_ids
    backend = open_backend("ort-cpu", Bundle.open(bundle), 1, 2)
    sizes = [size for size in session.bundle.manifest.block_sizes if size > 1]
    return record_text(backend, "text", PROMPT, tokens, sizes, lambda *_: None), session


def test_any_schedule_commits_what_the_record_says(recorded: tuple[RecordedText, Session]) -> None:
    text, session = recorded
    sizes = [1, *text.right]
    for schedule in ([size] for size in sizes), [sizes, sizes[::-1]]:
        for turn in schedule:
            config = GenerationConfig(
                max_new_tokens=60, stop_token_ids=(), reuse_prefix=False, block_schedule=lambda n, t=turn: t[n % len(t)]
            )
            pieces = session.stream(PROMPT, config)
            list(pieces)
            real = [len(done.committed) for done in pieces.rounds[1:]]
            turns, placed = itertools.cycle(turn), 0
            for committed in real:
                size = next(turns)
                right = text.right[size][placed] if size > 1 else 0
                assert committed == min(right + 1, text.num_tokens - placed)
                placed += committed
            assert placed == text.num_tokens
    assert {n for row in text.right.values() for n in row} - {0}, "something was accepted"


def test_playing_takes_the_time_of_its_rounds() -> None:
    text = RecordedText("t", 6, {4: [3, 0, 0, 0, 1, 0]})
    assert play(text, {1: 10.0, 4: 15.0}, lambda: 1) == (60.0, [1] * 6)
    assert play(text, {1: 10.0, 4: 15.0}, lambda: 4) == (30.0, [4, 4])
    assert RecordedText.from_json(json.loads(json.dumps(text.to_json()))) == text
    joined = join_texts([text, RecordedText("u", 4, {4: [1, 1, 1, 0]})], "both", 2)
    assert joined == RecordedText("both", 8, {4: [3, 0, 1, 1, 0, 0, 1, 0]})
    own, fixed = compare_choices([text] * 20, {1: 10.0, 4: 15.0})
    assert fixed == {1: 1200.0, 4: 600.0} and own < 700


def test_the_picture_shows_each_choice() -> None:
    rounds = [ChosenRound(8, 5, 40.0)] * 3 + [ChosenRound(1, 1, 20.0)] * 6
    plot = choices_chart([("a <b>", rounds), ("c", rounds)])
    ElementTree.fromstring(plot)
    bars = [tuple(map(float, found)) for found in re.findall(r'<rect class="size" x="([\d.]+)" y="([\d.]+)" w', plot)]
    assert len(bars) == 4 + 1  # and the legend's
    assert bars[0][1] < bars[1][1] and bars[0][0] < bars[1][0]
    assert "a &lt;b&gt;" in plot


def test_the_command_tells_both(bundle: Path, tmp_path: Path) -> None:
    prompts, svg, record = tmp_path / "p.txt", tmp_path / "c.svg", tmp_path / "r.json"
    prompts.write_text("one two\nthree\n")
    call = [str(bundle), "--prompts", str(prompts), "--max-new-tokens", "24", "--rounds", "1", "--threads", "1"]
    done = CliRunner().invoke(main, [*call, "--svg", str(svg), "--record", str(record), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["same_tokens"] is True
    assert set(told["played_ms_per_token"]) == {"prompt 1", "prompt 2", "mixed"}
    assert {"chosen", "plain"} < set(told["measured_ms_per_token"]["prompt 1"])
    texts = [RecordedText.from_json(text) for text in json.loads(record.read_text())["texts"]]
    assert [text.num_tokens for text in texts] == [23, 23]
    ElementTree.fromstring(svg.read_text())


def test_nothing_to_choose(plain_bundle: Path) -> None:
    done = CliRunner().invoke(main, [str(plain_bundle)])
    assert done.exit_code != 0 and "has no drafter" in done.output
