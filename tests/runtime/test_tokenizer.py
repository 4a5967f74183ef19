from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_bundle import BOS, write_tokenizer

from dflash_runtime import BundleError, PromptError
from dflash_runtime.bundle import TextFacts
from dflash_runtime.tokenizer import ChatTemplate, Tokenizer

HI = [{"role": "user", "content": "HI"}]
WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
WITHOUT_BOS = "{% for m in messages %}{{ m.content }}{% endfor %}"


def make(folder: Path, template: str | None = None, *, adds_bos: bool = False, **args: Any) -> Tokenizer:
    write_tokenizer(folder, adds_bos=adds_bos, template=template)
    return Tokenizer(folder, TextFacts([], BOS, template is not None, args, {"bos_token": "<bos>"}))


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
def test_one_bos_after_a_template(tmp_path: Path, template: str) -> None:
    tokenizer = make(tmp_path, template, adds_bos=True)
    assert tokenizer.encode_messages(HI) == [BOS, 72, 73]


def test_one_bos_in_raw_text(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, adds_bos=True)
    assert tokenizer.encode_text("HI") == [BOS, 72, 73]
    assert tokenizer.encode_text("<bos>HI") == [BOS, 72, 73]


def test_no_bos_where_neither_wants_one(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, WITHOUT_BOS)
    assert tokenizer.encode_messages(HI) == [72, 73]
    assert tokenizer.encode_text("HI") == [72, 73]


def test_template_arguments_of_the_pair_and_of_the_request(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, "{{ 'A' if thinking else 'B' }}", thinking=True)
    assert tokenizer.encode_messages(HI) == [65]
    assert tokenizer.encode_messages(HI, {"thinking": False}) == [66]


def test_no_template(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no chat template"):
        make(tmp_path).encode_messages(HI)


def test_special_tokens_have_no_text(tmp_path: Path) -> None:
    assert make(tmp_path).decode([256, 72, 258, 73, 257]) == "HI"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}", "user\n"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<é&>"}'),
        ('{{ {"a": 1} | tojson(indent=2) }}', '{\n  "a": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c", "abuserc"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if tools %}x{% endif %}{{ add_generation_prompt }}", "True"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}", "3"),
    ],
)
def test_templates_follow_hugging_face(source: str, expected: str) -> None:
    message = {"role": "user", "content": "<é&>"}
    assert ChatTemplate(source).render([message], {}) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only user turns') }}",
        "{{ messages[0].__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 + 'a' }}",
    ],
)
def test_templates_that_refuse(source: str) -> None:
    with pytest.raises(PromptError, match="roles"):
        ChatTemplate(source).render(HI, {})


def test_raise_exception_keeps_its_words() -> None:
    with pytest.raises(PromptError, match="only user turns"):
        ChatTemplate("{{ raise_exception('only user turns') }}").render(HI, {})
    with pytest.raises(PromptError, match="no valid Jinja"):
        ChatTemplate("{% if %}")


def test_broken_tokenizer_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path, TextFacts([], None, False, {}, {}))
