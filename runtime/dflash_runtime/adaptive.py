"""Which block size the next round takes: the one that commits most tokens per millisecond, plain decoding included.

A round of block size b takes t(b) ms and commits 1 + a tokens, a being how many of its b - 1 proposals are right. With
h(j) the chance that proposal j is right when all before it are, E(b) = 1 + h(1) + h(1)h(2) + ... + h(1)...h(b-1), and
the size that wins is the one with the largest E(b) / t(b); plain decoding has E = 1.

Both are learnt from the rounds. t(b) is a moving mean that begins at the profile's value. h(j) is right over tried,
for each b of its own, because a drafter proposes otherwise in a larger block; a round tells of positions up to its
first wrong proposal only, and of what it never tried a size knows what the others found, with little weight. Counts
fade slowly while rounds come out as expected. When they do not for some time, the text has changed: then most of what
was counted is forgotten at once.

The sum of surprises (committed - E) / deviation, each weighing _RECENT times the next one, has variance
1 / (1 - _RECENT^2) while E is right; an alarm is _ALARM of its deviations.

A time that was not measured for long is believed less and less. What slows one size is mostly the machine, and so the
times of the others move along.

Another size is tried where a slightly luckier view of it wins, of its chances and of a time that is old, and while the
loss this may bring stays in a budget: the time of _EXPLORING_ROUNDS rounds and a share of all time. Tries that gain pay
it back. So plain decoding is left again and again for a try, and a text on which speculation never pays loses no more
than the budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_FADE = 0.99
_FADE_PLAIN = 0.98
"""In a plain round, which tells nothing of the drafter: what is known of it gets old."""
_KEPT_BETWEEN_TEXTS = 0.5
_KEPT_AFTER_ALARM = 0.05
_RECENT = 0.9
_ALARM = 3.0
_TIME_SHARE = 0.2
"""Of a round's time in the moving mean; up to all of it where the mean is old."""
_OLD_ROUNDS = 256
"""A time not measured for so many rounds is half believed."""
_MACHINE = 0.8
"""Of a change in a size's time, on a logarithmic scale, how much is the machine's and so every size's."""
_BORROWED_TRIES = 2.0
"""Tries that other sizes' findings count for; a size's own soon outweigh them."""
_LUCK = 0.25
"""Standard errors by which the luckier view exceeds the plain one, at every position."""
_MARGIN = 0.05
"""Another size must promise this much more: no flapping between equals."""
_EXPLORING_ROUNDS = 2
_EXPLORING_SHARE = 0.01
_FIRST_GUESS = 0.7
"""Chance of a proposal to be right before anything is known."""
_MS_PER_TOKEN = 0.05
"""Of a plain round's time, for each further token of a block that was never timed."""


class BlockSizeController:
    """Chooses block sizes, one text after another; what it learns of the machine stays.

    Args:
        block_sizes: Sizes to choose from; 1, plain decoding, is always among them.
        round_ms: Size -> milliseconds of a round, as measured before; sizes without are guessed from the others.
        right: Size -> chance of each of its proposals to be right when those before it are, as measured before.
    """

    def __init__(self, block_sizes: Sequence[int], round_ms: Mapping[int, float] | None = None,
                 right: Mapping[int, Sequence[float]] | None = None) -> None:
        self.block_sizes = sorted({1, *block_sizes})
        self._ms = dict(round_ms or {})
        self._guess = dict(right or {})
        self._age = dict.fromkeys(self._ms, 0)
        self._counts = {b: [[0.0, 0.0] for _ in range(b - 1)] for b in self.block_sizes}  # right, tried
        self.begin()

    def begin(self) -> None:
        """A new text: what was accepted in the one before says something about it."""
        self._fade(_KEPT_BETWEEN_TEXTS)
        self._current, self._rate = 0, 0.0
        self._spent_ms = self._lost_ms = self._surprise = 0.0

    def choose(self) -> int:
        """The block size of the next round."""
        views = {size: self.expected_tokens(size) for size in self.block_sizes}
        rates = {size: views[size][0] / self.expected_ms(size) for size in self.block_sizes}
        best = max(rates, key=lambda size: rates[size])
        if rates[best] < rates.get(self._current, 0.0) * (1 + _MARGIN):
            best = self._current
        self._current, self._rate = best, rates[best]
        budget_ms = _EXPLORING_ROUNDS * self.expected_ms(best) + _EXPLORING_SHARE * self._spent_ms - self._lost_ms
        worth = {best: 0.0}
        for size in self.block_sizes:
            ms = self.expected_ms(size)
            gain = views[size][1] / (ms * (1 - self._old(size))) / self._rate - 1
            if size != best and gain > _MARGIN and ms - 1 / self._rate <= budget_ms:
                worth[size] = gain / max(ms * self._rate - views[size][0], 0.1)  # by the tokens it is expected to cost
        return max(worth, key=lambda size: worth[size])

    def observe(self, block_size: int, committed: int, elapsed_ms: float, *, complete: bool = True) -> None:
        """Takes a finished round into account.

        Args:
            block_size: Of the round.
            committed: Tokens it committed, the target's own included.
            elapsed_ms: Its time.
            complete: False where a stop or the budget cut it: its time counts, its acceptance says nothing.
        """
        if block_size not in self.block_sizes:
            return  # one that was shortened at the end of the text
        usual = self._ms.get(block_size, elapsed_ms)
        old = self._old(block_size)
        factor = 1 + max(_TIME_SHARE, old) * (min(elapsed_ms / usual, 2) - 1)
        self._ms = {size: ms * factor ** (_MACHINE * (1 - old)) for size, ms in self._ms.items()}
        self._ms[block_size] = usual * factor
        self._age = {size: age + 1 for size, age in self._age.items()} | {block_size: 0}
        self._spent_ms += elapsed_ms
        if self._current and block_size != self._current:
            self._lost_ms = max(0.0, self._lost_ms + elapsed_ms - committed / self._rate)
        if block_size == 1:
            self._fade(_FADE_PLAIN)
        if not complete or block_size == 1:
            return
        expected, _ = self.expected_tokens(block_size)
        deviation = min(max(math.sqrt(expected * (expected - 1)), 0.5), (block_size - 1) / 2.5)  # geometric, cut
        self._surprise = _RECENT * self._surprise + (committed - expected) / deviation
        changed = abs(self._surprise) > _ALARM / math.sqrt(1 - _RECENT**2)
        self._surprise = 0.0 if changed else self._surprise
        self._fade(_KEPT_AFTER_ALARM if changed else _FADE)
        for j, count in enumerate(self._counts[block_size][:committed]):
            count[0] += j < committed - 1
            count[1] += 1

    def expected_tokens(self, block_size: int) -> tuple[float, float]:
        """E(b), and the same in the luckier view."""
        expected = lucky = right = luckily = 1.0
        chance = _FIRST_GUESS
        for j, (own_right, own_tried) in enumerate(self._counts[block_size]):
            guess = self._guess.get(block_size, ())
            others = [c[j] for size, c in self._counts.items() if size != block_size and j < len(c)]
            lent_right, lent_tried = (sum(column) for column in zip((0.0, 0.0), *others, strict=True))
            lent = (lent_right + (guess[j] if j < len(guess) else chance)) / (lent_tried + 1)
            chance = (own_right + _BORROWED_TRIES * lent) / (own_tried + _BORROWED_TRIES)
            error = math.sqrt(max(chance * (1 - chance), 0.02) / (own_tried + 1 + min(lent_tried / 4, 8)))
            right, luckily = right * chance, luckily * min(1.0, chance + _LUCK * error)
            expected, lucky = expected + right, lucky + luckily
        return expected, lucky

    def expected_ms(self, block_size: int) -> float:
        """t(b); a size never timed is placed by the nearest one that was."""
        if block_size in self._ms:
            return self._ms[block_size]
        near = min(self._ms, key=lambda size: abs(size - block_size), default=1)
        return self._ms.get(near, 1.0) * (1 + _MS_PER_TOKEN * (block_size - 1)) / (1 + _MS_PER_TOKEN * (near - 1))

    def _old(self, size: int) -> float:
        """0 for a time just measured, nearly 1 for one that is old; a half where there is none."""
        age = self._age.get(size, _OLD_ROUNDS)
        return age / (age + _OLD_ROUNDS)

    def _fade(self, kept: float) -> None:
        for counts in self._counts.values():
            counts[:] = [[kept * count for count in pair] for pair in counts]
