"""Rows with pictures -> ids. Each picture becomes the tokens that the model's own processor gives it.

{"messages": [{"role": "user", "content": [PART, ...]}, ...]}      PART: {"type": "text", "text": ...},
    {"type": "image_url", "image_url": {"url": SOURCE}}, {"type": "image", "image" or "path" or "url": SOURCE}
{"messages": [... {"type": "image"} ...], "images": [SOURCE, ...]}  parts without a source take the next one
{"messages" or "conversations": [... "<image>" ...], "images": [SOURCE, ...] or "image": SOURCE}
{"instruction": "...", "output": "...", "images": [...]}            Alpaca
{"texts": [{"user": "...", "assistant": "..."}], "images": [...]}   the_cauldron

If nothing marks their places, the pictures come before the first text of the user, as in TRL.
SOURCE is a path, a file: or data: URL, bytes, or {"bytes": ..., "path": ...}. Paths are relative to the data
file, or to --image_dir, and must not lead out of that folder. The loss mask follows the rule of chats.py; the
tokens of a picture are neither trained nor cut.
"""

import base64
import io
import json
import math
import os
import re
import warnings
from collections import Counter
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

from PIL import Image, ImageOps

from ..run.errors import check, others_code, reason_of_others
from ..run.units import seed_of
from .chats import Chat, encode_chat, render_chats
from .documents import encode_plain
from .formats import IGNORED, REMEDY, keys_of, to_messages, typed
from .prompts import Prompt, prompt_of, turns_of
from .tokens import ANSWERED, HIDDEN, PLACE, adds_bos, encode, in_parts, render

TAG = "<image>"
PICTURE_TYPES = ("image", "image_url")  # types of a part that is a picture
SOURCES = "image_url image path url".split()  # keys of a part that may hold the source
NO_ROOM = (
    "with pictures of more tokens than --seq_len (fix: --image_max_pixels, or raise --seq_len)"
)
# Formats that Pillow reads by itself. For EPS it would run Ghostscript.
FORMATS = "JPEG PNG GIF WEBP BMP TIFF PPM TGA ICO JPEG2000".split()
# EXIF tag, and its values that swap width and height
ORIENTATION = 0x0112
TURNED = range(5, 9)
PATCH_PIXELS = 3 * 14 * 14
Size = tuple[int, int]  # width, height


# --- the processor


class NoVideos(dict):
    """A stand-in for the video processor, which needs torchvision."""

    slice_mode = downsample_mode = None


@lru_cache(maxsize=4)
def load_processor(folder: Path | str, tokenizer):
    """The processor of a model folder, for pictures only. Without videos it needs neither torchvision nor
    num2words. The tokenizer gets the processor's chat template, unless --chat_template was given, and any
    template writes the BOS token if the tokenizer adds one.

    ConfigError if the folder has no processor, or one that transformers cannot read, and for a model that
    does not predict each token of a conversation from those before it.
    """
    # Imported here because they import torch; this class by its file, since transformers 5.17 else demands
    # torchvision.
    import transformers
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    with others_code(
        f"{folder}: its processor cannot be read",
        "pip install what is named as missing, or another --model, which takes pictures",
    ):
        config = transformers.AutoConfig.from_pretrained(folder)
        check(
            not config.is_encoder_decoder and config.model_type != "paligemma",
            f"{folder}: in {config.model_type} all tokens of a prompt see each other: this is not trained"
            " (fix: a causal language model with pictures, such as qwen3_vl or gemma3)",
        )
        images = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
        settings, _ = transformers.ProcessorMixin.get_processor_dict(folder)
        # Pixtral 12B is a llava with a PixtralProcessor. Of GLM-OCR only the folder names one.
        name = settings.get("processor_class", "")
        kind = getattr(transformers, name, None) or transformers.PROCESSOR_MAPPING[type(config)]
        if kind.__name__ == "SmolVLMProcessor":
            kind = transformers.Idefics3Processor  # the same for pictures

        class Processor(kind):
            compared = False  # see compare_once

            def check_argument_for_proper_class(self, name, value):
                if name in parts:  # NoVideos is of no class that it knows
                    super().check_argument_for_proper_class(name, value)

            def _has_wrappers(*_):
                # HunYuan-VL's processor wants tokens around each placeholder, and `process` writes none.
                return True

        parts = {"tokenizer": tokenizer, "image_processor": images}
        processor = Processor.from_args_and_dict(
            [parts.get(name, NoVideos()) for name in kind.get_attributes()], settings
        )
        template = settings.get("chat_template")
        if template and tokenizer.template_name in (f"of {folder}", ""):
            tokenizer.chat_template = template
            tokenizer.template_name = f"of {folder}"
        if adds_bos(tokenizer) and not render(tokenizer, ANSWERED).startswith(tokenizer.bos_token):
            # AutoProcessor puts it before such a chat (LLaVA's), which others encode as it is.
            tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    return processor


def process(processor, rows: list) -> dict:
    """The processor's output, name -> tensor, for the RGB pictures of some rows. In input_ids (B, t) an
    end-of-text token stands before and after each picture. ValueError if the processor refuses a picture.
    """
    mark = processor.tokenizer.eos_token
    texts = [mark + (processor.image_token + mark) * len(pictures) for pictures in rows]
    try:
        output = dict(
            processor(text=texts, images=rows, padding=len(rows) > 1, return_tensors="pt")
        )
    except Exception as error:  # unusual sizes may raise anything
        raise ValueError(
            f"the model's processor: {reason_of_others(error)},"
            f" for pictures of {[image.size for pictures in rows for image in pictures]} ({REMEDY})"
        ) from None
    del output["attention_mask"]
    output.pop("cross_attention_mask", None)  # it depends on the text: see picture_batches.py
    return output


@lru_cache(maxsize=2**14)
def picture_texts(processor, sizes: tuple) -> tuple:
    """(texts, patches) for the pictures of a row. texts: what replaces the placeholder of each picture, as
    text. patches: their cost in the vision tower, in patches of 14 x 14 pixels. Both depend only on the sizes
    of the pictures.
    """
    output = process(processor, [[Image.new("RGB", size) for size in sizes]])
    tokenizer = processor.tokenizer
    ids = output["input_ids"][0].tolist()
    ends = [i for i, token in enumerate(ids) if token == tokenizer.eos_token_id]
    texts = [
        tokenizer.decode(ids[before + 1 : behind], clean_up_tokenization_spaces=False)
        for before, behind in pairwise(ends[: len(sizes) + 1])
    ]
    return texts, max(1, output["pixel_values"].numel() // PATCH_PIXELS)


# --- rows -> tokens


def add_pictured(part, tokenizer, row: dict, where: str, rows, form: str, notes: Counter) -> str:
    """Add a row with or without pictures to `part`, and return its form. part: an encode.Part; rows: an
    encode.Rows. ValueError names what is wrong with the row.
    """
    messages, tools, sources, form = read_pictured(row, form, notes)
    if messages[0]["role"] in ("text", "tokens"):
        part.add_row(*encode_plain(tokenizer, messages, notes), where, rows, form)
        keep_pictures(part, [], 0)
        return form
    processor = load_processor(rows.processor, tokenizer)
    pictures = sized(sources, where, rows)
    chats = render_chats(tokenizer, messages, tools, rows.train_on, notes)
    check_places(processor, chats[-1].text, pictures)
    for chat in chats:
        # It may end before the last picture.
        shown = pictures[: chat.text.count(processor.image_token)]
        filled, end, patches = with_pictures(processor, tokenizer, chat, shown)
        ids, mask = encode_chat(tokenizer, filled)
        cuts = rows.too_long == "truncate"
        if cuts and len(ids) > rows.seq_len < len(encode(tokenizer, filled.text[:end]).ids):
            part.dropped[NO_ROOM] += 1
        else:
            part.add_row(ids, mask, where, rows, form)
            keep_pictures(part, shown, patches)
    return form


def sized(sources: list[str], where: str, rows) -> list[list]:
    """[[source, width, height, bytes], ...] of the pictures of a row; see `described`."""
    return [described(source, folder_of(where, rows), rows.image_max_pixels) for source in sources]


def keep_pictures(part, pictures: list, patches: int) -> None:
    """Record the pictures of the sequences that add_row has just added; there may be none."""
    while len(part.row_sizes) < len(part.lengths):
        text = json.dumps(pictures)
        part.details.append(text)
        part.row_sizes.append(patches)
        if pictures:  # rows with equal text but other pictures are no duplicates
            part.keys[-1] ^= seed_of(text) * 2 - 2**63  # in all 64 bits


def check_places(processor, text: str, pictures: list) -> None:
    """Raise ValueError unless the chat template wrote one placeholder per picture."""
    written = text.count(processor.image_token)
    if written != len(pictures):
        raise ValueError(
            f"the chat template writes {written} of {len(pictures)} pictures (fix: another --chat_template)"
        )


def with_pictures(processor, tokenizer, chat: Chat, pictures: list) -> tuple:
    """(chat, end, patches): the chat with each placeholder replaced by the tokens of its picture, as text;
    the character where the last picture ends; the number of patches. pictures: from `sized`.
    """
    if not pictures:
        return chat, 0, 0
    sizes = tuple(tuple(size) for _, *size, _ in pictures)
    texts, patches = picture_texts(processor, sizes)
    filled, end = with_texts(chat, processor.image_token, texts)
    compare_once(processor, tokenizer, chat.text, filled.text, sizes)
    return filled, end, patches


def with_texts(chat: Chat, place: str, texts: list[str]) -> tuple:
    """(the chat with each placeholder `place` replaced by a text, the character where the last one ends). The
    replacements are not trained.
    """
    places = re.compile(re.escape(place))
    starts = [match.start() for match in places.finditer(chat.text)]

    def filled_up_to(end):
        """The text before character `end`, with its placeholders replaced."""
        replacements = iter(texts)
        return places.sub(lambda _: next(replacements), chat.text[:end])

    spans = []
    for begin, end, exact in chat.spans:
        for start in starts:
            if begin <= start < end:
                spans.append((begin, start, exact))
                begin = start + len(place)
                exact = False
        spans.append((begin, end, exact))
    spans = [
        (len(filled_up_to(begin)), len(filled_up_to(end)), exact) for begin, end, exact in spans
    ]
    end = len(filled_up_to(starts[-1] + len(place)))
    return chat._replace(text=filled_up_to(len(chat.text)), spans=spans), end


def compare_once(processor, tokenizer, text: str, filled: str, sizes: tuple) -> None:
    """Check once per process that our ids are those of the processor. filled: `text` with its placeholders
    replaced; the processor gets `text` and blank pictures of these sizes. ValueError if the ids differ.
    """
    if processor.compared or HIDDEN.search(text):
        return
    processor.compared = True
    blanks = [Image.new("RGB", size) for size in sizes]
    output = processor(text=[text], images=[blanks], add_special_tokens=False, return_tensors="pt")
    ours = encode(tokenizer, filled).ids
    theirs = output["input_ids"][0].tolist()
    if theirs != ours:
        raise ValueError(
            f"the model's processor gives {len(theirs)} tokens, and its tokenizer {len(ours)} others"
            " (fix: both from one folder, else another --model: such a processor writes other texts)"
        )


# --- prompts


def picture_prompt(row, rows) -> Prompt:
    """The prompt of a row: its `data`, and `where` it is. rows: an encode.Rows, with the folder of the
    pictures and their maximum size. ValueError: what is wrong.
    """
    data = row.data
    if data.get("texts"):
        data = data | alpaca_of([{"assistant": "to come"} | turn for turn in data["texts"]])
    messages, tools, _, sources, _ = turns_of(data, read_pictured)
    return Prompt(row.where, list(map(in_parts, messages)), tools, sized(sources, row.where, rows))


def picture_prompt_ids(processor, tokenizer, prompt: Prompt) -> list[int]:
    """The ids of the generation prompt, with the tokens of each picture. ValueError names what is wrong."""
    text = prompt_of(tokenizer, prompt.messages, prompt.tools)
    check_places(processor, text, prompt.pictures)
    filled, _, _ = with_pictures(processor, tokenizer, Chat(text, []), prompt.pictures)
    return encode(tokenizer, filled.text).ids


# --- rows -> messages and sources


def read_pictured(row: dict, form: str, notes: Counter) -> tuple:
    """(messages, tools, sources, form). In the contents of messages, PLACE stands for a picture; sources are
    the sources of the pictures as texts, in order. If nothing in the row marks their places, they come before
    the first user turn, as in TRL. The keys of pictures are taken out of `row`.
    """
    listed = []  # sources in columns of the row
    for key in ("image", "images"):
        value = row.pop(key, None)
        if value is not None:
            listed += value if isinstance(value, list) else [value]
    if not form and row.get("texts"):
        row |= alpaca_of(row.pop("texts"))
        form = "alpaca"
    sources = []  # one per part; None: the next one of `listed`
    for key in "messages conversations prompt completion".split():
        if isinstance(row.get(key), list):
            row[key] = [without_parts(turn, sources, notes) for turn in row[key]]
    messages, tools = to_messages(row, form, notes)
    if messages[0]["role"] in ("text", "tokens"):
        if listed:
            raise ValueError(
                "pictures need turns (fix: --columns instruction=THEIRS,output=THEIRS); captions need prompts"
            )
        return messages, tools, [], form
    if not sources:  # the texts mark pictures with <image>, or not at all
        if listed and not any(TAG in m["content"] for m in messages):
            first = next(message for message in messages if message["role"] == "user")
            first["content"] = TAG * len(listed) + first["content"]
        for message in messages:
            if listed and "<video>" in message["content"]:
                raise ValueError(f"<video>: videos are not trained ({REMEDY})")
            sources += [None] * message["content"].count(TAG)
            message["content"] = message["content"].replace(TAG, PLACE)
    if sources.count(None) != len(listed):
        raise ValueError(
            f"{len(listed)} pictures for {sources.count(None)} places in the texts"
            ' (fix: one <image>, or one {"type": "image"}, for each of "images"; < image> is no place)'
        )
    if any(m["role"] == "assistant" and PLACE in m["content"] for m in messages):
        raise ValueError("a picture in a turn of the assistant, which writes none")
    return messages, tools, [url_of(source or listed.pop(0)) for source in sources], form


def alpaca_of(texts: list) -> dict:
    """Convert the "texts" of a row of the_cauldron to an alpaca row. ValueError names the wrong turn."""
    pairs = [
        [typed(turn, key, str, f"texts[{i}].") for key in ("user", "assistant")]
        for i, turn in enumerate(texts)
    ]
    *history, (question, answer) = pairs
    return {"instruction": question, "output": answer, "history": history}


def without_parts(turn: object, sources: list, notes: Counter) -> object:
    """The turn with PLACE instead of each part that is a picture. Appends the pictures' sources to `sources`;
    None for a part without a source. notes: counts keys that are ignored, such as Qwen's max_pixels.
    """
    key = keys_of(turn)[1] if isinstance(turn, dict) else ""
    if not key or not isinstance(turn.get(key), list):
        return turn
    parts = []
    for part in turn[key]:
        if isinstance(part, dict) and part.get("type") in PICTURE_TYPES:
            sources.append(next(filter(None, map(part.get, SOURCES)), None))
            notes.update(f"{IGNORED}{name[:40]!r}" for name in part.keys() - {"type", *SOURCES})
            part = {"type": "text", "text": PLACE}
        parts.append(part)
    return turn | {key: parts}


# --- sources -> pictures


def url_of(source: object) -> str:
    """The source of a picture as text. Bytes become a data: URL."""
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path") or source.get("url")
    if isinstance(source, bytes):
        return f"data:;base64,{base64.b64encode(source).decode()}"
    if not isinstance(source, str) or not source:
        raise ValueError("a picture: expected a path, a data: URL or bytes")
    return source


def folder_of(where: str, rows) -> str:
    """The folder that the paths of a row are relative to."""
    return rows.image_dir or os.path.dirname(re.sub(r"(:| row )\d+$", "", where)) or "."


def file_of(source: str, folder: str) -> Path | io.BytesIO:
    """The path of a picture, or the content of a data: URL. ValueError if the path leads out of the folder or
    to the network, or if the file is missing.
    """
    start, _, content = source.partition(",")
    if start.lower().startswith("data:"):
        return io.BytesIO(base64.b64decode(content, validate=True))
    url = urlsplit(source)
    if url.scheme not in ("", "file"):
        raise ValueError(
            f"{url.scheme}: is not fetched while a model trains (fix: download them; paths relative, with /)"
        )
    root = Path(folder).resolve()
    file = (root / (unquote(url.path) if url.scheme else source)).resolve()
    if not file.is_relative_to(root):
        raise ValueError(
            f"it leads out of {folder}, to {str(file):.200}; symbolic links must not do so either (fix:"
            " --image_dir FOLDER, and paths relative to it; copy what links lead to, as by cp -rL)"
        )
    if not os.path.isfile(file):
        raise ValueError(
            f"no such file in {folder} (fix: --image_dir, / for \\; before base64 data:image/png;base64,)"
        )
    return file


@contextmanager
def open_picture(source: str, folder: str):
    """Open a picture; only its header is read. ValueError, also from the block within, if file_of refuses it,
    or if it exceeds Pillow's size limit, is broken, or is no picture.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(file_of(source, folder), formats=FORMATS) as image:
                yield image
        except Exception as error:
            reason = error if isinstance(error, ValueError) else reason_of_others(error)
            raise ValueError(f"picture {source[:80]!r}: {reason}; {REMEDY}") from None


def described(source: str, folder: str, max_pixels: int) -> list:
    """[source, width, height, bytes] of a picture: the size that the processor gets, after rotation by EXIF,
    and the bytes of the file. Reads the whole file, so that a truncated one is found.
    """
    with open_picture(source, folder) as image:
        size = image.size  # for a TIFF, Pillow has already applied the orientation
        image.draft("L", (1, 1))  # a JPEG is read to its end, but decoded to few pixels
        image.load()
        if image.getexif().get(ORIENTATION) in TURNED:
            size = size[::-1]
        return [source, *fitted(size, max_pixels), bytes_of(source, folder)]


def bytes_of(source: str, folder: str) -> int:
    """The bytes of the file of a picture; 0 for a data: URL. ValueError as from file_of."""
    file = file_of(source, folder)
    return file.stat().st_size if isinstance(file, Path) else 0


def fitted(size: Size, max_pixels: int) -> Size:
    """The size scaled down to at most max_pixels, with the same aspect ratio. max_pixels 0: no limit."""
    scale = min(1.0, ((max_pixels or math.inf) / math.prod(size)) ** 0.5)
    return tuple(max(1, int(side * scale)) for side in size)


def decoded(picture: list, folder: str, max_pixels: int) -> Image.Image:
    """A picture in RGB, rotated by EXIF and scaled. picture: from `described`. ValueError if it cannot be
    decoded, or if it was changed since.
    """
    source, *size = picture
    with open_picture(source, folder) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bits
            image = image.convert("I").point(lambda value: value / 256).convert("L")
        if image.has_transparency_data:  # what is behind is white, as in vLLM
            behind = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(behind, image.convert("RGBA"))
        image = image.convert("RGB")
        if [*fitted(image.size, max_pixels), bytes_of(source, folder)] != size:
            raise ValueError("it was changed since its tokens were made (fix: start again)")
        return image.resize(size[:2])  # bicubic; a plain copy if the size is equal


def have_changed(examples, rows) -> bool:
    """Whether a picture of some examples is missing, or has another number of bytes than when its tokens were
    made. No picture is opened.
    """
    with suppress(ValueError):
        return any(
            size_bytes and bytes_of(source, folder_of(where, rows)) != size_bytes
            for where, details in zip(examples.where, examples.details, strict=True)
            for source, _, _, size_bytes in json.loads(details)
        )
    return True
