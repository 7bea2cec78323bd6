"""Flags, YAML and --help: what is typed is what is meant, or it is refused in one line.

python -m pytest tests/test_config.py
"""

import dataclasses
import os
import re
import resource
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import finetune
import generate
import grpo
import plan
import prefer
import pretrain
import pytest
import reward
import vision
import yaml
from launch import forked
from shell import shell

from utils.run import foreign_flags
from utils.run.errors import ConfigError
from utils.run.help import help_text
from utils.run.settings import (
    check_settled,
    kinds_of,
    parse_cli,
    read_value,
    read_yaml,
    save_config,
)

ROOT = Path(__file__).resolve().parent.parent


def load_config(cls, path):
    """The settings of a YAML file."""
    return cls(**read_yaml(cls, path))


@dataclass
class Config:
    # What
    model: str = ""  # folder or id
    name: str = "a # b"  # a name

    # How much
    steps: int = 0  # optimizer steps; 0: whatever --epochs gives
    epochs: int = 1  # times through the data
    batch_size: int = 1  # sequences per rank
    grad_accum: int = 0  # micro-batches
    seq_len: int = 2048  # tokens
    # a field whose meaning is longer than its line,
    # told above it;
    lr: float = 2e-5  # peak
    warmup: int = -1
    clip_norm: float = 1.0  # largest norm

    # How
    low_cpu_fsdp: bool = True  # read only the own shards
    wandb: bool = False  # log there
    attn: Literal["auto", "sdpa", "eager"] = "auto"  # attention
    dtype: Literal["auto", "bf16", "fp32"] = "auto"  # compute dtype
    # frozen base
    quantization: Literal["none", "8bit", "4bit"] = field(default="none", metadata={"bare": "8bit"})

    # Where
    output_dir: str = ""  # run folder
    save_model: bool = True  # write OUT/model


@dataclass
class WithLora(Config):
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: str = "all"
    lora_dropout: float = 0.0
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    cpu_offload: bool = False


def changed(cfg) -> dict:
    """The fields that are not at their default."""
    return {f.name: v for f in dataclasses.fields(cfg) if (v := getattr(cfg, f.name)) != f.default}


def refusal(*argv: str, cls=Config, lines: int = 1) -> str:
    with pytest.raises(ConfigError) as error:
        parse_cli(cls, list(argv))
    message = str(error.value)
    assert len(message.splitlines()) == lines
    return message


# --- flags ---


def test_bf16_weights_at_a_low_rate_are_warned_of(capsys):
    """configs/README.md has what they lose."""
    for flags, warned in (
        (["--param_dtype", "bf16", "--lr", "2e-5"], True),
        (["--param_dtype", "bf16", "--lr", "2e-4"], False),
        (["--lr", "2e-5"], False),
    ):
        cfg = replace(parse_cli(finetune.Config, flags), seed=1)  # a recipe makes it several times
        check_settled(cfg, "")
        said = capsys.readouterr().out
        assert said.count("warning: in bf16 weights most updates of --lr 2e-05") == warned


def test_without_flags_every_field_has_its_default():
    assert parse_cli(Config, []) == Config()


LITERAL = [
    "1e5",
    "[a]",
    "{a}",
    "a,b",
    "foo#bar",
    "None",
    "1.10",
    "0x10",
    "1_000",
    "１２",
    "true",
    "2024-01-01",
    "(1,)",
]
LITERAL += [
    "",
    " /leading/space",
    "a\nb",
    "'q'",
    '"q"',
    "$(touch x)",
    "`id`",
    "~/m",
    "a=b",
    "a b",
    "1" * 400,
    "-1",
    "\\",
]


@pytest.mark.parametrize("text", LITERAL)
def test_text_stays_what_was_typed(text):
    assert parse_cli(Config, ["--model", text]).model == text
    assert parse_cli(Config, [f"--model={text}", "--wandb"]).model == text


def test_text_may_start_with_a_dash_after_an_equals_sign():
    assert parse_cli(Config, ["--model=-x", "--name=--lr"]).name == "--lr"
    assert parse_cli(Config, ["--model=-"]).model == "-"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--lr", "1e-4"], {"lr": 1e-4}),
        (["--lr=3"], {"lr": 3.0}),
        (["--lr", ".5"], {"lr": 0.5}),
        # a number; that it is no learning rate is for the recipe to say
        (["--lr", "-1"], {"lr": -1.0}),
        (["--steps", "-5"], {"steps": -5}),
        (["--batch-size", "4", "--grad-accum=2"], {"batch_size": 4, "grad_accum": 2}),
        (["--attn", "sdpa"], {"attn": "sdpa"}),
        (
            ["--epochs", "3.0", "--lr", ".0", "--warmup=-2.0"],
            {"epochs": 3, "lr": 0.0, "warmup": -2},
        ),
        (["--dtype", "float32"], {"dtype": "fp32"}),  # as torch calls it
    ],
)
def test_numbers_and_choices_are_read_by_the_type_of_their_field(argv, expected):
    cfg = parse_cli(Config, argv)
    assert changed(cfg) == expected
    assert all(type(getattr(cfg, name)) is type(value) for name, value in expected.items())


@pytest.mark.parametrize("word", ["true", "True", "TRUE", "yes", "Yes", "1", "on"])
def test_a_switch_takes_a_word_for_true(word):
    assert parse_cli(Config, ["--wandb", word]).wandb is True


@pytest.mark.parametrize("word", ["false", "False", "no", "NO", "0", "off"])
def test_a_switch_takes_a_word_for_false(word):
    assert parse_cli(Config, ["--low_cpu_fsdp", word]).low_cpu_fsdp is False
    assert parse_cli(Config, [f"--low_cpu_fsdp={word}"]).low_cpu_fsdp is False


def test_a_switch_may_stand_alone_also_before_another_flag():
    assert changed(parse_cli(Config, ["--low_cpu_fsdp", "--wandb", "--model", "X"])) == {
        "wandb": True,
        "model": "X",
    }
    assert parse_cli(Config, ["--model", "X", "--wandb"]).wandb is True


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--quantization"], "8bit"),
        (["--quantization", "--model", "X"], "8bit"),
        (["--quantization", "true"], "8bit"),
        (["--quantization", "4bit"], "4bit"),
        (["--quantization=none"], "none"),
    ],
)
def test_a_choice_may_be_a_switch_too(argv, expected):
    assert parse_cli(Config, argv).quantization == expected


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        # names
        (["--learing_rate", "1"], "unknown flag --learing_rate: did you mean --lr?"),
        (["--batch", "0"], "unknown flag --batch: did you mean --batch_size?"),
        (["--lrr", "1"], "did you mean --lr?"),
        (["--LR", "1"], "unknown flag --LR: did you mean --lr?"),
        (["--zzzzzz"], "unknown flag --zzzzzz: --help lists them all"),
        (["--outputdir", "x"], "did you mean --output_dir?"),
        # numbers
        (["--lr", "abc"], "--lr takes a finite number such as 0.001 or 1e-3, not 'abc'"),
        (["--lr", "nan"], "--lr takes a finite number"),
        (["--lr=-inf"], "not '-inf'"),
        (["--lr", "1e999"], "not '1e999'"),
        (["--lr="], "not ''"),
        (["--lr"], "--lr needs a value"),
        (["--steps", "3.7"], "--steps takes a whole number such as 1000, not '3.7'"),
        (["--steps", "1e3"], "not '1e3'"),
        (["--steps", "1" * 5000], "--steps takes a whole number"),
        # switches
        (["--wandb", "maybe"], "--wandb takes true or false, not 'maybe'"),
        (["--attn", "flash"], "--attn takes one of auto, sdpa, eager; not 'flash'"),
        (["--quantization", "false"], "--quantization takes one of none, 8bit, 4bit; not 'false'"),
        # no value, stray words, separators
        (["--model"], "--model needs a value"),
        (["--model", "--lr", "1"], "--model needs a value"),
        (["--attn"], "--attn needs a value"),
        (["stray"], "'stray'"),
        (
            ["a.yaml"],
            "'a.yaml' belongs to no flag (fix: --config FILE if it is a file of settings,",
        ),
        (["lr=3"], "'lr=3' belongs to no flag (fix: --config FILE"),
        (["lr=3"], "--name value if it is -name or name=value,"),
        (["--model", "a", "b"], "'b' belongs to no flag (fix: --config FILE"),
        (["--model", "a", "b"], "and several values as one, with commas: --dataset a,b)"),
        (["--model=a", "b"], "'b' belongs to no flag"),
        (["-lr", "1"], "'-lr' belongs to no flag"),
        (["--model", "X", "stray"], "belongs to no flag"),
        (["-"], "'-' belongs to no flag"),
        (["--model", "X", "-", "--lr", "1"], "'-' belongs to no flag"),
        (["--"], "unknown flag --: "),
        (["--config"], "--config needs a value"),
        (["--config", "--lr", "1"], "--config needs a value"),
        (["--interactive"], "unknown flag --interactive"),
        # a name is as typed: its no is no switch
        (["--no_wandb"], "unknown flag --no_wandb: "),
        (["--non_blocking"], "unknown flag --non_blocking: nothing has to be set for it (fix: "),
        (["--no_remove_unused_columns"], "unknown flag --no_remove_unused_columns: nothing has"),
        (["--normalize_reward"], "unknown flag --normalize_reward: the advantage of a completion"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(argv, words):
    assert words in refusal(*argv)


def test_of_a_flag_that_is_given_twice_the_last_one_counts_with_a_line(capsys):
    """Launch scripts append theirs."""
    assert parse_cli(Config, ["--lr", "1", "--wandb", "--lr", "2"]).lr == 2
    assert capsys.readouterr().out == "--lr is given twice: the last one counts\n"


def test_nothing_of_main_runs_before_the_command_line_is_understood(tmp_path):
    script = tmp_path / "recipe.py"
    script.write_text(
        '"""A recipe."""\n'
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from dataclasses import dataclass\n"
        "from utils.run.settings import parse_cli\n"
        "from utils.run.signals import report_errors\n"
        "@dataclass\n"
        "class Config:\n"
        "    # What\n"
        "    model: str = ''  # a folder\n"
        "def main(cfg): print('ran', repr(cfg.model), 'torch' in sys.modules)\n"
        "with report_errors(): main(parse_cli(Config))\n"
    )

    def run(words, fresh=False):
        command = f"python {script} {words}"
        done = shell(command) if fresh else forked(command, apart=True)
        return done.returncode, done.stdout, done.stderr

    # torch is not imported either, and a fork would have it
    assert run("--model foo#bar", fresh=True) == (0, "ran 'foo#bar' False\n", "")
    assert run("--model x --modle y") == (
        2,
        "",
        "error: unknown flag --modle: did you mean --model?\n",
    )
    assert run("-- --interactive")[:2] == (2, "")
    code, out, err = run("--model x --help")
    assert (code, err) == (0, "")
    assert "--model" in out
    assert "ran" not in out


# --- help ---


def test_help_is_the_comments_in_their_groups():
    text = help_text(Config, kinds_of(Config))
    assert text.startswith("Flags, YAML and --help")  # the module's docstring
    assert [line for line in text.splitlines() if line in ("What", "How much", "How", "Where")] == [
        "What",
        "How much",
        "How",
        "Where",
    ]
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("  --")}
    assert set(rows) == {f"--{f.name}" for f in dataclasses.fields(Config)} | {"--config"}
    assert "folder or id (default: empty)" in rows["--model"]
    assert "told above it; peak (default: 2e-05)" in rows["--lr"]
    assert "auto|sdpa|eager" in rows["--attn"]
    assert "[none|8bit|4bit]" in rows["--quantization"]
    assert "frozen base" in rows["--quantization"]
    assert "[true|false]" in rows["--wandb"]
    assert "(default: false)" in rows["--wandb"]


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--lr", "abc", "--help"]])
def test_help_prints_and_exits_with_zero(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_cli(Config, argv)
    assert stop.value.code == 0
    assert "--low_cpu_fsdp" in capsys.readouterr().out


def test_only_rank_0_prints_help(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        parse_cli(Config, ["--help"])
    assert capsys.readouterr().out == ""


# --- YAML ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("# a comment\n\n", {}),
        ("lr: 1e-4", {"lr": 1e-4}),  # text to YAML, a number to everyone else
        ("lr: '1e-4'", {"lr": 1e-4}),
        ("model: no", {"model": "no"}),  # false to YAML
        ("model: 1e5\nname: 1.10", {"model": "1e5", "name": "1.10"}),
        ("model: 2024-01-01", {"model": "2024-01-01"}),
        ("model: 0x10", {"model": "0x10"}),
        ("model: foo#bar  # a comment", {"model": "foo#bar"}),
        ("model: ~/m", {"model": "~/m"}),
        ("model: ''\nname: \"\"", {"name": ""}),
        ("low_cpu_fsdp: no\nwandb: 'yes'", {"low_cpu_fsdp": False, "wandb": True}),
        ("batch-size: 3", {"batch_size": 3}),
        ("quantization: true", {"quantization": "8bit"}),
        ("model:", {}),
        # as others write their defaults, and what is not set there
        ("steps: null\nname: ~\nlr: NULL", {}),
        ("fp16:\nspecial_tokens: null\nwandb_entity: ~", {}),
        ("epochs: 3.0\ndtype: bfloat16", {"epochs": 3, "dtype": "bf16"}),
        ("\ufefflr: 1\r\nsteps: 2\r\n", {"lr": 1.0, "steps": 2}),
    ],
)
def test_yaml_is_read_as_its_words_stand(text, expected, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(text.encode())
    assert changed(parse_cli(Config, ["--config", str(path)])) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr: 1\nlr: 2", "a.yaml:2: lr is set twice"),
        ("batch-size: 1\nbatch_size: 2", "a.yaml:2: batch_size is set twice"),
        ("lrr: 1", "a.yaml:1: lrr is no setting: did you mean --lr?"),
        ("learning_rate: 1", "a.yaml:1: learning_rate is no setting: did you mean --lr?"),
        ("config: b.yaml", "config is no setting"),
        ("lr:\t1", "found character '\\t'"),
        ("lr: 1\nmodel: a: b", "mapping values are not allowed here"),
        ("model: !!python/object/apply:os.system [touch hacked]", "no lists and no mappings"),
        ("attn: no", "attn takes one of auto, sdpa, eager; not 'no'"),
        ("lr: [1]", "a.yaml:1: lr: one `name: value` a line, no lists and no mappings"),
        ("lr: {a: 1}", "no lists and no mappings"),
        ("{{ lr }}: 1", "no lists and no mappings"),  # a template that nobody filled in
        ("lr: yes", "lr takes a finite number such as 0.001 or 1e-3, not 'yes'"),
        ("lr:", "lr takes a finite number"),
        ("steps: 1.5", "not '1.5'"),
        ("lr: 'null'", "lr takes a finite number"),  # a text
        ("- lr", "expected lines such as `lr: 1e-4`"),
        ("lr 1", "expected lines such as `lr: 1e-4`"),
        ("lr: 1\n---\nlr: 2", "another document"),
    ],
)
def test_yaml_that_cannot_be_meant_names_file_and_line(text, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(text)
    message = refusal("--config", "a.yaml")
    assert "a.yaml" in message
    assert words in message
    assert os.listdir() == ["a.yaml"]


def test_a_config_file_that_cannot_be_read_is_told_from_one_that_is_not_there(tmp_path):
    good = tmp_path / "llama3_8b.yaml"
    good.write_text("lr: 1")
    (tmp_path / "latin.yaml").write_bytes(b"model: \xe9")
    assert f"did you mean {good}?" in refusal("--config", str(tmp_path / "lama3_8b.yaml"))
    assert "No such file" in refusal("--config", "/no/such/folder/a.yaml")
    assert "Is a directory" in refusal("--config", str(tmp_path))
    assert "can't decode" in refusal("--config", str(tmp_path / "latin.yaml"))


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("lr: 1\nsteps: 7\nwandb: true\n")
    cfg = parse_cli(Config, ["--lr", "2", "--config", str(path), "--wandb", "false"])
    assert changed(cfg) == {"lr": 2.0, "steps": 7}


ODD = [
    "no",
    "1e5",
    "~",
    "",
    " a ",
    "a: b # c",
    "a\nb\r\n\tc",
    "'\"\\",
    "é漢😀",
    "\u2028\x85\x7f\udcff",
    "- x",
    "{",
    "%",
    "null",
]


@pytest.mark.parametrize("text", ODD)
def test_a_saved_config_reads_back_exactly(text, tmp_path):
    path = tmp_path / "config.yaml"
    cfg = Config(model=text, lr=1e-5 / 3, wandb=True, attn="eager", steps=-3)
    save_config(cfg, path)
    assert load_config(Config, path) == cfg
    assert parse_cli(Config, ["--config", str(path)]) == cfg
    assert yaml.safe_load(path.read_bytes()) == dataclasses.asdict(cfg)  # any YAML reader agrees
    assert os.listdir(tmp_path) == ["config.yaml"]


@pytest.mark.parametrize(
    "number", [5e-324, 1e22, 1.7976931348623157e308, 0.1, 1 / 3, 1e-5, 2.0, 1e16]
)
def test_a_saved_float_has_every_bit(number, tmp_path):
    save_config(Config(lr=number), tmp_path / "config.yaml")
    assert load_config(Config, tmp_path / "config.yaml").lr == number


def test_a_saved_config_has_every_setting_in_its_order_a_line_each(tmp_path):
    save_config(Config(), tmp_path / "config.yaml")
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        f.name for f in dataclasses.fields(Config)
    ]


def test_a_program_may_give_a_path_and_no_misspelt_value(tmp_path):
    """They ended a run in a traceback, the first at its first checkpoint, the second at its end."""
    cfg = finetune.Config(model=tmp_path, lr=1, fit=True, adapter=None)
    assert cfg.adapter == ""  # not a folder None
    assert (cfg.model, cfg.lr, cfg.fit) == (str(tmp_path), 1.0, "same")
    for setting in ({"save_dtype": "float8"}, {"optimizer": "adam"}, {"steps": 1.5}):
        (name,) = setting
        with pytest.raises(ConfigError, match=f"--{name} takes "):
            finetune.Config(**setting)


def test_a_tilde_is_the_home_folder_in_every_setting_that_names_a_path(tmp_path, monkeypatch):
    """No shell expands it in a configuration file, or after --output_dir=: runs went to a folder ./~, and a
    checkpoint, an adapter, a template or a reward was not found.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "a.yaml"
    file.write_text("model: ~/m\noutput_dir: ~/run\nadapter: ~/lora\nchat_template: ~/t.jinja\n")
    cfg = parse_cli(grpo.Config, ["--config", str(file), "--resume=~/old", "--rewards=~/r.py:f"])
    found = [cfg.model, cfg.output_dir, cfg.adapter, cfg.chat_template, cfg.resume, cfg.rewards]
    names = "m run lora t.jinja old r.py:f".split()
    assert found == [str(tmp_path / name) for name in names]


@dataclass
class Mine(finetune.Config):
    """The settings of a recipe and one more, as in a copy or a notebook."""

    margin: float = 0.5


@dataclass
class Unset(finetune.Config):
    teacher: str | None = None


def test_a_recipes_settings_can_be_a_base_class():
    assert parse_cli(Mine, ["--margin", "2", "--lr", "1e-3"]).margin == 2.0
    with pytest.raises(ConfigError, match=r"trains nothing \(fix: --lr 2e-05\)"):
        Mine(lr=0)


def test_a_setting_of_another_type_is_refused_by_its_name():
    with pytest.raises(ConfigError, match=r"^--teacher takes one of <class 'str'>, .*; not 'None'"):
        Unset()


def test_inherited_fields_are_saved(tmp_path):
    save_config(WithLora(lora_rank=4, steps=2), tmp_path / "config.yaml")
    assert load_config(WithLora, tmp_path / "config.yaml") == WithLora(lora_rank=4, steps=2)


def test_a_config_that_cannot_be_written_leaves_the_old_one(tmp_path):
    save_config(Config(steps=1), tmp_path / "config.yaml")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # as on a disk that is full
    try:
        with pytest.raises(OSError, match="File too large"):
            save_config(Config(steps=2), tmp_path / "config.yaml")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["config.yaml"]
    assert load_config(Config, tmp_path / "config.yaml").steps == 1


# --- other projects ---


def llama(*argv: str, cls=Config):
    return changed(parse_cli(cls, list(argv)))


def test_a_llama_recipes_command_runs_in_our_words(capsys):
    command = (
        "--enable_fsdp --low_cpu_fsdp --model_name DIR --batch_size_training 1 --context_length 512"
    )
    command += " --num_epochs 3 --gradient_accumulation_steps 4 --output_dir ./output --save_model"
    command += " --mixed_precision --use_wandb"
    assert llama(*command.split()) == {
        "model": "DIR",
        "seq_len": 512,
        "epochs": 3,
        "grad_accum": 4,
        "output_dir": "./output",
        "wandb": True,
    }
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == [
        "--enable_fsdp has no meaning here: every run is sharded",
        "--model_name is --model here",
        "--batch_size_training is --batch_size here",
    ]
    assert len(said) == 9  # one for each use, and the defaults of llama-recipes
    assert said[-1].endswith("(to come near: --lr 1e-4 --warmup 0 --clip_norm 0)")


def test_only_rank_0_tells_what_a_flag_is_here(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert llama("--model_name", "DIR") == {"model": "DIR"}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--mixed_precision false", {"dtype": "fp32"}),
        ("--use_fp16 False", {}),
        ("--use_fast_kernels", {"attn": "sdpa"}),
        ("--gradient_clipping false", {"clip_norm": 0.0}),
        ("--gradient_clipping --gradient_clipping_threshold 0.5", {"clip_norm": 0.5}),
        ("--train_config.model_name DIR --train_config.lr 1e-4", {"model": "DIR", "lr": 1e-4}),
        ("--fsdp_config.sharding_strategy ShardingStrategy.FULL_SHARD --optimizer AdamW", {}),
        ("--wandb_config.project mine --gamma 0.85 --samsum_dataset.train_split train", {}),
        ("--peft_method lora --use_peft false", {}),
        ("--train_config.quantization", {"quantization": "8bit"}),
        ("--quant_type int4", {"quantization": "4bit"}),
    ],
)
def test_llama_recipes_values_become_ours(argv, expected):
    assert llama(*argv.split()) == expected


def test_data_path_names_the_rows_that_are_trained():
    """Ignored, a run would train on the tiny task instead."""
    for flag in ("--data_path", "--alpaca_dataset.data_path", "--dataset_path"):
        assert parse_cli(finetune.Config, [flag, "a.jsonl"]).dataset == "a.jsonl"
    both = ["--data_path", "a.jsonl", "--dataset", "b.jsonl"]
    assert parse_cli(finetune.Config, both).dataset == "b.jsonl"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--use_peft", "--use_peft True needs --lora_rank: recipes that train adapters have it: "),
        (
            "--shard_x.sharding_group_size 2",
            "needs --shard: it is no flag of this recipe (fix: leave",
        ),
        ("--sharding_strategy NO_SHARD", "--sharding_strategy NO_SHARD: works with full_shard"),
        ("--peft_method prefix", "--peft_method prefix: works with lora only (fix: leave it out)"),
        ("--freeze_layers", "--freeze_layers True: works with false only"),
        ("--num_epochs 1.5", "--epochs takes a whole number"),
        ("--modle_name x", "unknown flag --modle_name"),
        ("--per_device_train_batch_size 4", "did you mean --batch_size?"),
        ("--max_length 4", "unknown flag --max_length: did you mean --seq_len?"),
        ("--load_in_4bit true", "(fix: --quantization 4bit)"),
        ("--deepspeed ds.json", "--deepspeed: there is no DeepSpeed here (fix: "),
        # the launcher of DeepSpeed and torch.distributed.launch add it to the recipe's flags
        ("--local-rank=0", "--local_rank: torchrun gives each rank its number (fix: start with"),
        ("--nproc_per_node 2", "before the recipe (fix: torchrun --nproc_per_node N"),
        # torchtune and NeMo AutoModel name the section before the flag
        ("--step_scheduler.max_steps 4", "unknown flag --max_steps: did you mean --steps?"),
        ("--wandb_project mine", "WANDB_PROJECT"),
        # flags of other recipes here
        ("--group_size 4", "--group_size: it is a flag of recipes/grpo.py (fix: leave it out"),
        ("--tokens 2e9", "in recipes/pretrain.py it is the length of a run; new tokens are"),
        ("--label_smoothing_factor 0.1", "for preferences recipes/prefer.py --label_smoothing)"),
        ("--per_device_eval_batch_size 8", "the held-out loss uses --batch_size"),
    ],
)
def test_flags_of_others_that_cannot_be_followed_are_answered(argv, words):
    assert words in refusal(*argv.split())


LORA = {"lora_rank": 8, "lora_alpha": 32.0, "lora_targets": "q_proj,v_proj", "lora_dropout": 0.05}


def test_use_peft_means_rank_8_unless_the_rank_is_set_elsewhere(tmp_path):
    assert llama("--use_peft", "--peft_method", "lora", cls=WithLora) == LORA
    assert llama("--lora_rank", "16", "--use_peft", cls=WithLora) == LORA | {"lora_rank": 16}
    assert llama("--use_peft", "--lora_alpha", "64", cls=WithLora) == LORA | {"lora_alpha": 64.0}
    (tmp_path / "a.yaml").write_text("lora_rank: 4")
    assert llama("--use_peft", "--config", str(tmp_path / "a.yaml"), cls=WithLora) == LORA | {
        "lora_rank": 4
    }


def test_pure_bf16_is_the_dtype_of_weights_and_beside_adapters_that_of_compute():
    both = llama("--fsdp_config.pure_bf16", "--fsdp_cpu_offload", cls=WithLora)
    assert both == {"param_dtype": "bf16", "cpu_offload": True}
    adapters = llama("--use_peft", "--fsdp_config.pure_bf16", cls=WithLora)
    assert adapters == LORA | {"dtype": "bf16"}


def test_each_hint_is_a_flag_of_a_recipe_or_a_sentence_with_a_remedy():
    configs = (
        finetune.Config,
        prefer.Config,
        reward.Config,
        pretrain.Config,
        grpo.Config,
        vision.Config,
        generate.Config,
        plan.Config,
    )
    names = {field.name for config in configs for field in dataclasses.fields(config)}
    for name, ours in foreign_flags.HINTS.items():
        flag, _, value = ours.partition(" ")
        assert flag in names or "(fix: " in ours, name
        if flag in names and value:
            kinds = kinds_of(finetune.Config)
            assert str(read_value(*kinds[flag], name, value)).lower() == value
        if "(fix: " in ours:  # else it reads as `did you mean --flag?`
            assert flag not in names | foreign_flags.HINTS.keys()
        # a setting of one recipe is explained in those that lack it
        assert name not in names or "(fix: " in ours


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("max_samples", "max_rows"),  # in each example of LLaMA-Factory
        ("adapter_name_or_path", "adapter"),
        ("lora_target", "lora_targets all-linear"),
        ("train_on_inputs", "train_on"),  # in each example of axolotl
        ("lora_model_dir", "adapter"),
        ("clip_grad_norm", "clip_norm"),  # in each config of torchtune
        ("dp_replicate_size", "replicate"),
        ("local_batch_size", "batch_size"),  # in each config of NeMo AutoModel
        ("ckpt_every_steps", "save_every"),
    ],
)
def test_frequent_flags_of_published_examples_are_answered_with_ours(theirs, ours):
    with pytest.raises(ConfigError, match=f"unknown flag --{theirs}: did you mean --{ours}[?]"):
        parse_cli(finetune.Config, [f"--{theirs}", "x"])


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ("train_type", "did you mean --lora_rank?"),  # ms-swift
        ("split_dataset_ratio", "did you mean --eval_share?"),
        (
            "rlhf_type",
            "did you mean --loss? it is a flag of recipes/prefer.py and grpo.py (fix: leave it",
        ),
        (
            "num_generations",
            "did you mean --group_size? it is a flag of recipes/grpo.py (fix: leave it",
        ),
        ("micro_train_batch_size", "did you mean --batch_size?"),  # OpenRLHF
        ("zero_stage", "there is no DeepSpeed here (fix: leave it out;"),
        ("data.train_files", "did you mean --dataset?"),  # verl
        ("train.micro_batch_size", "did you mean --batch_size?"),  # litgpt
        ("use_gradient_checkpointing", "did you mean --activation_checkpointing full?"),  # Unsloth
        ("system", "(fix: --chat_template FILE; if rows have their own, --columns system="),
        (
            "default_system",
            'is the first line of a copy of the chat template, {%- set messages = [{"role"',
        ),
        (
            "loftq_config",
            "--loftq_config: LoRA begins as in its paper, B at zero (fix: leave it out,",
        ),
        ("pissa_init", "LoRA begins as in its paper"),
        (
            "model_revision",
            "(fix: hf download OWNER/NAME --revision REV --local-dir DIR, and --model",
        ),
        ("nll_loss_coef", "did you mean --sft_weight? it is a flag of recipes/prefer.py"),
        ("warmup_style", "did you mean --schedule?"),
        ("video_max_pixels", "rows have pictures, and no videos (fix: leave it out)"),
        ("quantization_method", "are NF4 in blocks of 64"),
        ("additional_target", "did you mean --modules_to_save?"),
        ("eos_token", "the end of a turn is that of the chat template (fix: "),
        ("dataset_mixer_list", "(fix: leave it out, and --dataset a.jsonl:0.7,b.jsonl:0.3)"),
        ("use_dft_loss", "the loss of tokens is plain cross-entropy (fix: leave it out;"),
        (
            "shuffle_dataset",
            "rows come in a new order in each epoch, by --seed (fix: leave it out)",
        ),
        ("eval_packing", "with --packing held-out rows are packed too (fix: leave it out)"),
        ("mask_prompt", "did you mean --train_on?"),
        ("grad_clip", "did you mean --clip_norm?"),
        ("lora_query", "did you mean --lora_targets?"),
        ("packing_strategy", "did you mean --packing?"),
        ("bnb_4bit_quant_type", "are NF4 in blocks of 64, computed in --dtype (fix: leave it out)"),
    ],
)
def test_flags_of_further_projects_are_answered_also_those_of_a_sibling(theirs, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_cli(finetune.Config, [f"--{theirs}", "x"])


def test_a_yaml_of_another_project_is_answered_key_by_key(tmp_path):
    """As in the examples of axolotl: also lists, sections, and values that are not ours."""
    path = tmp_path / "theirs.yml"
    path.write_text(
        "base_model: X\noptimizer: adamw_torch_fused\ndatasets:\n  - path: a\nnum_epochs: 1\n"
        "saves_per_epoch: 1\nspecial_tokens:\n  pad_token: x\nload_in_8bit: false\nlr: [1]\nzzzzz: 1\n"
    )
    message = refusal("--config", str(path), cls=finetune.Config, lines=9)
    assert [line.removeprefix(f"{path}:") for line in message.splitlines()] == [
        "1: base_model is no setting: did you mean --model?",
        "2: optimizer takes one of adamw, adamw_8bit, paged_adamw_8bit; not 'adamw_torch_fused'",
        "3: datasets is no setting: did you mean --dataset?",
        "5: num_epochs is no setting: did you mean --epochs?",
        "6: saves_per_epoch is no setting: evaluations and checkpoints come every N steps"
        " (fix: --eval_every N and --save_every N)",
        "7: special_tokens is no setting: new tokens are added before the run, and the end of a turn is"
        " that of the chat template (fix: leave it out; recipes/README.md, New tokens)",
        "9: load_in_8bit is no setting: it is off here too (fix: leave it out)",
        "10: lr: one `name: value` a line, no lists and no mappings",
        "11: zzzzz is no setting: --help lists them all",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("load_in_4bit: false", "it is off here too (fix: leave it out)"),
        ("fp16: False", "it is off here too"),
        ("fp16: true", "did you mean --dtype fp16?"),
        ("bf16: auto", "nothing has to be set for it (fix: leave it out)"),
        ("bf16: false", "(fix: --dtype fp32, or --dtype fp16)"),
        ("enable_activation_checkpointing: False", "it is off here too"),
        ("enable_activation_checkpointing: True", "did you mean --activation_checkpointing full?"),
        ("disable_gradient_checkpointing: true", "it is off here too"),
        ("disable_gradient_checkpointing: false", "did you mean --activation_checkpointing full?"),
        ("use_peft: false", "it is off here too"),
        ("use_peft: true", "did you mean --lora_rank?"),
        ("pure_bf16: true", "did you mean --param_dtype bf16?"),
        ("finetuning_type: full", "it is off here too"),
        ("finetuning_type: lora", "did you mean --lora_rank?"),
        ("train_on_inputs: false", "it is so here, but in recipes/pretrain.py, which"),
        ("load_in_4bit: no", "it is off here too"),
        ("train_on_inputs: true", "did you mean --train_on?"),
        ("assistant_only_loss: true", "it is so here"),
        ("template: qwen3", "an instruct model has a template of its own (fix: leave it out;"),
        ("template: mine", "did you mean --chat_template?"),
        ("neat_packing: true", "did you mean --packing true?"),
        ("report_to: wandb", "did you mean --wandb true?"),
        ("report_to: none", "it is off here too"),
        ("report_to: trackio", "the log is OUT/metrics.jsonl (fix: leave it out, or --tensorboard"),
        ("loss_type: dft", "the loss of tokens is plain cross-entropy (fix: leave it out;"),
        ("loss_type: chunked_nll", "the loss never holds the logits of all tokens anyway"),
        ("optim: adamw_torch_fused", "did you mean --optimizer adamw?"),
        (
            "torch_dtype: bfloat16",
            "--param_dtype bf16 is for little memory, small updates are rounded",
        ),
    ],
)
def test_what_is_off_in_a_yaml_is_not_answered_with_on(line, words, tmp_path):
    (tmp_path / "theirs.yaml").write_text(line)
    assert words in refusal("--config", str(tmp_path / "theirs.yaml"), cls=finetune.Config)
    name, _, value = line.partition(": ")
    if name not in foreign_flags.TABLES["llama_recipes"]:
        assert words in refusal(f"--{name}", value, cls=finetune.Config)


@pytest.mark.parametrize("name", foreign_flags.TABLES["shared"])
def test_a_name_that_others_share_does_not_tell_of_llama_recipes(name, capsys):
    value = {"bias": "none", "task_type": "CAUSAL_LM", "use_peft": "true"}.get(name, "4")
    parse_cli(finetune.Config, [f"--{name}={value}", "--model=m", "--lora_rank=4"])
    (line,) = capsys.readouterr().out.splitlines()  # what it is here, and no note
    assert line.startswith(f"--{name}")
    parse_cli(finetune.Config, [f"--{name}={value}", "--model_name=m", "--lora_rank=4"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("llama-recipes itself would train")


def test_a_step_of_grpo_has_prompts_and_no_micro_batches(tmp_path):
    (tmp_path / "theirs.yaml").write_text("gradient_accumulation_steps: 8")
    for argv in (
        ["--gradient_accumulation_steps", "8"],
        ["--grad_accum", "8"],
        ["--config", str(tmp_path / "theirs.yaml")],
    ):
        message = refusal(*argv, cls=grpo.Config)
        assert (
            "a step has --global_batch_size prompts: of TRL per_device_train_batch_size x"
            in message
        )
        assert "of verl ppo_mini_batch_size (fix: --global_batch_size N there; leave" in message


def test_advice_is_given_for_exact_names_only():
    assert "--help lists them all" in refusal("--dist_config", "x")  # near to dataset_config


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--top_p 0.9", "draws from all tokens, at --temperature (fix: leave it out"),
        ("--vllm_server_host 0.0.0.0", "draws with the model that trains (fix: leave it out"),
        ("--mask_truncated_completions true", "are trained, with their rewards;"),
        ("--importance_sampling_level sequence", "GSPO is in utils/README.md)"),
        ("--reward_weights 1 0.5", "behind its reward (fix: --rewards exact:2,"),
        ("--generation_batch_size 64", "--group_size completions of each of --global_batch_size"),
        ("--sync_ref_model true", "the reference is the model at its start"),
        ("--log_completions true", "OUT/samples.jsonl has"),
        ("--chat_template_kwargs {}", "(fix: --chat_template FILE, whose first line is"),
        (
            "--system_prompt x",
            "(fix: --chat_template FILE; if rows have their own, --columns system=THEIRS)",
        ),
        ("--n_samples_per_prompt 8", "did you mean --group_size?"),  # OpenRLHF
        ("--init_kl_coef 0.01", "did you mean --kl_beta?"),
        ("--actor_rollout_ref.rollout.n 5", "in recipes/grpo.py it is --group_size,"),  # verl
        ("--num_samples_per_prompt_rollout 8", "did you mean --group_size?"),  # open-instruct
        ("--num_unique_prompts_rollout 8", "did you mean --global_batch_size?"),
        ("--num_mini_batches 1", "--group_size completions of each of --global_batch_size"),
        ("--ppo_epochs 1", "did you mean --epochs_per_rollout?"),
        ("--clip_ratio_c 3", "is written out in policy_loss of recipes/grpo.py"),
        ("--critic_learning_rate 9e-6", "there is no critic here (fix: leave it out)"),
        ("--dpo_beta 0.1", "DPO is recipes/prefer.py; GRPO's beta is --kl_beta"),
    ],
)
def test_flags_of_trl_and_openrlhf_for_rewards_are_answered(argv, words):
    with pytest.raises(ConfigError) as refused:
        parse_cli(grpo.Config, argv.split()[:2])
    assert words in str(refused.value)


def test_each_flag_of_the_llama_recipes_table_works_or_is_answered(capsys):
    for name, meaning in foreign_flags.TABLES["llama_recipes"].items():
        for text in meaning if isinstance(meaning, dict) else ["4"]:
            text = {"optimizer": "adamw", "use_wandb": "true"}.get(name, text)
            argv = [f"--{name}={text}", f"--lora_rank={0 if name == 'pure_bf16' else 4}"]
            argv += [] if name == "model_name" else ["--model=m"]
            parse_cli(finetune.Config, argv)
            assert name == "optimizer" or capsys.readouterr().out.startswith(f"--{name}")


def test_each_setting_of_llama_recipes_has_an_answer():
    """Those of its train_config, fsdp_config, lora_config and wandb_config that are not ours."""
    settings = """model_name tokenizer_name enable_fsdp run_validation batch_size_training batching_strategy
        context_length gradient_accumulation_steps gradient_clipping gradient_clipping_threshold num_epochs
        max_train_step max_eval_step num_workers_dataloader gamma use_fp16 mixed_precision val_batch_size
        peft_method use_peft from_peft_checkpoint freeze_layers num_freeze_layers freeze_LLM_only one_gpu
        dist_checkpoint_root_folder dist_checkpoint_folder save_optimizer use_fast_kernels use_wandb
        save_metrics flop_counter flop_counter_start use_profiler profiler_dir sharding_strategy hsdp
        sharding_group_size replica_group_size checkpoint_type fsdp_activation_checkpointing
        fsdp_cpu_offload pure_bf16 r target_modules bias task_type inference_mode project entity job_type
        tags group notes mode""".split()
    assert {*settings} <= foreign_flags.TABLES["llama_recipes"].keys()


def test_a_copy_without_the_table_still_refuses_unknown_flags(monkeypatch):
    monkeypatch.setitem(sys.modules, foreign_flags.__name__, None)  # as if it were not here
    with pytest.raises(ConfigError, match="unknown flag --model_name"):
        parse_cli(Config, ["--model_name", "x"])
