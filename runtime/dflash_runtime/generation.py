"""What a request asks for and what it gets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from dflash_runtime.bundle import Manifest
from dflash_runtime.errors import PromptError

PROPOSALS = ("argmax", "coupled", "sampled")
_LIMITS: dict[str, tuple[float, float]] = {
    "max_new_tokens": (1, 2**63), "seed": (0, 2**64 - 1),
    "temperature": (0.0, 1e300), "top_k": (0, 2**63), "top_p": (1e-9, 1), "min_p": (0.0, 1),
    "repetition_penalty": (1e-9, 1e300), "presence_penalty": (-1e300, 1e300), "frequency_penalty": (-1e300, 1e300),
}  # fmt: skip
"""Least and most of an option; it must be whole where the least is written so."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Options of one request; without any it is decoded greedily."""

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
    chooser: Callable[[GenerationConfig, Sequence[int], int], Any] | None = None
    """Makes the `TokenChooser` of the request, with the arguments of that: one that keeps scores, or rules tokens out.
    What it says for a place may depend on the text before it alone; then the drafter changes nothing."""
    progress: Callable[[int, int], None] = lambda read, of: None
    """Told after every piece of the prompt how many of its tokens are read, kept ones included, and how many it has.
    What it raises ends the request; what was read is kept for the next."""
    reuse_prefix: bool = True
    """Keep the rows of both models for the tokens this prompt begins with like the session's last request. They are
    those of other calls than a new prefill's, so that sums may be rounded otherwise; False runs the whole prompt."""

    temperature: float = 0.0
    """0 takes the likeliest token; 1 samples the target's own distribution."""
    top_k: int = 0
    """Keep the k likeliest tokens and those equal to the last of them; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens that have this much probability together, and those equal to the last."""
    min_p: float = 0.0
    """Keep tokens at least this times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Divides the positive scores of tokens in prompt and answer, multiplies the negative ones."""
    presence_penalty: float = 0.0
    """Taken once from the score of every token in the answer."""
    frequency_penalty: float = 0.0
    """Taken from the score of a token for each time it is in the answer."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Token id -> what is added to its score."""
    seed: int | None = None
    """Equal seeds give equal texts; None draws one."""
    proposals: str = "argmax"
    """What the drafter proposes above temperature 0: `argmax`, its likeliest tokens; `coupled`, tokens drawn from its
    distribution with the noise that the target's are drawn with; `sampled`, drawn with noise of their own and kept by
    rejection sampling. The target's distribution is kept by all; with `sampled` alone the text of a seed depends on
    the block sizes too, and so on time where these are `auto`."""

    def check(self, manifest: Manifest) -> None:
        """Raises PromptError for the first option that cannot be used with this bundle."""
        for name, (low, high) in _LIMITS.items():
            if (value := getattr(self, name)) is not None:
                _checked(name, value, low, high)
        if self.proposals not in PROPOSALS:
            raise PromptError(f"proposals is {self.proposals!r} and must be one of {', '.join(PROPOSALS)}.")
        vocab_size = manifest.target.vocab_size
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size or not bias < math.inf:
                raise PromptError(f"logit_bias has {token}: {bias}; ids go from 0 to {vocab_size - 1}.")
        for option in ("plain", "raw", "reuse_prefix"):
            if not isinstance(getattr(self, option), bool):
                raise PromptError(f"{option} is {getattr(self, option)!r} and must be True or False.")
        if isinstance(self.stop_strings, str) or not all(isinstance(s, str) and s for s in self.stop_strings):
            raise PromptError(f"stop_strings is {self.stop_strings!r} and must be a list of texts, none empty.")
        check_ids("stop_token_ids", self.stop_token_ids or (), vocab_size)
        if self.template_args is not None and not isinstance(self.template_args, Mapping):
            raise PromptError(f"template_args is {self.template_args!r} and must map names to values.")
        given = [name for name in ("block_size", "block_schedule", "plain") if getattr(self, name) not in (None, False)]
        if len(given) > 1:
            raise PromptError(f"{' and '.join(given)} contradict each other; give one of them.")
        if manifest.drafter is None and given and not self.plain:
            remedy = "Leave it out, or add a drafter with: dflash-export add-drafter BUNDLE DRAFTER"
            raise PromptError(f"{given[0]} is given, but the bundle has no drafter. {remedy}")
        if self.block_size not in (None, "auto"):
            _checked("block_size", self.block_size, 1, max(manifest.block_sizes))

    @property
    def needs_logits(self) -> bool:
        """Whether the graph's own argmax is not enough."""
        return self.temperature > 0 or self.needs_full_rows

    @property
    def needs_full_rows(self) -> bool:
        """Whether more is active than temperature, top-k and top-p: then no device picks tokens or candidates."""
        others = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1, self.min_p)
        return any(others) or bool(self.logit_bias)

    def block_size_of(self, manifest: Manifest) -> Callable[[int], int]:
        """The block size of every round; 1 throughout for plain decoding."""
        size, largest = self.fixed_block_size(manifest), max(manifest.block_sizes)
        schedule = self.block_schedule or (lambda n: size)
        return lambda n: int(_checked(f"block_schedule({n})", schedule(n), 1, largest))

    def fixed_block_size(self, manifest: Manifest) -> int:
        """The request's block size, the largest where a schedule varies it."""
        if self.plain or manifest.drafter is None:
            return 1
        if self.block_schedule is not None or self.block_size == "auto":
            return max(manifest.block_sizes)
        return self.block_size or min(manifest.drafter.block_size, max(manifest.block_sizes))


def check_ids(name: str, ids: Sequence[Any], vocab_size: int) -> list[int]:
    """Returns token ids as Python integers, or raises PromptError naming the first that is none."""
    return [int(_checked(f"{name}[{i}]", token, 0, vocab_size - 1)) for i, token in enumerate(ids)]


def _checked(name: str, value: Any, low: float, high: float) -> Any:
    whole = isinstance(low, int)
    kind = hasattr(value, "__index__") and not isinstance(value, bool) if whole else isinstance(value, (int, float))
    if not kind or not low <= value <= high:
        what = "a whole number" if whole else "a number"
        raise PromptError(f"{name} is {value!r} and must be {what} from {low:.12g} to {high:.12g}.")
    return value


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
        left_out = {"proposed_ids", "rounds_by_block_size", "seed" if self.seed is None else ""}
        data = {name: value for name, value in vars(self).items() if name not in left_out}
        return {**data, "num_drafts": self.num_drafts, "mean_acceptance_length": self.mean_acceptance_length}
