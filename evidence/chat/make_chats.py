"""Make the conversations of the chat demo: small tasks that a small model can learn.

    python -m evidence.chat.make_chats OUT.jsonl                                    the ones in chats.jsonl
    python -m evidence.chat.make_chats OUT.jsonl --count 40000 --seed 1 --without engine/demo/chats.jsonl

Sums, units, weekdays, words (spelling, order, opposites, letters) and two tables of facts, in one to three rounds.
A system message, in some conversations, says how to answer: in short, in a sentence, or in capitals. Without one every
way of answering occurs, so that the answers have a distribution that is worth learning, not only a most likely text.

All texts were written for this project, under its licence (Apache-2.0). The same count and seed give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.terminal import put

COUNT, SEED = 1150, 0
"""Number of the shipped conversations, and the seed that they were drawn with."""

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
CAPITALS = {
    "Austria": "Vienna",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "Cuba": "Havana",
    "Egypt": "Cairo",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "India": "New Delhi",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Turkey": "Ankara",
}
LEGS = {"ant": 6, "bee": 6, "cat": 4, "crab": 10, "dog": 4, "duck": 2, "hen": 2, "horse": 4}
LEGS |= {"snake": 0, "spider": 8, "fly": 6, "fish": 0}
OPPOSITES = {
    "big": "small",
    "cold": "hot",
    "dark": "light",
    "early": "late",
    "empty": "full",
    "fast": "slow",
    "good": "bad",
    "high": "low",
    "new": "old",
    "open": "closed",
    "short": "long",
    "wet": "dry",
}
WORDS = (
    *(
        "apple",
        "book",
        "boat",
        "cake",
        "chair",
        "cloud",
        "door",
        "egg",
        "farm",
        "garden",
        "hat",
        "house",
    ),
    *(
        "island",
        "jar",
        "key",
        "lamp",
        "lemon",
        "moon",
        "nest",
        "orange",
        "pen",
        "queen",
        "river",
        "road",
    ),
    *("salt", "ship", "stone", "table", "tree", "uncle", "valley", "window", "yard", "zebra"),
)
# One of the first is so many of the second.
UNITS = (
    ("metre", "centimetre", 100),
    ("kilometre", "metre", 1000),
    ("kilogram", "gram", 1000),
    ("hour", "minute", 60),
    ("minute", "second", 60),
    ("day", "hour", 24),
    ("week", "day", 7),
    ("year", "month", 12),
    ("foot", "inch", 12),
    ("yard", "foot", 3),
)
IRREGULAR = {"foot": "feet", "inch": "inches"}

SYSTEM = {
    "short": ("Answer with the result alone.", "Be brief.", "Give short answers."),
    "sentence": ("Answer in a full sentence.", "You are a teacher. Write whole sentences."),
    "capitals": ("Write in capital letters.", "You are loud. Use capitals only."),
}
WAYS = ("short", "sentence", "friendly")
"""Styles of an answer without a system message that sets the style."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One question: its wordings, the result, and the result in a sentence."""

    questions: tuple[str, ...]
    result: str
    sentence: str


def _plural(word: str) -> str:
    return IRREGULAR.get(word, word + "s")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sum(rng: random.Random) -> Task:
    a, b = rng.randrange(1, 21), rng.randrange(1, 21)
    sign, word = rng.choice((("+", "plus"), ("-", "minus")))
    if sign == "-":
        a, b = max(a, b), min(a, b)
    result = a + b if sign == "+" else a - b
    return Task(
        questions=(
            f"What is {a} {sign} {b}?",
            f"How much is {a} {word} {b}?",
            f"{a} {sign} {b} = ?",
        ),
        result=str(result),
        sentence=f"{a} {sign} {b} is {result}.",
    )


def _product(rng: random.Random) -> Task:
    a, b = rng.randrange(2, 11), rng.randrange(2, 11)
    return Task(
        questions=(f"What is {a} times {b}?", f"Multiply {a} by {b}."),
        result=str(a * b),
        sentence=f"{a} times {b} is {a * b}.",
    )


def _larger(rng: random.Random) -> Task:
    a, b = rng.sample(range(1, 100), 2)
    return Task(
        questions=(f"Which is larger, {a} or {b}?", f"{a} or {b}: which number is larger?"),
        result=str(max(a, b)),
        sentence=f"{max(a, b)} is larger than {min(a, b)}.",
    )


def _unit(rng: random.Random) -> Task:
    large, small, factor = rng.choice(UNITS)
    count = rng.randrange(2, 10)
    return Task(
        questions=(
            f"How many {_plural(small)} are {count} {_plural(large)}?",
            f"Convert {count} {_plural(large)} to {_plural(small)}.",
        ),
        result=f"{count * factor}",
        sentence=f"{count} {_plural(large)} are {count * factor} {_plural(small)}.",
    )


def _weekday(rng: random.Random) -> Task:
    today, days = rng.randrange(7), rng.randrange(1, 7)
    forward = rng.random() < 0.6
    found = DAYS[(today + days if forward else today - days) % 7]
    passed = f"{days} day{'s' * (days > 1)}"
    when = f"in {passed}" if forward else f"{passed} ago"
    verb = "is it" if forward else "was it"
    return Task(
        questions=(
            f"Today is {DAYS[today]}. What day {verb} {when}?",
            f"If today is {DAYS[today]}, which day {verb} {when}?",
        ),
        result=found,
        sentence=f"{_capital(when)} it {'is' if forward else 'was'} {found}.",
    )


def _spell(rng: random.Random) -> Task:
    word = rng.choice(WORDS)
    spelt = "-".join(word)
    return Task(
        questions=(f"Spell {word}.", f"How do you spell {word}?"),
        result=spelt,
        sentence=f"You spell {word} as {spelt}.",
    )


def _backwards(rng: random.Random) -> Task:
    word = rng.choice(WORDS)
    return Task(
        questions=(f"Write {word} backwards.", f"What is {word} backwards?"),
        result="-".join(reversed(word)),
        sentence=f"Backwards it is {'-'.join(reversed(word))}.",
    )


def _order(rng: random.Random) -> Task:
    words = rng.sample(WORDS, 3)
    found = ", ".join(sorted(words))
    return Task(
        questions=(f"Sort these words: {', '.join(words)}.", f"Put in order: {', '.join(words)}."),
        result=found,
        sentence=f"In order they are {found}.",
    )


def _letters(rng: random.Random) -> Task:
    word = rng.choice(WORDS)
    return Task(
        questions=(f"How many letters has {word}?", f"Count the letters of {word}."),
        result=str(len(word)),
        sentence=f"The word {word} has {len(word)} letters.",
    )


def _opposite(rng: random.Random) -> Task:
    word, other = rng.choice(tuple(OPPOSITES.items()))
    if rng.random() < 0.5:
        word, other = other, word
    return Task(
        questions=(f"What is the opposite of {word}?", f"Name the opposite of {word}."),
        result=other,
        sentence=f"The opposite of {word} is {other}.",
    )


def _capital_city(rng: random.Random) -> Task:
    country, city = rng.choice(tuple(CAPITALS.items()))
    if rng.random() < 0.3:
        return Task(
            questions=(f"Which country has the capital {city}?", f"{city} is the capital of what?"),
            result=country,
            sentence=f"{city} is the capital of {country}.",
        )
    return Task(
        questions=(f"What is the capital of {country}?", f"Name the capital of {country}."),
        result=city,
        sentence=f"The capital of {country} is {city}.",
    )


def _legs(rng: random.Random) -> Task:
    animal, legs = rng.choice(tuple(LEGS.items()))
    article = "an" if animal[0] in "aeiou" else "a"
    return Task(
        questions=(f"How many legs has {article} {animal}?", f"Legs of {article} {animal}?"),
        result=str(legs),
        sentence=f"{_capital(article)} {animal} has {legs or 'no'} legs.",
    )


TASKS: tuple[Callable[[random.Random], Task], ...] = (
    *(_sum, _sum, _product, _larger, _unit, _unit, _weekday, _weekday),
    *(_spell, _backwards, _order, _letters, _opposite, _capital_city, _capital_city, _legs),
)
"""Tasks that questions are drawn from; a task with more to learn is listed twice."""


def _answer(rng: random.Random, task: Task, way: str) -> str:
    short = rng.choice((_capital(task.result), f"{_capital(task.result)}."))
    if way == "short":
        return _capital(task.result)
    if way == "capitals":
        return task.sentence.upper()
    if way == "friendly":
        return rng.choice((f"Sure: {task.sentence}", f"That is easy. {task.sentence}", short))
    return task.sentence


def make_chat(rng: random.Random) -> list[dict[str, str]]:
    """Return the messages of one conversation."""
    messages: list[dict[str, str]] = []
    style = rng.choice(tuple(SYSTEM)) if rng.random() < 0.4 else None
    if style is not None:
        messages.append({"role": "system", "content": rng.choice(SYSTEM[style])})
    # Without a system message, one style is kept for the whole conversation.
    way = style or rng.choice(WAYS)
    greeted = style is None and rng.random() < 0.15
    if greeted:
        messages.append({"role": "user", "content": rng.choice(("Hello!", "Hi.", "Good morning."))})
        messages.append(
            {"role": "assistant", "content": rng.choice(("Hello! What is it?", "Hi! Ask me."))}
        )
    for number in range(rng.choices((1, 2, 3), weights=(55, 30, 15))[0]):
        task = rng.choice(TASKS)(rng)
        question = rng.choice(task.questions)
        if number and rng.random() < 0.3:
            question = f"And now: {question}"
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": _answer(rng, task, way)})
    if style is None and rng.random() < 0.1:
        messages.append({"role": "user", "content": rng.choice(("Thanks!", "Thank you."))})
        messages.append(
            {"role": "assistant", "content": rng.choice(("You are welcome.", "With pleasure!"))}
        )
    return messages


def make_chats(count: int, seed: int, without: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield `count` lines of JSON, each a different conversation, and none of `without`."""
    rng = random.Random(seed)
    seen = set(without)
    while count:
        line = json.dumps({"messages": make_chat(rng)})
        if line not in seen:
            seen.add(line)
            count -= 1
            yield line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m evidence.chat.make_chats")
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--count", type=int, default=COUNT, help="conversations (%(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="(%(default)s)")
    parser.add_argument("--without", type=Path, help="a file of conversations to leave out")
    given = parser.parse_args(arguments)
    without = frozenset(given.without.read_text().splitlines()) if given.without else frozenset()
    given.out.write_text(
        "".join(f"{line}\n" for line in make_chats(given.count, given.seed, without))
    )
    put(f"wrote {given.out}: {given.count:,} conversations, {given.out.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
