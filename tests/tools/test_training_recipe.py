"""Every rule of the recipe, each by a check that fails without it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, drafter_config, fill
from torch import Tensor

import dflash_tools.training_attention
import dflash_tools.training_loss
from dflash_export.drafter import Drafter, draft_without_cache
from dflash_export.drafter_attention import LayerAttention
from dflash_runtime.errors import PairError
from dflash_tools.new_drafter import make_drafter, own_parameters
from dflash_tools.training_answers import Answer
from dflash_tools.training_attention import draft_blocks
from dflash_tools.training_blocks import (
    anchor_range,
    draw_anchors,
    drawn_weights,
    loss_decay,
    make_blocks,
    seeded_generator,
    slot_weights,
)
from dflash_tools.training_evaluation import right_prefixes, walk_rounds
from dflash_tools.training_head_rows import HeadRows, HeadSample
from dflash_tools.training_loss import best_tokens, head_loss
from dflash_tools.training_mask_id import TokenFacts, choose_mask_token_id
from dflash_tools.training_schedule import TextOrder, learning_rate

MASK = 511
TEXT = torch.arange(100, 130)


def small_drafter(**changes: Any) -> Drafter:
    """Norms and matrices filled so that nothing is at its plain first value."""
    generator = torch.Generator().manual_seed(5)
    table, head = (torch.randn(VOCAB_SIZE, 64, generator=generator) for _ in range(2))
    drafter = make_drafter(drafter_config(block_size=4, **changes), table, head, seed=0)
    with torch.no_grad():
        fill(dict(own_parameters(drafter)), seed=3)
    return drafter


def taps_of(text: Tensor) -> Tensor:
    return torch.randn(len(text), 2 * 64, generator=torch.Generator().manual_seed(7))


def blocks_at(*anchors: int, block_size: int = 4, text: Tensor = TEXT) -> Any:
    return make_blocks(text, torch.tensor(anchors), block_size, MASK, 2.0)


WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


@pytest.mark.parametrize("changes", [{}, WINDOWED, {**WINDOWED, "is_causal": False}, {"is_causal": True}])
def test_many_blocks_are_what_each_would_be_alone(changes: dict[str, Any]) -> None:
    drafter, taps = small_drafter(**changes), taps_of(TEXT)
    blocks = blocks_at(1, 3, 4, 9, 20)
    together = draft_blocks(drafter, taps, blocks)
    for n, anchor in enumerate(blocks.anchors.tolist()):
        alone, _ = draft_without_cache(drafter, taps[None, :anchor], blocks.input_ids[n : n + 1])
        torch.testing.assert_close(together[n], alone[0], rtol=1e-4, atol=1e-4)


def test_a_block_sees_no_tap_at_or_after_its_anchor() -> None:
    drafter, taps = small_drafter(), taps_of(TEXT)
    blocks = blocks_at(5, 10, 25)
    before = draft_blocks(drafter, taps, blocks)
    for changed_row, sees in ((4, [True, True, True]), (5, [False, True, True]), (10, [False, False, True])):
        changed = taps.clone()
        changed[changed_row] += 1.0
        moved = (draft_blocks(drafter, changed, blocks) - before).abs().amax((1, 2)) > 0
        assert moved.tolist() == sees


def test_an_anchor_that_could_see_its_own_tap_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    # The fault planted here shows one row too many to every block.
    real = dflash_tools.training_attention._attend

    def later(*arguments: Any) -> Tensor:
        query, keys, values, own_keys, own_values, positions, rule = arguments

        shown = positions.clone()
        shown[:, 0] += 1
        return real(query, keys, values, own_keys, own_values, shown, rule)

    drafter, taps, blocks = small_drafter(), taps_of(TEXT), blocks_at(5, 25)
    monkeypatch.setattr(dflash_tools.training_attention, "_attend", later)
    before = draft_blocks(drafter, taps, blocks)
    taps[5] += 1.0
    assert (draft_blocks(drafter, taps, blocks) - before)[0].abs().max() > 0


def test_blocks_do_not_see_each_other_and_see_themselves_both_ways() -> None:
    drafter, taps = small_drafter(), taps_of(TEXT)
    blocks = blocks_at(5, 6)
    before = draft_blocks(drafter, taps, blocks)
    blocks.input_ids[1, 3] = 17
    after = draft_blocks(drafter, taps, blocks)
    assert torch.equal(after[0], before[0])
    assert ((after[1] - before[1]).abs().amax(-1) > 0).tolist() == [True] * 4


def test_parts_give_the_same_and_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[Tensor, list[Tensor]]:
        drafter = small_drafter()
        hidden = draft_blocks(drafter, taps_of(TEXT), blocks_at(2, 5, 9, 14, 20))
        hidden.square().sum().backward()  # type: ignore[no-untyped-call]
        return hidden.detach(), [p.grad for p in own_parameters(drafter).values() if p.grad is not None]

    whole, gradients = run()
    monkeypatch.setattr(dflash_tools.training_attention, "MAX_SCORES", 1000)
    parts, part_gradients = run()
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(part_gradients, gradients, rtol=1e-3, atol=1e-2)


def test_labels_are_the_tokens_at_the_slots_own_positions() -> None:
    blocks = blocks_at(5, 28, block_size=4)
    assert blocks.positions.tolist() == [[5, 6, 7, 8], [28, 29, 30, 31]]
    assert blocks.input_ids.tolist() == [[105, MASK, MASK, MASK], [128, MASK, MASK, MASK]]
    assert blocks.labels[0].tolist() == [106, 107, 108]
    assert blocks.labels[1, 0] == 129
    assert (blocks.weights > 0).tolist() == [[True] * 3, [True, False, False]]  # nothing is asked past the end


def test_positions_are_absolute() -> None:
    drafter = small_drafter()
    early, late = (draft_blocks(drafter, taps_of(TEXT), blocks_at(a, text=torch.full((30,), 9))) for a in (5, 6))
    assert (early - late).abs().max() > 1e-3


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_weights_decay_by_the_papers_gamma(block_size: int, gamma: float) -> None:
    assert loss_decay(block_size) == pytest.approx(gamma)
    weights = slot_weights(block_size, gamma)
    assert weights.tolist() == pytest.approx([math.exp(-(k - 1) / gamma) for k in range(1, block_size)])


def test_drawn_slots_have_the_weights_as_their_mean() -> None:
    weights = torch.cat((slot_weights(8, 4.0), torch.zeros(1)))  # the last one lies past the text's end
    drawn = drawn_weights(weights.expand(4000, -1), seeded_generator(0))
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    assert drawn[:, 0].min() == 1  # the first slot is always asked
    assert drawn[:, -1].max() == 0
    torch.testing.assert_close(drawn.mean(0), weights, atol=0.03, rtol=0)


def test_drawn_slots_give_the_same_gradient_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 8, generator=generator, requires_grad=True)
    head, labels = torch.randn(50, 8, generator=generator), torch.randint(50, (20,), generator=generator)
    weights = torch.rand(20, generator=generator)

    def gradient(of: Tensor) -> Tensor:
        return torch.autograd.grad(head_loss(hidden, HeadRows(head), labels, of), hidden)[0]

    mean = torch.stack([gradient(drawn_weights(weights, generator)) for _ in range(3000)]).mean(0)
    torch.testing.assert_close(mean, gradient(weights), atol=0.2, rtol=0)


def test_anchors_lie_in_the_answer_and_change_every_epoch() -> None:
    eligible = anchor_range(10, 60)
    drawn = [draw_anchors(eligible, 12, seeded_generator(0, epoch, 3)) for epoch in range(40)]
    for anchors in drawn:
        assert len(set(anchors.tolist())) == 12
        assert anchors.tolist() == sorted(anchors.tolist())
    everywhere = {a for anchors in drawn for a in anchors.tolist()}
    assert everywhere == set(range(10, 59))  # the first answer token is an anchor of the loop; the last asks nothing
    assert len({tuple(anchors.tolist()) for anchors in drawn}) == 40
    assert torch.equal(drawn[4], draw_anchors(eligible, 12, seeded_generator(0, 4, 3)))
    assert draw_anchors(anchor_range(4, 9), 12, seeded_generator(0)).tolist() == [4, 5, 6, 7]


def test_the_loss_is_weighted_cross_entropy_and_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dflash_tools.training_loss.MAX_LOGITS, "cpu", 3 * 50)  # three rows at a time
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 8, generator=generator, requires_grad=True)
    head = torch.randn(50, 8, generator=generator)
    labels = torch.randint(50, (11,), generator=generator)
    weights = torch.rand(11, generator=generator)
    weights[4] = 0
    expected = (torch.nn.functional.cross_entropy(hidden @ head.T, labels, reduction="none") * weights).sum()
    (gradient,) = torch.autograd.grad(expected, hidden)
    loss = head_loss(hidden, HeadRows(head), labels, weights)
    (found,) = torch.autograd.grad(2 * loss, hidden)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, 2 * gradient)
    assert torch.equal(best_tokens(hidden.detach(), head), (hidden @ head.T).argmax(-1))


def test_drawn_tokens_stand_for_all_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    head = 0.3 * torch.randn(400, 8, generator=generator)
    hidden = torch.randn(6, 8, generator=generator, requires_grad=True)
    used = [3, 7, 250, 399, 11, 64]
    labels, weights = torch.tensor(used), torch.rand(6, generator=generator)

    def loss_and_gradient(rows: HeadRows) -> Tensor:
        loss = head_loss(hidden, rows, labels, weights)
        return torch.cat((loss.detach()[None], torch.autograd.grad(loss, hidden)[0].flatten()))

    exact = loss_and_gradient(HeadRows(head))
    everything = HeadSample(head, used, 1000, 0).rows(0)
    torch.testing.assert_close(loss_and_gradient(everything), exact, atol=1e-4, rtol=1e-4)
    sample = HeadSample(head, used, 100, 0)
    rows = [sample.rows(step) for step in range(400)]
    assert {len(r.matrix) for r in rows} == {len(used) + 100}
    assert all(torch.equal(r.matrix[r.of(labels)], head[labels]) for r in rows)
    assert torch.equal(rows[5].matrix, sample.rows(5).matrix)
    assert not torch.equal(rows[5].matrix, rows[6].matrix)
    mean = torch.stack([loss_and_gradient(r) for r in rows]).mean(0)
    torch.testing.assert_close(mean, exact, atol=0.05, rtol=0.05)
    without = torch.stack([loss_and_gradient(dataclasses.replace(r, drawn_log_weight=0.0)) for r in rows]).mean(0)
    assert (without - exact)[0] < -0.3  # the others' share of the softmax would be too small


def test_only_the_drafters_own_parameters_get_gradients() -> None:
    drafter = small_drafter()
    blocks = blocks_at(5, 9)
    hidden = draft_blocks(drafter, taps_of(TEXT), blocks)[:, 1:]
    rows = HeadRows(drafter.lm_head.weight)
    loss = head_loss(hidden.flatten(0, 1), rows, blocks.labels.flatten(), blocks.weights.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    moved = {name for name, p in drafter.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert moved == set(own_parameters(drafter))
    assert set(dict(drafter.named_parameters())) - moved == {"embed_tokens.weight", "lm_head.weight"}


def test_rates_warm_up_over_four_hundredths_and_fall_by_a_cosine() -> None:
    rates = [learning_rate(step, 1000, 6e-4, 0.04) for step in range(1000)]
    assert rates[0] == pytest.approx(6e-4 / 40)
    assert rates[39] == rates[40] == pytest.approx(6e-4)
    assert max(rates) == pytest.approx(6e-4)
    assert rates[520] == pytest.approx(3e-4)
    assert rates == sorted(rates[:40]) + sorted(rates[40:], reverse=True)
    assert 0 < rates[-1] < 1e-8


def test_every_text_once_an_epoch_in_a_new_order() -> None:
    order = TextOrder([3, 5, 8, 9, 11], batch_size=2, seed=0)
    epochs = [[i for step in range(3) for i in order.batch(3 * epoch + step)] for epoch in range(4)]
    assert all(sorted(epoch) == [3, 5, 8, 9, 11] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [len(order.batch(step)) for step in range(3)] == [2, 2, 1]


def test_rounds_are_walked_as_the_loop_would() -> None:
    # Six answer tokens, so five anchors; a full block of 4 accepts three guesses and the target's token.
    assert walk_rounds([3, 0, 0, 0, 0]) == [4, 1]
    assert walk_rounds([0, 3, 0, 0, 0]) == [1, 4]
    assert walk_rounds([0, 0, 0, 0, 0]) == [1, 1, 1, 1, 1]
    assert walk_rounds([2, 0, 0, 2, 1]) == [3, 2]  # the last round ends with the answer


def test_right_prefixes_count_to_the_first_wrong_guess() -> None:
    drafter, text = small_drafter(), Answer(tuple(range(6)), tuple(range(40, 52)))
    taps = torch.randn(17, 128, generator=torch.Generator().manual_seed(1))
    found = right_prefixes(drafter, drafter.lm_head.weight, text, taps)
    expected = []
    for anchor in range(6, 17):
        ids = torch.tensor([[text.token_ids[anchor], MASK, MASK, MASK]])
        _, logits = draft_without_cache(drafter, taps[None, :anchor], ids)
        guesses = logits[0].argmax(-1).tolist()
        count = 0
        for guess, token in zip(guesses, text.token_ids[anchor + 1 :], strict=False):
            if guess != token:
                break
            count += 1
        expected.append(count)
    assert found == expected


FACTS = TokenFacts(512, {i: f"t{i}" for i in range(500)}, frozenset({0, 1, 2, 3, 4}), frozenset({0, 1}))
FULL = TokenFacts(500, FACTS.names, FACTS.special_ids, FACTS.reserved_ids)


def test_the_mask_is_a_row_of_the_target_that_no_text_holds() -> None:
    assert choose_mask_token_id(FACTS, []) == 500  # first row past the tokenizer
    assert choose_mask_token_id(FACTS, [3, 500]) == 501  # a target's own answer may hold even that
    assert choose_mask_token_id(FULL, []) == 4  # no such row: a special token without a role
    assert choose_mask_token_id(FULL, [4, 7]) == 3
    assert choose_mask_token_id(FULL, [4], wanted=17) == 17
    for wanted, used, word in ((500, [], "500 rows|has 500"), (1, [], "role"), (17, [17], "training data")):
        with pytest.raises(PairError, match=word):
            choose_mask_token_id(FULL, used, wanted)
    with pytest.raises(PairError, match="--mask-token-id"):
        choose_mask_token_id(FULL, [2, 3, 4])


def test_rules_of_layers_are_those_of_the_exporter() -> None:
    # A new drafter sees its whole block both ways, as the paper trains it.
    assert small_drafter().config.layers == (LayerAttention(False, None),) * 2
