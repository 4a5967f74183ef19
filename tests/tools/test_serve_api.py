"""The official client, unchanged, against a running server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serve_calls import Running, serving, wait_until
from tiny_bundle import Sizes, write_bundle

from dflash_runtime import GenerationConfig, Session
from dflash_runtime.generation import PROPOSALS
from dflash_tools.serve_jobs import Question
from dflash_tools.serve_metrics import ServeMetrics
from dflash_tools.serve_requests import Defaults
from dflash_tools.serve_session import LoadedBundle, SessionOptions

MESSAGES: Any = [{"role": "user", "content": "hello"}]
STEPS = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("served") / "pair", Sizes(likely_tokens=3, max_context=192))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with serving([folder], options=SessionOptions(threads=1, block_size=4)) as running:  # auto depends on the clock
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def session(folder: Path) -> Iterator[Session]:
    with Session.open(folder, threads=1) as opened:
        yield opened


def answer(session: Session, prompt: Any = MESSAGES, **options: Any) -> Any:
    return session.generate(prompt, GenerationConfig(**{"max_new_tokens": 24, **options}))


def test_chat_says_what_a_session_says(client: openai.OpenAI, session: Session) -> None:
    expected = answer(session)
    found = client.chat.completions.create(model="pair", messages=MESSAGES, **STEPS)
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert found.usage.prompt_tokens == expected.prompt_token_count
    assert found.usage.completion_tokens == len(expected.token_ids)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    details = found.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == sum(n - 1 for n in expected.acceptance_lengths) > 0
    assert found.object == "chat.completion"
    assert found.model == "pair"
    assert found.system_fingerprint


def test_a_conversation_that_goes_on_costs_what_is_new(client: openai.OpenAI, session: Session) -> None:
    first = client.chat.completions.create(model="pair", messages=MESSAGES, **STEPS)
    said = first.choices[0].message.content or ""
    longer = [*MESSAGES, {"role": "assistant", "content": said}, {"role": "user", "content": "and now?"}]
    second = client.chat.completions.create(model="pair", messages=longer, **STEPS)
    assert second.choices[0].message.content == answer(session, longer, reuse_prefix=False).text
    assert first.usage is not None and second.usage is not None and second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens <= (cached or 0) < second.usage.prompt_tokens


def test_streamed_pieces_are_the_same_text_with_usage_at_the_end(client: openai.OpenAI, session: Session) -> None:
    expected = answer(session)
    chunks = list(client.chat.completions.create(
        model="pair", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **STEPS
    ))  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    told = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.delta.content or "" for choice in told) == expected.text
    assert [choice.finish_reason for choice in told] == [None] * (len(told) - 1) + ["length"]
    assert len(told) > 3  # not all at once
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_usage_ends_with_the_reason(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="pair", messages=MESSAGES, stream=True, **STEPS))
    assert chunks[-1].choices[0].finish_reason == "length"


def test_stop_strings_are_no_part_of_the_answer(client: openai.OpenAI, session: Session) -> None:
    whole = answer(session).text
    stop = whole[10:13]
    for given in (stop, ["never said", stop]):
        found = client.chat.completions.create(model="pair", messages=MESSAGES, stop=given, **STEPS)
        assert found.choices[0].message.content == whole[: whole.index(stop)]
        assert found.choices[0].finish_reason == "stop"


def test_equal_seeds_give_the_text_of_a_session_with_that_seed(client: openai.OpenAI, session: Session) -> None:
    options: Any = {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 0.3, "frequency_penalty": 0.1}
    results = [answer(session, seed=7 + i, **options) for i in range(3)]
    expected = [result.text for result in results]
    found = client.chat.completions.create(model="pair", messages=MESSAGES, seed=7, n=3, max_tokens=24, **options)
    assert [choice.message.content for choice in found.choices] == expected
    assert len(set(expected)) == 3
    assert found.usage is not None
    assert found.usage.completion_tokens == sum(len(result.token_ids) for result in results)
    assert found.usage.prompt_tokens == answer(session).prompt_token_count
    again = client.chat.completions.create(model="pair", messages=MESSAGES, seed=7, max_tokens=24, **options)
    assert again.choices[0].message.content == expected[0]


def test_what_the_drafter_proposes_is_a_field(client: openai.OpenAI, session: Session) -> None:
    """With `sampled` alone the text of a seed depends on the block sizes, so that it takes no automatic one."""
    options: Any = {"temperature": 0.7, "top_k": 40, "seed": 3, "block_size": 4}
    for kind in PROPOSALS:
        expected = answer(session, proposals=kind, **options)
        body = {"proposals": kind, "top_k": 40}
        found = client.chat.completions.create(
            model="pair", messages=MESSAGES, temperature=0.7, seed=3, max_tokens=24, extra_body=body
        )
        assert found.choices[0].message.content == expected.text
        details = found.usage and found.usage.completion_tokens_details
        assert details and details.accepted_prediction_tokens == sum(n - 1 for n in expected.acceptance_lengths)
        text = client.completions.create(model="pair", prompt="ab", temperature=0.7, seed=3, max_tokens=24,
                                         extra_body=body).choices[0].text  # fmt: skip
        assert text == answer(session, "ab", raw=True, proposals=kind, **options).text


def test_seeded_texts_of_drawn_proposals_take_no_block_sizes_by_time(folder: Path) -> None:
    with Session.open(folder, threads=1) as session:
        loaded = LoadedBundle("pair", session, SessionOptions(threads=1), ServeMetrics())
        sizes = {}
        for options in ({}, {"proposals": "coupled"}, {"proposals": "sampled"}, {"proposals": "sampled", "seed": None},
                        {"proposals": "sampled", "temperature": 0.0}):  # fmt: skip
            asked = GenerationConfig(**{"temperature": 1.0, "seed": 3, **options})
            sizes[str(options)] = loaded._config(Question("hi", asked), 5, [], lambda read, of: None).block_size
    assert list(sizes.values()) == ["auto", "auto", None, "auto", "auto"]


def test_the_server_says_what_is_proposed_where_a_request_does_not(folder: Path, session: Session) -> None:
    served = SessionOptions(threads=1, block_size=4)
    options: Any = {"temperature": 0.7, "seed": 3}
    with serving([folder], options=served, defaults=Defaults(0.7, "sampled")) as running:
        found = running.client().chat.completions.create(model="pair", messages=MESSAGES, seed=3, max_tokens=24)
        drawn = answer(session, proposals="sampled", block_size=4, **options).text
        assert found.choices[0].message.content == drawn != answer(session, **options).text
        found = running.client().chat.completions.create(
            model="pair", messages=MESSAGES, seed=3, max_tokens=24, extra_body={"proposals": "argmax"}
        )
        assert found.choices[0].message.content == answer(session, **options).text


def test_temperature_is_1_where_nobody_says(client: openai.OpenAI, session: Session) -> None:
    found = client.chat.completions.create(model="pair", messages=MESSAGES, seed=3, max_tokens=24)
    assert found.choices[0].message.content == answer(session, seed=3, temperature=1.0).text
    assert found.choices[0].message.content != answer(session).text


def test_logit_bias_moves_the_choice(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="pair", messages=MESSAGES, logit_bias={"122": 100}, **STEPS)
    assert found.choices[0].message.content == "z" * 24


def test_completions_take_texts_and_ids(client: openai.OpenAI, session: Session) -> None:
    text, ids = answer(session, "ab", raw=True), answer(session, [1, 2, 3])
    found = client.completions.create(model="pair", prompt="ab", **STEPS)
    assert found.choices[0].text == text.text
    found = client.completions.create(model="pair", prompt=[[97, 98], [1, 2, 3]], **STEPS)
    assert [choice.text for choice in found.choices] == [text.text, ids.text]
    assert found.usage is not None
    assert found.usage.prompt_tokens == 5
    chunks = list(client.completions.create(model="pair", prompt=["ab"], stream=True, **STEPS))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text.text
    assert client.completions.create(model="pair", prompt="ab", temperature=0).usage.completion_tokens == 16  # type: ignore[union-attr]


def test_an_answer_without_a_length_goes_on_to_the_end_of_the_context(client: openai.OpenAI) -> None:
    endless = {"257": -100}
    found = client.chat.completions.create(model="pair", messages=MESSAGES, temperature=0, logit_bias=endless)
    assert found.usage is not None
    assert found.usage.total_tokens == 193  # the newest token needs no row
    assert found.choices[0].finish_reason == "length"


def test_log_probabilities_belong_to_the_words(client: openai.OpenAI, session: Session) -> None:
    expected = answer(session)
    options: Any = {"model": "pair", "messages": MESSAGES, "logprobs": True, "top_logprobs": 3, **STEPS}
    found = client.chat.completions.create(**options)
    assert found.choices[0].logprobs is not None
    content = found.choices[0].logprobs.content or []
    assert len(content) == 24
    assert "".join(token.token for token in content) == expected.text == found.choices[0].message.content
    for token in content:
        assert token.top_logprobs[0].token == token.token  # greedy: the likeliest
        assert token.top_logprobs[0].logprob == token.logprob <= 0
        assert bytes(token.bytes or []).decode("utf-8", "replace") == token.token
        logprobs = [other.logprob for other in token.top_logprobs]
        assert logprobs == sorted(logprobs, reverse=True)
        assert sum(map(math.exp, logprobs)) < 1
    streamed = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(stream=True, **options)]
    pieces = [token for found in streamed if found is not None for token in found.content or []]
    assert [(token.token, token.bytes) for token in pieces] == [(token.token, token.bytes) for token in content]
    told = [token.logprob for token in pieces]  # blocks of another size round otherwise
    assert told == pytest.approx([token.logprob for token in content], abs=1e-4)


def test_a_part_of_a_character_has_its_byte(client: openai.OpenAI) -> None:
    options: Any = {"logit_bias": {"195": 100}, "max_tokens": 2, "temperature": 0, "logprobs": True}
    found = client.chat.completions.create(model="pair", messages=MESSAGES, **options)
    assert found.choices[0].logprobs is not None
    assert [(t.token, t.bytes) for t in found.choices[0].logprobs.content or []] == [("\ufffd", [195])] * 2


def test_log_probabilities_are_those_of_plain_decoding(client: openai.OpenAI, session: Session) -> None:
    from dflash_tools.serve_chooser import ServedChooser

    kept: list[ServedChooser] = []

    def make(*arguments: Any) -> ServedChooser:
        kept.append(ServedChooser(*arguments, top_logprobs=0, grammar=None))
        return kept[-1]

    options: Any = {"temperature": 0.7, "seed": 5, "logit_bias": {257: -100}}
    for plain in (True, False):
        answer(session, chooser=make, plain=plain, **options)
    expected, drafted = kept[0].scored, kept[1].scored
    assert [token.token_id for token in drafted] == [token.token_id for token in expected]
    assert [t.logprob for t in drafted] == pytest.approx([t.logprob for t in expected], abs=1e-4)
    found = client.chat.completions.create(model="pair", messages=MESSAGES, logprobs=True, max_tokens=24, **options)
    assert found.choices[0].logprobs is not None
    told = [token.logprob for token in found.choices[0].logprobs.content or []]
    assert told == pytest.approx([token.logprob for token in expected], abs=1e-4)


def test_log_probabilities_of_completions_end_where_the_text_does(client: openai.OpenAI, session: Session) -> None:
    whole = answer(session, "ab", raw=True).text
    stop = whole[7:10]
    found = client.completions.create(model="pair", prompt="ab", logprobs=2, stop=stop, **STEPS)
    choice = found.choices[0]
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text == whole[: whole.index(stop)]
    assert choice.logprobs.text_offset == list(range(len(choice.text)))
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs or [])


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["abc", "cab"]}, "many": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "many"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize("temperature", [0, 1])
def test_json_follows_the_schema_drafted_as_plain(client: openai.OpenAI, session: Session, temperature: float) -> None:
    from dflash_tools.serve_chooser import ServedChooser
    from dflash_tools.serve_grammar import JsonGrammars

    kind: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    found = client.chat.completions.create(
        model="pair", messages=MESSAGES, response_format=kind, seed=1, max_tokens=150, temperature=temperature
    )
    text = found.choices[0].message.content or ""
    data = json.loads(text)
    assert found.choices[0].finish_reason == "stop"
    assert data["kind"] in ("abc", "cab")
    assert 0 <= data["many"] <= 99

    def make(*arguments: Any) -> ServedChooser:
        return ServedChooser(*arguments, top_logprobs=None, grammar=grammars.compile(json.dumps(SCHEMA)))

    grammars = JsonGrammars(session.bundle)
    plain = answer(session, max_new_tokens=150, seed=1, temperature=temperature, chooser=make, plain=True)
    assert plain.text == text


def test_any_json_object(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="pair", messages=MESSAGES, response_format={"type": "json_object"}, **STEPS
    )
    assert (found.choices[0].message.content or "").startswith("{")


def test_roles_and_parts_of_messages(client: openai.OpenAI, session: Session) -> None:
    parts: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
    ]
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    found = client.chat.completions.create(model="pair", messages=parts, **STEPS)
    assert found.choices[0].message.content == answer(session, plain).text


def test_bookkeeping_fields_change_nothing(client: openai.OpenAI, session: Session) -> None:
    found = client.chat.completions.create(
        model="pair", messages=MESSAGES, user="x", metadata={"a": "b"}, store=False, tools=[], service_tier="auto",
        response_format={"type": "text"}, **STEPS,
    )  # fmt: skip
    assert found.choices[0].message.content == answer(session).text


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["pair"]
    assert client.models.retrieve("pair").owned_by == "dflash-export"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


CHAT_FAULTS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"temperature": 3}, "temperature", "3"), ({"top_p": "a"}, "top_p", "'a'"), ({"n": 0}, "n", "0"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "4"), ({"max_tokens": 0}, "max_tokens", "0"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "4"), ({"seed": 1.5}, "seed", "1.5"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"), ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "9"),
    ({"logit_bias": {"264": 1}}, "logit_bias", "263"), ({"repetition_penalty": -1}, "repetition_penalty", "-1"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
    ({"proposals": "greedy"}, "proposals", "argmax, coupled, sampled"), ({"proposals": ["sampled"]}, "proposals", "["),
    ({"stream_options": {"chunks": 1}, "stream": True}, "chunks", "chunks"), ({"messages": []}, "messages", "[]"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "king"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "None"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0]", "image_url"),
    ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tools", "function calling"),
    ({"audio": {"voice": "alloy", "format": "mp3"}}, "audio", "text only"),
    ({"modalities": ["text", "audio"]}, "modalities", "text only"), ({"colour": "red"}, "colour", "colour"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "chat_template_kwargs"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objct"}}}},
     "response_format", "objct"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "word"), CHAT_FAULTS, ids=lambda value: None)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str | None, word: str, stream: bool
) -> None:
    body = {"messages": MESSAGES, "stream": stream, **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="pair", extra_body=body, messages=MESSAGES)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert word in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": ["a", 1]}, "prompt"), ({}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"), ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"), ({"prompt": "a", "n": 65}, "n"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "logprobs": 9}, "logprobs"),
    ],
)  # fmt: skip
def test_a_wrong_field_of_completions_is_named(server: Running, fields: dict[str, Any], param: str) -> None:
    found = server.post("/v1/completions", json={"model": "pair", **fields})
    assert (found.status_code, found.json()["error"]["param"]) == (400, param)


def test_errors_of_the_prompt(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="pair", messages=[{"role": "user", "content": "x" * 300}])
    assert caught.value.code == "context_length_exceeded"
    assert "192" in caught.value.message
    with pytest.raises(openai.BadRequestError, match="264"):
        client.completions.create(model="pair", prompt=[264])
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert "pair" in missing.value.message
    for body, status in [(b"{", 400), (b"[]", 400), (b'{"model": NaN}', 400), (b"[" * 100_000, 400), (b"\xff", 400),
                         (b'{"model": "\\ud800"}', 400)]:
        found = server.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
        assert (found.status_code, found.json()["error"]["type"]) == (status, "invalid_request_error")
    found = server.post("/v1/chat/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    assert found.status_code == 415
    assert server.get("/v1/chat/completions").status_code == 405
    assert server.get("/v2").json()["error"]["code"] == "unknown_url"


def test_a_template_that_refuses_is_the_clients_fault(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    folder = write_bundle(tmp_path / "strict", Sizes(likely_tokens=3), template=template)
    silent = write_bundle(tmp_path / "silent", Sizes(likely_tokens=3), template=None)
    broken = write_bundle(tmp_path / "broken", Sizes(likely_tokens=3), template="{{ 1 / messages[1:]|length }}")
    words_of = {"strict": "roles must alternate", "silent": "no chat template", "broken": "division by zero"}
    with serving([folder, silent, broken]) as running:
        for name, words in words_of.items():
            with pytest.raises(openai.BadRequestError, match=words):
                running.client().chat.completions.create(model=name, messages=MESSAGES)


def test_health_and_metrics_tell_what_happened(server: Running, client: openai.OpenAI) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    before = {name: server.metric(name) for name in ("dflash_prompt_tokens_total", "dflash_completion_tokens_total")}
    found = client.chat.completions.create(model="pair", messages=MESSAGES, **STEPS)
    assert found.usage is not None
    grown = {name: server.metric(name) - value for name, value in before.items()}
    assert list(grown.values()) == [found.usage.prompt_tokens, 24]
    assert server.metric("dflash_acceptance_length_count") > 0
    assert 'dflash_rounds_total{block_size="4",model="pair"}' in server.get("/metrics").text
    assert server.metric("dflash_time_to_first_token_seconds_count") > 0
    assert server.metric("dflash_time_per_token_seconds_count") > 0
    assert server.metric("dflash_loaded_bundles") == 1
    wait_until(lambda: server.metric("dflash_queue_length") == server.metric("dflash_running") == 0)
    assert 'dflash_requests_total{path="/v1/chat/completions",status="200"}' in server.get("/metrics").text
