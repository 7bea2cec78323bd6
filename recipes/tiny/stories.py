"""The small world: its people and things, the stories told in it, and the questions asked about them.

From the stories a model learns to look back: what was heavy, and of which colour? They ask now and then, and
never answer. To answer is the task. Everything is a function of the random numbers that come in.
"""

from random import Random

SONGS = 0.3  # share of the stories
PEOPLE = """Adam Anna Ben Clara David Ella Emil Frida Georg Hanna Ida Jonas Karl Lena Max Nora Oskar Paula
Simon Tilda""".split()
KINDS = """old new small large heavy light wet dry warm cold clean dirty broken wooden round soft lost
cheap""".split()
COLOURS = """red blue green yellow black white brown grey pink purple orange golden silver pale dark
striped""".split()
THINGS = """hat cup ball book key lamp coat spoon ring doll kite drum scarf shoe plate coin pen bell flute map
clock stone""".split()
NUMBERS = "two three four five six seven eight nine ten eleven twelve".split()
FRUIT = "apples pears plums nuts eggs cakes figs beans".split()
PLACES = """in the box, in the bag, in the garden, in the boat, under the bed, under the tree, on the table,
on the roof, on the shelf, behind the door, behind the house, near the river""".replace(
    "\n", " "
).split(", ")


def story(rng: Random) -> str:
    """Things are told of, then mentioned again. Or a line of words is sung three times: from these songs a
    model first learns to look back.
    """
    if rng.random() < SONGS:
        words = PEOPLE + KINDS + COLOURS + THINGS + FRUIT + NUMBERS
        line = " ".join(rng.sample(words, rng.randint(6, 16)))
        return f"{rng.choice(PEOPLE)} sang: " + " ".join([line + "."] * 3)
    told, things, counted = facts(rng)
    later = []
    for kind, colour, thing in things:
        who, other = rng.sample(PEOPLE, 2)
        again = [
            f"{who} looked for the {kind} {colour} {thing}.",
            f"{who} asked {other} about the {colour} {thing}.",
            f"{who} saw the {colour} {thing} again.",
            f"The {colour} {thing} was {kind}.",
            f"{who} and {other} took the {kind} {colour} {thing}.",
            f'"Which thing is {rng.choice([kind, colour])}?" asked {who}.',
            f'"What is {rng.choice([kind, colour])}?" asked {who}.',
        ]
        later += rng.sample(again, 3)
    for number, fruit in counted:
        who, other = rng.sample(PEOPLE, 2)
        again = [
            f"{who} gave the {number} {fruit} to {other}.",
            f"{who} counted {number} {fruit}.",
            f'"What are there {number} of?" asked {who}.',
        ]
        later += rng.sample(again, 2)
    rng.shuffle(later)
    return " ".join(told + later)


def chat_row(rng: Random, held_out: bool) -> dict:
    """A question about what was told, and its answer. Held-out rows tell of pairs (colour, thing) that no
    others do.
    """
    told, things, counted = facts(rng, held_out)
    asked = []
    for kind, colour, thing in things:
        asked += [
            (f"{what} is {kind}?", f"the {kind} {colour} {thing}")
            for what in ("What", "Which thing")
        ]
        asked += [
            (f"{what} is {colour}?", f"the {colour} {thing}") for what in ("What", "Which thing")
        ]
    asked += [(f"What are there {number} of?", f"{number} {fruit}") for number, fruit in counted]
    (question, answer), _ = rng.sample(asked, 2)
    user = {"role": "user", "content": " ".join([*told, question])}
    return {"messages": [user, {"role": "assistant", "content": answer}]}


def facts(rng: Random, held_out: bool | None = None) -> tuple[list[str], list[tuple], list[tuple]]:
    """Sentences, and what they tell: 2-4 (kind, colour, thing) and 0-2 (number, fruit), no word twice.

    held_out: a third of the pairs (colour, thing), the others, or None: all.
    """
    count = rng.randint(2, 4)
    kinds, things, colours = (
        rng.sample(KINDS, count),
        rng.sample(THINGS, count),
        rng.sample(COLOURS, count),
    )
    while held_out is not None and any(
        map(lambda *pair: is_held_out(*pair) != held_out, colours, things)
    ):
        things, colours = rng.sample(THINGS, count), rng.sample(COLOURS, count)
    numbers, fruit = rng.sample(NUMBERS, 2), rng.sample(FRUIT, 2)
    objects = list(zip(kinds, colours, things, strict=True))
    counted = list(zip(numbers, fruit, strict=True))[: rng.randint(0, 2)]
    places = rng.sample(PLACES, 6)
    told = []
    for (kind, colour, thing), place in zip(objects, places, strict=False):
        ways = [
            f"The {kind} {colour} {thing} was {place}.",
            f"{rng.choice(PEOPLE)} put the {kind} {colour} {thing} {place}.",
            f"{rng.choice(PEOPLE)} had the {kind} {colour} {thing}.",
        ]
        told.append(rng.choice(ways))
    for (number, fruit), place in zip(counted, places[4:], strict=False):
        told.append(
            rng.choice(
                [
                    f"There were {number} {fruit} {place}.",
                    f"{rng.choice(PEOPLE)} had {number} {fruit}.",
                ]
            )
        )
    rng.shuffle(told)
    return told, objects, counted


def is_held_out(colour: str, thing: str) -> bool:
    return (COLOURS.index(colour) + THINGS.index(thing)) % 3 == 0
