from __future__ import annotations

import io

import click
import pytest

from dflash_tools.build_command import default_folder
from dflash_tools.error_lines import one_line
from dflash_tools.option_values import read_template_args, read_token_ids
from dflash_tools.progress import ProgressLine, describe_share
from dflash_tools.prompt_progress import PromptProgress
from dflash_tools.sizes import bytes_text, count_text, counted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_silent_in_a_pipe() -> None:
    stream = io.StringIO()
    with ProgressLine(stream) as progress:
        progress("store weights", 1, 10)
    assert stream.getvalue() == ""


def test_progress_keeps_each_finished_stage() -> None:
    stream = Terminal()
    with ProgressLine(stream) as progress:
        progress("trace target", 0, 1)
        progress("store weights", 5, 10)
        progress("store weights", 10, 10)
    lines = [line.rpartition("\x1b[K")[2] for line in stream.getvalue().split("\n")[:-1]]
    assert [line.partition(":")[0] for line in lines] == ["trace target", "store weights"]
    assert "store weights 100 %" in stream.getvalue()


def test_how_far_a_prompt_is_read_goes_away() -> None:
    stream = Terminal()
    reading = PromptProgress(stream)
    for done in (1128, 1256, 2000):
        reading(done, 2000)
    shown = stream.getvalue().split("\r\x1b[K")
    assert shown == ["", "reading the prompt: 1,128 of 2,000 tokens", "reading the prompt: 1,256 of 2,000 tokens", ""]
    short, piped = Terminal(), io.StringIO()
    PromptProgress(short)(20, 20)
    PromptProgress(piped)(128, 2000)
    assert piped.getvalue() == short.getvalue() == ""


def test_estimate_comes_once_it_means_something() -> None:
    assert describe_share(0, 1, 5.0) == " ..."
    assert describe_share(1, 4, 0.5) == " 25 %"
    assert describe_share(1, 4, 10.0) == " 25 %, 30 s left"
    assert describe_share(4, 4, 10.0) == " 100 %"


def test_numbers() -> None:
    assert [bytes_text(n) for n in (999, 1000, 538_090_408, 15_200_000_000, 2 * 10**15)] == [
        "999 B",
        "1.0 kB",
        "538.1 MB",
        "15.2 GB",
        "2000000.0 GB",
    ]
    assert [count_text(n) for n in (264, 134_515_008, 1_543_714_304)] == ["264", "135 M", "1.54 B"]
    assert [counted(n, "round") for n in (0, 1, 1024)] == ["0 rounds", "1 round", "1,024 rounds"]


def test_option_values() -> None:
    assert read_template_args(("enable_thinking=false", "name=Ada", "n=3", "x=a=b")) == {
        "enable_thinking": False,
        "name": "Ada",
        "n": 3,
        "x": "a=b",
    }
    assert read_token_ids(" 1, 2\n3") == [1, 2, 3]
    for wrong in ("1.5", "x", "1;2"):
        with pytest.raises(click.BadParameter):
            read_token_ids(wrong)


def test_messages_stay_on_one_line() -> None:
    assert one_line("a\n  b\tc") == "a b c"


def test_bundle_is_named_after_what_the_user_typed() -> None:
    assert str(default_folder("qwen2-7b")) == "qwen2-7b-dflash"
    assert str(default_folder("Qwen/Qwen2-7B-Instruct@main")) == "Qwen2-7B-Instruct-dflash"
    assert str(default_folder("/models/mine/")) == "mine-dflash"
