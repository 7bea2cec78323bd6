"""generate.py, eval.py and export.py of models that read pictures: what transformers' own classes compute.

python -m pytest tests/test_vision_serving.py -m ""
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import eval as evaluate
import export
import finetune
import generate
import preview
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from picture_families import FAMILIES as FAMILIES_OF_PICTURES
from picture_families import NAMES, family_folder
from PIL import Image
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from shell import ROOT
from test_generate import answers, chatted, on_rank, user
from test_vision import RUN, chat, train, write
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from utils.data.formats import form_of
from utils.data.pictures import load_processor, picture_prompt, read_pictured
from utils.data.tokens import load_tokenizer, render
from utils.run.errors import ConfigError, escaped

slow = pytest.mark.slow
SAID = {"role": "assistant", "content": "Yes"}
NEW = 12  # tokens of an answer
SIZES = [(60, 40), (120, 60), (30, 90)]
FAMILIES = ["qwen2_5_vl", *(pytest.param(n, marks=slow) for n in ("gemma3", "llava", "mllama"))]
RANKS = [pytest.param(1, marks=slow), 2]
OTHERS = (
    "gemma3",
    "llava",
    "qwen3_vl",
    "qwen3_vl_moe",
    "llava_onevision",
    "smolvlm",
    "internvl",
    "minicpmv4_6",
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Seven rows with one picture, two and none."""
    root = tmp_path_factory.mktemp("rows")
    for i, size in enumerate(SIZES):
        torch.manual_seed(i)
        noise = torch.randint(256, (size[1], size[0], 3), dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(root / f"{i}.png")
    lines = []
    for i in range(7):
        pictures = [[f"{i % 3}.png"], [], [f"{i % 2}.png", "2.png"], ["1.png"]][i % 4]
        lines.append(chat("What? " * (1 + i % 3), "So " * (1 + i % 5), *pictures))
    write(root / "rows.jsonl", lines)
    return root / "rows.jsonl"


@pytest.fixture
def prompts(rows, tmp_path):
    """The rows in a folder of their own, without their answers but for the first."""
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    for line in lines[1:]:
        del line["messages"][-1]
    write(tmp_path / "prompts.jsonl", lines)
    return tmp_path / "prompts.jsonl"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")

    def folder(name: str) -> Path:
        return root / name if (root / name).exists() else family_folder(name, root)

    return folder


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, folder_of, rows):
    """The run folder of a family, made once: of its parts that train, or of adapters."""
    root = tmp_path_factory.mktemp("runs")

    def run(name: str, **flags) -> Path:
        out = root / f"{name}-{len(flags)}-{''.join(map(str, flags.values()))}"
        if not out.exists():
            given = {"model": str(folder_of(name)), "dataset": str(rows), "output_dir": str(out)}
            train(None, RUN | {"save_every": 3, "lr": 1e-2, "batch_size": 6} | given | flags)
        return out

    return run


def inputs_of(folder: Path, line: dict, where: Path) -> dict:
    """What the model's own processor makes of a row without its answer."""
    tokenizer = load_tokenizer(folder)
    processor = load_processor(folder, tokenizer)
    messages, _, sources, _ = read_pictured(line, form_of(line), Counter())
    text = render(tokenizer, messages[:-1], prompt=True)
    pictures = [Image.open(where / name) for name in sources]
    return processor(
        text=[text],
        images=[pictures] if pictures else None,
        add_special_tokens=False,
        return_tensors="pt",
    )


@torch.inference_mode()
def plain(model, folder: Path, rows: Path, ends: Sequence[int] = ()) -> list[str]:
    """transformers alone, one row at a time."""
    if isinstance(model, Path):
        model = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    tokenizer, texts = load_tokenizer(folder), []
    stop = [tokenizer.eos_token_id, *ends]
    for line in rows.read_text().splitlines():
        inputs = inputs_of(folder, json.loads(line), rows.parent)
        output = model.eval().generate(
            **inputs, do_sample=False, max_new_tokens=NEW, eos_token_id=stop
        )
        new = output[0, inputs["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True).strip())
    return texts


@pytest.fixture(scope="module")
def plain_of(rows):
    """plain() of a folder, whose answers are computed once for any number of ranks."""
    return cache(lambda folder: plain(folder, folder, rows))


@pytest.fixture(scope="module")
def pefts_of(run_of, folder_of, rows):
    """(the answers of peft's model with the adapter of a family's run, the logits of its merge)"""

    @cache
    def pefts(name: str) -> tuple[list[str], list[torch.Tensor]]:
        run, folder = run_of(name, lora_rank=4), folder_of(name)
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, run / "adapter")
        ends = load_tokenizer(folder).convert_tokens_to_ids(["<end_of_turn>"] * (name == "gemma3"))
        return plain(model, folder, rows, ends), logits(model.merge_and_unload(), folder, rows)

    return pefts


@pytest.fixture(scope="module")
def logits_of(rows):
    """logits() of a folder, computed once for any number of ranks."""
    return cache(lambda folder: logits(folder, folder, rows))


@torch.no_grad()
def logits(model, folder: Path, rows: Path) -> list[torch.Tensor]:
    if isinstance(model, Path):
        model = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    lines = map(json.loads, rows.read_text().splitlines())
    return [model.eval()(**inputs_of(folder, line, rows.parent)).logits for line in lines]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("qwen2_5_vl", 1),
        ("qwen2_5_vl", 2),
        ("mllama", 2),
        pytest.param("mllama", 1, marks=slow),
        *(pytest.param(name, ranks, marks=slow) for name in OTHERS for ranks in (1, 2)),
    ],
)
def test_answers_are_those_of_transformers(name, ranks, folder_of, run_of, plain_of, rows, prompts):
    """Rows with one picture, two and none: 3 batches on 2 ranks, of which one repeats another's."""
    folder = folder_of(name)
    if name == "internvl":  # whose answers differ only after it has learned
        folder = run_of(name, steps=60) / "model"
    expected = plain_of(folder)
    assert len(set(expected)) > 1
    found = answers(prompts, ranks, model=str(folder), image_dir=str(rows.parent))
    assert found == expected


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_answers_as_the_model_it_became(name, ranks, run_of, plain_of, rows, prompts):
    """It holds only what trained; the tower is the base's."""
    run = run_of(name)
    expected = plain_of(run / "model")
    found = answers(prompts, ranks, checkpoint=str(run), image_dir=str(rows.parent))
    assert found == expected


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_answers_as_pefts_and_merges(
    name, ranks, run_of, folder_of, pefts_of, rows, prompts, tmp_path
):
    run, folder = run_of(name, lora_rank=4), folder_of(name)
    expected, expected_logits = pefts_of(name)
    of_rows = {"image_dir": str(rows.parent)}
    assert answers(prompts, ranks, adapter=str(run / "adapter"), **of_rows) == expected
    assert answers(prompts, ranks, checkpoint=str(run), **of_rows) == expected
    exported(ranks, adapter=str(run / "adapter"), output_dir=str(tmp_path / "merged"))
    merged, original = names(tmp_path / "merged"), names(folder)
    assert merged >= original
    assert load_file(tmp_path / "merged/model.safetensors").keys() == stored(folder)
    merged_logits = logits(tmp_path / "merged", tmp_path / "merged", rows)
    for one, two in zip(merged_logits, expected_logits, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_becomes_the_runs_model(name, ranks, run_of, logits_of, rows, tmp_path):
    run, out = run_of(name), tmp_path / "out"
    exported(ranks, checkpoint=str(run), output_dir=str(out))
    assert names(out) == names(run / "model")
    ours, theirs = load_file(out / "model.safetensors"), load_file(run / "model/model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for one, two in zip(logits(out, out, rows), logits_of(run / "model"), strict=True):
        assert torch.equal(one, two)


def test_a_checkpoint_of_adapters_becomes_the_adapter(run_of, tmp_path):
    run = run_of("qwen2_5_vl", lora_rank=4)
    exported(1, checkpoint=str(run), output_dir=str(tmp_path / "out"))
    assert names(tmp_path / "out") == names(run / "adapter")
    ours, theirs = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (tmp_path / "out", run / "adapter")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_eval_asks_in_the_chat_template_of_the_processor(folder_of, rows, tmp_path):
    """Older folders have it in chat_template.json, which a tokenizer does not read."""
    folder = tmp_path / "older"
    shutil.copytree(folder_of("llava"), folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    run = {"model": str(folder), "dataset": str(rows), "output_dir": str(tmp_path / "run")}
    train(None, RUN | run | {"save_every": 3})
    write(tmp_path / "pairs.jsonl", [{"prompt": "What?", "chosen": "So", "rejected": "No"}])
    asked = {"task": "pairs", "dataset": str(tmp_path / "pairs.jsonl")}
    found = [
        json.loads((evaluate.main(config) / "items.jsonl").read_text())["log_probs"]
        for config in (
            evaluate.Config(**asked, **opened, output_dir=str(tmp_path / name))
            for name, opened in {
                "model": {"model": str(tmp_path / "run/model")},  # its tokenizer has the template
                "checkpoint": {"checkpoint": str(tmp_path / "run")},
            }.items()
        )
    ]
    assert found[0] == found[1]


def exported(ranks: int, **flags) -> None:
    write_folder(None, flags) if ranks == 1 else run_ranks(write_folder, ranks, flags)


def write_folder(world, flags):
    export.main(export.Config(**flags))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def stored(folder: Path) -> set[str]:
    return load_file(folder / "model.safetensors").keys()


@pytest.mark.parametrize("quantization", [pytest.param("4bit", marks=slow)])
def test_adapters_on_quantized_weights_answer(quantization, run_of, rows, prompts):
    run = run_of("qwen2_5_vl", lora_rank=4, quantization=quantization)
    found = answers(prompts, 2, checkpoint=str(run), image_dir=str(rows.parent))
    assert found == answers(prompts, adapter=str(run / "adapter"), image_dir=str(rows.parent))


@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", *(pytest.param(n, marks=slow) for n in ("gemma3", "llava", "mllama"))]
)
def test_in_bf16_too(name, folder_of, rows, prompts):
    """One rank computes as from_pretrained does; the rows are one by one, as there."""
    folder = folder_of(name)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
    flags = {"dtype": "bf16", "batch_size": 1, "image_dir": str(rows.parent)}
    assert answers(prompts, model=str(folder), **flags) == plain(model, folder, rows)


def test_every_form_of_a_row_is_read(folder_of, rows, tmp_path):
    url = {"type": "image_url", "image_url": {"url": "0.png"}}
    text = {"type": "text", "text": "What?"}
    forms = [
        {"messages": [{"role": "user", "content": [url, text]}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}, text]}], "images": ["0.png"]},
        {"messages": user("<image>What?"), "images": ["0.png"]},
        {"prompt": "<image>What?", "image": "0.png"},
        {"prompt": "What?", "image": "0.png"},
        {"prompt": user("<image>What?"), "image": "0.png"},
        {"prompt": "<image>What?", "completion": "So", "image": "0.png"},
        {"conversations": [{"from": "human", "value": "<image>What?"}], "image": "0.png"},
        {"instruction": "What?", "images": ["0.png"]},
        {"instruction": "What?", "output": "So", "images": ["0.png"]},
        {"texts": [{"user": "What?"}], "images": ["0.png"]},
        {"texts": [{"user": "What?", "assistant": "So"}], "images": ["0.png"]},
    ]
    write(tmp_path / "forms.jsonl", forms)
    asked = tmp_path / "asked.jsonl"
    write(asked, [chat("What?", "So", str(rows.parent / "0.png"))])
    folder = folder_of("qwen2_5_vl")
    expected = plain(folder, folder, asked)
    flags = {"model": str(folder), "image_dir": str(rows.parent), "batch_size": 8}
    assert answers(tmp_path / "forms.jsonl", **flags) == expected * len(forms)


@pytest.mark.parametrize(
    "name", ["llava", *(pytest.param(name, marks=slow) for name in NAMES if name != "llava")]
)
def test_the_first_round_may_have_pictures(name, folder_of, rows, tmp_path):
    """generate calls a tower before the model, which FSDP has not gathered by then. One rank is idle."""
    write(tmp_path / "asked.jsonl", [chat("What?", "So", f"{i}.png") for i in range(2)])
    flags = {"image_dir": str(rows.parent), "model": str(folder_of(name))}
    alone = answers(tmp_path / "asked.jsonl", **flags)
    assert answers(tmp_path / "asked.jsonl", 2, **flags) == alone


def test_texts_alone_and_a_chat(folder_of, tmp_path):
    folder = folder_of("llava")
    without = {"prompt": "Hello", "image": None, "images": []}
    write(tmp_path / "texts.jsonl", [{"prompt": "Hello"}, {"messages": user("Hello")}, without])
    write(tmp_path / "asked.jsonl", [chat("Hello", "So")])
    (expected,) = plain(folder, folder, tmp_path / "asked.jsonl")
    assert answers(tmp_path / "texts.jsonl", model=str(folder)) == [expected] * 3
    said = chatted(None, folder, "Hello\n", {}).partition("ends the chat\n")[2].strip()
    assert said == escaped(expected)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (chat("What?", "So", "missing.png"), "1: picture 'missing.png': no such file"),
        ({"prompt": "<image>?", "images": ["0.png", "1.png"]}, "1: 2 pictures for 1 places"),
        ({"messages": "What?", "image": "0.png"}, "bad.jsonl:1: "),
        ({"messages": [], "image": "0.png"}, "bad.jsonl:1: "),
        ({"text": "What?"}, "bad.jsonl:1: no prompt to answer"),
        (chat("What? " * 900, "So", "0.png"), "bad.jsonl:1: .* exceed the model's 2048 positions"),
    ],
)
def test_a_wrong_row_is_named(row, said, folder_of, rows):
    write(rows.parent / "bad.jsonl", [row])
    flags = {"model": str(folder_of("qwen2_5_vl")), "prompts": str(rows.parent / "bad.jsonl")}
    with pytest.raises(ConfigError, match=said):
        on_rank(None, flags)


@pytest.mark.parametrize("row", [chat("What?", "So", "0.png"), {"prompt": "?", "image": "0.png"}])
def test_raw_rows_with_pictures_are_refused_in_words(row, folder_of, rows):
    write(rows.parent / "bad.jsonl", [row])
    flags = {"model": str(folder_of("llava")), "prompts": str(rows.parent / "bad.jsonl")}
    with pytest.raises(ConfigError, match=r"bad.jsonl:1: these are messages, and --raw completes"):
        on_rank(None, flags | {"raw": True})


def test_answers_that_a_kill_left_are_kept_for_the_same_pictures_only(folder_of, rows, tmp_path):
    asked, output = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    flags = {"model": str(folder_of("llava")), "prompts": str(asked), "output": str(output)}
    flags |= {"image_dir": str(rows.parent), "batch_size": 1, "max_new_tokens": 1}
    config, count = generate.Config(**flags), generate.KEPT_BATCHES

    def ask(picture: str) -> list:
        write(asked, [{"prompt": "What?", "image": picture}] * count)
        read = partial(picture_prompt, rows=config)
        return generate.read_prompts(asked, False, "", read)

    prompts = ask("0.png")
    kept = {"prompt": prompts[0].content, "answer": "kept"}
    write(generate.unfinished_file(config, prompts), [kept] * count)
    for picture, keeps in {"2.png": False, "0.png": True}.items():
        ask(picture)
        on_rank(None, flags)
        assert ("kept" in output.read_text()) == keeps
        output.unlink()


def test_a_picture_that_is_broken_is_named(folder_of, rows):
    """Its header is right, its pixels are cut."""
    whole = Image.open(rows.parent / "1.png").convert("RGB")
    whole.save(rows.parent / "cut.jpg")
    data = (rows.parent / "cut.jpg").read_bytes()
    (rows.parent / "cut.jpg").write_bytes(data[: len(data) // 2])
    write(rows.parent / "bad.jsonl", [chat("What?", "So", "cut.jpg")])
    flags = {"model": str(folder_of("qwen2_5_vl")), "prompts": str(rows.parent / "bad.jsonl")}
    with pytest.raises(ConfigError, match=r"bad.jsonl:1: picture 'cut.jpg': "):
        on_rank(None, flags)


def test_larger_pictures_are_made_smaller(folder_of, rows, tmp_path, capsys):
    folder = folder_of("qwen2_5_vl")
    Image.open(rows.parent / "1.png").resize((42, 21), Image.Resampling.BICUBIC).save(
        tmp_path / "small.png"
    )
    write(tmp_path / "small.jsonl", [chat("What?", "So", "small.png")])
    expected = plain(folder, folder, tmp_path / "small.jsonl")
    write(tmp_path / "large.jsonl", [chat("What?", "So", str(rows.parent / "1.png"))])
    flags = {"image_max_pixels": 42 * 21, "image_dir": str(rows.parent)}
    assert answers(tmp_path / "large.jsonl", model=str(folder), **flags) == expected


def run_on_text(tmp_path, **how) -> tuple[Path, Path]:
    """(a model that reads pictures, of a family with a class for its text part; a run of finetune.py)"""
    made = FAMILIES_OF_PICTURES["qwen3_vl"]
    text = FAMILIES_OF_PICTURES["minicpmv4_6"]["text"]
    vision = {k: v for k, v in made["vision"].items() if k != "deepstack_visual_indexes"}
    FAMILIES_OF_PICTURES["qwen3_5"] = made | {"text": text, "vision": vision}
    folder = family_folder("qwen3_5", tmp_path)
    write(tmp_path / "rows.jsonl", [{"messages": user("Hello") + [SAID]}] * 4)
    flags = {"model": str(folder), "dataset": str(tmp_path / "rows.jsonl"), "steps": 2, "lr": 1e-2}
    run = finetune.main(finetune.Config(**flags, **how, output_dir=str(tmp_path / "run")))
    return folder, run


@slow
@pytest.mark.parametrize("how", [{}, {"lora_rank": 4}], ids=str)
def test_a_fine_tune_on_text_of_a_family_with_a_class_for_it_is_served_as_text(how, tmp_path):
    """Its layers have other names, and no tower was trained, nor is one in OUT/model."""
    folder, run = run_on_text(tmp_path, **how)
    write(tmp_path / "asked.jsonl", [{"prompt": "Hello"}, {"prompt": "What?"}])
    asked = tmp_path / "asked.jsonl"
    result = {"adapter": str(run / "adapter")} if how else {"model": str(run / "model")}
    expected = answers(asked, checkpoint=str(run))
    assert answers(asked, **result) == expected
    assert answers(asked, model=str(folder)) != expected


@slow
def test_the_adapter_of_a_fine_tune_on_text_merges_into_the_model_that_reads_pictures(tmp_path):
    """The merged model still reads them, and its text part is what peft makes of it."""
    folder, run = run_on_text(tmp_path, lora_rank=4)
    exported(1, adapter=str(run / "adapter"), output_dir=str(tmp_path / "merged"))
    before, merged = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "merged"))
    assert merged.keys() == before.keys()
    changed = {name for name in merged if not torch.equal(merged[name], before[name])}
    text = AutoModelForCausalLM.from_pretrained(folder)
    tuned = PeftModel.from_pretrained(text, run / "adapter").merge_and_unload().state_dict()
    prefix = "model.language_model."
    for name in changed:
        assert torch.equal(merged[name], tuned[name.replace(prefix, "model.")]), name
    assert len(changed) == len(load_file(run / "adapter/adapter_model.safetensors")) // 2


@pytest.mark.parametrize("how", [{}, {"lora_rank": 4}], ids=str)
def test_a_result_is_asked_in_the_template_of_the_run_and_not_in_an_older_one_of_the_base(
    how, folder_of, rows, tmp_path
):
    """A processor reads chat_template.json, of older folders, before chat_template.jinja."""
    folder = shutil.copytree(folder_of("qwen2_5_vl"), tmp_path / "base")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    (tmp_path / "own.jinja").write_text(template + "{# own #}")
    flags = {"model": folder, "dataset": rows, "chat_template": tmp_path / "own.jinja"}
    flags = {name: str(path) for name, path in flags.items()} | {"steps": 1, **how}
    run = train(None, RUN | flags | {"output_dir": str(tmp_path / "run")})
    result = run / "model"
    if how:
        result = tmp_path / "merged"
        exported(1, adapter=str(run / "adapter"), output_dir=str(result))
    tokenizer = load_tokenizer(result)
    load_processor(result, tokenizer)
    assert tokenizer.chat_template == template + "{# own #}"


OLDER = {  # name now -> name in transformers before 4.52
    "qwen2_5_vl": {"model.language_model.": "model.", "model.visual.": "visual."},
    "gemma3": {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.vision_model.",
    },
}


@pytest.mark.parametrize("name", OLDER)
def test_an_adapter_of_transformers_4_is_renamed_as_the_readme_says(name, tmp_path, monkeypatch):
    """Each of its tensors has its effect again, in the language model and in the vision tower."""
    folder, lora = family_folder(name, tmp_path / "base"), tmp_path / "DIR"
    model = AutoModelForImageTextToText.from_pretrained(folder)
    get_peft_model(model, LoraConfig(target_modules=r".*\.(q_proj|down_proj|fc1)")).save_pretrained(
        lora
    )
    file = lora / "adapter_model.safetensors"
    as_now = {key: torch.randn_like(tensor) for key, tensor in load_file(file).items()}
    older = {}
    for key, tensor in as_now.items():
        for new, old in OLDER[name].items():
            key = key.replace(f"base_model.model.{new}", f"base_model.model.{old}")
        older[key.replace(".weight", ".default.weight")] = tensor
    assert as_now.keys().isdisjoint(older)
    save_file(older, file)
    flags = {"model": str(folder), "adapter": str(lora), "output_dir": str(tmp_path / "merged")}
    with pytest.raises(
        ConfigError, match=r"recipes/README\.md says .* rename the tensors of an older"
    ):
        exported(1, **flags)
    code = re.search(
        r"```python\n(from safetensors.*?)```", (ROOT / "recipes/README.md").read_text(), re.S
    )
    monkeypatch.chdir(tmp_path)
    exec(code[1], {})
    renamed = load_file(file)
    assert renamed.keys() == as_now.keys()
    assert all(torch.equal(renamed[key], as_now[key]) for key in as_now)
    exported(1, **flags)


def test_a_head_that_a_merge_unties_is_untied_in_the_text_config_too(tmp_path):
    """transformers 4 and some servers read that one, and would drop the trained head in silence."""
    folder = family_folder("gemma3", tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    get_peft_model(model, LoraConfig(target_modules=["lm_head"])).save_pretrained(tmp_path / "lora")
    exported(1, model=str(folder), adapter=str(tmp_path / "lora"), output_dir=str(tmp_path / "out"))
    ties = []
    for path in (folder, tmp_path / "out"):
        config = json.loads((path / "config.json").read_text())
        parts = config, config["text_config"]
        ties.append([part["tie_word_embeddings"] for part in parts])
    assert ties == [[True, True], [False, False]]
    assert "lm_head.weight" in load_file(tmp_path / "out/model.safetensors")


SHOWN = ("data ", "batch ", "train ", "memory ")  # lines of the plan


@pytest.mark.parametrize(
    "how",
    [
        {"train": "language,vision"},
        pytest.param({"train": "language", "lora_rank": 4}, marks=slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FAMILIES)
def test_preview_shows_the_plan_of_the_run_and_each_pictures_tokens(
    name, how, folder_of, rows, tmp_path, capsys
):
    flags = {"model": str(folder_of(name)), "dataset": str(rows), "batch_size": 2, **how}
    train(None, flags | {"output_dir": str(tmp_path / "out"), "steps": 1, "workers": 0})
    run = capsys.readouterr().out
    assert preview.main(preview.Config(**flags, ranks=1, steps=1, show=3))
    shown = capsys.readouterr().out
    for begin in SHOWN:
        line = next(line for line in run.splitlines() if line.startswith(begin))
        assert line in shown
    tokenizer = load_tokenizer(folder_of(name))
    token = load_processor(folder_of(name), tokenizer).image_token
    assert shown.count("[picture 60x40: ") == 2  # of the first row and the third
    assert shown.count("[picture 30x90: ") == 1
    assert token not in shown
    assert "[[So" in shown


def test_preview_of_the_parts_to_train_shows_the_tiny_model_of_pictures(capsys):
    assert preview.main(preview.Config(train="language,projector", max_rows=4, show=1))
    assert "tiny/vision" in capsys.readouterr().out


def test_preview_names_what_vision_has_not(folder_of, rows):
    with pytest.raises(ConfigError, match="vision.py has no --packing and no --loss"):
        preview.main(preview.Config(model=str(folder_of("llava")), packing=True))
