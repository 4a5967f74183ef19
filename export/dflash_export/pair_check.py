"""Do a target and a drafter fit each other? Asked of their configs and headers, before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedConfig

from dflash_export.drafter_config import DrafterConfig
from dflash_export.tensor_files import TensorPlace
from dflash_runtime.errors import CheckpointError, PairError

_FC = ("fc.weight", "model.fc.weight")


def check_pair(
    target: PreTrainedConfig,
    drafter: DrafterConfig,
    drafter_places: Mapping[str, TensorPlace],
    *,
    max_context_tokens: int | None = None,
    block_sizes: Sequence[int] = (),
) -> None:
    """Refuses a pair that cannot work, or that would work with silently poor proposals.

    Args:
        target: The target's config.
        drafter: The drafter's facts.
        drafter_places: The drafter's tensors.
        max_context_tokens: Rows the bundle's requests may commit; None skips that check.
        block_sizes: Block sizes asked for beside the drafter's own.

    Raises:
        PairError: naming both values.
    """
    text = target.get_text_config()
    _check_sizes(text, drafter, drafter_places)
    _check_taps(int(text.num_hidden_layers), drafter)
    _check_blocks(drafter, block_sizes)
    limit = drafter.max_position_tokens
    if max_context_tokens is not None and limit is not None and max_context_tokens > limit:
        raise PairError(
            f"the bundle's context is {max_context_tokens} tokens and the drafter was made for {limit} "
            f"(max_position_embeddings). Give --max-context {limit} or less."
        )


def _check_sizes(text: PreTrainedConfig, drafter: DrafterConfig, places: Mapping[str, TensorPlace]) -> None:
    hidden, rows = int(text.hidden_size), int(text.vocab_size)
    if drafter.hidden_size != hidden:
        raise PairError(
            f"the drafter's hidden_size is {drafter.hidden_size} and the target's is {hidden}. {_WRONG_PAIR}"
        )
    if drafter.target_hidden_size != hidden:
        raise PairError(
            f"the drafter's target_hidden_size is {drafter.target_hidden_size} and the target's hidden_size is "
            f"{hidden}. {_WRONG_PAIR}"
        )
    if drafter.vocab_size not in (None, rows):
        raise PairError(f"the drafter's vocab_size is {drafter.vocab_size} and the target's is {rows}. {_WRONG_PAIR}")
    if drafter.mask_token_id >= rows:
        raise PairError(
            f"the drafter's mask_token_id is {drafter.mask_token_id} and the target's embedding has {rows} rows (ids 0 "
            f"to {rows - 1}). {_WRONG_PAIR}"
        )
    fc = next((places[name] for name in _FC if name in places), None)
    K = len(drafter.target_layer_ids)
    if fc is not None and (len(fc.shape) != 2 or fc.shape[1] != K * hidden):
        raise PairError(
            f"the drafter's fc.weight takes {fc.shape[-1]} values and {K} taps of {hidden} give {K * hidden}: its "
            f"target_layer_ids {list(drafter.target_layer_ids)} belong to other weights, or the target does."
        )


def _check_taps(num_target_layers: int, drafter: DrafterConfig) -> None:
    outside = [i for i in drafter.target_layer_ids if i >= num_target_layers]
    if outside:
        raise PairError(
            f"the drafter taps layers {list(drafter.target_layer_ids)} and the target has {num_target_layers} (0 to "
            f"{num_target_layers - 1}); {outside} do not exist. target_layer_ids count layers from 0; other tools "
            f"count the same taps from 1, as {[i + 1 for i in drafter.target_layer_ids]}. {_WRONG_PAIR}"
        )
    stated = drafter.num_target_layers
    if stated not in (None, num_target_layers):
        raise PairError(
            f"the drafter was made for a target of {stated} layers (num_target_layers) and this one has "
            f"{num_target_layers}. {_WRONG_PAIR}"
        )


def _check_blocks(drafter: DrafterConfig, block_sizes: Sequence[int]) -> None:
    if drafter.block_size < 2:
        raise PairError(
            f"the drafter's block_size is {drafter.block_size}; a block is the anchor and at least one draft, so 2 or "
            "more."
        )
    largest = max([drafter.block_size, *block_sizes])
    windows = [window for window in drafter.windows if window is not None]
    if windows and min(windows) < largest:
        raise PairError(
            f"the drafter's sliding window is {min(windows)} tokens and a block has {largest}: a block must fit into "
            "the window."
        )


_WRONG_PAIR = "Give the drafter that was trained for this target."


def check_tokenizers(target_folder: Path, drafter_folder: Path, mask_token_id: int) -> None:
    """Compares the tokenizers of a pair, where the drafter ships one.

    The mask token may be known to one of them only.

    Args:
        target_folder: The target's checkpoint.
        drafter_folder: The drafter's checkpoint.
        mask_token_id: The drafter's mask id.

    Raises:
        PairError: they differ in length, or in what an id stands for.
        CheckpointError: a tokenizer.json cannot be read.
    """
    files = [folder / "tokenizer.json" for folder in (target_folder, drafter_folder)]
    if not all(file.is_file() for file in files):
        return
    target, drafter = (_tokens_by_id(file) for file in files)
    for tokens in (target, drafter):
        tokens.pop(mask_token_id, None)
    if len(target) != len(drafter):
        raise PairError(
            f"the drafter's tokenizer has {len(drafter)} tokens and the target's {len(target)} (mask token left out). "
            f"{_WRONG_PAIR}"
        )
    different = sorted(i for i in target if drafter.get(i) != target[i])
    if different:
        first = different[0]
        raise PairError(
            f"target and drafter give {len(different)} ids different meanings, the first is {first}: "
            f"{target[first]!r} and {drafter.get(first)!r}. {_WRONG_PAIR}"
        )


def _tokens_by_id(file: Path) -> dict[int, str]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file} cannot be read as a tokenizer ({error}). Download it again.") from error
    return {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
