"""The data of the tiny model: random stories about people and things, and questions about them.

From the stories a model learns to look back in its context: what was heavy, and of which colour? Some stories
ask questions, but none answers: to answer is the task. Everything depends only on the generator `rng`.
"""

from random import Random

SONGS = 0.3  # share of songs among the stories
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
PLACES = [
    "in the box",
    "in the bag",
    "in the garden",
    "in the boat",
    "under the bed",
    "under the tree",
    "on the table",
    "on the roof",
    "on the shelf",
    "behind the door",
    "behind the house",
    "near the river",
]


def story(rng: Random) -> str:
    """A story that describes things, then mentions them again; or a song that repeats a line of words three
    times. From songs a model first learns to look back.
    """
    if rng.random() < SONGS:
        words = PEOPLE + KINDS + COLOURS + THINGS + FRUIT + NUMBERS
        line = " ".join(rng.sample(words, rng.randint(6, 16)))
        return f"{rng.choice(PEOPLE)} sang: " + " ".join([line + "."] * 3)
    described, things, counted = facts(rng)
    later = []
    for kind, colour, thing in things:
        person, friend = rng.sample(PEOPLE, 2)
        again = [
            f"{person} looked for the {kind} {colour} {thing}.",
            f"{person} asked {friend} about the {colour} {thing}.",
            f"{person} saw the {colour} {thing} again.",
            f"The {colour} {thing} was {kind}.",
            f"{person} and {friend} took the {kind} {colour} {thing}.",
            f'"Which thing is {rng.choice([kind, colour])}?" asked {person}.',
            f'"What is {rng.choice([kind, colour])}?" asked {person}.',
        ]
        later += rng.sample(again, 3)
    for number, fruit in counted:
        person, friend = rng.sample(PEOPLE, 2)
        again = [
            f"{person} gave the {number} {fruit} to {friend}.",
            f"{person} counted {number} {fruit}.",
            f'"What are there {number} of?" asked {person}.',
        ]
        later += rng.sample(again, 2)
    rng.shuffle(later)
    return " ".join(described + later)


def chat_row(rng: Random, held_out: bool) -> dict:
    """A row with some sentences, a question about them, and its answer. The (colour, thing) pairs of held-out
    rows are in no other row.
    """
    question, answer, _ = asked(rng, held_out)
    user = {"role": "user", "content": question}
    return {"messages": [user, {"role": "assistant", "content": answer}]}


def pair_row(rng: Random, held_out: bool) -> dict:
    """A row with a question and two answers. The rejected answer names another thing of the story."""
    question, answer, wrong = asked(rng, held_out)
    return {"prompt": question, "chosen": answer, "rejected": rng.choice(wrong)}


def asked(rng: Random, held_out: bool) -> tuple[str, str, list[str]]:
    """(some sentences and a question, its answer, wrong answers about the same sentences)."""
    described, things, counted = facts(rng, held_out)
    pairs = []  # (question, answer)
    for kind, colour, thing in things:
        by_kind = f"the {kind} {colour} {thing}"
        by_colour = f"the {colour} {thing}"
        pairs.append((f"What is {kind}?", by_kind))
        pairs.append((f"Which thing is {kind}?", by_kind))
        pairs.append((f"What is {colour}?", by_colour))
        pairs.append((f"Which thing is {colour}?", by_colour))
    for number, fruit in counted:
        pairs.append((f"What are there {number} of?", f"{number} {fruit}"))
    (question, answer), _ = rng.sample(pairs, 2)
    wrong = [other for _, other in pairs if other.split()[-1] != answer.split()[-1]]
    return " ".join([*described, question]), answer, wrong


def facts(rng: Random, held_out: bool | None = None) -> tuple[list[str], list[tuple], list[tuple]]:
    """(sentences, things, counted). The sentences describe 2-4 things (kind, colour, thing) and 0-2 counted
    (number, fruit). No word is used twice.

    held_out: which (colour, thing) pairs are used. True: only held-out pairs, a third of all; False: only the
    others; None: all.
    """
    count = rng.randint(2, 4)
    kinds = rng.sample(KINDS, count)
    names = rng.sample(THINGS, count)
    colours = rng.sample(COLOURS, count)
    while held_out is not None and not all_held_out(colours, names, held_out):
        names = rng.sample(THINGS, count)
        colours = rng.sample(COLOURS, count)
    numbers = rng.sample(NUMBERS, 2)
    fruits = rng.sample(FRUIT, 2)
    things = list(zip(kinds, colours, names, strict=True))
    counted = list(zip(numbers, fruits, strict=True))[: rng.randint(0, 2)]
    places = rng.sample(PLACES, 6)
    sentences = []
    for (kind, colour, thing), place in zip(things, places, strict=False):
        ways = [
            f"The {kind} {colour} {thing} was {place}.",
            f"{rng.choice(PEOPLE)} put the {kind} {colour} {thing} {place}.",
            f"{rng.choice(PEOPLE)} had the {kind} {colour} {thing}.",
        ]
        sentences.append(rng.choice(ways))
    for (number, fruit), place in zip(counted, places[4:], strict=False):
        ways = [
            f"There were {number} {fruit} {place}.",
            f"{rng.choice(PEOPLE)} had {number} {fruit}.",
        ]
        sentences.append(rng.choice(ways))
    rng.shuffle(sentences)
    return sentences, things, counted


def all_held_out(colours: list[str], things: list[str], held_out: bool) -> bool:
    """Whether all (colour, thing) pairs are held out; with held_out False, whether none is."""
    pairs = zip(colours, things, strict=True)
    return all(is_held_out(colour, thing) == held_out for colour, thing in pairs)


def is_held_out(colour: str, thing: str) -> bool:
    return (COLOURS.index(colour) + THINGS.index(thing)) % 3 == 0
