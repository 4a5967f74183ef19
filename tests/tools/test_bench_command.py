from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from openai_server import MODEL, serving
from tiny_bundle import Sizes, write_bundle

from dflash_runtime import DFlashError
from dflash_tools import bench_run
from dflash_tools.bench_agreement import main as agreement
from dflash_tools.bench_command import command
from dflash_tools.bench_job import SERVER, Job, Mode, Question
from dflash_tools.bench_page import page
from dflash_tools.bench_prompts import PromptSet, find_prompts
from dflash_tools.bench_report import BenchReport, disturbance_notes, headline
from dflash_tools.bench_rounds import Settings, make_questions
from dflash_tools.bench_server import ServerEngine
from dflash_tools.bench_worker import measure, parse_device_memory
from dflash_tools.device_conditions import DeviceConditions, MomentaryState

SMALL = ["--num-prompts", "2", "--max-new-tokens", "16", "--threads", "1"]


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its drafter is right now and then."""
    return write_bundle(tmp_path_factory.mktemp("pair") / "b", Sizes(likely_tokens=3, max_context=200))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    rows = [{"prompt": "hello"}, {"prompt": "one two three"}, {"prompt": "never asked"}]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def measured(pair: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Any, str]:
    """One measurement of three rounds for all tests: what was printed, the JSON, the page."""
    out = tmp_path_factory.mktemp("out")
    done = bench(
        pair, "--prompts", prompts, *SMALL, "--rounds", 3, "--context", 20, "--context", 60,
        "--scripted-acceptance", 1, "--scripted-acceptance", 8, "--json", out / "r.json", "--html", out / "r.html",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    return done, json.loads((out / "r.json").read_text())[0], (out / "r.html").read_text()


def row(report: Any, mode: str) -> Any:
    (found,) = [row for row in report["rows"] if row["mode"] == mode]
    return found


def test_every_mode_is_measured_in_every_round(measured: tuple[Result, Any, str]) -> None:
    _, report, _ = measured
    modes = ["plain", "block 4", "block 8", "block 8 scripted 1", "block 8 scripted 8"]
    assert [found["mode"] for found in report["rows"]] == modes
    for found in report["rows"]:
        assert len(found["tokens_per_s"]["rounds"]) == 3
        assert found["tokens_per_s"]["lowest"] <= found["tokens_per_s"]["median"] <= found["tokens_per_s"]["highest"]
        assert found["same_answers"] == found["answers"] == 2
        assert found["token_ms"] == sorted(found["token_ms"])
        assert found["precision"] == "fp32"


def test_acceptance_is_told_both_ways_and_by_position(measured: tuple[Result, Any, str]) -> None:
    _, report, _ = measured
    assert row(report, "plain")["acceptance"] is None
    for mode, tokens in (("block 8 scripted 1", 1), ("block 8 scripted 8", 8)):
        acceptance = row(report, mode)["acceptance"]
        assert acceptance["survival"] == [float(tokens == 8)] * 7
        assert acceptance["histogram"][tokens - 1] == sum(acceptance["histogram"]) > 0
    acceptance = row(report, "block 8")["acceptance"]
    assert acceptance["mean"]["over_rounds"] >= 1
    assert acceptance["mean"]["over_requests"] >= 1
    assert acceptance["reached"][0] >= acceptance["reached"][-1]


def test_stages_sum_up_and_plain_decoding_does_not_draft(measured: tuple[Result, Any, str]) -> None:
    _, report, _ = measured
    assert row(report, "plain")["stages_ms"]["draft"] == 0
    assert min(row(report, "block 8")["stages_ms"][name] for name in ("draft", "verify", "context")) > 0
    lengths = [(found["context_tokens"], found["mode"]) for found in report["contexts"]]
    assert lengths == [(n, mode) for mode in ("plain", "block 4", "block 8") for n in (20, 60)]
    assert report["memory"]["weight_bytes"] > 0
    assert report["memory"]["peak_resident_bytes"]["dflash-export"] > report["memory"]["weight_bytes"]
    assert report["conditions"]["cpu"]
    assert "power_mode" in report["conditions"]


def test_the_printed_verdicts_are_those_of_the_intervals(measured: tuple[Result, Any, str]) -> None:
    done, report, _ = measured
    assert report["comparisons"]
    for found in report["comparisons"]:
        effect = found["effect"]
        clear = effect["low"] > 1 or effect["high"] < 1
        assert clear == (effect["verdict"] in ("faster", "slower"))
        (line,) = [ln for ln in done.stdout.splitlines() if ln.startswith(f"{found['first']} against")]
        assert f"({effect['low']:.2f} to {effect['high']:.2f})" in line
    assert "note: Rows marked 'scripted N'" in done.stdout


def test_the_page_works_offline_and_is_well_formed(measured: tuple[Result, Any, str]) -> None:
    _, _, text = measured
    assert not re.search(r"<script|<link|<img|@import|url\(|https?://", text)
    assert "prefers-color-scheme: dark" in text
    plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(plots) == 5  # speed, speedup, acceptance, cycle, context
    for plot in plots:
        ElementTree.fromstring(plot)
    body = text[text.index("<body>") : text.index("</body>") + 7]
    ElementTree.fromstring(body)
    for variable in set(re.findall(r"var\((--[\w-]+)\)", text)):
        assert text.count(f"{variable}:") >= 2, f"{variable} is not set for both colour schemes"


def test_hostile_names_stay_text(measured: tuple[Result, Any, str]) -> None:
    from dflash_runtime.bundle import decode

    pair_facts = {**measured[1]["pair"], "target": "<script>alert(1)</script>"}
    data = {**measured[1], "pair": pair_facts, "notes": ["a & b <i>"]}
    text = page([decode(BenchReport, data, "the report")])
    assert "<script" not in text
    assert "a &amp; b &lt;i&gt;" in text


def test_two_rounds_call_nothing_a_speedup(pair: Path, prompts: Path) -> None:
    done = bench(pair, "--prompts", prompts, *SMALL, "--rounds", 2, "--block-size", 4)
    assert done.exit_code == 0
    assert "too few rounds" in done.stdout
    assert not re.search(r", (faster|slower)$", done.stdout, re.MULTILINE)


def test_a_headline_claims_no_more_than_the_interval(measured: tuple[Result, Any, str]) -> None:
    from dflash_runtime.bundle import decode

    data = json.loads(json.dumps(measured[1]))
    for found in data["comparisons"]:
        found["effect"] = {"ratio": 1.3, "low": 0.9, "high": 1.9, "rounds": [1, 1, 2.0], "verdict": "within the spread"}
    words = headline(decode(BenchReport, data, "the report"))
    assert words.startswith("No block size is faster than plain decoding here beyond the spread")
    for found in data["comparisons"]:
        found["effect"] = {"ratio": 1.3, "low": 1.2, "high": 1.4, "rounds": [1.3], "verdict": "faster"}
    assert "1.30 x (1.20 to 1.40), faster" in headline(decode(BenchReport, data, "the report"))
    # The larger mean whose spread is larger still does not hide the one that is sure.
    unsure = {"ratio": 1.9, "low": 0.8, "high": 4.0, "rounds": [1.0, 3.0, 2.3], "verdict": "within the spread"}
    (of_block_8,) = [c for c in data["comparisons"] if c["block_size"] == 8 and not c["scripted_tokens"]]
    of_block_8["effect"] = unsure
    words = headline(decode(BenchReport, data, "the report"))
    assert "block size 4" in words
    assert "faster" in words


def test_a_reader_is_told_of_other_work_and_of_a_changed_mode() -> None:
    conditions = DeviceConditions("d", "c", 4, "MAXN", None, None, None)
    idle, busy = MomentaryState(2000, None, 0.4), MomentaryState(2000, None, 3.1)
    assert disturbance_notes(conditions, idle, []) == []
    assert disturbance_notes(conditions, MomentaryState(None, None, None), []) == []
    (note,) = disturbance_notes(conditions, busy, [])
    assert "load average 3.1 on 4 CPUs" in note
    slower = dataclasses.replace(conditions, power_mode="15W")
    (note,) = disturbance_notes(conditions, idle, conditions.differences(slower))
    assert "power mode was MAXN and is 15W" in note


def chat_settings(bundle: Path) -> Settings:
    return Settings(bundle, "ort-cpu", 1, "cpu", "fp32", {})


def test_a_server_is_asked_with_messages_and_counts_its_own_tokens() -> None:
    question = Question([1, 2], [{"role": "user", "content": "hello"}], 12, [])
    with serving(["a", "b", "c", "d"], 9) as fake:
        job = Job(
            engine=SERVER, bundle="", backend="", threads=None, device="cpu", precision="fp32", model=fake.url + "/v1",
            drafter=None, served_model=MODEL, template_args={"enable_thinking": False}, modes=[Mode(1)],
            questions=[question], turn=0,
        )  # fmt: skip
        run = measure(job)
        (answer,) = run.answers
        assert answer.text == "abcd"
        assert sum(answer.round_tokens) == 8  # nine, the first of which is the time to the first token
        assert len(answer.round_ms) == len(answer.round_tokens) == 3
        assert fake.requests[-1]["temperature"] == 0
        assert fake.requests[-1]["max_tokens"] == 12
        assert fake.requests[-1]["chat_template_kwargs"] == {"enable_thinking": False}
        assert fake.requests[-1]["messages"] == question.messages
        assert run.precision == "as served"
        with pytest.raises(DFlashError, match="serves fake-model, not other"):
            ServerEngine(Job(**{**job.__dict__, "served_model": "other"}))
    with pytest.raises(DFlashError, match="does not answer"):
        ServerEngine(job)
    for pieces, count, words in ((["a"], None, "sent no usage"), ([], 3, "sent no text"), (["abc"], 3, "in one piece")):
        with serving(pieces, count) as fake, pytest.raises(DFlashError, match=words):
            measure(Job(**{**job.__dict__, "model": fake.url}))


def test_a_server_takes_part_in_a_measurement(prompts: Path, tmp_path: Path, pair: Path) -> None:
    with serving(["x", "y", "z"], 6) as fake:
        done = bench(
            pair, "--prompts", prompts, *SMALL, "--rounds", 1, "--block-size", 4, "--against",
            f"openai:{fake.url}#{MODEL}", "--json", tmp_path / "r.json",
        )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    (report,) = json.loads((tmp_path / "r.json").read_text())
    served = report["rows"][-1]
    label = f"{MODEL} at {fake.url}"
    assert (served["label"], served["mode"], served["same_answers"]) == (label, "as served", None)
    assert any(found["second"] == f"{label}, as served" for found in report["comparisons"])


def test_turns_are_answered_one_by_one(pair: Path, tmp_path: Path) -> None:
    prompts = PromptSet("mt-bench", [["first", "second"], ["only"]], "{text}", "", "")
    questions = make_questions(prompts, chat_settings(pair), 8, raw=False, scratch=tmp_path)
    roles = [[m["role"] for m in q.messages or []] for q in questions]
    assert roles == [["user"], ["user"], ["user", "assistant", "user"]]
    said = (questions[2].messages or [])[1]["content"]
    assert said
    assert (questions[2].messages or [])[2]["content"] == "second"


def test_a_template_switch_that_is_not_there_is_refused(pair: Path, prompts: Path) -> None:
    done = bench(pair, "--prompts", prompts, "--thinking", "off")
    assert done.exit_code == 1
    assert "no thinking mode" in done.stderr


REFUSED: list[tuple[list[str], str]] = [
    (["--against", "ollama"], "'ollama' is none of transformers, dflash, genai, openai:URL"),
    (["--against", "dflash"], "Give the checkpoint the bundle was built from with --model"),
    (["--block-size", "16"], "Block size 16 is larger than the bundle allows, 8"),
    (["--scripted-acceptance", "9"], "commits at most 8 tokens, not 9"),
    (["--context", "5000"], "this bundle has room for 1 to 176"),
    (["--prompts", "gsm9k"], "'gsm9k' is neither a set of prompts"),
    (["--max-new-tokens", "999"], "exceed the context of 200"),
    (["--raw", "--against", "openai:http://127.0.0.1:9"], "--raw prompts cannot be compared"),
    (["--scripted-acceptance", "2", "--backend", "tensorrt"], "drafts and accepts without the host"),
    (["--html", "no/such/folder/a.html"], "is not a folder"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_cannot_be_measured_is_said_before_measuring(
    pair: Path, prompts: Path, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_run, "run_rounds", lambda *a: pytest.fail("it measured"))
    done = bench(pair, "--prompts", prompts, *arguments)
    assert done.exit_code == 1
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_peer_that_is_not_installed_is_named_with_its_command(
    pair: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = bench(pair, "--prompts", prompts, "--against", "genai")
    assert done.exit_code == 1
    assert "pip install onnxruntime-genai" in done.stderr


def test_a_process_that_fails_is_told_in_its_own_words(pair: Path, prompts: Path) -> None:
    done = bench(pair, "--prompts", prompts, *SMALL, "--against", "openai:http://127.0.0.1:9", "--rounds", 1)
    assert done.exit_code == 1
    assert "Measuring openai failed: http://127.0.0.1:9/v1/models does not answer" in done.stderr


def test_named_sets_are_wrapped_and_picked_as_the_authors_do(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": f"Q{i}"} for i in range(10)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    found = find_prompts(f"gsm8k={path}", 3)
    order = [7, 3, 2]  # random.Random(42).shuffle(list(range(10))) begins so
    wrapped = "Q{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    assert found.conversations == [[wrapped.format(i)] for i in order]
    assert "3 of 10 after the authors' shuffle" in found.picked


@pytest.mark.parametrize("name", ["gsm8k", "math500", "humaneval", "mt-bench"])
def test_wrapping_is_that_of_the_authors_package(name: str, tmp_path: Path) -> None:
    authors = pytest.importorskip("dflash.benchmark").DATASETS[name]
    key = {"gsm8k": "question", "math500": "problem", "humaneval": "prompt", "mt-bench": "prompt"}[name]
    text: Any = ["first {turn}", "second"] if name == "mt-bench" else "what is {x}?"
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({key: text}), encoding="utf-8")
    expected = authors["format"]({key: text})
    found = find_prompts(f"{name}={path}", 1)
    assert found.conversations == [expected if authors.get("multi_turn") else [expected]]


def test_a_set_without_its_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "x"}', encoding="utf-8")
    with pytest.raises(DFlashError, match="Row 1 of math500 has no text in 'problem'"):
        find_prompts(f"math500={path}", 1)


def test_a_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*arguments: Any, **options: Any) -> list[dict[str, Any]]:
        asked.append((arguments, options))
        return [{"prompt": ["one", "two"]}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))  # type: ignore[arg-type]
    assert find_prompts("mt-bench", 5).conversations == [["one", "two"]]
    assert asked == [(("HuggingFaceH4/mt_bench_prompts", None), {"split": "train"})]


def test_a_set_of_the_hub_says_how_else_it_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DFlashError, match=r"pip install datasets.*--prompts gsm8k=FILE"):
        find_prompts("gsm8k", 1)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=refuse))  # type: ignore[arg-type]
    with pytest.raises(DFlashError, match=r"could not be loaded from the hub \(no network\).*math500=FILE"):
        find_prompts("math500", 1)


def test_two_runs_agree_where_their_intervals_overlap(measured: tuple[Result, Any, str], tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    data = json.loads(json.dumps(measured[1]))
    first.write_text(json.dumps([data]))
    second.write_text(json.dumps([data]))
    same = CliRunner().invoke(agreement, [str(first), str(second)])
    assert same.exit_code == 0
    assert f"All {len(data['comparisons'])} ratios agree" in same.stdout
    effect = data["comparisons"][1]["effect"]
    effect.update(low=effect["high"] * 1.01, ratio=effect["high"] * 1.02, high=effect["high"] * 1.03)
    second.write_text(json.dumps([data]))
    other = CliRunner().invoke(agreement, [str(first), str(second)])
    assert other.exit_code == 1
    assert f"1 of {len(data['comparisons'])} ratios differ" in other.stderr
    assert other.stdout.count("DIFFER") == 1
    effect["rounds"] = effect["rounds"][:2]
    second.write_text(json.dumps([data]))
    assert "fewer than 3 rounds" in CliRunner().invoke(agreement, [str(first), str(second)]).stderr
    second.write_text("[]")
    assert "nothing in common" in CliRunner().invoke(agreement, [str(first), str(second)]).stderr


def test_memory_on_a_gpu_is_that_of_the_process() -> None:
    text = "123, 2048\n124, 1\n123, 10\n125, [N/A]\n"
    assert parse_device_memory(text, 123) == 2058 << 20
    assert parse_device_memory(text, 125) is None
    assert parse_device_memory("", 123) is None
