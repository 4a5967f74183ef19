"""Parameter counts of dense decoder families from their config.json alone, exact to the last norm and bias.

Defaults are those Transformers takes where a config.json leaves a key out. Everything here is compared with the real
modules in the tests; a family that is not in the table is refused, because a near formula would be wrong unnoticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash_runtime.errors import CheckpointError, UnsupportedModelError
from dflash_tools.model_shape import KvLayer, Matrix, ModelShape
from dflash_tools.quantized_config import HEAD, StoredForms, read_stored_forms, with_forms


@dataclasses.dataclass(frozen=True)
class Family:
    """How a `model_type` builds its layers."""

    defaults: Mapping[str, Any]
    norms_per_layer: int = 2
    qk_norms: bool = False
    """One norm of head_dim for queries and one for keys in every layer."""
    qkv_bias: bool = False
    """Biases on q, k and v whatever the config says."""
    fused_qkv: bool = False
    """q, k and v are one matrix, gate and up another: the same parameters in fewer pieces."""
    window_rule: str = "none"
    """Where `layer_types` is absent: `all`, `alternating`, `pattern`, `flag` or `none`."""


_LLAMA = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": None, "max_position_embeddings": 2048}  # fmt: skip
_QWEN = {**_LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
         "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}  # fmt: skip
_GEMMA = {"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
          "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
          "tie_word_embeddings": True}  # fmt: skip
_GEMMA2 = {**_GEMMA, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
           "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family(_LLAMA),
    "mistral": Family(
        {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
         "sliding_window": 4096}, window_rule="all",
    ),
    "qwen2": Family(_QWEN, qkv_bias=True, window_rule="flag"),
    "qwen3": Family({**_QWEN, "head_dim": 128}, qk_norms=True, window_rule="flag"),
    "gemma": Family(_GEMMA),
    "gemma2": Family(_GEMMA2, norms_per_layer=4, window_rule="alternating"),
    "gemma3_text": Family(
        {**_GEMMA2, "vocab_size": 262208, "max_position_embeddings": 131072},
        norms_per_layer=4, qk_norms=True, window_rule="pattern",
    ),
    "phi3": Family(
        {**_LLAMA, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
         "max_position_embeddings": 4096}, fused_qkv=True, window_rule="all",
    ),
    "smollm3": Family(
        {**_LLAMA, "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
         "num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True},
    ),
}  # fmt: skip
_TEXT_PART = {"gemma3": "gemma3_text"}
_WITH_BIAS_KEYS = {"llama": ("attention_bias", "mlp_bias"), "smollm3": ("attention_bias", "mlp_bias")}
_ATTENTION_BIAS_ONLY = ("qwen3", "gemma", "gemma2", "gemma3_text")
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def read_model_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """The sizes a config.json describes.

    Args:
        config: Content of config.json.
        name: What to call the model, for messages.

    Raises:
        UnsupportedModelError: a family whose parameters are not known here exactly.
        CheckpointError: a size is no positive number, or the checkpoint is quantised in a way no build takes.
    """
    forms = read_stored_forms(config, name)
    model_type, notes = str(config.get("model_type", "")), []
    stored = config.get("dtype") or config.get("torch_dtype")
    if model_type in _TEXT_PART:
        outer, model_type = config, _TEXT_PART[model_type]
        config = {**(outer.get("text_config") or {})}
        config.setdefault("tie_word_embeddings", outer.get("tie_word_embeddings", True))
        notes.append("only the text decoder is counted; the vision tower is not exported")
    family = FAMILIES.get(model_type)
    if family is None:
        known = ", ".join(sorted([*FAMILIES, *_TEXT_PART]))
        raise UnsupportedModelError(
            f"{name} has model_type {model_type!r}, whose parameters are not known here exactly. Known: {known}."
        )
    sizes = _Sizes({**family.defaults, **config}, name)
    shape = _shape(sizes, model_type, family, name, _PRECISIONS.get(str(stored)), tuple(notes))
    return shape if forms is None else _as_stored(shape, forms)


def _as_stored(shape: ModelShape, forms: StoredForms) -> ModelShape:
    """The same decoder with its weights in the forms its checkpoint holds them in."""
    head = forms.form(HEAD, shape.hidden_size) if shape.head_elements else None
    matrices = with_forms(shape.matrices, forms)
    stored = dataclasses.replace(shape, matrices=matrices, head_form=head, notes=(*shape.notes, *forms.notes))
    if not stored.quantised_as:
        raise CheckpointError(f"{shape.name} says it is quantised ({forms.method}) and leaves all its layers out.")
    return stored


class _Sizes:
    """Numbers of a config, checked as they are read."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self._name = name

    def count(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self._name}: {key} is {value!r}; it must be a whole number above 0.")
        return value

    def flag(self, key: str) -> bool:
        return bool(self.config.get(key, False))


def _shape(
    sizes: _Sizes, model_type: str, family: Family, name: str, stored: str | None, notes: tuple[str, ...]
) -> ModelShape:
    H, layers, heads = sizes.count("hidden_size"), sizes.count("num_hidden_layers"), sizes.count("num_attention_heads")
    kv_heads, inner = sizes.count("num_key_value_heads", heads), sizes.count("intermediate_size")
    D, V = sizes.count("head_dim", H // heads), sizes.count("vocab_size")
    q, kv = heads * D, kv_heads * D
    matrices = _matrices(family, layers, H, q, kv, inner)
    attention_bias, mlp_bias = _biases(sizes, model_type)
    vectors = family.norms_per_layer * H + (2 * D if family.qk_norms else 0)
    vectors += q + 2 * kv if family.qkv_bias or attention_bias else 0
    vectors += H if attention_bias else 0
    vectors += 2 * inner + H if mlp_bias else 0
    windows = _windows(sizes, family, layers)
    return ModelShape(
        name=name, family=model_type, num_layers=layers, hidden_size=H, vocab_size=V, num_heads=heads, head_dim=D,
        num_kv_heads=kv_heads, intermediate_size=inner, matrices=matrices,
        vector_elements=layers * vectors + H, embedding_elements=V * H,
        head_elements=0 if sizes.flag("tie_word_embeddings") else V * H,
        kv_layers=tuple(KvLayer(kv_heads, D, window) for window in windows),
        max_position_tokens=_max_position(sizes), stored_precision=stored, notes=notes,
    )  # fmt: skip


def _matrices(family: Family, layers: int, hidden: int, q: int, kv: int, inner: int) -> tuple[Matrix, ...]:
    """Linear layers by shape, with the names Transformers gives them."""
    attention, mlp = "model.layers.{}.self_attn.", "model.layers.{}.mlp."

    def linear(rows: int, columns: int, where: str, *names: str) -> Matrix:
        return Matrix(rows, columns, layers * len(names), modules=tuple(where + name for name in names))

    out, down = linear(hidden, q, attention, "o_proj"), linear(hidden, inner, mlp, "down_proj")
    if family.fused_qkv:
        both = linear(2 * inner, hidden, mlp, "gate_up_proj")
        return linear(q + 2 * kv, hidden, attention, "qkv_proj"), out, both, down
    keys_and_values = linear(kv, hidden, attention, "k_proj", "v_proj")
    return linear(q, hidden, attention, "q_proj"), keys_and_values, out, linear(
        inner, hidden, mlp, "gate_proj", "up_proj"
    ), down


def _biases(sizes: _Sizes, model_type: str) -> tuple[bool, bool]:
    """Whether q, k, v and o have biases, and whether the MLP has."""
    if model_type in _ATTENTION_BIAS_ONLY:
        return sizes.flag("attention_bias"), False
    attention, mlp = _WITH_BIAS_KEYS.get(model_type, ("", ""))
    return bool(attention) and sizes.flag(attention), bool(mlp) and sizes.flag(mlp)


def _windows(sizes: _Sizes, family: Family, layers: int) -> list[int | None]:
    """Attention window of each layer, None where all rows are read."""
    config, rule = sizes.config, family.window_rule
    if rule == "none" or not config.get("sliding_window") or (rule == "flag" and not sizes.flag("use_sliding_window")):
        return [None] * layers
    window = sizes.count("sliding_window")
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    pattern = sizes.count("sliding_window_pattern", 6)
    first = sizes.count("max_window_layers") if rule == "flag" else 0
    return [window if _slides(rule, i, first, pattern) else None for i in range(layers)]


def _slides(rule: str, layer: int, first: int, pattern: int) -> bool:
    if rule == "alternating":
        return layer % 2 == 0
    if rule == "pattern":
        return (layer + 1) % pattern != 0
    return layer >= first


def _max_position(sizes: _Sizes) -> int:
    """Most tokens an export serves: rope that changes with the length is exact in its original range only."""
    limit = sizes.count("max_position_embeddings")
    rope = sizes.config.get("rope_parameters") or sizes.config.get("rope_scaling") or {}
    kind = str(rope.get("rope_type", rope.get("type", ""))) if isinstance(rope, Mapping) else ""
    if kind in ("longrope", "su"):
        original = rope.get("original_max_position_embeddings")
        return min(limit, original or sizes.count("original_max_position_embeddings", limit))
    return limit
