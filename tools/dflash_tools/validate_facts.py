"""What the bundle says about the pair against what the checkpoints say: one row a fact, with its class of cause."""

from __future__ import annotations

from typing import Any, NamedTuple

from dflash_runtime.bundle import Bundle, CheckRow
from dflash_runtime.tokenizer import Tokenizer
from dflash_tools.greedy_identity import first_difference
from dflash_tools.reference_record import ReferenceFacts
from dflash_tools.validate_verdict import Divergence

TEMPLATE, TOKENIZER = "template or thinking mode", "tokenizer"


_WHOLE = 8
"""Longest list that is shown whole."""


class Fact(NamedTuple):
    """One fact."""

    level: str
    name: str
    cause: str
    """Class of cause: what is wrong where the two differ."""
    found: Any
    expected: Any

    @property
    def is_wrong(self) -> bool:
        """Whether bundle and checkpoint differ."""
        return bool(self.found != self.expected)

    def row(self) -> CheckRow:
        """As a row of the table."""
        both = f"the bundle has {_short(self.found, self.expected)}, the checkpoint {_short(self.expected, self.found)}"
        return CheckRow(self.level, self.name, float(self.is_wrong), 0.0, not self.is_wrong,
                        both if self.is_wrong else "as the checkpoint")  # fmt: skip

    def divergence(self) -> Divergence:
        """As the first thing that is wrong."""
        return Divergence("", self.name, None, self.cause, "bundle.json or tokenizer/",
                          _short(self.found, self.expected), _short(self.expected, self.found), 1.0, 0.0, "bundle",
                          _CAUSES[self.cause])  # fmt: skip


def _short(value: Any, other: Any) -> str:
    """A value as text; of a long list the piece where it begins to differ from the other one."""
    if not isinstance(value, list) or len(value) <= _WHOLE or not isinstance(other, list):
        return str(value)
    place = first_difference(value, other) or 0
    return f"{len(value)} ids with {value[max(0, place - 1) : place + 4]} from {max(0, place - 1)} on"


_CAUSES = {
    "stop ids": "a stop id missing or wrong: answers run on, or end early",
    TOKENIZER: "another tokenizer.json, or special tokens added twice or not at all",
    TEMPLATE: "another chat template, or another thinking mode than the drafter was trained with",
    "mask id": "the id that fills a block before drafting: nearly nothing is accepted with another one",
    "taps": "layer ids off by one, or in another order",
    "window": "a sliding window of another size, or on other layers",
    "block size": "another block size than the drafter was trained with",
}


def text_facts(bundle: Bundle, facts: ReferenceFacts) -> list[Fact]:
    """Facts on which the words depend: stop ids, and the ids that prompts become."""
    text, pair = bundle.manifest.text, facts.pair
    stops = Fact("tokens", "stop ids", "stop ids", sorted(text.stop_token_ids), sorted(pair.stop_token_ids))
    return [stops, *prompt_facts(bundle, facts, "tokens")]


def prompt_facts(bundle: Bundle, facts: ReferenceFacts, level: str) -> list[Fact]:
    """The ids that prompts become: where they are others, the text before the tokenizer tells whose fault it is."""
    tokenizer, found = Tokenizer.open(bundle), []
    for index, one in enumerate(facts.texts):
        if one.prompt is None or tokenizer is None:
            continue
        expected = one.rendered or one.prompt  # references of before say nothing about it
        cause = TOKENIZER if rendered_by(tokenizer, one.prompt) == expected else TEMPLATE
        found.append(Fact(level, f"ids of prompt {index}", cause, ids_of(tokenizer, one.prompt), one.ids))
    return found


def ids_of(tokenizer: Tokenizer, prompt: Any) -> list[int]:
    """What a bundle makes of a prompt."""
    if isinstance(prompt, str) and not tokenizer.has_chat_template:
        return tokenizer.encode_text(prompt)
    return tokenizer.encode_messages(messages_of(prompt))


def rendered_by(tokenizer: Tokenizer, prompt: Any) -> str:
    """The text a bundle gives its tokenizer for a prompt."""
    if tokenizer._template is None:
        return prompt if isinstance(prompt, str) else ""
    return tokenizer._template.render(messages_of(prompt), tokenizer._variables)


def drafting_facts(bundle: Bundle, facts: ReferenceFacts) -> list[Fact]:
    """Facts on which acceptance depends."""
    manifest, pair = bundle.manifest, facts.pair
    windows = [tensor.window_tokens for tensor in manifest.target.graph.state[0::2]]
    found = [Fact("acceptance", "taps", "taps", manifest.taps.layer_ids, pair.tap_layer_ids)]
    if pair.target_windows:
        found.append(Fact("acceptance", "target windows", "window", windows, pair.target_windows))
    if manifest.drafter is not None:
        drafter = manifest.drafter
        windows = [tensor.window_tokens for tensor in drafter.graph.state[0::2]]
        found.append(Fact("acceptance", "mask id", "mask id", drafter.mask_token_id, pair.mask_token_id))
        found.append(Fact("acceptance", "drafter windows", "window", windows, pair.drafter_windows))
        found.append(Fact("acceptance", "block size", "block size", drafter.block_size, pair.trained_block_size))
        arguments = manifest.text.template_args
        found.append(Fact("acceptance", "template arguments", TEMPLATE, arguments, pair.template_args))
    return found


def messages_of(prompt: Any) -> Any:
    """A prompt as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
