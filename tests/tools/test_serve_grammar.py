"""Rows of a verified block under a grammar, and tokens in step with their text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_bundle import Sizes, write_bundle, write_tokenizer

from dflash_runtime import Bundle, DFlashError
from dflash_runtime.bundle import TextFacts
from dflash_runtime.generation import GenerationConfig
from dflash_runtime.tokenizer import Tokenizer
from dflash_tools.serve_chooser import Logits, ServedChooser
from dflash_tools.serve_errors import ApiError
from dflash_tools.serve_grammar import JsonGrammars
from dflash_tools.serve_jobs import ScoredToken
from dflash_tools.serve_token_text import ShownTokens, TokenTexts

EOS = 257
SCHEMA = json.dumps({"enum": ["ab", "ac"]})  # the texts "ab" and "ac", quoted


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.open(write_bundle(tmp_path_factory.mktemp("grammar") / "pair", Sizes()))


@pytest.fixture(scope="module")
def grammars(bundle: Bundle) -> JsonGrammars:
    return JsonGrammars(bundle)


def rows(count: int) -> Logits:
    return np.random.default_rng(0).standard_normal((count, 264), np.float32)


def allowed(row: Logits) -> set[str]:
    return {chr(token) if token < 256 else "<eos>" for token in np.flatnonzero(row > -1e29)}


def test_each_row_is_ruled_by_the_proposals_before_it(grammars: JsonGrammars) -> None:
    grammar = grammars.compile(SCHEMA)
    for _ in range(2):  # looking does not move it
        ruled = grammar.rule_out(rows(6), [*b'"ac"', EOS])
        assert [allowed(row) for row in ruled[:5]] == [{'"'}, {"a"}, {"b", "c"}, {'"'}, {"<eos>"}]
    grammar.take([*b'"a'])
    ruled = grammar.rule_out(given := rows(3), [*b'b"'])
    assert [allowed(row) for row in ruled] == [{"b", "c"}, {'"'}, {"<eos>"}]
    kept = ruled > -1e29
    assert (ruled[kept] == given[kept]).all()


def test_rows_behind_a_proposal_that_may_not_come_are_not_asked_for(grammars: JsonGrammars) -> None:
    grammar, given = grammars.compile(SCHEMA), rows(3)
    ruled = grammar.rule_out(given, [*b'"z'])
    assert [allowed(row) for row in ruled[:2]] == [{'"'}, {"a"}]
    assert (ruled[2] == given[2]).all()
    chooser = ServedChooser(GenerationConfig(), [1], 264, top_logprobs=None, grammar=grammar)
    assert chooser.choose(given, [*b'"z'], 1)[:2] == [*b'"a']


def test_scores_that_are_not_finite_stay_so(grammars: JsonGrammars) -> None:
    given = rows(1)
    given[0, 5] = np.nan  # of a token that may not come
    chooser = ServedChooser(GenerationConfig(), [1], 264, top_logprobs=2, grammar=grammars.compile(SCHEMA))
    assert chooser.choose(given, [], 1) == [-1]


def test_white_space_is_for_indenting_and_ends(grammars: JsonGrammars) -> None:
    schema, data = json.dumps({"type": "object"}), {"a": [{"b": 1}, {}], "c": "d  \n\n"}
    for text in (json.dumps(data), *(json.dumps(data, indent=i) for i in (1, 4, "\t"))):
        for told in (text, text.replace("\n", "\r\n")):
            grammars.compile(schema).take([*told.encode(), EOS])
    for begun in ('{"a" ', '{\n\n', "{\n" + 20 * " ", '{"a":\r\n\r\n'):
        grammar = grammars.compile(schema)
        grammar.take([*begun.encode()])
        found = allowed(grammar.rule_out(rows(1), [])[0])
        assert found and not found & {"\n", "\r"}, begun
        assert " " not in found or begun.endswith("\n"), begun


def test_a_token_against_the_grammar_is_an_error(grammars: JsonGrammars) -> None:
    with pytest.raises(DFlashError, match="stops at token 122"):
        grammars.compile(SCHEMA).take([122])


@pytest.mark.parametrize("schema", ['{"type": "objct"}', '{"if": {}}', "[1]", '{"$ref": "http://example.com"}',
                                    '{"x-guidance": {"whitespace_pattern": 3}}'])  # fmt: skip
def test_a_schema_that_cannot_be_held_to_is_refused(grammars: JsonGrammars, schema: str) -> None:
    with pytest.raises(ApiError, match="cannot be followed"):
        grammars.compile(schema)


def test_a_bundle_without_stop_tokens_writes_no_json(tmp_path: Path) -> None:
    endless = Bundle.open(write_bundle(tmp_path / "endless", Sizes(stop_token_ids=())))
    with pytest.raises(ApiError, match="stop token"):
        JsonGrammars(endless)


def test_only_committed_tokens_keep_their_scores() -> None:
    chooser = ServedChooser(GenerationConfig(), [1], 264, top_logprobs=2, grammar=None)
    given = rows(4)
    likeliest = given.argmax(axis=1).tolist()
    assert chooser.choose(given, [likeliest[0], likeliest[1] + 1, 7], 1) == likeliest[:2]
    chooser.commit(likeliest[:1])  # two are accepted, and the budget has room for one
    assert [token.token_id for token in chooser.scored] == likeliest[:1]
    exact = given[0].astype(np.float64) - np.log(np.exp(given[0].astype(np.float64)).sum())
    assert chooser.scored[0].logprob == pytest.approx(exact.max())
    assert chooser.scored[0].top == [(t, pytest.approx(exact[t])) for t in np.argsort(-exact)[:2].tolist()]


def test_tokens_leave_with_their_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    shown = ShownTokens(TokenTexts(Tokenizer(tmp_path, TextFacts([], None, False, {}, {}))), [EOS])
    scored = [ScoredToken(token, -1.0, [(EOS, -2.0)]) for token in [*"aé!z".encode(), EOS]]
    assert [t.token for t in shown.until(scored[:2], 1)] == ["a", "\ufffd"]
    first = shown.until(scored, 2)
    assert [(t.token, t.text_bytes, t.offset) for t in first] == [("\ufffd", b"\xa9", 1)]
    assert first[0].top == [("<eos>", None, -2.0)]
    assert [t.token for t in shown.until(scored, 3)] == ["!"]
    assert shown.until(scored, 3) == []
    assert shown.rest(3) == []  # a stop string at `z`
