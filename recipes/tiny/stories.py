"""The small world: its people and things, the stories told in it, and the questions asked about them.

From the stories a model learns to look back: what was heavy, and of which colour? They ask now and then, and never answer. To answer is
the task. Everything is a function of the random numbers that come in.
"""

from random import Random

SONG, LATER = 0.3, 3
PEOPLE = (
    "Adam Anna Ben Clara David Ella Emil Frida Georg Hanna Ida Jonas Karl Lena Max Nora Oskar Paula".split()
)
KINDS = "old new small large heavy light wet dry warm cold clean dirty broken wooden round soft lost cheap".split()
COLOURS = (
    "red blue green yellow black white brown grey pink purple orange golden silver pale dark striped".split()
)
THINGS = "hat cup ball book key lamp coat spoon ring doll kite drum scarf shoe plate coin pen bell flute map".split()
NUMBERS = "two three four five six seven eight nine ten eleven twelve".split()
FRUIT = "apples pears plums nuts figs beans cherries grapes".split()
PLACES = [
    "in the box",
    "in the bag",
    "in the garden",
    "under the bed",
    "under the tree",
    "on the table",
    "near the river",
]


def story(rng: Random) -> str:
    """Things are told of, then mentioned again. Or words are sung three times: from these a model first learns to look back."""
    if rng.random() < SONG:
        count = rng.randint(3, 5)
        words = zip(rng.sample(KINDS, count), rng.sample(COLOURS, count), rng.sample(THINGS, count), strict=True)
        verse = [" ".join(w) for w in words]
        lines = [" ".join(rng.sample(verse, count)) + "." for _ in range(3)]
        return f"{rng.choice(PEOPLE)} sang: {' '.join(lines)}"
    things, counted = draw(rng)
    later = []
    for kind, colour, thing in things:
        who, other = rng.sample(PEOPLE, 2)
        again = [
            f"{who} looked for the {kind} {colour} {thing}.",
            f"{who} and {other} took the {kind} {colour} {thing}.",
            f"{who} asked {other} about the {colour} {thing}.",
            f"The {colour} {thing} was {kind}.",
            f'"What is {rng.choice([kind, colour])}?" asked {who}.',
            f'"Which thing is {rng.choice([kind, colour])}?" asked {who}.',
        ]
        later += rng.sample(again, LATER)
    for number, fruit in counted:
        who, other = rng.sample(PEOPLE, 2)
        later.append(f"{who} gave the {number} {fruit} to {other}.")
        later.append(f'"What are there {number} of?" asked {who}.')
    return " ".join(tell(rng, things, counted) + rng.sample(later, len(later)))


def chat_row(rng: Random, held_out: bool) -> dict:
    """What happened, a question about it, and the answer; in training now and then a system message or a second question.

    The pairs (colour, thing) and (number, fruit) of held-out rows, a third of all, occur in no other row.
    """
    things, counted = draw(rng, held_out)
    asked = [(kind, f"the {kind} {colour} {thing}") for kind, colour, thing in things]
    asked += [(colour, f"the {colour} {thing}") for _, colour, thing in things]
    asked = [(f"{rng.choice(['What', 'Which thing'])} is {word}?", answer) for word, answer in asked]
    asked += 2 * [(f"What are there {number} of?", f"{number} {fruit}") for number, fruit in counted]
    first, second = rng.sample(asked, 2)
    messages = turn(" ".join([*tell(rng, things, counted), first[0]]), first[1])
    if not held_out and rng.random() < 0.1:
        messages = [{"role": "system", "content": "Look at the story and answer."}, *messages]
    if not held_out and rng.random() < 0.1:
        messages += turn(*second)
    return {"messages": messages}


def draw(rng: Random, held_out: bool | None = None) -> tuple[list[tuple], list[tuple]]:
    """2-4 (kind, colour, thing) and 0-2 (number, fruit), from all pairs or from those of one side."""
    kinds = rng.sample(KINDS, rng.randint(2, 3))
    pairs = draw_pairs(rng, COLOURS, THINGS, len(kinds), held_out)
    things = [(kind, *pair) for kind, pair in zip(kinds, pairs, strict=True)]
    return things, draw_pairs(rng, NUMBERS, FRUIT, rng.randint(0, 1), held_out)


def draw_pairs(rng: Random, firsts: list, seconds: list, count: int, held_out: bool | None) -> list[tuple]:
    """`count` pairs in which no word occurs twice."""
    while True:
        first, second = rng.sample(range(len(firsts)), count), rng.sample(range(len(seconds)), count)
        if held_out is None or all(
            ((a + b) % 3 == 0) == held_out for a, b in zip(first, second, strict=True)
        ):
            return [(firsts[a], seconds[b]) for a, b in zip(first, second, strict=True)]


def tell(rng: Random, things: list[tuple], counted: list[tuple]) -> list[str]:
    """One sentence about each, in any order."""
    told = []
    for kind, colour, thing in things:
        what, who, verb = f"{kind} {colour} {thing}", rng.choice(PEOPLE), rng.choice(["had", "found", "saw"])
        told.append(rng.choice([f"{who} {verb} the {what}.", f"The {what} was {rng.choice(PLACES)}."]))
    told += [f"There were {number} {fruit} {rng.choice(PLACES)}." for number, fruit in counted]
    return rng.sample(told, len(told))


def turn(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
