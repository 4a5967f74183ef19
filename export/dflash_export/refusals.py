"""Kinds of models that are refused before any work, each by its name."""

from __future__ import annotations

import re

from transformers import PreTrainedConfig, PreTrainedModel

from dflash_runtime.errors import UnsupportedModelError

_STATEFUL = re.compile(r"linear|mamba|conv|recurrent|hybrid|moe_mamba|ssm|rwkv|lstm", re.IGNORECASE)
_CROSS = re.compile(r"(^|\.)(encoder_attn|cross_?attn|cross_?attention|EncDecAttention)(\.|$)", re.IGNORECASE)

_INDEXERS = ("index_topk", "index_topk_blocks", "indexer_budget")
# Attention code of their own that was compared with PyTorch over a preallocated cache; others count keys by the
# length of the cache, which here is its capacity.
_PROVEN_OWN_ATTENTION = frozenset(["bloom", "falcon"])


def refuse_own_attention(config: PreTrainedConfig) -> None:
    """For a model that does not use Transformers' attention interface.

    Raises:
        UnsupportedModelError: its attention code is not among those known to be exact.
    """
    if config.model_type not in _PROVEN_OWN_ATTENTION:
        raise UnsupportedModelError("it has attention code of its own instead of Transformers' attention interface")


def refuse_by_config(config: PreTrainedConfig) -> None:
    """Looks at what the config says of the layers.

    Raises:
        UnsupportedModelError: the layers keep a recurrent state, share caches, or belong to an encoder-decoder model.
    """
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModelError("it is the decoder of an encoder-decoder model")
    stateful = sorted({kind for kind in layer_kinds(text) if _STATEFUL.search(kind)})
    if stateful:
        raise UnsupportedModelError(
            f"its layers of kind {', '.join(stateful)} keep a recurrent or convolutional state, which cannot be "
            "rolled back to an earlier token"
        )
    if any(getattr(text, name, None) for name in _INDEXERS):
        raise UnsupportedModelError("its attention reads only the keys an indexer picks (sparse attention)")
    shared = getattr(text, "num_kv_shared_layers", 0) or 0
    if shared:
        raise UnsupportedModelError("some of its layers read the KV cache of another layer (KV sharing)")
    if not hasattr(text, "num_hidden_layers"):
        raise UnsupportedModelError("its config states no number of decoder layers")


def refuse_by_modules(model: PreTrainedModel) -> None:
    """Looks at the module's own declarations.

    Raises:
        UnsupportedModelError: recurrent state, or attention to an encoder.
    """
    if getattr(model, "_is_stateful", False) and not layer_kinds(model.config.get_text_config(decoder=True)):
        raise UnsupportedModelError(
            "its layers keep a recurrent or convolutional state, which cannot be rolled back to an earlier token"
        )
    if any(_CROSS.search(name) for name, _ in model.named_modules()):
        raise UnsupportedModelError("its layers attend to an encoder (cross-attention)")


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """Kind of every layer as the config spells it; empty when it does not."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    return [str(kind) for kind in kinds]
