"""Make the embedded model: a small world's stories, a tokenizer, a model pre-trained on them, and a task to fine-tune it on.

    python recipes/tiny/make.py             # rebuild everything beside this file, and compare with made.json
    python recipes/tiny/make.py --record    # write made.json anew, after changing something here

The stories never ask and answer. What the model learns from them is to look back: which thing was heavy, and of what colour? The task,
chat.jsonl, is to answer when asked; nothing that heldout.jsonl asks about occurs in chat.jsonl. Three files beside this one are written by
hand: config.json, tokenizer_config.json, chat_template.jinja.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

HERE = Path(__file__).resolve().parent
STEPS, BATCH, LR, LENGTH = 1600, 32, 1e-3, 80  # LENGTH: tokens; longer stories are cut
TRAIN_ROWS, HELD_OUT_ROWS, HELD_OUT_STORIES = 3000, 300, 512

PEOPLE = [
    "Adam",
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Ella",
    "Emil",
    "Frida",
    "Georg",
    "Hanna",
    "Ida",
    "Jonas",
    "Karl",
    "Lena",
    "Max",
    "Nora",
    "Oskar",
    "Paula",
    "Simon",
    "Tilda",
]
KINDS = [
    "old",
    "new",
    "small",
    "large",
    "heavy",
    "light",
    "wet",
    "dry",
    "warm",
    "cold",
    "clean",
    "dirty",
    "broken",
    "wooden",
    "round",
    "soft",
    "lost",
    "cheap",
]
COLOURS = [
    "red",
    "blue",
    "green",
    "yellow",
    "black",
    "white",
    "brown",
    "grey",
    "pink",
    "purple",
    "orange",
    "golden",
    "silver",
    "pale",
    "dark",
    "striped",
]
THINGS = [
    "hat",
    "cup",
    "ball",
    "book",
    "key",
    "lamp",
    "coat",
    "spoon",
    "ring",
    "doll",
    "kite",
    "drum",
    "scarf",
    "shoe",
    "plate",
    "coin",
    "pen",
    "bell",
    "flute",
    "map",
    "clock",
    "stone",
]
NUMBERS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
FRUIT = ["apples", "pears", "plums", "nuts", "eggs", "cakes", "figs", "beans"]
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


def facts(rng, held_out=None):
    count = rng.randint(2, 4)
    kinds, things, colours = rng.sample(KINDS, count), rng.sample(THINGS, count), rng.sample(COLOURS, count)
    if held_out is not None:
        while any(is_held_out(c, t) != held_out for c, t in zip(colours, things)):
            things, colours = rng.sample(THINGS, count), rng.sample(COLOURS, count)
    numbers, fruit = rng.sample(NUMBERS, 2), rng.sample(FRUIT, 2)
    objects = [(k, c, t) for k, c, t in zip(kinds, colours, things)]
    counted = list(zip(numbers, fruit))[: rng.randint(0, 2)]
    places = rng.sample(PLACES, 6)
    told = []
    for (k, c, t), place in zip(objects, places):
        told.append(
            rng.choice(
                [
                    f"The {k} {c} {t} was {place}.",
                    f"{rng.choice(PEOPLE)} put the {k} {c} {t} {place}.",
                    f"{rng.choice(PEOPLE)} had the {k} {c} {t}.",
                ]
            )
        )
    for (n, f), place in zip(counted, places[4:]):
        told.append(rng.choice([f"There were {n} {f} {place}.", f"{rng.choice(PEOPLE)} had {n} {f}."]))
    rng.shuffle(told)
    return told, objects, counted


def is_held_out(c, t):
    return (COLOURS.index(c) + THINGS.index(t)) % 3 == 0


def story(rng):
    if rng.random() < 0.3:
        line = " ".join(rng.sample(PEOPLE + KINDS + COLOURS + THINGS + FRUIT + NUMBERS, rng.randint(6, 16)))
        return f"{rng.choice(PEOPLE)} sang: " + " ".join([line + "."] * 3)
    told, objects, counted = facts(rng)
    later = []
    for k, c, t in objects:
        who, other = rng.sample(PEOPLE, 2)
        later += rng.sample(
            [
                f"{who} looked for the {k} {c} {t}.",
                f"{who} asked {other} about the {c} {t}.",
                f"{who} saw the {c} {t} again.",
                f"The {c} {t} was {k}.",
                f"{who} and {other} took the {k} {c} {t}.",
                f'"Which thing is {rng.choice([k, c])}?" asked {who}.',
                f'"What is {rng.choice([k, c])}?" asked {who}.',
            ],
            3,
        )
    for n, f in counted:
        who, other = rng.sample(PEOPLE, 2)
        later += rng.sample(
            [
                f"{who} gave the {n} {f} to {other}.",
                f"{who} counted {n} {f}.",
                f'"What are there {n} of?" asked {who}.',
            ],
            2,
        )
    rng.shuffle(later)
    return " ".join(told + later)


def ask(rng, held_out):
    told, objects, counted = facts(rng, held_out)
    qs = []
    for k, c, t in objects:
        qs += [(f"{w} is {k}?", f"the {k} {c} {t}") for w in ("What", "Which thing")]
        qs += [(f"{w} is {c}?", f"the {c} {t}") for w in ("What", "Which thing")]
    qs += [(f"What are there {n} of?", f"{n} {f}") for n, f in counted] * 2
    return told, rng.sample(qs, 2)
