"""What a block's proposals are chosen by, in the target's ids: the likeliest, mapped ones, or a selector's choice.

Letters: S slots (block size - 1), k candidates of a slot, V draft logits of a slot.
"""

from __future__ import annotations

import numpy as np

from dflash_tools.reference_tensors import TOP_COUNT, Array, Tensors, likeliest


def candidates(found: Tensors) -> tuple[Array, Array]:
    """The best candidates of each slot and their scores, [S, k], best first.

    Args:
        found: What a draft gave: ids, logits, and what else a graph hands out for a vocabulary of the drafter's own or
            for a selector.
    """
    if "draft_edges" in found:
        return _selected(found)
    ids, scores = likeliest(found["draft_logits"])
    return (found["draft_vocabulary"][0][ids] if "draft_vocabulary" in found else ids), scores


def with_next_likeliest(found: Tensors) -> tuple[Array, Array]:
    """The candidates, and behind those of a selector the tokens that were not likely enough to be one.

    Such a token lost by at least its distance to the last candidate; its score is that much under the best.
    """
    ids, scores = candidates(found)
    count, logits = ids.shape[1], found["draft_logits"]
    if "draft_edges" not in found or count >= TOP_COUNT:
        return ids, scores
    next_ids, next_logits = (array[:, count:] for array in likeliest(logits))
    last = np.take_along_axis(logits, ids, -1).min(-1, keepdims=True)
    lost = np.maximum(last - next_logits, 0)
    return np.concatenate((ids, next_ids), axis=1), np.concatenate((scores, scores[:, :1] - lost), axis=1)


def scores_of(found: Tensors, ids: Array, *, likeliest_alone: bool) -> Array:
    """What a draft gave to ids of its own or of another one.

    Args:
        found: What the draft gave.
        ids: [S, k] of `with_next_likeliest`.
        likeliest_alone: Proposals are the likeliest of the draft logits, which say the score of every id.

    Returns:
        [S, k], NaN for an id that was no candidate, here or there.
    """
    if likeliest_alone:
        return np.take_along_axis(found["draft_logits"], ids, -1)
    own_ids, own_scores = candidates(found)
    same = ids[:, :, None] == own_ids[:, None, :]
    scores = np.take_along_axis(own_scores, same.argmax(-1), -1)
    known: Array = np.where(same.any(-1), scores, np.nan)
    known[:, own_ids.shape[1] :] = np.nan
    return known


def _selected(found: Tensors) -> tuple[Array, Array]:
    """DFlash 2: a slot's scores behind the token that was chosen before it; before the first is the anchor."""
    ids, chosen = found["draft_candidates"], found["draft_ids"][:, 0]
    slots, count = ids.shape
    edges = found["draft_edges"].reshape(slots, count, count)
    before = np.concatenate(([0], (ids[:-1] == chosen[:-1, None]).argmax(-1)))
    scores: Array = edges[np.arange(slots), before]
    order = np.argsort(-scores, axis=-1, kind="stable")
    return np.take_along_axis(ids, order, -1).astype(np.int64), np.take_along_axis(scores, order, -1)
