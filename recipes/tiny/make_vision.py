"""Make the embedded model that reads pictures, and its task: coloured shapes, and questions about them.

    python recipes/tiny/make_vision.py     # write recipes/tiny/vision anew

The language part is recipes/tiny/model.safetensors, which has never seen a picture; vision tower and
projector are random. Everything is a function of the numbers here.
"""

import base64
import io
import json
from pathlib import Path
from random import Random

import torch
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
CELL, CELLS = 16, 3  # pixels of a cell, cells in a row
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 205, 40),
    "black": (20, 20, 20),
    "white": (255, 255, 255),
}
SHAPES = ("circle", "square", "triangle")
NUMBERS = ("zero", "one", "two", "three", "four")
GROUND = (150, 150, 150)
PICTURES, HELD_OUT = 900, 300
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


def draw(rng: Random, things: list[Thing]) -> bytes:
    """A PNG of things in cells of their own, of different sizes."""
    image = Image.new("RGB", (CELL * CELLS, CELL * CELLS), GROUND)
    pen = ImageDraw.Draw(image)
    cells = rng.sample(range(CELLS * CELLS), len(things))
    for cell, (shape, colour) in zip(cells, things, strict=True):
        size = rng.randint(9, 13)  # pixels
        left = cell % CELLS * CELL + rng.randint(1, CELL - 2 - size)
        top = cell // CELLS * CELL + rng.randint(1, CELL - 2 - size)
        box = (left, top, left + size, top + size)
        if shape == "circle":
            pen.ellipse(box, COLOURS[colour])
        elif shape == "square":
            pen.rectangle(box, COLOURS[colour])
        else:
            corners = [(left + size // 2, top), (left, top + size), (left + size, top + size)]
            pen.polygon(corners, COLOURS[colour])
    file = io.BytesIO()
    image.quantize(len(COLOURS) + 1).save(file, "PNG", optimize=True)
    return file.getvalue()


def questions(things: list[Thing]) -> list[tuple[str, str]]:
    """All questions about a picture that have one answer, with it."""
    shapes = [shape for shape, _ in things]
    colours = [colour for _, colour in things]
    found = [(f"How many {shape}s?", NUMBERS[shapes.count(shape)]) for shape in SHAPES]
    for shape, colour in things:
        if shapes.count(shape) == 1:
            found.append((f"What colour is the {shape}?", colour))
        if colours.count(colour) == 1:
            found.append((f"What is {colour}?", f"the {shape}"))
    return found


def make_rows(file: Path, pictures: int, turns: int, seed: int) -> None:
    """Write conversations about pictures, each with some questions about one."""
    rng = Random(seed)
    with open(file, "w") as rows:
        for _ in range(pictures):
            count = rng.randint(2, 4)
            things = [(rng.choice(SHAPES), rng.choice(list(COLOURS))) for _ in range(count)]
            url = "data:image/png;base64," + base64.b64encode(draw(rng, things)).decode()
            asked = questions(things)
            messages = []
            for question, answer in rng.sample(asked, min(turns, len(asked))):
                messages.append({"role": "user", "content": question})
                messages.append({"role": "assistant", "content": answer})
            picture = {"type": "image_url", "image_url": {"url": url}}
            messages[0]["content"] = [picture, {"type": "text", "text": messages[0]["content"]}]
            rows.write(json.dumps({"messages": messages}) + "\n")


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
        num_additional_image_tokens=1,  # the tower's class token, which is left out
        image_token=IMAGE,
    )
    processor.save_pretrained(FOLDER)
    text = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.bfloat16)
    torch.manual_seed(0)
    text.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tower = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=CELL * CELLS,
        patch_size=CELL,
        projection_dim=64,
        initializer_factor=1.0,
    )
    config = LlavaConfig(
        text_config=text.config,
        vision_config=tower,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=CELLS * CELLS,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config).to(torch.bfloat16)
    model.model.language_model.load_state_dict(text.model.state_dict())
    import torch as t

    sd = t.load("/tmp/h2/p/tower.pt")
    print(model.model.vision_tower.load_state_dict(sd))
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids("<|end|>")]
    model.save_pretrained(FOLDER)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    make_rows(FOLDER / "rows.jsonl", PICTURES, turns=4, seed=0)
    make_rows(FOLDER / "heldout.jsonl", HELD_OUT, turns=1, seed=1)
    make_model()
