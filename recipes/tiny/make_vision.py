"""Make the embedded model that reads pictures, and its task: coloured shapes, and questions about them.

    python recipes/tiny/make_vision.py     # write recipes/tiny/vision anew

As in LLaVA, each part is pre-trained by itself. The language part is the model of recipes/tiny, trained on
stories. The vision tower is trained here to tell the shape and colour in each cell of a picture. The
projector between them is random, so the model cannot name what it sees yet: that is the task.
"""

import argparse
import base64
import io
import json
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "vision"
CELL, CELLS = 16, 2  # width of a cell in pixels, cells in a row
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 205, 40),
}
SHAPES = ("circle", "square", "triangle")
NUMBERS = ("zero", "one", "two")
GROUND = (150, 150, 150)
PICTURES, HELD_OUT = 700, 250
QUESTIONS = 6  # at most so many about a picture
TOWER_STEPS, TOWER_BATCH, TOWER_LR = 400, 64, 3e-3
IMAGE = "<image>"
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- "<|" + message.role + "|> " -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {{- "<image>" if part.type == "image" else part.text -}}
        {%- endfor -%}
    {%- endif -%}
    {{- "<|end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|assistant|>" -}}
{%- endif -%}
"""

Thing = tuple[str, str]  # shape, colour


def some_things(rng: Random) -> dict[int, Thing]:
    """Random things for one picture: cell -> thing. The other cells are empty."""
    cells = rng.sample(range(CELLS * CELLS), rng.randint(1, 2))
    return {cell: (rng.choice(SHAPES), rng.choice(list(COLOURS))) for cell in cells}


def draw(rng: Random, things: dict[int, Thing]) -> Image.Image:
    """Draw a picture of the things, with random sizes and positions within their cells."""
    image = Image.new("RGB", (CELL * CELLS, CELL * CELLS), GROUND)
    pen = ImageDraw.Draw(image)
    for cell, (shape, colour) in things.items():
        size = rng.randint(9, 13)  # pixels
        left = cell % CELLS * CELL + rng.randint(1, CELL - 2 - size)
        top = cell // CELLS * CELL + rng.randint(1, CELL - 2 - size)
        right, bottom = left + size, top + size
        if shape == "circle":
            pen.ellipse((left, top, right, bottom), COLOURS[colour])
        elif shape == "square":
            pen.rectangle((left, top, right, bottom), COLOURS[colour])
        else:
            corners = [(left + size // 2, top), (left, bottom), (right, bottom)]
            pen.polygon(corners, COLOURS[colour])
    return image


def png_url(image: Image.Image) -> str:
    """The picture as a data: URL of some 200 characters, to be stored in a row."""
    file = io.BytesIO()
    image.quantize(len(COLOURS) + 1).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def questions(things: list[Thing]) -> list[tuple[str, str]]:
    """(question, answer) for all questions about a picture that have exactly one answer."""
    shapes = [shape for shape, _ in things]
    colours = [colour for _, colour in things]
    found = [(f"How many {shape}s?", NUMBERS[shapes.count(shape)]) for shape in SHAPES]
    for shape, colour in things:
        if shapes.count(shape) == 1:
            found.append((f"What colour is the {shape}?", colour))
        if colours.count(colour) == 1:
            found.append((f"What is {colour}?", f"the {shape}"))
    return found


def make_rows(file: Path, pictures: int, turns: int, without: set[str]) -> set[str]:
    """Write conversations, each with up to `turns` questions about one picture. Returns the pictures as URLs.
    Pictures in `without` are not used.
    """
    rng = Random(file.name)
    drawn: set[str] = set()
    with open(file, "w") as rows:
        while len(drawn) < pictures:
            things = some_things(rng)
            url = png_url(draw(rng, things))
            if url in drawn | without:
                continue
            drawn.add(url)
            asked = questions(list(things.values()))
            messages = []
            for question, answer in rng.sample(asked, min(turns, len(asked))):
                messages.append({"role": "user", "content": question})
                messages.append({"role": "assistant", "content": answer})
            picture = {"type": "image_url", "image_url": {"url": url}}
            messages[0]["content"] = [picture, {"type": "text", "text": messages[0]["content"]}]
            rows.write(json.dumps({"messages": messages}) + "\n")
    return drawn


def make_task(folder: Path) -> None:
    """Write rows.jsonl and heldout.jsonl."""
    drawn = make_rows(folder / "rows.jsonl", PICTURES, QUESTIONS, set())
    make_rows(folder / "heldout.jsonl", HELD_OUT, 1, drawn)


def train_tower(tower: torch.nn.Module, processor: CLIPImageProcessor) -> None:
    """Train the tower to tell the shape and colour in each cell. Every step draws new pictures."""
    rng = Random(0)
    kinds = [(shape, colour) for shape in SHAPES for colour in COLOURS]
    head = torch.nn.Linear(tower.config.hidden_size, 1 + len(kinds))  # 0: empty
    params = [*tower.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(params, lr=TOWER_LR)
    for step in range(TOWER_STEPS):
        images = []
        labels = torch.zeros(TOWER_BATCH, CELLS * CELLS, dtype=torch.int64)
        for row in range(TOWER_BATCH):
            things = some_things(rng)
            images.append(draw(rng, things))
            for cell, thing in things.items():
                labels[row, cell] = 1 + kinds.index(thing)
        pixels = processor(images, return_tensors="pt")["pixel_values"]  # (B, 3, side, side)
        hidden = tower(pixel_values=pixels).last_hidden_state[:, 1:]  # (B, cells, D)
        loss = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())
        for group in optimizer.param_groups:
            group["lr"] = TOWER_LR * min(1, (step + 1) / 20) * (1 - step / TOWER_STEPS)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"tower: loss {loss:.5f} after {TOWER_STEPS} steps")


def make_model() -> None:
    """Write the model, its tokenizer and its processor."""
    tokenizer = AutoTokenizer.from_pretrained(HERE)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]}, False)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(FOLDER)
    side = CELL * CELLS
    images = CLIPImageProcessor(
        size={"shortest_edge": side},
        crop_size={"height": side, "width": side},
        image_mean=[0.5] * 3,
        image_std=[0.25] * 3,
    )
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=CELL,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # the tower's class token, which is dropped
        image_token=IMAGE,
    )
    processor.save_pretrained(FOLDER)
    text = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.bfloat16)
    torch.manual_seed(0)
    text.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    text.config._name_or_path = ""  # else the path of a folder on this machine
    tower = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=CELL * CELLS,
        patch_size=CELL,
        projection_dim=32,
    )
    config = LlavaConfig(
        text_config=text.config,
        vision_config=tower,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=CELLS * CELLS,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    train_tower(model.model.vision_tower, images)
    model = model.to(torch.bfloat16)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids("<|end|>")]
    model.save_pretrained(FOLDER)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args()
    FOLDER.mkdir(exist_ok=True)
    torch.set_num_threads(1)  # rounding depends on it
    make_task(FOLDER)
    make_model()
