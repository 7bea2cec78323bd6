"""Flags, YAML and --help: what is typed is what is meant, or it is refused in one line.

python -m pytest tests/test_config.py
"""

import dataclasses
import itertools
import os
import resource
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import yaml

from utils.run.errors import ConfigError
from utils.run.foreign_flags import project
from utils.run.settings import help_text, load_config, parse_cli, save_config

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Config:
    # What
    model: str = ""  # folder or id; "#" is no comment here
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
    quantization: Literal["none", "8bit", "4bit"] = field(
        default="none", metadata={"bare": "8bit"}
    )  # frozen base

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
        parse_cli(cls, list(argv), aliases="foreign_flags")
    message = str(error.value)
    assert len(message.splitlines()) == lines
    return message


# --- flags ---


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
        # row 77: names
        (["--learing_rate", "1"], "unknown flag --learing_rate (did you mean --lr?)"),
        (["--batch", "0"], "unknown flag --batch (did you mean --batch_size?)"),
        (["--LR", "1"], "did you mean --lr?"),
        (["-lr", "1"], "unknown flag -lr (did you mean --lr?)"),
        (["---lr", "1"], "unknown flag ---lr (did you mean --lr?)"),
        (["-l", "1"], "unknown flag -l"),
        (["--zzzzzz"], "unknown flag --zzzzzz (--help lists them all)"),
        (["--save_model_every", "1"], "unknown flag --save_model_every (--help lists them all)"),
        (["--conifg", "x"], "did you mean --config?"),
        (["--nolow_cpu_fsdp"], "did you mean --low_cpu_fsdp false?"),
        (["--no_low_cpu_fsdp"], "did you mean --low_cpu_fsdp false?"),
        (["--=x"], "unknown flag --"),
        # row 78: numbers
        (["--lr", "abc"], "--lr takes a finite number such as 0.001 or 1e-3, not 'abc'"),
        (["--lr", "nan"], "--lr takes a finite number"),
        (["--lr", "inf"], "--lr takes a finite number"),
        (["--lr=-inf"], "not '-inf'"),
        (["--lr", "1e999"], "not '1e999'"),
        (["--lr", "1_0.0"], "not '1_0.0'"),
        (["--lr="], "not ''"),
        (["--lr", "True"], "not 'True'"),
        (
            ["--steps", "3.7"],
            "--steps takes a whole number in plain digits such as 1000, not '3.7'",
        ),
        (["--steps", "1e3"], "not '1e3'"),
        (["--steps", "1_000"], "not '1_000'"),
        (["--steps", "0x10"], "not '0x10'"),
        (["--steps", "007"], "not '007'"),
        (["--steps", " 5"], "not ' 5'"),
        (["--steps", "5\n"], "not '5\\n'"),
        # row 91: digits of other scripts, numbers that fit nowhere
        (["--steps", "１２"], "not '１２'"),
        (["--lr", "１"], "not '１'"),
        (["--steps", "1" + "0" * 400], "--steps takes a whole number"),
        (["--lr", "1" + "0" * 400], "--lr takes a finite number"),
        (["--steps", "1" * 5000], "--steps takes a whole number"),
        # row 79: switches
        (["--wandb", "maybe"], "--wandb takes true or false, not 'maybe'"),
        (["--wandb", "2"], "--wandb takes true or false, not '2'"),
        (["--attn", "flash"], "--attn takes one of auto, sdpa, eager; not 'flash'"),
        (["--quantization", "false"], "--quantization takes one of none, 8bit, 4bit; not 'false'"),
        # row 81: twice, no value, stray words, separators
        (["--lr", "1", "--lr", "1"], "--lr is given twice"),
        (
            ["--batch_size", "1", "--batch-size=2"],
            "--batch_size is given twice (--batch_size, --batch-size)",
        ),
        (["--wandb", "--wandb"], "--wandb is given twice"),
        (["--model"], "--model needs a value"),
        (["--model", "--lr", "1"], "--model needs a value"),
        (["--attn"], "--attn needs a value"),
        (["--config"], "--config needs a value"),
        (["stray"], "'stray' belongs to no flag"),
        (["--model", "X", "stray"], "'stray' belongs to no flag"),
        ([""], "'' belongs to no flag"),
        (["–lr", "1"], "belongs to no flag"),
        (["-"], "a lone - has no meaning"),
        (["--model", "-"], "a lone - has no meaning"),
        (["--model", "X", "-", "--lr", "1"], "a lone - has no meaning"),
        # row 82: fire's own flags
        (["--", "--interactive"], "a lone -- has no meaning"),
        (["--lr", "1", "--", "--trace"], "a lone -- has no meaning"),
        (["--", "--completion"], "a lone -- has no meaning"),
        (["--interactive"], "unknown flag --interactive"),
        (["--trace"], "unknown flag --trace"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(argv, words):
    assert words in refusal(*argv)


def test_nothing_of_main_runs_before_the_command_line_is_understood(tmp_path):
    script = tmp_path / "recipe.py"
    script.write_text(
        '"""A recipe."""\n'
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from dataclasses import dataclass\n"
        "from utils.run.settings import parse_cli\n"
        "from utils.run.errors import report_errors\n"
        "@dataclass\n"
        "class Config:\n"
        "    # What\n"
        "    model: str = ''  # a folder\n"
        "def main(cfg): print('ran', repr(cfg.model), 'torch' in sys.modules)\n"
        "with report_errors(): main(parse_cli(Config, aliases='foreign_flags'))\n"
    )

    def run(*argv):
        done = subprocess.run(
            [sys.executable, script, *argv], capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout, done.stderr

    assert run("--model", "foo#bar") == (0, "ran 'foo#bar' False\n", "")
    assert run("--model", "x", "--modle", "y") == (
        2,
        "",
        "error: unknown flag --modle (did you mean --model?)\n",
    )
    assert run("--", "--interactive")[:2] == (2, "")
    code, out, err = run("--model", "x", "--help")
    assert (code, err) == (0, "")
    assert "--model" in out
    assert "ran" not in out


# --- help ---


def test_help_is_the_comments_in_their_groups():
    text = help_text(Config)
    assert text.startswith("Flags, YAML and --help")  # the module's docstring
    assert [line for line in text.splitlines() if line in ("What", "How much", "How", "Where")] == [
        "What",
        "How much",
        "How",
        "Where",
    ]
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("  --")}
    assert set(rows) == {f"--{f.name}" for f in dataclasses.fields(Config)} | {"--config"}
    assert 'folder or id; "#" is no comment here (default: empty)' in rows["--model"]
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
        ("\ufefflr: 1\r\nsteps: 2\r\n", {"lr": 1.0, "steps": 2}),
    ],
)
def test_yaml_is_read_as_its_words_stand(text, expected, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(text.encode())
    assert changed(parse_cli(Config, ["--config", str(path)])) == expected


BOMB = "a: &a [x, x]\n" + "".join(
    f"{c}: &{c} [*{p}, *{p}, *{p}, *{p}]\n" for p, c in itertools.pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr: 1\nlr: 2", "a.yaml:2: lr is set twice"),
        ("batch-size: 1\nbatch_size: 2", "a.yaml:2: batch_size is set twice"),
        ("learing_rate: 1", "a.yaml:1: learing_rate is no setting (did you mean lr?)"),
        ("config: b.yaml", "config is no setting"),
        ("lr:\t1", "a.yaml:1: found character '\\t'"),
        ("\tlr: 1", "a.yaml:1: found character '\\t'"),
        ("lr: 1\nmodel: a: b", "a.yaml:2: mapping values are not allowed here"),
        ("model: !!python/object/apply:os.system [touch hacked]", "model takes one value"),
        (
            "model: !!python/name:os.system x",
            "model takes a plain value, not python/name:os.system",
        ),
        ("model: !mine x", "model takes a plain value, not !mine"),
        (BOMB, "a is no setting"),
        (BOMB.replace("a:", "model:", 1), "model takes one value"),
        ("[" * 20000, "recursion"),
        ("attn: no", "attn takes one of auto, sdpa, eager; not 'no'"),
        ("lr: [1]", "a.yaml:1: lr takes one value, not a list or a mapping"),
        ("lr: {a: 1}", "lr takes one value"),
        ("lr: yes", "lr takes a finite number such as 0.001 or 1e-3, not 'yes'"),
        ("lr: .inf", "not '.inf'"),
        ("steps: 010", "not '010'"),  # 8 to YAML
        ("steps: 1:30", "not '1:30'"),  # 90 to YAML
        ("steps: 1.0", "not '1.0'"),
        ("steps: 1" + "0" * 400, "steps takes a whole number"),
        ("model:", 'model takes a plain value, not null; the empty text is ""'),
        ("model: ~", "not null"),
        ("? [a]\n: 1", "is no setting"),
        ("<<: {lr: 1}", "<< is no setting"),
        ("- lr", "expected lines such as `lr: 1e-4`"),
        ("lr 1", "expected lines such as `lr: 1e-4`"),
        ("lr: 1\n---\nlr: 2", "another document"),
        ('model: "\\UFFFFFFFF"', "a.yaml"),
        ('model: "\\0"', "cannot hold a NUL"),
        ("model: \x00", "a.yaml"),
    ],
)
def test_yaml_that_cannot_be_meant_names_file_and_line(text, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(text)
    message = refusal("--config", "a.yaml", lines=9 if text is BOMB else 1)
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
    assert "--config is given twice" in refusal("--config", str(good), "--config", str(good))


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


def test_a_path_is_saved_as_text(tmp_path):
    save_config(Config(model=tmp_path), tmp_path / "config.yaml")
    assert load_config(Config, tmp_path / "config.yaml").model == str(tmp_path)


def test_no_field_is_lost_where_the_source_does_not_show_it(tmp_path):
    typed_at_a_prompt = dataclasses.make_dataclass("Config", [("steps", int, 0)])
    for cfg in WithLora(lora_rank=4, steps=2), typed_at_a_prompt(3):
        save_config(cfg, tmp_path / "config.yaml")
        assert load_config(type(cfg), tmp_path / "config.yaml") == cfg
        assert "--steps int" in help_text(type(cfg))


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


# --- llama-recipes ---


def llama(*argv: str, cls=Config):
    return changed(parse_cli(cls, list(argv), aliases="foreign_flags"))


def test_a_llama_recipes_command_runs_in_our_words(capsys):
    command = (
        "--enable_fsdp --low_cpu_fsdp --model_name DIR --batch_size_training 1 --context_length 512"
    )
    command += " --num_epochs 3 --gradient_accumulation_steps 4 --output_dir ./output --save_model"
    command += " --mixed_precision --use_wandb"
    assert llama(*command.split()) == {
        "model": "DIR", "seq_len": 512, "epochs": 3, "grad_accum": 4, "output_dir": "./output", "wandb": True
    }  # fmt: skip
    assert capsys.readouterr().out.splitlines() == [
        "--enable_fsdp has no meaning here: every run is sharded",
        "--model_name is --model here",
        "--batch_size_training is --batch_size here",
        "--context_length is --seq_len here",
        "--num_epochs is --epochs here",
        "--gradient_accumulation_steps is --grad_accum here",
        "--mixed_precision is what happens here",
        "--use_wandb is --wandb here",
        "llama-recipes itself would take lr 1e-4, warmup 0, clip_norm 0, AdamW's second beta 0.999 "
        "in place of 0.95, and a rate that gamma lowers to 0.85 of it after each epoch; here it is lr 2e-05, "
        "warmup -1, clip_norm 1.0 (to match: --lr 1e-4 --warmup 0 --clip_norm 0)",
    ]


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


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            "--use_peft --peft_method lora",
            "--use_peft needs --lora_rank, which is not here yet (fix: ",
        ),
        ("--batching_strategy packing", "--batching_strategy packing needs --packing"),
        ("--use_fp16", "--use_fp16 needs --dtype"),
        ("--fsdp_config.pure_bf16", "--fsdp_config.pure_bf16 needs --param_dtype"),
        ("--sharding_strategy NO_SHARD", "--sharding_strategy no_shard is not possible here"),
        (
            "--peft_method prefix",
            "--peft_method prefix is not possible here: leave it out, or write lora",
        ),
        ("--freeze_layers", "--freeze_layers is not possible here"),
        ("--model_name a --model b", "--model is given twice (--model_name, --model)"),
        ("--model_name", "--model_name needs a value"),
        ("--num_epochs 1.5", "--num_epochs takes a whole number"),
        ("--use_wandb maybe", "--use_wandb takes true or false"),
        ("--modle_name x", "unknown flag --modle_name (did you mean --model?)"),
        ("--fsdp_config.nothing 1", "unknown flag --fsdp_config.nothing"),
    ],
)
def test_llama_recipes_flags_that_cannot_work_say_so(argv, words):
    assert words in refusal(*argv.split())


def test_use_peft_means_rank_8_unless_the_rank_is_set_elsewhere(tmp_path):
    lora = {
        "lora_rank": 8,
        "lora_alpha": 32.0,
        "lora_targets": "q_proj,v_proj",
        "lora_dropout": 0.05,
    }
    assert llama("--use_peft", "--peft_method", "lora", cls=WithLora) == lora
    assert llama("--r", "16", "--use_peft", cls=WithLora) == lora | {"lora_rank": 16}
    assert llama("--use_peft", "--lora_alpha", "64", cls=WithLora) == lora | {"lora_alpha": 64.0}
    (tmp_path / "a.yaml").write_text("lora_rank: 4")
    assert llama("--use_peft", "--config", str(tmp_path / "a.yaml"), cls=WithLora) == lora | {
        "lora_rank": 4
    }


def test_flags_of_later_versions_work_where_the_recipe_has_the_setting():
    both = llama("--fsdp_config.pure_bf16", "--fsdp_cpu_offload", cls=WithLora)
    assert both == {"param_dtype": "bf16", "cpu_offload": True}


ITS_VALUES = [
    (n, v)
    for n, ours in project("llama_recipes").names.items()
    for v in (ours if isinstance(ours, dict) else ["1"])
]
ITS_DEFAULTS = "llama-recipes itself would take"
OURS_TOO = ("quantization", "name")  # flags of this Config as well


@pytest.mark.parametrize(("name", "text"), [pair for pair in ITS_VALUES if pair[0] not in OURS_TOO])
def test_every_llama_recipes_flag_has_one_line_for_the_user(name, text, capsys):
    try:
        parse_cli(Config, [f"--{name}={text}"], aliases="foreign_flags")
        lines = capsys.readouterr().out.splitlines()
    except ConfigError as refused:
        lines = str(refused).splitlines()
    if ITS_DEFAULTS in lines[-1]:  # where a model is named
        lines.pop()
    assert len(lines) == 1
    assert lines[0].startswith(f"--{name}")


def test_a_copy_without_the_table_still_refuses_unknown_flags():
    with pytest.raises(ConfigError, match="unknown flag --model_name"):
        parse_cli(Config, ["--model_name", "x"], aliases="no_such_file")
