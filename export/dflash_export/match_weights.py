"""Finds every parameter of the model in the checkpoint, and accounts for every tensor of the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedConfig

from dflash_export.tensor_files import TensorPlace
from dflash_runtime.errors import CheckpointError

# Tables that older checkpoints carry and the model computes itself.
_RECOMPUTED = re.compile(r"(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|\.attn\.(masked_)?bias|attention\.bias)$")


def match_weights(
    model_class: type[nn.Module],
    names: Iterable[str],
    tied: dict[str, str],
    shapes: dict[str, tuple[int, ...]],
    places: dict[str, TensorPlace],
) -> dict[str, TensorPlace]:
    """Maps each parameter to its tensor in the checkpoint.

    A checkpoint saved from the bare model lacks the model prefix; both spellings are accepted. A tied weight may
    be stored under any of its names.

    Args:
        model_class: The causal-LM class, for its prefix and its list of ignorable tensors.
        names: State-dict names wanted, tied parameters once.
        tied: Every parameter name -> the one it is stored under.
        shapes: Shapes of the wanted parameters.
        places: What the checkpoint holds.

    Raises:
        CheckpointError: parameters missing, tensors left over, or shapes that differ; all are named.
    """
    prefix = getattr(model_class, "base_model_prefix", "") + "."
    aliases: dict[str, list[str]] = {}
    for alias, name in tied.items():
        aliases.setdefault(name, []).append(alias)
    found: dict[str, TensorPlace] = {}
    used: set[str] = set()
    missing = []
    for name in names:
        spellings = [name, *aliases.get(name, [])]
        spellings += [s.removeprefix(prefix) for s in spellings] + [prefix + s for s in spellings]
        present = [s for s in dict.fromkeys(spellings) if s in places]
        if not present:
            missing.append(name)
            continue
        used.update(present)
        found[name] = places[present[0]]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of {len(found) + len(missing)} weights of "
            f"{model_class.__name__}: {', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}. "
            "Download it again, or it belongs to another architecture."
        )
    _refuse_leftovers(model_class, places.keys() - used)
    for name, place in found.items():
        if place.shape != shapes[name]:
            raise CheckpointError(
                f"{name} has shape {list(place.shape)} in the checkpoint and {list(shapes[name])} by its config."
            )
    return found


def _refuse_leftovers(model_class: type[nn.Module], unused: Iterable[str]) -> None:
    ignorable = [_RECOMPUTED]
    ignorable += [re.compile(p) for p in getattr(model_class, "_keys_to_ignore_on_load_unexpected", None) or ()]
    left = sorted(t for t in unused if not any(pattern.search(t) for pattern in ignorable))
    if left:
        raise CheckpointError(
            f"{len(left)} tensors of the checkpoint have no place in {model_class.__name__}: {', '.join(left[:8])}"
            f"{' ...' if len(left) > 8 else ''}. The config does not describe these weights."
        )


def untie_if_stored_apart(config: PreTrainedConfig, places: dict[str, TensorPlace]) -> list[str]:
    """Follows the checkpoint where it stores a head that differs from a table its config calls tied.

    Transformers does the same when it loads such a checkpoint.

    Args:
        config: The target's config; `tie_word_embeddings` is set in place.
        places: What the checkpoint holds.

    Returns:
        Notes for the user.
    """
    text = config.get_text_config()
    if not getattr(text, "tie_word_embeddings", False):
        return []
    head = next((p for n, p in places.items() if n.endswith("lm_head.weight")), None)
    table = next((p for n, p in places.items() if n.endswith(("embed_tokens.weight", "wte.weight"))), None)
    if head is None or table is None or head == table or _same_bytes(head, table):
        return []
    config.tie_word_embeddings = False
    text.tie_word_embeddings = False
    return ["config.json ties embedding and head, the checkpoint stores two different ones: kept apart"]


def _same_bytes(one: TensorPlace, two: TensorPlace) -> bool:
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    return all(a == b for a, b in zip(one.chunks(), two.chunks(), strict=True))
