"""What generate.py answers is what transformers' own generate answers, on any number of ranks.

python -m pytest tests/test_generate.py
"""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import finetune
import generate
import pytest
import torch
from peft import PeftModel
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from shell import ROOT
from test_export import lora_run, make_adapter
from test_parity import write_rows
from tiny import tiny_model_folder, without_special_end
from transformers import AutoModelForCausalLM, AutoTokenizer

from utils.run.errors import ConfigError, escaped

PROMPTS = ["Hello there", "a", "What is larger, three or seven?", "one two three", "b c"]
ASKED = [[{"role": "user", "content": text}] for text in PROMPTS]
NEW = 12  # tokens of an answer


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def folder(request, tmp_path_factory):
    return tiny_model_folder(
        tmp_path_factory.mktemp(request.param) / "model", request.param, vocab_size=271
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("llama") / "model", vocab_size=271)


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    """A finished LoRA run beside its base."""
    return lora_run(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def finished(llama, tmp_path_factory):
    """A finished run that has trained all weights."""
    root = tmp_path_factory.mktemp("finished")
    rows = write_rows(root / "rows.jsonl", 4)
    flags = {"model": str(llama), "dataset": str(rows), "output_dir": str(root / "run")}
    return finetune.main(finetune.Config(**flags, steps=2, lr=1e-2))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


def answers(prompts: Path, ranks: int = 1, **flags) -> list[str]:
    """The answers that the recipe writes, one a row, to the prompts of a file."""
    output = prompts.with_name(f"answers-{len(list(prompts.parent.iterdir()))}.jsonl")
    flags = {
        "max_new_tokens": NEW,
        "batch_size": 2,
        "prompts": str(prompts),
        "output": str(output),
        **flags,
    }
    on_rank(None, flags) if ranks == 1 else run_ranks(on_rank, ranks, flags)
    return [json.loads(line)["answer"] for line in output.read_text().split("\n")[:-1]]


def on_rank(world, flags):
    generate.main(generate.Config(**flags))


@torch.inference_mode()
def plain(model, folder: Path, conversations: list, ends: tuple = ()) -> list[str]:
    """transformers alone, one prompt at a time; texts are completed, messages answered."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(model) if isinstance(model, Path) else model
    texts = []
    for asked in conversations:
        if isinstance(asked, str):
            ids = tokenizer(asked, return_tensors="pt")["input_ids"]
        else:
            options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
            ids = tokenizer.apply_chat_template(asked, **options)["input_ids"]
        stop = {"eos_token_id": [2, *ends]} if ends else {}
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, **stop
        )
        text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        texts.append(text if isinstance(asked, str) else text.strip())
    return texts


@cache
def plain_asked(folder: Path) -> list[str]:
    """The answers of a folder to ASKED, computed once."""
    return plain(folder, folder, ASKED)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("ranks", [1, 2])
def test_greedy_answers_are_those_of_transformers(ranks, folder, prompts):
    expected = plain_asked(folder)
    assert len(set(expected)) > 1
    assert answers(prompts, ranks, model=str(folder)) == expected


def test_a_mixture_that_trains_with_its_load_balancing_loss_answers_without(prompts, tmp_path):
    folder = tiny_model_folder(tmp_path / "model", "mixtral", vocab_size=271, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.output_router_logits
    model.config.output_router_logits = False
    assert answers(prompts, model=str(folder)) == plain(model, folder, ASKED)


def test_a_generation_config_that_asks_for_other_answers_than_one_per_prompt_is_not_followed(
    llama, prompts, tmp_path
):
    expected = answers(prompts, model=str(llama))
    model = shutil.copytree(llama, tmp_path / "model")
    file = model / "generation_config.json"
    own = json.loads(file.read_text())
    beams = {"num_beams": 2, "num_return_sequences": 2, "prompt_lookup_num_tokens": 3}
    own |= {
        "max_time": 1e-9,
        "return_dict_in_generate": True,
        "stop_strings": ["never said"],
        **beams,
    }
    file.write_text(json.dumps(own))
    assert answers(prompts, model=str(model)) == expected


def test_more_ranks_than_prompts_answer_each_once_and_in_order(llama, prompts):
    expected = plain_asked(llama)
    assert answers(prompts, 3, model=str(llama), batch_size=3) == expected  # two batches
    prompts.write_text(json.dumps({"prompt": PROMPTS[2]}) + "\n")
    assert answers(prompts, 3, model=str(llama)) == expected[2:3]


def test_raw_lines_are_completed_and_blank_ones_passed_over(llama, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(PROMPTS) + "\n")
    assert answers(path, model=str(llama), raw=True) == plain(llama, llama, PROMPTS)
    path.write_text("a b\u2028c\r\nd\n")  # only a line feed ends a line
    assert answers(path, model=str(llama), raw=True) == plain(llama, llama, ["a b\u2028c", "d"])


def test_the_lines_of_all_text_files_are_prompts(tmp_path):
    for name, text in (("a.txt", "one\n\ntwo\n"), ("b.txt", "three\n")):
        (tmp_path / name).write_text(text)
    for several in (tmp_path / "*.txt", tmp_path):
        prompts = generate.read_prompts(several, True, "")
        assert [prompt.content for prompt in prompts] == ["one", "two", "three"]
        assert [prompt.where[-7:] for prompt in prompts] == ["a.txt:1", "a.txt:3", "b.txt:1"]


def test_messages_lose_a_last_answer_and_gain_a_system_turn(llama, tmp_path):
    asked = [*user("Hello"), {"role": "assistant", "content": "Hi"}, *user("a b c")]
    rows = [{"messages": asked}, {"messages": [*asked, {"role": "assistant", "content": "known"}]}]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    system = {"role": "system", "content": "Be brief."}
    assert answers(path, model=str(llama)) == plain(llama, llama, [asked]) * 2
    assert (
        answers(path, model=str(llama), system="Be brief.")
        == plain(llama, llama, [[system, *asked]]) * 2
    )


def test_drawn_answers_depend_on_the_seed_and_not_on_the_ranks(llama, prompts):
    drawn = {"model": str(llama), "temperature": 2.0, "top_p": 0.95}
    alone = answers(prompts, 1, **drawn)
    assert answers(prompts, 2, **drawn) == alone
    assert answers(prompts, 1, **drawn, seed=1) != alone


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_adapter_answers_as_peft_does(ranks, folder, prompts, tmp_path):
    adapter = make_adapter(folder, tmp_path / "adapter")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    expected = plain(model, folder, ASKED, ends=(4,))  # 4: <|im_end|>
    assert expected != plain_asked(folder)
    # the base: what the adapter says
    assert answers(prompts, ranks, adapter=str(adapter)) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_answers_as_the_models_it_became(ranks, llama, finished, prompts):
    expected = answers(prompts, model=str(finished / "model"))
    assert answers(prompts, ranks, checkpoint=str(finished)) == expected
    assert answers(prompts, ranks, checkpoint=str(finished), dtype="bf16")  # fp32 in the checkpoint
    assert expected != answers(prompts, model=str(llama))


def test_what_a_run_trained_in_full_is_quantized_from_its_model_folder(finished, prompts):
    with pytest.raises(ConfigError, match="it trains.*OUT/model as --model"):
        answers(prompts, checkpoint=str(finished), quantization="8bit")
    assert answers(prompts, model=str(finished / "model"), quantization="8bit")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_a_lora_run_answers_with_its_base_and_its_adapter(ranks, lora, prompts):
    base = lora.parent / "base"
    model = AutoModelForCausalLM.from_pretrained(base)
    expected = plain(PeftModel.from_pretrained(model, lora / "adapter"), base, ASKED, ends=(4,))
    assert expected != plain(base, base, ASKED, ends=(4,))
    assert answers(prompts, ranks, checkpoint=str(lora)) == expected
    assert answers(prompts, ranks, adapter=str(lora / "adapter")) == expected


def test_a_folder_that_is_called_as_the_runs_chat_template_is_not_taken_for_it(
    llama, prompts, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alpaca").mkdir()
    rows = write_rows(tmp_path / "rows.jsonl", 4)
    flags = {"model": str(llama), "dataset": str(rows), "output_dir": "run", "steps": 1}
    out = finetune.main(finetune.Config(**flags, chat_template="alpaca"))
    assert answers(prompts, checkpoint="run") == answers(prompts, model=str(out / "model"))


def test_another_base_than_the_one_of_the_run_is_said(lora, prompts, tmp_path, capsys):
    run, other = lora, shutil.copytree(lora.parent / "base", tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    (other / "config.json").write_text(json.dumps(config))
    weights = load_file(other / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, other / "model.safetensors")
    answers(prompts, checkpoint=str(run))
    assert "warning" not in capsys.readouterr().out
    answers(prompts, checkpoint=str(run), model=str(other))
    assert re.search(
        rf"warning: {other} is not what the run was trained from, then -> now:"
        r" config.rms_norm_eps 1e-06 -> 0.001, weights \w+ -> \w+\n",
        capsys.readouterr().out,
    )


def chatted(world, folder: Path, typed: str, flags: dict) -> str:
    """What a chat prints that gets `typed` through a pipe."""
    reading, writing = os.pipe()
    os.write(writing, typed.encode())
    os.close(writing)
    before, sys.stdin, printed = sys.stdin, os.fdopen(reading), io.StringIO()
    try:
        with redirect_stdout(printed):
            flags = {"max_new_tokens": NEW, **flags}
            generate.main(generate.Config(model=str(folder), chat=True, **flags))
    finally:
        sys.stdin.close()
        sys.stdin = before
    return printed.getvalue()


def test_the_token_that_ends_a_turn_is_no_text_even_if_it_is_not_special(tmp_path):
    tiny = ROOT / "recipes/tiny"
    (tmp_path / "prompts").mkdir()
    prompts = tmp_path / "prompts/rows.jsonl"
    prompts.write_text("".join((tiny / "heldout.jsonl").read_text().splitlines(True)[:4]))
    expected = answers(prompts, model=str(tiny / "started"))
    model = without_special_end(tiny / "started", tmp_path / "model")
    assert answers(prompts, model=str(model)) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_chat_remembers_its_turns_and_ends_with_the_input(ranks, llama):
    first = plain(llama, llama, [user("Hello")])[0]
    history = [*user("Hello"), {"role": "assistant", "content": first}, *user("what?")]
    second = plain(llama, llama, [history])[0]
    typed = "Hello\nwhat?\n"
    printed = (
        [chatted(None, llama, typed, {})] if ranks == 1 else run_ranks(chatted, 2, llama, typed, {})
    )
    assert printed[0].partition("ends the chat\n")[2].strip().split("\n") == [
        escaped(first),
        escaped(second),
    ]
    assert not any(printed[1:])


def test_a_chat_goes_on_with_the_positions_that_are_left_and_ends_when_there_are_none(
    llama, tmp_path
):
    folder = shutil.copytree(llama, tmp_path / "short")
    options = {"add_generation_prompt": True, "return_dict": True}
    tokenizer = AutoTokenizer.from_pretrained(llama)
    asked = tokenizer.apply_chat_template(user("Hello"), **options)["input_ids"]
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = len(asked) + 3
    (folder / "config.json").write_text(json.dumps(config))
    said = chatted(None, folder, "Hello\n", {}).partition("ends the chat\n")[2].strip("\n")
    whole = escaped(plain(llama, llama, [user("Hello")])[0])
    assert whole.startswith(said.rstrip())
    assert 0 < len(said) < len(whole)
    with pytest.raises(ConfigError, match=rf"the model {len(asked) + 3} positions .fix: begin"):
        chatted(None, folder, "Hello\nwhat?\n", {})


@pytest.mark.slow
def test_ctrl_c_ends_a_chat_with_one_line_and_130(llama):
    command = [sys.executable, "recipes/generate.py", "--model", str(llama), "--chat"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    timer = threading.Timer(120, process.kill)
    timer.start()
    try:
        while "ends the chat" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    finally:
        timer.cancel()
        process.kill()
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "error: stopped by SIGINT in act 'generate'"


def test_an_output_is_never_overwritten_and_never_half(llama, prompts, tmp_path):
    output = tmp_path / "answers.jsonl"
    output.write_text("mine")
    flags = {"model": str(llama), "prompts": str(prompts), "output": str(output)}
    with pytest.raises(ConfigError, match="exists, and is not overwritten"):
        on_rank(None, flags)
    assert output.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.jsonl", "prompts.jsonl"]


def test_a_start_that_was_killed_goes_on_after_the_answers_that_are_kept(llama, tmp_path):
    path, output = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    count = generate.KEPT_BATCHES + 6
    path.write_text("".join(f"{number} and {PROMPTS[number % 5]}\n" for number in range(count)))
    flags = {"model": str(llama), "prompts": str(path), "output": str(output), "batch_size": 1}
    flags |= {"max_new_tokens": 3, "temperature": 2.0}
    on_rank(None, flags)
    whole = output.read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in whole] == path.read_text().splitlines()
    assert [json.loads(line)["where"] for line in whole[:2]] == [f"{path}:1", f"{path}:2"]
    output.unlink()

    kept = generate.unfinished_file(generate.Config(**flags), [])
    marked = []
    for line in whole[: generate.KEPT_BATCHES]:
        marked.append(json.dumps(json.loads(line) | {"answer": "kept"}))
    # The kill cut the next batches, whose random numbers are drawn anew, from their first on, in a character.
    begun = "".join(line + "\n" for line in [*marked, marked[0]]) + whole[-1][:7]
    kept.write_bytes(begun.encode() + "火".encode()[:1])
    on_rank(None, flags)
    assert output.read_text().splitlines() == marked + whole[generate.KEPT_BATCHES :]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.jsonl", "prompts.txt"]

    output.unlink()
    kept.write_text((whole[1] + "\n") * generate.KEPT_BATCHES)
    with pytest.raises(ConfigError, match=r"answers to other prompts than .*txt:1 \(fix: remove"):
        on_rank(None, flags)
    on_rank(None, {**flags, "seed": 1})  # other settings have another file
    assert kept.read_text() == (whole[1] + "\n") * generate.KEPT_BATCHES
    assert output.read_text().splitlines() != whole

    output.rename(tmp_path / "other.jsonl")
    twice = (whole * 2)[: 2 * generate.KEPT_BATCHES]
    kept.write_text("".join(line + "\n" for line in twice))
    with pytest.raises(ConfigError, match=r"128 answers to 70 prompts \(fix: remove it"):
        on_rank(None, flags)
    assert not output.exists()


def test_two_processes_never_write_the_answers_of_one_file(llama, tmp_path):
    """Both made all answers, and at the end each found those of the other among its own."""
    path, output = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    path.write_text("one\n")
    flags = {"model": str(llama), "prompts": str(path), "output": str(output), "max_new_tokens": 3}
    unfinished = generate.unfinished_file(generate.Config(**flags), [])
    with (
        generate.locked(unfinished),
        pytest.raises(
            ConfigError, match=r"another process writes it \(fix: wait, or another --out"
        ),
    ):
        on_rank(None, flags)
    on_rank(None, flags)
    assert len(output.read_text().splitlines()) == 1
    assert not unfinished.exists()


MISTAKES = {
    "no model": ({"prompts": "p.txt"}, "no --model given"),
    "nothing to answer": ({"model": "m"}, "--prompts FILE, or --chat"),
    "temperature": (
        {"model": "m", "prompts": "p.txt", "temperature": -1.0},
        "--temperature -1.0 is too small .fix: at least 0",
    ),
    "top_p": ({"model": "m", "prompts": "p.txt", "temperature": 1.0, "top_p": 0.0}, "--top_p 0.0"),
    "top_p when greedy": ({"model": "m", "prompts": "p.txt", "top_p": 0.5}, "at --temperature 0"),
    "raw chat": ({"model": "m", "chat": True, "raw": True}, "--raw has no turns"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_flags_that_cannot_work_are_refused_at_once(name):
    flags, words = MISTAKES[name]
    with pytest.raises(ConfigError, match=words):
        generate.Config(**flags)


FILES = {
    "missing.txt": (None, "no such file"),
    "missing.jsonl": (None, "no such file"),
    "empty.txt": ("\n \n", "no rows"),
    "long.txt": (
        "short\n" + "x" * 300,
        r"long.txt:2: 3\d\d tokens and --max_new_tokens 9 .* 256 positions",
    ),
    "odd.jsonl": ('{"question": "?"}', r"odd.jsonl:1: no prompt to answer"),
    "no_content.jsonl": (
        '{"messages": [{"role": "user"}]}',
        r"no_content.jsonl:1: messages\[0\].content: missing",
    ),
    "answer_only.jsonl": (
        '{"messages": [{"role": "assistant", "content": "x"}]}',
        ":1: no turn to answer",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_prompts_are_named_by_file_and_line(name, llama, tmp_path):
    text, words = FILES[name]
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        on_rank(None, {"model": str(llama), "prompts": str(tmp_path / name), "max_new_tokens": 9})


@pytest.mark.parametrize("flag", [{"image_dir": "pictures"}, {"image_max_pixels": 1000}])
def test_flags_of_pictures_are_refused_for_a_model_that_reads_none(flag, llama, prompts):
    with pytest.raises(ConfigError, match="reads no pictures .fix: leave them out"):
        answers(prompts, model=str(llama), **flag)


def test_a_chat_without_standard_input_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="standard input is closed"):
        generate.Config(model="m", chat=True)


def test_an_adapter_of_another_base_is_refused_before_weights_are_read(
    llama, prompts, tmp_path, capsys
):
    adapter = make_adapter(llama, tmp_path / "adapter")
    for kind, sizes in (("llama", {"hidden_size": 32}), ("gpt2", {})):
        other = tiny_model_folder(tmp_path / kind, kind, vocab_size=271, **sizes)
        with pytest.raises(ConfigError):
            on_rank(None, {"model": str(other), "adapter": str(adapter), "prompts": str(prompts)})
        assert "--- load" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match=rf"{adapter} is an adapter \(fix: .*--adapter"):
        on_rank(None, {"model": str(adapter), "prompts": str(prompts)})


def test_messages_and_tools_are_read_as_for_training(tmp_path):
    """A row that was trained on may be asked: its bare tools are wrapped, its answer is left out."""
    tool = {"name": "look", "parameters": {}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = [
        {"role": "user", "content": [{"type": "text", "text": "The sea?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "grey"},
        {"role": "assistant", "content": "It is grey."},
    ]
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps({"messages": said, "tools": [tool]}) + "\n")
    (prompt,) = generate.read_prompts(file, False, "Be brief.")
    assert [turn["role"] for turn in prompt.content] == ["system", "user", "assistant", "tool"]
    assert prompt.content[1]["content"] == "The sea?"
    assert prompt.content[2]["tool_calls"][0]["function"]["arguments"] == {}
    assert prompt.tools == [{"type": "function", "function": tool}]
    file.write_text(json.dumps({"instruction": "Add.", "input": "1 and 2", "output": "3"}) + "\n")
    (prompt,) = generate.read_prompts(file, False, "")
    assert prompt.content == [{"role": "user", "content": "Add.\n\n1 and 2"}]


def test_columns_may_have_any_name(tmp_path):
    file = tmp_path / "asked.csv"
    file.write_text("question,instructions\n1 + 1?,Be brief.\n")
    columns = "prompt=question,system=instructions"
    (prompt,) = generate.read_prompts(file, False, "", columns=columns)
    assert [turn["content"] for turn in prompt.content] == ["Be brief.", "1 + 1?"]
    with pytest.raises(ConfigError, match=r"no prompt to answer.*\(fix: --columns prompt=THEIRS"):
        generate.read_prompts(file, False, "")
    with pytest.raises(ConfigError, match="--columns system=instruction: no row has 'instruction'"):
        generate.read_prompts(file, False, "", columns="prompt=question,system=instruction")
