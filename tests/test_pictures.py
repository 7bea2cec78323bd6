"""Rows with pictures -> ids. Alone: .venv/bin/python -m pytest tests/test_pictures.py"""

import base64
import io
import json
import os
import shutil
import struct
from collections import Counter

import datasets
import pytest
import torch
from generate import read_rows
from picture_families import MORE, NAMES, family_folder
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaNextProcessor

from utils.data import cache
from utils.data import examples as data
from utils.data.chats import Chat
from utils.data.encode import Rows
from utils.data.formats import IGNORED, form_of
from utils.data.held_out import split_by_hash
from utils.data.pictures import (
    decoded,
    described,
    file_of,
    fitted,
    load_processor,
    picture_texts,
    process,
    read_pictured,
    url_of,
    with_texts,
)
from utils.data.tokens import load_tokenizer, render
from utils.run.errors import ConfigError
from utils.run.units import IGNORE

SIZES = {"a.png": (60, 40), "b.png": (200, 100), "c.png": (30, 90)}
ANSWER = {"role": "assistant", "content": "A picture."}
PART = {"type": "image", "path": "a.png"}


def user(*parts) -> dict:
    return {
        "role": "user",
        "content": [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts],
    }


def png(size=(60, 40), color="red", **options) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, options.pop("format", "PNG"), **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """opened(family) -> (folder, tokenizer, processor)."""
    base = tmp_path_factory.mktemp("families")
    made = {}

    def open_family(name):
        if name not in made:
            folder = family_folder(name, base)
            tokenizer = load_tokenizer(folder)
            made[name] = folder, tokenizer, load_processor(str(folder), tokenizer)
        return made[name]

    return open_family


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """The working folder, with three pictures in it."""
    for name, size in SIZES.items():
        Image.effect_noise(size, 80).convert("RGB").save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(rows: list, folder, tokenizer, seq_len=4000, name="t.jsonl", **settings):
    with open(name, "w") as file:
        file.write("\n".join(map(json.dumps, rows)))
    return data.load_examples(Rows(name, seq_len, processor=str(folder), **settings), tokenizer)


def refusal(call, *args, **settings) -> str:
    with pytest.raises(ConfigError) as refused:
        call(*args, **settings)
    return str(refused.value)


def read(row: dict, form: str = "") -> tuple[list, list]:
    """([text of each message], sources); | where a picture stands."""
    messages, _, sources, _ = read_pictured(row, form or form_of(row), Counter())
    return [m["content"].replace("\ufdd2", "|") for m in messages], sources


@pytest.mark.parametrize("name", [*NAMES, *MORE])
def test_ids_are_those_that_the_processor_gives_for_text_and_pictures(name, opened, pictures):
    folder, tokenizer, processor = opened(name)
    turns = [
        user(PART, "What?"),
        ANSWER,
        user(
            "And ", {"type": "image", "path": "b.png"}, " or\n", {"type": "image", "path": "c.png"}
        ),
        ANSWER,
    ]
    rows = [
        {"messages": turns},
        {"messages": turns[:2]},
        {"messages": [user("No picture"), ANSWER]},
    ]
    examples = load(rows, folder, tokenizer)
    for i, (row, names) in enumerate(zip(rows, [SIZES, ["a.png"], []], strict=True)):
        messages = read_pictured(row, "chat", Counter())[0]
        images = [Image.open(picture) for picture in names]
        made = processor(
            text=[render(tokenizer, messages)],
            images=[images] if images else None,
            add_special_tokens=False,
            return_tensors="pt",
        )
        assert examples[i].ids.tolist() == made["input_ids"][0].tolist()
        answers = [id for id, label in zip(*examples[i][:2], strict=True) if label != IGNORE]
        assert tokenizer.decode(answers).count("A picture.") == len(row["messages"]) // 2
        assert processor.image_token not in tokenizer.decode(answers)
    assert (examples.row_sizes > 0).tolist() == [True, True, False]


@pytest.mark.parametrize("name", [*NAMES, "gemma4"])
def test_transformers_own_model_runs_on_what_the_processor_makes(name, opened):
    folder, tokenizer, processor = opened(name)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}]
    picture = Image.effect_noise((130, 90), 80).convert("RGB")
    text = render(tokenizer, messages, prompt=True)
    made = processor(text=[text], images=[[picture]], return_tensors="pt")
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(**made).logits
        blank = processor(
            text=[text], images=[[Image.new("RGB", picture.size)]], return_tensors="pt"
        )
        assert logits.isfinite().all()
        assert not logits[:, -1].allclose(model(**blank).logits[:, -1])


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "minicpmv4_6"])
def test_picture_tokens_are_never_trained_though_all_others_are(name, opened, pictures):
    folder, tokenizer, processor = opened(name)
    row = {"messages": [user(PART, "What?"), ANSWER]}
    example = load([row], folder, tokenizer, train_on="all")[0]
    untrained = tokenizer.decode(example.ids[example.labels == IGNORE])
    assert untrained == picture_texts(processor, (SIZES["a.png"],))[0][0]


def test_smolvlm_rooms_are_those_of_its_own_processor(opened):
    """The class itself cannot be made without num2words, which it needs for videos."""
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    _, _, processor = opened("smolvlm")
    words = (4, "<fake_token_around_image>", "<image>", "<global-img>")
    for size, rows, columns in (((60, 40), 2, 2), ((200, 100), 1, 2)):
        assert picture_texts(processor, (size,))[0] == [
            get_image_prompt_string(rows, columns, *words)
        ]


# --- forms


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "image_url", "image_url": "a.png"},
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "a.png"},
        {"type": "image", "url": "a.png"},
    ],
)
def test_openai_parts_hold_their_source_under_any_of_their_keys(part):
    row = {"messages": [user("See ", part, "?"), ANSWER]}
    assert read(row, "chat") == (["See |?", "A picture."], ["a.png"])


def test_parts_without_a_source_take_the_next_of_the_row():
    row = {"messages": [user({"type": "image"}, " and ", {"type": "image"}), ANSWER]}
    assert read(row | {"images": ["a.png", "b.png"]}, "chat") == (
        ["| and |", "A picture."],
        ["a.png", "b.png"],
    )


@pytest.mark.parametrize("key", ["image", "images"])
def test_llama_factory_and_llava_rows_write_image_in_their_texts(key):
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "It."}]
    row = {"conversations": turns, key: "a.png" if key == "image" else ["a.png"]}
    assert read(row, "sharegpt") == (["|\nWhat?", "It."], ["a.png"])


def test_rows_that_mark_no_place_show_their_pictures_before_the_first_text_of_the_user():
    texts = [{"user": "What?", "assistant": "It."}, {"user": "Sure?", "assistant": "Yes."}]
    assert read({"images": ["a.png", "b.png"], "texts": texts})[0][0] == "||What?"
    alpaca = {"instruction": "What?", "output": "It.", "image": "a.png"}
    assert read(alpaca, "alpaca") == (["|What?", "It."], ["a.png"])
    messages = [{"role": "system", "content": "Look."}, user("What?"), ANSWER]
    trl = {"messages": messages, "images": ["a.png", "b.png"]}
    assert read(trl, "chat")[0] == ["Look.", "||What?", "A picture."]
    trl = {"prompt": messages[:2], "completion": messages[2:], "images": ["a.png"]}
    assert read(trl, "completion")[0] == ["Look.", "|What?", "A picture."]


def test_keys_of_a_picture_that_are_not_read_are_named():
    """Qwen's own format: limits of one picture beside its source."""
    part = {"type": "image", "image": "a.png", "max_pixels": 50176, "resized_height": 280}
    notes = Counter()
    read_pictured({"messages": [user(part), ANSWER]}, "chat", notes)
    assert notes == {f"{IGNORED}'max_pixels'": 1, f"{IGNORED}'resized_height'": 1}


def test_rows_without_pictures_may_name_the_elements_of_html():
    text = "Is <video> an element? And <img>?"
    assert read({"messages": [user(text), ANSWER]}, "chat") == ([text, "A picture."], [])
    assert read({"text": "<image>"})[0] == ["<image>"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": [user("<image> <image>"), ANSWER], "images": ["a.png"]}, "1 pictures for 2"),
        ({"messages": [user("<image>"), ANSWER], "images": ["a.png"] * 2}, "2 pictures for 1"),
        ({"messages": [user({"type": "image"}), ANSWER]}, "0 pictures for 1"),
        ({"messages": [user("<image>What?"), ANSWER], "img": "a.png"}, "0 pictures for 1"),
        ({"messages": [user("<video>"), ANSWER], "images": ["a.png"]}, "<video>: videos are not"),
        (
            {"messages": [user("Hi"), ANSWER], "videos": ["a.mp4"]},
            "but no pairs, no videos",
        ),
        (
            {"messages": [user({"type": "input_audio"}), ANSWER]},
            "messages[0].content[0].type: 'input_",
        ),
        ({"messages": [user("Draw"), user(PART) | {"role": "assistant"}]}, "turn of the assistant"),
        ({"messages": [user(PART | {"path": 3}), ANSWER]}, "expected a path"),
        ({"text": "<image>", "image": "a.png"}, "need turns"),
        ({"texts": [], "images": ["a.png"]}, "its keys are 'texts'"),
    ],
)
def test_rows_that_cannot_be_read_say_why_at_their_place(row, why, opened, pictures):
    said = refusal(load, [row], *opened("llava")[:2])
    assert said.startswith("t.jsonl:1: ")
    assert why in said


def test_a_prompt_and_a_completion_with_a_picture_are_read_as_the_error_says(opened, pictures):
    rows = [{"input": "What?", "output": "It.", "image": "a.png"}]  # torchtune's vqa_dataset
    said = refusal(load, rows, *opened("llava")[:2], columns="prompt=input,completion=output")
    assert "(fix: --columns instruction=THEIRS,output=THEIRS)" in said
    assert len(load(rows, *opened("llava")[:2], columns="instruction=input,output=output")) == 1


def test_a_picture_with_a_text_alone_needs_a_prompt_as_the_error_says(opened, pictures):
    row = {"image": "a.png", "text": "x^2"}  # LaTeX_OCR
    said = refusal(load, [row], *opened("llava")[:2])
    assert "captions need prompts" in said
    row["instruction"] = "Write this formula in LaTeX."
    assert len(load([row], *opened("llava")[:2], columns="output=text")) == 1


# --- sources


def test_a_source_is_a_path_a_url_or_bytes(opened, pictures):
    content = base64.b64encode(png()).decode()
    sources = [
        "a.png",
        str(pictures / "a.png"),
        (pictures / "a.png").as_uri(),
        f"data:image/png;base64,{content}",
    ]
    rows = [{"messages": [user({"type": "image", "url": s}), ANSWER]} for s in sources]
    assert len(load(rows, *opened("llava")[:2])) == len(sources)


def test_parquet_holds_bytes(opened, pictures):
    import pyarrow
    import pyarrow.parquet

    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "It."}]
    for name, value in (
        ("dict.parquet", {"bytes": png(), "path": "x.png"}),
        ("bytes.parquet", png()),
    ):
        table = pyarrow.Table.from_pylist([{"messages": turns, "images": [value]}])
        pyarrow.parquet.write_table(table, name)
        folder, tokenizer, _ = opened("llava")
        examples = data.load_examples(Rows(name, 500, processor=str(folder)), tokenizer)
        assert len(examples) == 1
        assert examples.row_sizes.tolist() == [16]


def test_paths_are_relative_to_the_data_file_or_to_image_dir(opened, pictures):
    (pictures / "deep").mkdir()
    (pictures / "deep" / "d.png").write_bytes(png())
    row = {"messages": [user(PART | {"path": "d.png"}), ANSWER]}
    family = opened("llava")[:2]
    assert "t.jsonl:1: picture 'd.png': no such file" in refusal(load, [row], *family)
    assert len(load([row], *family, image_dir="deep"))
    assert len(load([row], *family, name="deep/t.jsonl"))


@pytest.mark.parametrize(
    "source", ["../out.png", "/etc/hostname", "link.png", "folder/out.png", "file:///etc/hostname"]
)
def test_no_path_leads_out_of_the_folder(source, opened, pictures, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "out.png"
    outside.write_bytes(png())
    (pictures / "link.png").symlink_to(outside)
    (pictures / "folder").symlink_to(outside.parent)
    row = {"messages": [user(PART | {"path": source}), ANSWER]}
    said = refusal(load, [row], *opened("llava")[:2])
    assert "leads out of" in said
    if source in ("link.png", "folder/out.png"):
        assert f"to {outside}; symbolic links must not do so either (fix: --image_dir" in said
        row = {"messages": [user(PART | {"path": "out.png"}), ANSWER]}
        assert load([row], *opened("llava")[:2], image_dir="folder")


@pytest.mark.parametrize("source", ["http://x/a.png", "https://x/a.png", "s3://x/a.png", "gs://a"])
def test_addresses_are_refused_by_name(source):
    with pytest.raises(ValueError, match=f"{source.split(':')[0]}: is not fetched.*download"):
        file_of(source, ".")


# --- files


THUMBNAIL = Image.Exif()  # in place of a thumbnail, the two bytes that end one
THUMBNAIL[0x927C] = b"\xff\xd9"


def header(width: int, height: int) -> bytes:
    """A PNG that says it has that size, and has no pixels."""
    import zlib

    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return head + struct.pack(">I", 10) + b"IDAT"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cannot identify"),
        (b"no picture", "cannot identify"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot identify"),
        (png()[:20], "cannot identify|Truncated|truncated"),
        (png()[:-30], "broken|truncated|Truncated|EOF|incomplete"),
        (png(format="JPEG")[:-9], "truncated"),
        (png(format="JPEG", exif=THUMBNAIL)[:-9], "truncated"),
        (png(format="GIF")[:-9], "truncated"),
        (png(format="BMP")[:-9], "truncated"),
        (header(20000, 20000), "DecompressionBomb"),
        (header(12000, 12000), "DecompressionBomb"),
    ],
)
def test_what_is_no_whole_picture_is_named_with_its_row(content, why, opened, pictures):
    (pictures / "bad.png").write_bytes(content)
    rows = [
        {"messages": [user(PART), ANSWER]},
        {"messages": [user(PART | {"path": "bad.png"}), ANSWER]},
    ]
    import re

    said = refusal(load, rows, *opened("llava")[:2])
    assert said.startswith("t.jsonl:2: picture 'bad.png': ")
    assert re.search(why, said)
    assert "; fix: remove these rows" in said
    assert "\n" not in said


def test_bytes_behind_a_jpeg_are_no_fault(tmp_path):
    for behind in (b"a film", b"a longer film" * 2**16):
        (tmp_path / "a.jpg").write_bytes(png(format="JPEG") + behind)
        made = described("a.jpg", str(tmp_path), 0)
        assert made == ["a.jpg", 60, 40, (tmp_path / "a.jpg").stat().st_size]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_exif_turns_a_picture_before_its_size_counts(kind, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "t").write_bytes(png((60, 40), format=kind, exif=exif))
    made = described("t", tmp_path, 0)
    assert made[1:3] == [40, 60]
    assert decoded(made, tmp_path, 0).size == (40, 60)


def save(image: Image.Image, path) -> None:
    image.save(path, {"CMYK": "TIFF", "I;16": "PNG"}.get(image.mode, "PNG"))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_every_mode_becomes_rgb_of_the_same_shade(mode, tmp_path):
    image = Image.new("L", (8, 6), 128)
    image = Image.new(mode, (8, 6), 128 * 256) if mode == "I;16" else image.convert(mode, dither=0)
    save(image, tmp_path / "t")
    made = decoded(described("t", tmp_path, 0), tmp_path, 0)
    assert made.mode == "RGB"
    shade = 255 if mode == "1" else 128
    assert all(abs(value - shade) <= 1 for value in made.getpixel((3, 3)))


@pytest.mark.parametrize("mode", ["LA", "RGBA", "P"])
def test_behind_a_picture_is_white(mode, tmp_path):
    """As in vLLM. Charts and formulas are black on nothing: on black they could not be seen."""
    image = Image.new("RGBA", (8, 6), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 4, 6))
    if mode == "P":
        image.quantize(2).save(tmp_path / "t", "PNG")
    else:
        image.convert(mode).save(tmp_path / "t", "PNG")
    made = decoded(described("t", tmp_path, 0), tmp_path, 0)
    assert [made.getpixel((x, 3)) for x in (1, 6)] == [(0, 0, 0), (255, 255, 255)]


def test_pictures_of_datasets_come_as_the_bytes_of_their_files(tmp_path):
    (tmp_path / "a.jpg").write_bytes(png(format="JPEG"))
    pictures = [
        {"path": str(tmp_path / "a.jpg"), "bytes": None},  # as in a data set of a folder
        {"path": None, "bytes": png(format="TIFF")},
    ]
    features = {"images": datasets.List(datasets.Image()), "image": datasets.Image()}
    rows = {"images": [[picture] * 2 for picture in pictures], "image": pictures}
    made = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    made.save_to_disk(tmp_path / "saved")
    for row, kind in zip(read_rows(tmp_path / "saved"), ("JPEG", "TIFF"), strict=True):
        source = url_of(row.data["image"])
        assert source == f"data:;base64,{base64.b64encode(png(format=kind)).decode()}"
        assert [url_of(one) for one in row.data["images"]] == [source] * 2


def test_a_picture_that_breaks_off_is_an_error_when_it_is_decoded(tmp_path):
    (tmp_path / "t").write_bytes(png(format="JPEG"))
    made = described("t", tmp_path, 0)
    (tmp_path / "t").write_bytes(png(format="JPEG")[:-9])  # since then
    with pytest.raises(ValueError, match="picture 't'.*truncated"):
        decoded(made, tmp_path, 0)


# --- lengths


def test_image_max_pixels_makes_pictures_smaller_and_keeps_their_shape(opened, pictures):
    assert fitted((400, 100), 10_000) == (200, 50)
    assert fitted((40, 10), 10_000) == (40, 10)
    row = {"messages": [user(PART | {"path": "b.png"}), ANSWER]}
    family = opened("qwen2_5_vl")[:2]
    large, small = (load([row], *family, image_max_pixels=n) for n in (0, 70 * 70))
    assert len(small[0].ids) < len(large[0].ids)
    assert small.row_sizes < large.row_sizes


def test_a_long_row_is_cut_only_behind_its_pictures(opened, pictures):
    family = opened("qwen2_5_vl")[:2]
    long = {"messages": [user(PART, "What?"), ANSWER | {"content": "word " * 100}]}
    pictured = {"messages": [user("x" * 200, PART), ANSWER]}
    examples = load([long, pictured], *family, seq_len=100)
    assert [len(example.ids) for example in examples] == [100]
    assert [reason[:13] for reason in examples.dropped] == ["with pictures"]
    assert examples.row_sizes.tolist() == [48]
    dropped = load(
        [long, {"messages": [user(PART), ANSWER]}], *family, seq_len=100, too_long="drop"
    )
    assert dropped.dropped == {"longer than --seq_len": 1}
    assert "t.jsonl:1: " in refusal(load, [long], *family, seq_len=100, too_long="error")


def test_rows_with_other_pictures_and_the_same_words_are_other_rows(opened, pictures):
    rows = [{"messages": [user(PART | {"path": p}), ANSWER]} for p in ("a.png", "a2.png", "a.png")]
    (pictures / "a2.png").write_bytes(png(SIZES["a.png"], "blue"))
    examples = load(rows, *opened("llava")[:2])
    keys = examples.keys.tolist()
    assert keys[0] == keys[2] != keys[1]
    assert (
        load(rows[:2], *opened("llava")[:2]).fingerprint
        != load(rows[::2], *opened("llava")[:2]).fingerprint
    )


def test_spans_move_with_the_room_of_pictures_and_leave_it_out():
    chat = Chat("a#b#c", [(0, 5, False), (4, 5, True)])
    moved, end = with_texts(chat, "#", ["12", "345"])
    assert moved.text == "a12b345c"
    assert [moved.text[a:b] for a, b, _ in moved.spans] == ["a", "b", "c", "c"]
    assert end == 7


def test_a_folder_names_its_processor_as_that_of_pixtral_12b_does(opened, tmp_path):
    """Pixtral 12B is a llava. A LlavaProcessor would give each picture another number of tokens."""
    folder, _, _ = opened("llava")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "processor_config.json"
    file.write_text(file.read_text().replace("LlavaProcessor", "LlavaNextProcessor"))
    theirs = AutoProcessor.from_pretrained(tmp_path)
    ours = load_processor(str(tmp_path), load_tokenizer(tmp_path))
    assert isinstance(ours, LlavaNextProcessor)
    assert isinstance(ours, type(theirs))


def test_a_processor_that_only_the_folder_names_is_found_as_that_of_glm_ocr(opened, tmp_path):
    """transformers lists none for its model type; AutoProcessor finds it by the same name."""
    folder, _, _ = opened("qwen2_5_vl")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text('{"model_type": "glm_ocr"}')
    ours = load_processor(str(tmp_path), load_tokenizer(tmp_path))
    assert type(ours).__mro__[1].__name__ == "Qwen2_5_VLProcessor"


@pytest.mark.parametrize("template", ["", "{{ bos_token }}"])
def test_a_chat_begins_with_the_bos_token_that_auto_processor_adds(
    template, opened, pictures, tmp_path
):
    """The template of LLaVA 1.5 and 1.6 writes none, and their tokenizer adds one."""
    folder, tokenizer, _ = opened("llava")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    words = json.loads((folder / "tokenizer.json").read_text())
    parts = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    bos = {"id": "<s>", "ids": [tokenizer.bos_token_id], "tokens": ["<s>"]}
    words["post_processor"] = {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": parts,
        "special_tokens": {"<s>": bos},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    file = tmp_path / "chat_template.jinja"
    file.write_text(template + file.read_text())
    theirs = AutoProcessor.from_pretrained(tmp_path)
    question = user({"type": "image", "image": Image.open("a.png")}, "What?")
    answer = user("A picture.") | {"role": "assistant"}
    made = theirs.apply_chat_template([question, answer], tokenize=True, return_dict=True)
    ours = load([{"messages": [user(PART, "What?"), ANSWER]}], tmp_path, load_tokenizer(tmp_path))
    assert ours[0].ids.tolist() == list(made["input_ids"][0])
    assert ours[0].ids.tolist().count(tokenizer.bos_token_id) == 1


def test_a_processor_that_gives_other_tokens_is_named(opened, pictures, tmp_path):
    """A tokenizer of another folder than the processor's, by mistake."""
    folder, tokenizer, _ = opened("internvl")
    words = json.loads((folder / "tokenizer.json").read_text())
    words["normalizer"] = {"type": "Lowercase"}
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    other = load_tokenizer(tmp_path)
    row = {"messages": [user(PART, "What?"), ANSWER]}
    load_processor(str(tmp_path), other).tokenizer = tokenizer
    assert "the model's processor gives" in refusal(load, [row], tmp_path, other)


def test_a_chat_template_that_leaves_out_a_picture_is_refused(opened, pictures):
    folder, _, _ = opened("llava_onevision")
    row = {"messages": [user(PART, "What?"), ANSWER]}
    tokenizer = load_tokenizer(folder, "alpaca")
    assert "writes 0 of 1 pictures" in refusal(load, [row], folder, tokenizer)


def test_a_model_without_pictures_is_refused(tmp_path):
    from test_tokens import byte_level

    byte_level(True).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    said = refusal(load_processor, str(tmp_path), load_tokenizer(tmp_path))
    assert "its processor cannot be read" in said


@pytest.mark.parametrize("kind", ["paligemma", "florence2"])
def test_a_model_whose_answers_see_later_tokens_is_refused(kind, tmp_path):
    """The config of a hub's folder does not say so: transformers does, when it reads it."""
    from test_tokens import byte_level

    byte_level(True).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    said = refusal(load_processor, str(tmp_path), load_tokenizer(tmp_path))
    assert f"in {kind} all tokens of a prompt see each other" in said


def test_process_gives_sizes_alone_the_rooms_of_real_pictures(opened):
    for name in NAMES:
        _, _, processor = opened(name)
        images = [Image.effect_noise(size, 80).convert("RGB") for size in SIZES.values()]
        blanks = [Image.new("RGB", size) for size in SIZES.values()]
        ids = [process(processor, [each])["input_ids"] for each in (images, blanks)]
        assert torch.equal(*ids)


@pytest.mark.slow
def test_large_data_is_tokenized_by_other_processes_to_the_same_rows(opened, pictures, monkeypatch):
    folder, tokenizer, _ = opened("gemma3")
    rows = [{"messages": [user(PART, f"What {i}?"), ANSWER]} for i in range(100)]
    plain = load(rows, folder, tokenizer)
    monkeypatch.setattr(data, "SMALL", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(pictures / "cache"))
    for _ in range(2):  # made, then mapped
        kept = load(rows, folder, tokenizer)
        assert kept.fingerprint == plain.fingerprint
        assert kept.keys.tolist() == plain.keys.tolist()


def test_tokens_on_disk_are_made_again_if_pictures_have_changed(opened, pictures, monkeypatch):
    """Otherwise a picture that is gone, or is another one, would stop the training."""
    folder, tokenizer, _ = opened("gemma3")
    monkeypatch.setattr(data, "SMALL", 0)
    monkeypatch.setattr(cache, "in_processes", map)  # the test above has the processes
    monkeypatch.setenv("XDG_CACHE_HOME", str(pictures / "cache"))
    rows = [{"messages": [user(PART, "What?"), ANSWER]}]
    first = load(rows, folder, tokenizer)
    (kept,) = (path for path in pictures.glob("cache/raw_fsdp/data/*") if path.is_dir())
    before = kept.stat().st_ino
    assert load(rows, folder, tokenizer).fingerprint == first.fingerprint
    assert kept.stat().st_ino == before
    Image.new("RGB", (30, 90)).save("a.png")
    second = load(rows, folder, tokenizer)
    made = [["a.png", 30, 90, os.path.getsize("a.png")]]
    assert json.loads(second.details[0]) == made != json.loads(first.details[0])
    assert kept.stat().st_ino != before
    Image.effect_noise((30, 90), 80).save("a.png")
    third = load(rows, folder, tokenizer)
    assert third.fingerprint != second.fingerprint
    assert third.ids.tolist() == second.ids.tolist()
    os.remove("a.png")
    assert "t.jsonl:1: picture 'a.png': no such file" in refusal(load, rows, folder, tokenizer)
    assert "no such file" in refusal(load, rows, folder, tokenizer)
    rows = [*rows, {"messages": [user({"type": "image", "path": "b.png"}, "What?"), ANSWER]}]
    left_out = load(rows, folder, tokenizer, bad_rows="drop").dropped
    assert [*left_out.values()] == [1]
    assert "bad rows (the first: t.jsonl:1: picture 'a.png': no such file" in next(iter(left_out))


def test_rows_that_differ_in_pictures_alone_are_held_out_by_their_share(opened, pictures):
    """The hash of a row decides, and in it all bits of that of its pictures."""
    folder, tokenizer, _ = opened("gemma3")
    rows = []
    for i in range(200):
        Image.new("RGB", (30 + i % 20, 40 + i // 20)).save(f"{i}.png")
        part = {"type": "image", "path": f"{i}.png"}
        rows.append({"messages": [user(part, "What?"), ANSWER]})
    kept = load(rows, folder, tokenizer)
    assert 60 < (kept.keys < 0).sum() < 140
    _, held_out = split_by_hash(kept, 0.25)
    assert 25 < len(held_out) < 75


def test_code_of_a_processor_is_not_run_and_not_asked_for(opened, tmp_path, monkeypatch):
    folder, tokenizer, _ = opened("gemma3")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for file in copy.glob("*processor_config.json"):
        settings = json.loads(file.read_text())
        for part in (settings, settings.get("image_processor", {})):
            part["image_processor_type"] = "Own"
            part["auto_map"] = {"AutoImageProcessor": "own.Own"}
        file.write_text(json.dumps(settings))
    (copy / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    with pytest.raises(ConfigError, match="its processor cannot be read"):
        load_processor(str(copy), tokenizer)
    assert not (tmp_path / "ran").exists()
