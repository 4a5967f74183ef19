"""Makes a reference: an oracle says what is right, twins of it that round say how far they deviate from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_tools.graph_probe import GraphProbe, joined_taps
from dflash_tools.own_deviation import own_deviation
from dflash_tools.proposal_scores import with_next_likeliest
from dflash_tools.reference_calls import drafter_calls, run_call, target_calls
from dflash_tools.reference_file import Reference
from dflash_tools.reference_record import (
    CONTEXT,
    REFERENCE_SCHEMA_VERSION,
    Call,
    PairFacts,
    ReferenceFacts,
    ReferenceText,
    Round,
)
from dflash_tools.reference_tensors import (
    Array,
    Tensors,
    is_choice,
    is_output,
    likeliest,
    sketch,
)

BUDGET_BYTES = {"outputs": 3 << 20, "inner": 1 << 20}
"""Above this the rows of all tensors of a kind are sketched."""

_NOT_KEPT = ("token_ids", "draft_candidates", "draft_edges", "draft_vocabulary")

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as given, and the ids the checkpoint's own tokenizer makes of it."""

    given: Any
    ids: list[int]
    rendered: str = ""
    """Behind the chat template."""


@dataclasses.dataclass(frozen=True)
class Order:
    """What a reference shall cover."""

    oracle: str
    precision: str
    config_sha256: str
    drafter_config_sha256: str | None
    pair: PairFacts
    vocab_size: int
    block_sizes: list[int]
    max_context_tokens: int
    new_tokens: int
    versions: dict[str, str]
    quantized: dict[str, str]


def make_reference(
    order: Order, prompts: Sequence[Prompt], oracle: GraphProbe, twins: Mapping[str, GraphProbe], progress: Progress,
    budgets: Mapping[str, int] | None = None,
) -> Reference:
    """Runs the oracle over every text and call.

    Args:
        order: What to cover.
        prompts: At least one.
        oracle: In fp32.
        twins: Half precision, or `int8 products` -> the same models, rounding so.
        progress: Called with stage, done, total.
        budgets: Bytes of outputs and of inner tensors above which their rows are sketched.
    """
    arrays: dict[str, Array] = {}
    texts, calls = [], list[Call]()
    for i, prompt in enumerate(prompts):
        progress("reference texts", i, len(prompts))
        text, its_calls = _text(order, prompt, oracle, i, calls, arrays)
        texts.append(text)
        calls += its_calls
    progress("reference texts", len(prompts), len(prompts))
    results = _run(calls, texts, oracle, progress)
    own = {n: own_deviation(calls, results, texts, arrays, order.pair, twin) for n, twin in twins.items()}
    sketched = _keep(calls, results, arrays, budgets or BUDGET_BYTES)
    for n, text in enumerate(texts):
        logits = results[text.whole_call]["logits"][len(text.ids) - 1 : -1]
        arrays[f"text{n}.top_ids"], arrays[f"text{n}.top_logits"] = likeliest(logits)
    if order.pair.has_drafter:  # its calls are made on the first text
        arrays["text0.taps"] = joined_taps(results[texts[0].whole_call])
    names = [[name for name in result if f"{number}/{name}" in arrays] for number, result in enumerate(results)]
    facts = ReferenceFacts(
        REFERENCE_SCHEMA_VERSION, order.oracle, order.precision, order.config_sha256,
        order.drafter_config_sha256, order.pair, texts, calls, names,
        sketched, own, order.versions, order.quantized,
    )  # fmt: skip
    return Reference(facts, arrays)


def _text(order: Order, prompt: Prompt, oracle: GraphProbe, index: int, before: Sequence[Call],
          arrays: dict[str, Array]) -> tuple[ReferenceText, list[Call]]:
    room = min(order.new_tokens, order.max_context_tokens - len(prompt.ids))
    pair, size = order.pair, 1
    if pair.has_drafter and pair.trained_block_size is not None:
        size = min(pair.trained_block_size, max(order.block_sizes))
    tokens, rounds, drafts = generate(oracle, prompt.ids, room, size, pair.mask_token_id)
    whole = [*prompt.ids, *tokens]
    first = 1 + max((call.sequence for call in before), default=-1)
    calls = list(target_calls(index, first, prompt.ids, whole, order.vocab_size))
    whole_call = len(before)
    if pair.has_drafter and pair.mask_token_id is not None:
        # Every row of the drafter's context, from all taps at once.
        calls.append(Call(CONTEXT, first + 2, index, 0, [], len(whole), 0, f"context of all {len(whole)} rows"))
        for r, (ids, scores) in enumerate(drafts):
            arrays[f"text{index}.round{r}_ids"], arrays[f"text{index}.round{r}_logits"] = ids, scores
        if index == 0:
            sizes = sorted({2, *order.block_sizes})
            calls += drafter_calls(index, first + 3, prompt.ids, whole, sizes, pair.mask_token_id)
    return ReferenceText(prompt.given, prompt.ids, tokens, size, rounds, whole_call, prompt.rendered), calls


def generate(oracle: GraphProbe, ids: Sequence[int], new_tokens: int, block_size: int, mask: int | None
             ) -> tuple[list[int], list[Round], list[tuple[Array, Array]]]:
    """Greedy tokens and, with a drafter, its rounds: written out here, not by the loop it is a reference for.

    Returns:
        Tokens, rounds, and the best candidates of each round's slots with their scores, [b - 1, k].
    """
    oracle.reset()
    found = oracle.target(ids, 0)
    tokens = [int(found["logits"][-1].argmax())]
    if mask is not None:
        oracle.context(joined_taps(found), 0)
    rounds, drafts = [], []
    while len(tokens) < new_tokens:
        position, room = len(ids) + len(tokens) - 1, new_tokens - len(tokens)
        proposed: list[int] = []
        size = min(block_size, room + 1)
        if mask is not None and size > 1:
            found = oracle.draft([tokens[-1], *[mask] * (size - 1)], position)
            proposed = [int(token) for token in found["draft_ids"][:, 0]]
            drafts.append(with_next_likeliest(found))
        found = oracle.target([tokens[-1], *proposed], position)
        chosen = [int(token) for token in found["logits"].argmax(-1)]
        right = next((i for i, token in enumerate(proposed) if token != chosen[i]), len(proposed))
        committed = chosen[: min(right + 1, room)]
        if mask is not None:
            oracle.context(joined_taps(found), position)
            rounds.append(Round(position, tokens[-1], proposed, committed))
        tokens += committed
    return tokens, rounds, drafts


def _run(calls: Sequence[Call], texts: Sequence[ReferenceText], probe: GraphProbe, progress: Progress
         ) -> list[Tensors]:
    results: list[Tensors] = []
    for number, call in enumerate(calls):
        progress("reference calls", number, len(calls))
        if number == 0 or call.sequence != calls[number - 1].sequence:
            probe.reset()
        whole = texts[call.text].whole_call
        found = run_call(probe, call, joined_taps(results[whole]) if whole < number else None)
        results.append({name: array for name, array in found.items() if name not in _NOT_KEPT})
    progress("reference calls", len(calls), len(calls))
    return results


def _keep(
    calls: Sequence[Call], results: Sequence[Tensors], arrays: dict[str, Array], budgets: Mapping[str, int]
) -> list[str]:
    """Keeps tensors whole, or sketched where a kind of them is larger than its budget."""
    sketched = []
    for kind, wanted in (("outputs", True), ("inner", False)):
        chosen = {(number, name): array for number, result in enumerate(results)
                  for name, array in result.items() if is_output(name) == wanted}  # fmt: skip
        if sum(array.nbytes for array in chosen.values()) > budgets[kind]:
            sketched.append(kind)
            if kind == "inner":  # a closer look begins at the first call that is wrong: the first text's are enough
                chosen = {key: array for key, array in chosen.items() if calls[key[0]].text == 0}
            chosen = {key: array if is_choice(key[1]) else sketch(array) for key, array in chosen.items()}
        arrays |= {f"{number}/{name}": array for (number, name), array in chosen.items()}
    return sketched
