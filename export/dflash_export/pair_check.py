"""Do a target and a drafter fit each other? Asked of their configs and headers, before any work.

What would only show as low acceptance is found here too: each finding says what follows from it and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dflash_export.drafter_config import DrafterConfig
from dflash_export.drafter_dflash2 import MOST_SLOTS
from dflash_export.pair_findings import ERROR, NOTE, WARNING, WRONG_PAIR, Finding, TargetSide
from dflash_export.tap_rule import default_target_layer_ids
from dflash_export.tensor_files import TensorPlace

_FC = ("fc.weight", "model.fc.weight", "encoder.fc.weight")
_CANNOT_RUN = "It cannot run."
_MEANINGLESS = "It would run, and its proposals would mean nothing."
_LOW = "Words stay right, and fewer proposals are accepted."


def config_findings(
    target: TargetSide,
    drafter: DrafterConfig,
    places: Mapping[str, TensorPlace],
    *,
    block_sizes: Sequence[int] = (),
    max_context_tokens: int | None = None,
) -> list[Finding]:
    """Everything two configs and the drafter's tensor headers say of a pair.

    Args:
        target: The target's facts.
        drafter: The drafter's facts.
        places: The drafter's tensors, by their names in the checkpoint.
        block_sizes: Block sizes asked for beside the drafter's own.
        max_context_tokens: Rows the bundle's requests may commit; None skips that check.
    """
    checks: tuple[Callable[[TargetSide, DrafterConfig], list[Finding]], ...] = (
        _sizes, _taps, _rope, _window, _embedding_scale, _vocabulary, _names,
    )  # fmt: skip
    findings = [finding for check in checks for finding in check(target, drafter)]
    return [
        *findings,
        *_fusing_matrix(target, drafter, places),
        *_blocks(drafter, block_sizes),
        *_context(drafter, max_context_tokens),
    ]


def _sizes(target: TargetSide, drafter: DrafterConfig) -> list[Finding]:
    pairs = [
        ("hidden_size", drafter.hidden_size, "the target's", target.hidden_size),
        ("target_hidden_size", drafter.target_hidden_size, "the target's hidden_size", target.hidden_size),
        ("vocab_size", drafter.vocab_size, "the target's", target.vocab_size),
    ]
    found = [
        _error("sizes", f"the drafter's {key} is {value} and {whose} is {wanted}.", _CANNOT_RUN)
        for key, value, whose, wanted in pairs
        if value not in (None, wanted)
    ]
    if len(found) == 2 and drafter.hidden_size == drafter.target_hidden_size:
        del found[1]  # the same number, said twice
    if drafter.mask_token_id >= target.vocab_size:
        found.append(
            _error(
                "mask id",
                f"the drafter's mask_token_id is {drafter.mask_token_id} and the target's embedding has "
                f"{target.vocab_size} rows (ids 0 to {target.vocab_size - 1}).",
                _CANNOT_RUN,
            )
        )
    if target.head_has_bias:
        found.append(
            Finding(
                ERROR, "head", "the target's output head has a bias, and a drafter borrows the head's matrix alone.",
                _LOW, "Export the target without a drafter.",
            )
        )  # fmt: skip
    return found


def _error(subject: str, text: str, consequence: str, remedy: str = WRONG_PAIR) -> Finding:
    return Finding(ERROR, subject, text, consequence, remedy)


def _fusing_matrix(target: TargetSide, drafter: DrafterConfig, places: Mapping[str, TensorPlace]) -> list[Finding]:
    fc = next((places[name] for name in _FC if name in places), None)
    K, H = len(drafter.target_layer_ids), target.hidden_size
    if fc is None or drafter.hidden_size != H or (len(fc.shape) == 2 and fc.shape[1] == K * H):
        return []
    return [
        _error(
            "taps",
            f"the drafter's fc.weight takes {fc.shape[-1]} values and {K} taps of {H} give {K * H}: its "
            f"target_layer_ids {list(drafter.target_layer_ids)} belong to other weights, or the target does.",
            _CANNOT_RUN,
        )
    ]


def _taps(target: TargetSide, drafter: DrafterConfig) -> list[Finding]:
    ids, count, stated = list(drafter.target_layer_ids), target.num_layers, drafter.num_target_layers
    found = []
    outside = [i for i in ids if i >= count]
    if outside:
        found.append(
            _error(
                "taps",
                f"the drafter taps layers {ids} and the target has {count} (0 to {count - 1}); {outside} do not exist. "
                f"target_layer_ids count layers from 0; other tools count the same taps from 1, as "
                f"{[i + 1 for i in ids]}.",
                _CANNOT_RUN,
            )
        )
    if stated not in (None, count):
        found.append(
            _error(
                "taps",
                f"the drafter was made for a target of {stated} layers (num_target_layers) and this one has {count}.",
                _MEANINGLESS,
            )
        )
    usual = default_target_layer_ids(count, len(ids))
    if drafter.layout == "z-lab" and not outside and sorted(ids) == [i + 1 for i in usual] and len(ids) > 1:
        found.append(
            Finding(
                WARNING, "taps",
                f"the drafter taps layers {ids}, each one above the usual {usual}: they look counted from 1.",
                "Taps one layer off cost acceptance and nothing else shows it.",
                f"If a tool wrote them that counts from 1, set dflash_config.target_layer_ids to {usual}.",
            )
        )  # fmt: skip
    if count - 1 in ids:
        found.append(
            Finding(
                NOTE, "taps", f"the drafter taps the last layer ({count - 1}): its raw output, before the final norm.",
                "A drafter trained on the normalised output would be accepted less.",
                "Nothing to do where it was trained as z-lab and vLLM do.",
            )
        )  # fmt: skip
    return found


def _rope(target: TargetSide, drafter: DrafterConfig) -> list[Finding]:
    base, bases = float(drafter.rope_parameters["rope_theta"]), target.rope_bases
    if not bases or base in bases:
        return []
    listed = " and ".join(f"{one:g}" for one in bases)
    return [
        Finding(
            WARNING, "rope", f"the base of the drafter's rotary embedding is {base:g} and the target's is {listed}.",
            f"Published drafters have their target's; with a wrong one positions are misread. {_LOW}",
            "Compare rope_theta with the config the drafter was trained from.",
        )
    ]  # fmt: skip


def _window(target: TargetSide, drafter: DrafterConfig) -> list[Finding]:
    windows = sorted({w for w in drafter.windows if w is not None})
    both_ways = [i for i, layer in enumerate(drafter.layers) if layer.window_tokens is not None and not layer.causal]
    if not windows or not both_ways or drafter.layout != "z-lab" or drafter.dflash2 is not None:
        return []
    return [
        Finding(
            NOTE, "window",
            f"layers {both_ways} of the drafter see {windows} tokens back, and their block tokens see each other both "
            "ways, because its config says so for all layers.",
            "Most drafters with windows are causal there.", "Nothing to do where it was trained so.",
        )
    ]  # fmt: skip


def _embedding_scale(target: TargetSide, drafter: DrafterConfig) -> list[Finding]:
    if not target.scales_its_embedding:
        return []
    scale = embedding_scale(target, drafter)
    other = target.width_root if scale == 1 else 1 / scale
    return [
        Finding(
            NOTE, "embedding",
            f"{target.model_type} multiplies its embedding by the root of its width. Drafters in {drafter.layout} "
            f"layout are taken to be trained on {'the raw table' if scale == 1 else 'that'}, so the drafter's rows are "
            f"multiplied by {scale:g}.",
            "This was never compared with a real pair here; a wrong factor costs acceptance.",
            f"If it was trained otherwise, multiply input_embedding_scale in its config by {other:g}.",
        )
    ]  # fmt: skip


def embedding_scale(target: TargetSide, drafter: DrafterConfig) -> float:
    """What the drafter's rows of the target's embedding table are multiplied by, beside its own factor.

    z-lab's drafters see a Gemma's rows as its embedding module gives them (vLLM's and MLX's code for them, by z-lab's
    authors), Transformers' assistants too. The library speculators (0.9.0) trains on the raw table.
    """
    return target.width_root if target.scales_its_embedding and drafter.layout != "speculators" else 1.0


def _vocabulary(target: TargetSide, drafter: DrafterConfig) -> list[Finding]:
    added, rows = drafter.dflash2, drafter.draft_vocab_size
    if added is not None and added.selector_top_k > target.vocab_size:
        text = f"the drafter's selector_top_k is {added.selector_top_k} and the target has {target.vocab_size} tokens."
        return [_error("vocabulary", text, _CANNOT_RUN)]
    if rows is None:
        return []
    return [
        Finding(
            NOTE, "vocabulary", f"the drafter proposes from {rows} of the target's {target.vocab_size} tokens.",
            "What lies outside is never proposed: text of another language or field is accepted less.", "",
        )
    ]  # fmt: skip


def _names(target: TargetSide, drafter: DrafterConfig) -> list[Finding]:
    found = []
    stated = drafter.made_for
    if stated and _last(stated) != _last(target.name):
        found.append(
            Finding(
                WARNING, "target", f"the drafter says it was made for {stated}, and the target is {target.name}.",
                "A drafter reads one target's layers; another's, a fine-tune's too, are accepted less.",
                f"Give {stated}, or the drafter trained for {target.name}.",
            )
        )  # fmt: skip
    if drafter.unknown_keys:
        found.append(
            Finding(
                WARNING, "config", f"the drafter's config has keys unknown here: {', '.join(drafter.unknown_keys)}.",
                "If one of them changes what the drafter computes, acceptance suffers.",
                "Look them up where the drafter was trained; a newer dflash-export may know them.",
            )
        )  # fmt: skip
    return found


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def _blocks(drafter: DrafterConfig, block_sizes: Sequence[int]) -> list[Finding]:
    own, found = drafter.block_size, []
    if own < 2:
        found.append(
            _error(
                "block",
                f"the drafter's block_size is {own}; a block is the anchor and at least one draft, so 2 or more.",
                _CANNOT_RUN,
            )
        )
    largest = max([own, *block_sizes])
    windows = [window for window in drafter.windows if window is not None]
    if windows and min(windows) < largest:
        found.append(
            _error(
                "window",
                f"the drafter's sliding window is {min(windows)} tokens and a block has {largest}: a block must fit "
                "into the window.",
                _CANNOT_RUN, "Ask for smaller blocks with --block-size, or correct the config.",
            )
        )  # fmt: skip
    if drafter.dflash2 is not None and largest - 1 > MOST_SLOTS:
        text = f"a block of {largest} has {largest - 1} slots to choose for, and DFlash 2 is exported for {MOST_SLOTS}."
        found.append(_error("block", text, _CANNOT_RUN, f"Ask for --block-size {MOST_SLOTS + 1} or less."))
    if largest > own:
        found.append(
            Finding(
                WARNING, "block", f"a block of {largest} tokens is asked for and the drafter was trained for {own}.",
                "Drafters serve smaller blocks than their own well, and larger ones poorly.",
                f"Ask for --block-size {own} or less.",
            )
        )  # fmt: skip
    return found


def _context(drafter: DrafterConfig, max_context_tokens: int | None) -> list[Finding]:
    limit = drafter.max_position_tokens
    if max_context_tokens is None or limit is None or max_context_tokens <= limit:
        return []
    return [
        _error(
            "context",
            f"the bundle's context is {max_context_tokens} tokens and the drafter was made for {limit} "
            "(max_position_embeddings).",
            _LOW, f"Give --max-context {limit} or less.",
        )
    ]  # fmt: skip
