"""Bodies of OpenAI's API to questions for a bundle."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_runtime.generation import PROPOSALS, GenerationConfig
from dflash_tools.serve_errors import ApiError, unsupported, wrong_field
from dflash_tools.serve_fields import Fields
from dflash_tools.serve_jobs import Question
from dflash_tools.serve_messages import read_messages

MOST_ANSWERS = 128
_MOST_TOKENS = 2**31
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
            "prompt_cache_retention", "prediction")  # fmt: skip
"""Bookkeeping at OpenAI, and hints about speed: the answer is the same without them."""
_NO_TOOLS = "this server has no function calling. Leave it out."
_TEXT_ONLY = "models of this server read and write text only. Leave it out."
_CHAT_NEUTRAL: dict[str, tuple[Sequence[Any], str]] = {
    "tools": ([[]], _NO_TOOLS), "tool_choice": (["none", "auto"], _NO_TOOLS), "functions": ([[]], _NO_TOOLS),
    "function_call": (["none", "auto"], _NO_TOOLS), "parallel_tool_calls": ([True, False], _NO_TOOLS),
    "modalities": ([["text"]], _TEXT_ONLY), "audio": ([], _TEXT_ONLY),
    "web_search_options": ([], "this server searches nothing. Leave it out."),
    "reasoning_effort": ([], "use chat_template_kwargs for what the model's chat template knows."),
    "verbosity": (["medium"], "say in the prompt how long the answer should be."),
}  # fmt: skip
_COMPLETION_NEUTRAL: dict[str, tuple[Sequence[Any], str]] = {
    "echo": ([False], "put the prompt before the answer yourself."),
    "suffix": ([""], "models of this server write on at the end only. Leave it out."),
}


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What a request asks for where it leaves a field out."""

    temperature: float = 1.0
    proposals: str = PROPOSALS[0]


@dataclasses.dataclass(frozen=True)
class Order:
    """A request that can be answered as far as its body tells."""

    model: str
    questions: list[Question]
    """One for each choice of the answer, in their order: all of the first prompt, all of the next."""
    answers_per_prompt: int
    stream: bool
    include_usage: bool
    """A last chunk with usage, when streaming."""


def read_chat(body: Mapping[str, Any], defaults: Defaults) -> Order:
    """An order for `/v1/chat/completions`; ApiError for the first field that cannot be used."""
    fields = Fields(body)
    model, messages = fields.text("model"), read_messages(fields.value("messages"))
    length_field, length = _chat_length(fields)
    config = _config(fields, defaults, length)
    config = dataclasses.replace(config, template_args=fields.mapping("chat_template_kwargs") or None)
    wants, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, 20)
    if top is not None and not wants:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs", code="invalid_value")
    schema = _json_schema(fields.mapping("response_format"))
    count, stream, usage = _answers(fields)
    fields.finish(_IGNORED, _CHAT_NEUTRAL)
    question = Question(messages, config, (top or 0) if wants else None, schema, length_field)
    return Order(model, _with_seeds([question], count), count, stream, usage)


def read_completion(body: Mapping[str, Any], defaults: Defaults) -> Order:
    """An order for `/v1/completions`; ApiError for the first field that cannot be used."""
    fields = Fields(body)
    model, prompts = fields.text("model"), _prompts(fields.value("prompt"))
    length = fields.whole("max_tokens", 1, _MOST_TOKENS)
    config = _config(fields, defaults, 16 if length is None else length)  # OpenAI's default here
    top = fields.whole("logprobs", 0, 5)
    count, stream, usage = _answers(fields)
    if (best_of := fields.whole("best_of", 1, MOST_ANSWERS)) not in (None, count):
        raise unsupported("best_of", f"it is {best_of} and n is {count}; ask for n answers and choose yourself.")
    fields.finish(_IGNORED, _COMPLETION_NEUTRAL)
    if len(prompts) * count > MOST_ANSWERS:
        raise wrong_field("prompt", f"{len(prompts)} prompts times n={count}", f"at most {MOST_ANSWERS} answers")
    questions = [Question(prompt, config, top) for prompt in prompts]
    return Order(model, _with_seeds(questions, count), count, stream, usage)


def _config(fields: Fields, defaults: Defaults, length: int | None) -> GenerationConfig:
    """How tokens are chosen. `max_new_tokens` is 0 where the request does not say."""
    return GenerationConfig(
        max_new_tokens=length or 0,
        stop_strings=fields.texts("stop", 4),
        temperature=fields.number("temperature", defaults.temperature, 0, 2),
        top_p=max(fields.number("top_p", 1, 0, 1), 1e-9),
        presence_penalty=fields.number("presence_penalty", 0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0, -2, 2),
        logit_bias=_logit_bias(fields.mapping("logit_bias")),
        seed=None if (seed := fields.whole("seed", -(2**63), 2**63 - 1)) is None else seed % 2**64,
        top_k=fields.whole("top_k", 0, 2**31) or 0,
        min_p=fields.number("min_p", 0, 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 1, 1e-3, math.inf),
        proposals=fields.choice("proposals", defaults.proposals, PROPOSALS),
    )


def _chat_length(fields: Fields) -> tuple[str, int | None]:
    lengths = {name: fields.whole(name, 1, _MOST_TOKENS) for name in ("max_tokens", "max_completion_tokens")}
    given = {name: length for name, length in lengths.items() if length is not None}
    if len(set(given.values())) > 1:
        raise ApiError(400, f"max_tokens is {lengths['max_tokens']} and max_completion_tokens "
                       f"{lengths['max_completion_tokens']}; give one of them.", param="max_tokens",
                       code="invalid_value")  # fmt: skip
    return next(iter(given.items()), ("max_tokens", None))


def _answers(fields: Fields) -> tuple[int, bool, bool]:
    """How many answers, whether streamed, and whether usage comes at the end of the stream."""
    count, stream = fields.whole("n", 1, MOST_ANSWERS) or 1, fields.flag("stream")
    options = Fields(fields.mapping("stream_options"))
    if fields.value("stream_options") is not None and not stream:
        raise ApiError(400, "stream_options needs stream to be true.", param="stream_options", code="invalid_value")
    usage = options.flag("include_usage")
    options.finish(("include_obfuscation",), {})
    return count, stream, usage


def _with_seeds(questions: list[Question], count: int) -> list[Question]:
    """Each question `count` times; the second answer has the next seed, and so on."""
    found = []
    for question in questions:
        for i in range(count):
            seed = question.config.seed
            config = dataclasses.replace(question.config, seed=None if seed is None else (seed + i) % 2**64)
            found.append(dataclasses.replace(question, config=config))
    return found


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids."""
    wanted = "a text, a list of texts, a list of token ids or a list of such lists, none empty"
    one = isinstance(value, str) or (isinstance(value, list) and all(_is_id(token) for token in value))
    prompts = [value] if one else value
    if not isinstance(prompts, list) or not prompts or len(prompts) > MOST_ANSWERS:
        raise wrong_field("prompt", value, wanted)
    for prompt in prompts:
        is_ids = isinstance(prompt, list) and all(_is_id(token) for token in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids):
            raise wrong_field("prompt", value, wanted)
    return prompts


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _logit_bias(given: Mapping[str, Any]) -> dict[int, float]:
    found = {}
    for token, bias in given.items():
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100 <= bias <= 100
        if not re.fullmatch("[0-9]{1,9}", token) or not is_number:
            raise wrong_field("logit_bias", {token: bias}, "token ids with numbers from -100 to 100")
        found[int(token)] = float(bias)
    return found


def _json_schema(given: Mapping[str, Any]) -> str | None:
    """JSON text of the schema a `response_format` asks for."""
    kind, name = given.get("type", "text"), "response_format"
    if kind == "text":
        return None
    if kind == "json_object":
        return '{"type": "object"}'
    if kind != "json_schema":
        raise wrong_field(f"{name}.type", kind, "text, json_object or json_schema")
    schema = given.get("json_schema", {})
    schema = schema.get("schema") if isinstance(schema, dict) else None
    if not isinstance(schema, dict):
        raise wrong_field(f"{name}.json_schema", given.get("json_schema"), 'like {"name": "x", "schema": {...}}')
    return json.dumps(schema)
