"""Small sums told as stories: questions and worked answers, made up here and free to ship."""

from __future__ import annotations

import random

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Kim", "Lena")
THINGS = (
    "apples", "books", "cards", "coins", "eggs", "marbles", "pears", "pencils", "shells", "stamps", "stones", "toys",
)  # fmt: skip
PLACES = ("in the garden", "at the market", "on the shelf", "in a box", "at school", "in the kitchen")


def question_and_answer(rng: random.Random) -> tuple[str, str]:
    """One story; the answer works the sum out step by step."""
    name, other = rng.sample(NAMES, 2)
    thing, place = rng.choice(THINGS), rng.choice(PLACES)
    a, b, c = rng.randint(11, 60), rng.randint(2, 9), rng.randint(2, 9)
    tell = rng.choice((_more, _fewer, _both, _bags, _price))
    return tell(name, other, thing, place, a, b, c)


def questions_and_answers(count: int, seed: int) -> list[tuple[str, str]]:
    """Different stories, always the same ones for a seed."""
    rng = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        question, answer = question_and_answer(rng)
        found.setdefault(question, answer)
    return list(found.items())


def _more(name: str, other: str, thing: str, place: str, a: int, b: int, c: int) -> tuple[str, str]:
    return (
        f"{name} has {a} {thing} and finds {b} more {place}. How many {thing} does {name} have?",
        f"{name} has {a} {thing}. {name} finds {b} more {thing} {place}. We add them: {a} + {b} = {a + b}. "
        f"So {name} has {a + b} {thing} in all.",
    )


def _fewer(name: str, other: str, thing: str, place: str, a: int, b: int, c: int) -> tuple[str, str]:
    return (
        f"{name} has {a} {thing} {place}. {name} gives {b} of them to {other}. How many {thing} are left?",
        f"{name} has {a} {thing} {place}. {name} gives {b} {thing} to {other}. We take them away: {a} - {b} = {a - b}. "
        f"So {a - b} {thing} are left {place}.",
    )


def _both(name: str, other: str, thing: str, place: str, a: int, b: int, c: int) -> tuple[str, str]:
    return (
        f"There are {a} {thing} {place}. {name} takes {b} and {other} brings {c}. How many {thing} are there now?",
        f"At first there are {a} {thing} {place}. {name} takes {b} {thing}, so {a} - {b} = {a - b}. {other} brings {c} "
        f"{thing}, so {a - b} + {c} = {a - b + c}. Now there are {a - b + c} {thing} {place}.",
    )


def _bags(name: str, other: str, thing: str, place: str, a: int, b: int, c: int) -> tuple[str, str]:
    return (
        f"{name} fills {b} bags with {c} {thing} each. How many {thing} is that?",
        f"{name} fills {b} bags. Each bag holds {c} {thing}. We multiply: {b} * {c} = {b * c}. So {name} has {b * c} "
        f"{thing} in {b} bags.",
    )


def _price(name: str, other: str, thing: str, place: str, a: int, b: int, c: int) -> tuple[str, str]:
    return (
        f"{name} buys {b} {thing} for {c} euros each and {other} pays {a} euros. How much do they spend?",
        f"{name} buys {b} {thing} for {c} euros each, so {b} * {c} = {b * c} euros. {other} pays {a} euros. Together "
        f"they spend {b * c} + {a} = {a + b * c} euros.",
    )
