from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_calls import Invoke, Launch

from dflash_runtime import GenerationConfig, GenerationResult, Session
from dflash_tools.run_command import statistics_line

RESULT_KEYS = {
    "text",
    "token_ids",
    "prompt_token_count",
    "finish_reason",
    "acceptance_lengths",
    "num_drafts",
    "mean_acceptance_length",
    "tokens_per_s",
    "time_to_first_token_ms",
    "backend",
    "block_size",
    "reused_token_count",
}


def answer(bundle: Path, prompt: str, **options: object) -> list[int]:
    with Session.open(bundle, threads=1) as session:
        return session.generate(prompt, GenerationConfig(**options)).token_ids  # type: ignore[arg-type]


def test_json_has_exactly_the_documented_keys(invoke: Invoke, bundle: Path) -> None:
    done = invoke("run", bundle, "hello", "--json", "--max-new-tokens", 12, "--block-size", 4)
    assert done.exit_code == 0
    data = json.loads(done.stdout)
    assert set(data) == RESULT_KEYS
    assert data["token_ids"] == answer(bundle, "hello", max_new_tokens=12)
    assert data["num_drafts"] == len(data["acceptance_lengths"]) > 0
    assert data["backend"] == "ort-cpu"
    assert data["block_size"] == 4
    assert len(done.stdout.splitlines()) == 1


def test_of_several_block_sizes_a_controller_chooses(invoke: Invoke, bundle: Path) -> None:
    for given in ((), ("--block-size", "auto")):
        data = json.loads(invoke("run", bundle, "hello", "--json", "--max-new-tokens", 12, *given).stdout)
        assert set(data) == {*RESULT_KEYS, "rounds_by_block_size", "block_size_reason"}
        assert data["token_ids"] == answer(bundle, "hello", max_new_tokens=12)
        assert data["block_size_reason"].startswith("Block sizes chosen by tokens per millisecond: ")
        assert sum(data["rounds_by_block_size"].values()) <= 11
        size, rounds = next(item for item in data["rounds_by_block_size"].items() if item[0] != "1")
        assert f"{rounds} round{'s' if rounds > 1 else ''} of block size {size}" in data["block_size_reason"]
    one = json.loads(invoke("run", bundle, "hello", "--json", "--max-new-tokens", 1).stdout)
    assert "no round behind its first token" in one["block_size_reason"]  # no figures of rounds that never were
    refused = invoke("run", bundle, "hello", "--block-size", "many")
    assert refused.exit_code == 2 and "neither a whole number nor auto" in refused.stderr


def test_proposals_may_be_drawn(invoke: Invoke, bundle: Path) -> None:
    """Coupled ones change nothing of the text. With a seed, rejection sampling takes block sizes that do not vary."""
    given = ("run", bundle, "hello", "--json", "--max-new-tokens", 24, "--temperature", 1.0, "--seed", 3)
    plain, coupled, once, again = (
        json.loads(invoke(*given, *how).stdout)
        for how in (["--plain"], ["--proposals", "coupled"], *[["--proposals", "sampled"]] * 2)
    )
    assert coupled["token_ids"] == plain["token_ids"] and "rounds_by_block_size" in coupled
    assert once["token_ids"] == again["token_ids"] != plain["token_ids"]
    assert once["block_size"] == 4 and "rounds_by_block_size" not in once
    refused = invoke(*given, "--proposals", "greedy")
    assert refused.exit_code == 2 and "'argmax', 'coupled', 'sampled'" in refused.stderr


def test_penalties_and_biases_are_options(invoke: Invoke, bundle: Path) -> None:
    given = {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "min_p": 0.05, "seed": 3,
             "temperature": 0.9}  # fmt: skip
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    bias = ("--logit-bias", "98=2.5", "--logit-bias", "97=-inf")
    done = invoke("run", bundle, "hello", "--json", "--max-new-tokens", 16, *words, *bias)
    expected = answer(bundle, "hello", max_new_tokens=16, logit_bias={98: 2.5, 97: float("-inf")}, **given)
    assert json.loads(done.stdout)["token_ids"] == expected != answer(bundle, "hello", max_new_tokens=16, **given)
    for wrong, code in (("98", 2), ("a=1", 2), ("9=x", 2), ("9=1=2", 2), ("9999=1", 1), ("9=nan", 1), ("9=inf", 1)):
        refused = invoke("run", bundle, "hello", "--logit-bias", wrong)
        assert refused.exit_code == code and wrong.partition("=")[0] in refused.stderr, refused.stderr


def test_plain_says_the_same_without_drafts(invoke: Invoke, bundle: Path) -> None:
    drafted = json.loads(invoke("run", bundle, "hello", "--json", "--max-new-tokens", 12).stdout)
    plain = json.loads(invoke("run", bundle, "hello", "--json", "--max-new-tokens", 12, "--plain").stdout)
    assert plain["token_ids"] == drafted["token_ids"]
    assert (plain["num_drafts"], plain["acceptance_lengths"], plain["block_size"]) == (0, [], 1)


def test_block_size_is_used_and_limited(invoke: Invoke, bundle: Path) -> None:
    data = json.loads(invoke("run", bundle, "hello", "--json", "--block-size", 8, "--max-new-tokens", 4).stdout)
    assert data["block_size"] == 8
    refused = invoke("run", bundle, "hello", "--block-size", 9)
    assert refused.exit_code == 1
    assert refused.stderr.startswith("Error: ")
    assert "9" in refused.stderr
    assert "8" in refused.stderr


def test_text_is_the_answer_and_a_line_end(invoke: Invoke, bundle: Path) -> None:
    done = invoke("run", bundle, "hello", "--max-new-tokens", 8)
    data = json.loads(invoke("run", bundle, "hello", "--max-new-tokens", 8, "--json").stdout)
    assert done.stdout == data["text"] + "\n"
    assert done.stderr == ""  # statistics are for terminals


def test_prompt_from_standard_input(invoke: Invoke, bundle: Path) -> None:
    """`echo` puts a line end behind it, which would be another prompt."""

    def ask(*arguments: object, stdin: str | None = None) -> str:
        return invoke("run", bundle, *arguments, "--max-new-tokens", 8, stdin=stdin).stdout

    expected = ask("hello")
    assert ask("-", stdin="hello\n") == ask(stdin="hello\n") == ask(stdin="hello") == expected
    assert ask(stdin="hello\n\n") == ask("hello\n") != expected
    assert ask("--raw", stdin="hello\n") == ask("--raw", "hello\n") != ask("--raw", "hello")
    assert ask("--ids", stdin="1,2\n") == ask("--ids", "1,2")
    for given in ((), ("-",)):
        empty = invoke("run", bundle, *given, stdin="")
        assert (empty.exit_code, empty.stdout) == (2, "") and "Standard input is empty" in empty.stderr


@pytest.mark.parametrize("spelling", ["1,2,3", "1 2 3", "[1, 2, 3]"])
def test_ids_in_and_out(invoke: Invoke, bundle: Path, spelling: str) -> None:
    with Session.open(bundle, threads=1) as session:
        expected = session.generate([1, 2, 3], GenerationConfig(max_new_tokens=6)).token_ids
    done = invoke("run", bundle, spelling, "--ids", "--max-new-tokens", 6)
    assert [int(word) for word in done.stdout.split()] == expected


def test_ids_that_are_none(invoke: Invoke, bundle: Path) -> None:
    words = invoke("run", bundle, "one two", "--ids")
    assert words.exit_code == 2
    assert "'one' is not a token id" in words.stderr
    too_large = invoke("run", bundle, "1,264", "--ids")
    assert too_large.exit_code == 1
    assert "264" in too_large.stderr
    assert "263" in too_large.stderr


def test_template_arg_must_be_a_pair(invoke: Invoke, bundle: Path) -> None:
    done = invoke("run", bundle, "hello", "--template-arg", "enable_thinking")
    assert done.exit_code == 2
    assert "KEY=VALUE" in done.stderr


def test_user_errors_are_one_line(launch: Launch, tmp_path: Path, bundle: Path) -> None:
    for arguments, words in [
        (("run", tmp_path / "nothing", "hi"), ["nothing", "bundle.json", "dflash-export build"]),
        (("run", bundle, "hi", "--backend", "openvino"), ["openvino", "ort-cpu"]),
        (("run", bundle, "hi", "--max-new-tokens", 0), ["max_new_tokens", "0"]),
        (("run", bundle, "", "--raw"), ["prompt"]),
        (("inspect", tmp_path), [str(tmp_path)]),
    ]:
        done = launch(*arguments)
        assert done.returncode == 1, (arguments, done.stderr)
        assert done.stdout == ""
        assert done.stderr.startswith("Error: ")
        assert len(done.stderr.splitlines()) == 1
        assert all(word.lower() in done.stderr.lower() for word in words), done.stderr


def test_bugs_keep_their_traceback(launch: Launch, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import dflash_runtime.session as s\n"
        "def broken(*a, **k): raise RuntimeError('a fault')\n"
        "s.open_backend = broken\n"
    )
    done = launch("run", bundle, "hi", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "a fault" in done.stderr


def test_a_reader_that_leaves_is_no_error(bundle: Path) -> None:
    argv = [sys.executable, "-m", "dflash_tools.cli", "run", str(bundle), "hello", "--max-new-tokens", "60"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0
    process.stderr.close()


def test_interrupt_ends_with_130(bundle: Path) -> None:
    argv = [sys.executable, "-m", "dflash_tools.cli", "run", str(bundle), "-"]
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a shell's background jobs ignore SIGINT, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    assert process.stdin is not None
    # waiting for standard input is the one place where the command surely stands still
    try:
        process.wait(timeout=4)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_sampled_text_repeats_with_its_seed(invoke: Invoke, bundle: Path) -> None:
    options = ("--json", "--max-new-tokens", 16, "--temperature", 0.8, "--top-p", 0.9, "--presence-penalty", 0.2)
    first = json.loads(invoke("run", bundle, "hello", *options, "--block-size", 4).stdout)
    assert set(first) == {*RESULT_KEYS, "seed"}
    again = json.loads(invoke("run", bundle, "hello", *options, "--seed", first["seed"], "--plain").stdout)
    assert again["token_ids"] == first["token_ids"]
    other = json.loads(invoke("run", bundle, "hello", *options, "--seed", first["seed"] + 1).stdout)
    assert other["token_ids"] != first["token_ids"]
    refused = invoke("run", bundle, "hello", "--top-p", 1.5)
    assert refused.exit_code == 1 and "top_p is 1.5" in refused.stderr


def test_what_a_request_cost() -> None:
    result = GenerationResult("a", [1, 2, 3], 5, "stop", [2], [[2, 3, 4]], 20.0, 12.3, "ort-cpu", 8)
    plain = GenerationResult("a", [1], 5, "length", [], [], 0.0, 12.3, "ort-cpu", 1)
    told = "3 tokens (stop), 20.0 tokens/s, first token after 12 ms, 2.00 tokens a round in 1 round"
    assert statistics_line(result, adaptive=False) == f"[{told}, block size 8, ort-cpu]"
    assert statistics_line(result, adaptive=True) == f"[{told}, block sizes up to 8, ort-cpu]"
    assert statistics_line(plain, adaptive=False) == (
        "[1 token (length), first token after 12 ms, plain decoding, ort-cpu]"
    )


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
def test_threads_are_some(invoke: Invoke, bundle: Path, command: str) -> None:
    refused = invoke(command, bundle, "--threads", 0)
    assert refused.exit_code == 2 and "'--threads': 0 is not in the range x>=1" in refused.stderr


@pytest.mark.parametrize("option", ["--cuda-graphs", "--no-cuda-graphs"])
def test_cuda_graphs_are_for_a_gpu(invoke: Invoke, bundle: Path, option: str) -> None:
    refused = invoke("run", bundle, "hello", option)
    assert refused.exit_code == 1 and "'ort-cpu' runs on the CPU" in refused.stderr
