"""How fast `make-data` answers prompts, against Transformers' own `generate` with the same prompts at once.

    python -m dflash_tools.answer_speed --target TARGET --prompts FILE [--batch-size 16] [--limit 64]

Both are greedy, in the target's own precision, with prompts sorted by length. Tokens behind a stop token do not count.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from dflash_tools.error_lines import DFlashCommand, needs_extra


def transformers_answers(
    model: Any, prompts: list[list[int]], batch_size: int, max_new_tokens: int, stops: list[int]
) -> list[list[int]]:
    """Answers of `generate`, batch after batch, padded on the left."""
    import torch

    answers = []
    for start in range(0, len(prompts), batch_size):
        part = prompts[start : start + batch_size]
        longest = max(map(len, part))
        ids = torch.tensor([[stops[0]] * (longest - len(p)) + p for p in part], device=model.device)
        seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in part], device=model.device)
        with torch.inference_mode():
            found = model.generate(
                ids, attention_mask=seen, do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=stops,
                pad_token_id=stops[0],
            )  # fmt: skip
        answers += [to_stop(row, stops) for row in found[:, longest:].tolist()]
    return answers


def to_stop(answer: list[int], stops: list[int]) -> list[int]:
    """An answer up to its first stop token, that one included."""
    ends = [i for i, token in enumerate(answer) if token in stops]
    return answer[: ends[0] + 1] if ends else answer


@click.command(cls=DFlashCommand)
@click.option("--target", required=True, help="Catalog name, Hugging Face id, or folder.")
@click.option("--prompts", "prompt_file", type=click.Path(path_type=Path), required=True)
@click.option("--field", default="prompt", show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=16, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(2), default=256, show_default=True)
@click.option("--limit", type=click.IntRange(1), default=64, show_default=True, help="First prompts of the file.")
@click.option("--threads", type=click.IntRange(1), help="[default: torch's own choice]")
def main(
    target: str, prompt_file: Path, field: str, batch_size: int, max_new_tokens: int, limit: int, threads: int | None
) -> None:
    """Prints tokens a second of both, and how many answers are the same, as one JSON object."""
    with needs_extra("export"):
        import torch

        from dflash_export.text_files import read_text_facts
        from dflash_tools.answer_batch import AnswerBatch, AnswerRules
        from dflash_tools.answer_linear import can_pack, pack_linear_layers
        from dflash_tools.answer_writing import answering_order
        from dflash_tools.data_making import DataOptions, encoded_prompts
        from dflash_tools.prompt_file import read_prompts
        from dflash_tools.training_processes import default_device
        from dflash_tools.training_target import FrozenTarget, find_target
    if threads is not None:
        torch.set_num_threads(threads)
    plan = find_target(target)
    options = DataOptions(target, prompt_file, Path())
    found = encoded_prompts(options, plan, read_prompts(prompt_file, field)[:limit])
    prompts = [prompt.ids for prompt in answering_order(found)]
    stops = list(read_text_facts(plan.checkpoint.folder, {})[0].stop_token_ids)
    model = FrozenTarget.load(plan, default_device()).model
    started = time.perf_counter()
    theirs = transformers_answers(model, prompts, batch_size, max_new_tokens, stops)
    middle = time.perf_counter()
    if can_pack(model):
        pack_linear_layers(model, batch_size)
    rules = AnswerRules(max_new_tokens, frozenset(stops))
    batch = AnswerBatch(model, batch_size, max(map(len, prompts)) + max_new_tokens, rules)
    ours = batch.answer(prompts, [0] * len(prompts), lambda length: None)
    ended = time.perf_counter()
    their_speed, our_speed = sum(map(len, theirs)) / (middle - started), sum(map(len, ours)) / (ended - middle)
    result = {
        "prompts": len(prompts),
        "batch_size": batch_size,
        "answer_tokens": sum(map(len, ours)),
        "same_answers": sum(a == b for a, b in zip(ours, theirs, strict=True)),
        "transformers_tokens_per_s": round(their_speed, 1),
        "make_data_tokens_per_s": round(our_speed, 1),
        "ratio": round(our_speed / their_speed, 2),
        "threads": torch.get_num_threads(),
    }
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
