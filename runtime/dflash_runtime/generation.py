"""What a request asks for and what it gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from dflash_runtime.bundle import Manifest
from dflash_runtime.errors import PromptError
from dflash_runtime.sampling_config import Sampling


@dataclasses.dataclass(frozen=True)
class GenerationConfig(Sampling):
    """Options of one request; those of `Sampling` say how tokens are chosen."""

    max_new_tokens: int = 128
    block_size: int | Literal["auto"] | None = None
    """Tokens in a block, anchor included: 8 drafts 7 tokens. None: what the drafter was trained for. `auto`: of the
    bundle's block sizes and plain decoding, round by round, what commits most tokens per millisecond."""
    plain: bool = False
    """Decode without the drafter."""
    raw: bool = False
    """Text goes to the model as it is, without the chat template; so it does where the bundle has none."""
    stop_strings: Sequence[str] = ()
    """Texts that end the output; they are not part of it."""
    stop_token_ids: Sequence[int] | None = None
    """Replace the bundle's stop ids; an empty list never stops. None: the bundle's."""
    template_args: Mapping[str, Any] | None = None
    """Arguments for the chat template, over the bundle's own."""
    block_schedule: Callable[[int], int] | None = None
    """Block size of the n-th round, n from 0, instead of one size for all."""
    chooser: Callable[[Sampling, Sequence[int], int], Any] | None = None
    """Makes the `TokenChooser` of the request, with the arguments of that: one that keeps scores, or rules tokens out.
    What it says for a place may depend on the text before it alone; then the drafter changes nothing."""
    reuse_prefix: bool = True
    """Keep the rows of both models for the tokens this prompt begins with like the session's last request. They are
    those of other calls than a new prefill's, so that sums may be rounded otherwise; False runs the whole prompt."""

    def check(self, manifest: Manifest) -> None:
        """Raises PromptError for the first option that cannot be used with this bundle."""
        self.check_sampling(manifest.target.vocab_size)
        if not _is_int(self.max_new_tokens) or self.max_new_tokens < 1:
            raise PromptError(f"max_new_tokens is {self.max_new_tokens!r} and must be a whole number >= 1.")
        for option in ("plain", "raw", "reuse_prefix"):
            if not isinstance(getattr(self, option), bool):
                raise PromptError(f"{option} is {getattr(self, option)!r} and must be True or False.")
        if isinstance(self.stop_strings, str) or not all(isinstance(s, str) and s for s in self.stop_strings):
            raise PromptError(f"stop_strings is {self.stop_strings!r} and must be a list of texts, none empty.")
        check_ids("stop_token_ids", self.stop_token_ids or (), manifest.target.vocab_size)
        if self.template_args is not None and not isinstance(self.template_args, Mapping):
            raise PromptError(f"template_args is {self.template_args!r} and must map names to values.")
        given = [name for name in ("block_size", "block_schedule") if getattr(self, name) is not None]
        given += ["plain"] if self.plain else []
        if len(given) > 1:
            raise PromptError(f"{' and '.join(given)} contradict each other; give one of them.")
        if manifest.drafter is None and given and not self.plain:
            remedy = "Leave it out, or add a drafter with: dflash-export add-drafter BUNDLE DRAFTER"
            raise PromptError(f"{given[0]} is given, but the bundle has no drafter. {remedy}")
        if self.block_size not in (None, "auto"):
            check_block_size("block_size", self.block_size, manifest)

    def block_size_of(self, manifest: Manifest) -> Callable[[int], int]:
        """The block size of every round; 1 throughout for plain decoding."""
        if self.block_schedule is not None:
            schedule = self.block_schedule
            return lambda n: check_block_size(f"block_schedule({n})", schedule(n), manifest)
        size = self.fixed_block_size(manifest)
        return lambda n: size

    def fixed_block_size(self, manifest: Manifest) -> int:
        """The request's block size, the largest where a schedule varies it."""
        if self.plain or manifest.drafter is None:
            return 1
        if self.block_schedule is not None or self.block_size == "auto":
            return max(manifest.block_sizes)
        return self.block_size or min(manifest.drafter.block_size, max(manifest.block_sizes))


def check_block_size(name: str, size: Any, manifest: Manifest) -> int:
    """Returns `size` if the bundle's buffers have room for it, else raises PromptError."""
    largest = max(manifest.block_sizes)
    if not _is_int(size) or not 1 <= size <= largest:
        raise PromptError(f"{name} is {size!r}; this bundle takes whole numbers from 1 to {largest}.")
    return int(size)


def check_ids(name: str, ids: Sequence[Any], vocab_size: int) -> list[int]:
    """Returns token ids as Python integers, or raises PromptError naming the first that is none."""
    for i, token in enumerate(ids):
        if not _is_int(token) or not 0 <= token < vocab_size:
            raise PromptError(f"{name}[{i}] is {token!r}; this model's token ids go from 0 to {vocab_size - 1}.")
    return [int(token) for token in ids]


def _is_int(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """What a request produced."""

    text: str
    """Without stop token and stop string."""
    token_ids: list[int]
    """New tokens, the stop token included."""
    prompt_token_count: int
    finish_reason: str
    """`stop`, `length` (the budget is used up) or `context` (no room for another token)."""
    acceptance_lengths: list[int]
    """Tokens committed by each round of draft and verify, the target's own included; empty when plain."""
    proposed_ids: list[list[int]]
    """What the drafter proposed in each of those rounds."""
    tokens_per_s: float
    """Committed tokens after the first, per second of decoding; 0 where there is none."""
    time_to_first_token_ms: float
    backend: str
    block_size: int
    """1 for plain decoding; the largest allowed where it varied."""
    rounds_by_block_size: dict[int, int] = dataclasses.field(default_factory=dict)
    """How many rounds took each block size; 1 is a plain step."""
    seed: int | None = None
    """What the noise of sampled text came from."""
    reused_token_count: int = 0
    """Tokens of the prompt whose rows were kept from the request before; the others were run."""

    @property
    def num_drafts(self) -> int:
        """Rounds of draft and verify."""
        return len(self.acceptance_lengths)

    @property
    def mean_acceptance_length(self) -> float:
        """Mean over rounds; 1 where nothing was drafted, as every pass of the target then gives one token."""
        return sum(self.acceptance_lengths) / self.num_drafts if self.num_drafts else 1.0

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values, without the proposals."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del data["proposed_ids"], data["rounds_by_block_size"]
        if self.seed is None:
            del data["seed"]
        return {**data, "num_drafts": self.num_drafts, "mean_acceptance_length": self.mean_acceptance_length}
