"""A very small language model with a tokenizer of its own, trained here from nothing: a target that can be shipped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from dflash_tools.training_schedule import TextOrder, learning_rate

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IGNORED = -100


@dataclasses.dataclass(frozen=True)
class TinySizes:
    """Sizes of a target and of its training."""

    vocab_size: int = 512
    """Rows of the embedding; the tokenizer leaves the last ones free."""
    hidden_size: int = 128
    intermediate_size: int = 320
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    max_position_tokens: int = 512
    num_steps: int = 1500
    batch_size: int = 16
    peak_learning_rate: float = 3e-3


def train_tokenizer(texts: Sequence[str], sizes: TinySizes) -> Any:
    """A byte-level BPE tokenizer over the texts, with eight rows of the embedding left free."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # Digits stand alone, so that a sum is worked out digit by digit.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=sizes.vocab_size - 8, special_tokens=[USER, ASSISTANT, END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Any, sizes: TinySizes) -> None:
    """Writes tokenizer.json, its config and the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False,
        "model_max_length": sizes.max_position_tokens,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def train_tiny_target(
    folder: Path, pairs: Sequence[tuple[str, str]], sizes: TinySizes, *, seed: int, dtype: torch.dtype,
    progress: Callable[[str, int, int], None],
) -> float:  # fmt: skip
    """Trains a target on questions and answers and writes it as a checkpoint folder.

    Args:
        folder: To make.
        pairs: Questions with their answers.
        sizes: Of the model and its training.
        seed: Of weights and order.
        dtype: Of the stored weights.
        progress: Called with stage, done, total.

    Returns:
        The last loss.
    """
    tokenizer = train_tokenizer([text for pair in pairs for text in pair], sizes)
    write_tokenizer(folder, tokenizer, sizes)
    end = tokenizer.token_to_id(END)
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(_config(sizes, end), dtype=torch.float32)
    texts = [tokenizer.encode(f"{USER}{question}{ASSISTANT}{answer}{END}").ids for question, answer in pairs]
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes.peak_learning_rate)
    loss = torch.zeros(())
    for step, (ids, labels) in enumerate(_batches(texts, sizes, seed, end)):
        progress("train target", step, sizes.num_steps)
        optimizer.param_groups[0]["lr"] = learning_rate(step, sizes.num_steps, sizes.peak_learning_rate, 0.04)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    progress("train target", sizes.num_steps, sizes.num_steps)
    model.generation_config.eos_token_id = [end]
    model.to(dtype).save_pretrained(folder)
    return float(loss.detach())


def _config(sizes: TinySizes, end: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=sizes.vocab_size, hidden_size=sizes.hidden_size, intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_layers, num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads, head_dim=sizes.head_dim,
        max_position_embeddings=sizes.max_position_tokens, tie_word_embeddings=True, eos_token_id=end,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip


def _batches(texts: Sequence[list[int]], sizes: TinySizes, seed: int, end: int) -> Iterator[tuple[Tensor, Tensor]]:
    order = TextOrder(range(len(texts)), sizes.batch_size, seed)
    for step in range(sizes.num_steps):
        chosen = [texts[i] for i in order.batch(step)]
        longest = max(map(len, chosen))
        yield (
            torch.tensor([text + [end] * (longest - len(text)) for text in chosen]),
            torch.tensor([text + [IGNORED] * (longest - len(text)) for text in chosen]),
        )
