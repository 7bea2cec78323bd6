"""Names of llama-recipes, TRL, LLaMA-Factory, axolotl and torchtune: each is understood, or answered.

python -m pytest tests/test_foreign_flags.py
"""

import dataclasses
import re
import typing

import bench
import export
import finetune
import generate
import plan
import pytest
from transformers import Seq2SeqTrainingArguments

from utils.run.errors import ConfigError
from utils.run.fields import kinds_of, read_value
from utils.run.foreign_flags import PROJECTS, find_project, known_names, project, renamed, translate
from utils.run.settings import SHORT, edits, near_setting, parse_cli

KINDS = kinds_of(finetune.Config)
FLAGS = r"--\w+( (?!--)[\w.,-]+)?"
# TRL 1.16: SFTConfig, ModelConfig, ScriptArguments, DatasetMixtureConfig; what they add to TrainingArguments.
TRL = """
model_init_kwargs trust_remote_code router_aux_loss_coef chat_template_path dataset_text_field dataset_kwargs
dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing packing_strategy padding_free
pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss loss_type activation_offloading
pad_token model_name_or_path model_revision dtype attn_implementation use_peft lora_r lora_alpha lora_dropout
lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora
load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage dataset_name
dataset_config dataset_train_split dataset_test_split dataset_streaming ignore_bias_buffers
streaming test_split_size
""".split()


def understood(*argv: str, cls=finetune.Config) -> dict:
    """The settings that differ from their defaults."""
    cfg = parse_cli(cls, list(argv), aliases="foreign_flags")
    return {f.name: v for f in dataclasses.fields(cfg) if (v := getattr(cfg, f.name)) != f.default}


def refusal(*argv: str, cls=finetune.Config) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_cli(cls, list(argv), aliases="foreign_flags")
    return str(error.value).splitlines()


def meanings(name: str):
    """(name, value or None, what the table says) of every line of a project's table."""
    one = project(name)
    for theirs, meaning in [*one.names.items(), *one.ours_too.items()]:
        for value, text in meaning.items() if isinstance(meaning, dict) else [(None, meaning)]:
            yield theirs, value, text


# --- the tables


@pytest.mark.parametrize("name", PROJECTS)
def test_every_line_of_a_table_is_flags_of_ours_or_a_sentence_or_a_refusal_with_its_remedy(name):
    lines = list(meanings(name))
    assert len(lines) > 50
    for theirs, value, text in lines:
        where = f"{name}: {theirs} {value}"
        assert isinstance(text, str), where
        ours = text.removeprefix("unless set: ")
        if ours.startswith("-"):
            assert re.fullmatch(rf"{FLAGS}( {FLAGS})*( \(.*\))?", ours), where
            for flag, text in re.findall(r"--(\w+)(?: (?!--)([\w.,-]+))?", ours):
                assert flag in KINDS, where
                if text:
                    read_value(*KINDS[flag], where, text)
        elif text.startswith("refused: "):
            assert re.fullmatch(r"refused: .+ \(fix: .+\)", text), where
        else:
            assert "fix:" not in text, where
    for flag, value in project(name).defaults.items():
        read_value(*KINDS[flag], flag, str(value))


def answer(name: str) -> str:
    """What a user is told of a name, whatever its value."""
    if name in KINDS:
        return "ours"
    try:
        return translate(find_project([name]), f"--{name}", name, "1", KINDS)[2]
    except ConfigError as error:
        return str(error)


TRAINER = [f.name for f in dataclasses.fields(Seq2SeqTrainingArguments) if f.init]


def test_every_name_of_the_trainer_and_of_trl_is_answered():
    assert len(TRAINER) > 100
    for name in (*TRAINER, *TRL):
        said = answer(name)
        assert said == "ours" or said.startswith((f"--{name} ", f"--{name}:")), name


@pytest.mark.parametrize("name", PROJECTS)
def test_no_name_of_a_table_is_unknown(name):
    for theirs in project(name).names:
        assert answer(theirs.replace("*", "x")), theirs


# --- flags


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--model_name_or_path X --learning_rate 2.0e-4", {"model": "X", "lr": 2e-4}),
        ("--num_train_epochs 3.0 --max_steps -1", {"epochs": 3}),
        ("--max_steps 7", {"steps": 7}),
        ("--per_device_train_batch_size 4", {"batch_size": 4}),
        ("--gradient_accumulation_steps 2", {"grad_accum": 2}),
        ("--save_steps 5 --save_total_limit 3", {"save_every": 5, "keep": 3}),
        ("--logging_steps 20", {"log_every": 20}),
        ("--warmup_steps 10 --max_grad_norm 0.3", {"warmup": 10, "clip_norm": 0.3}),
        ("--warmup_ratio 0.03", {}),
        ("--warmup_ratio 0.0", {"warmup": 0}),
        ("--lr_scheduler_type linear", {"schedule": "linear"}),
        ("--lr_scheduler_type constant", {"schedule": "constant", "warmup": 0}),
        ("--optim adamw_torch_fused --adam_beta1 0.9", {}),
        ("--optim adamw_bnb_8bit", {"optimizer": "adamw_8bit"}),
        ("--bf16", {"dtype": "bf16"}),
        ("--bf16 false --fp16 True", {"dtype": "fp16"}),
        ("--gradient_checkpointing", {"activation_checkpointing": "full"}),
        ("--max_length 512 --dataset_name d.jsonl", {"seq_len": 512, "dataset": "d.jsonl"}),
        ("--use_peft --lora_r 32 --lora_target_modules q_proj,k_proj", {
            "lora_rank": 32, "lora_alpha": 32.0, "lora_targets": "q_proj,k_proj", "lora_dropout": 0.05}),
        ("--load_in_4bit --lora_r 8", {"quantization": "4bit", "lora_rank": 8}),
        ("--report_to wandb --eval_strategy steps --eval_steps 9", {"wandb": True, "eval_every": 9}),
        ("--save_strategy no", {"save_every": 0}),
        ("--resume_from_checkpoint true", {}),
        ("--resume_from_checkpoint runs/a", {"resume": "runs/a"}),
        ("--fsdp full_shard --dataloader_num_workers 4 --neftune_noise_alpha 0", {}),
        ("--fsdp shard_grad_op,auto_wrap", {"reshard_after_forward": False}),
        ("--cutoff_len 99 --finetuning_type full --flash_attn sdpa", {"seq_len": 99, "attn": "sdpa"}),
        ("--stage sft --quantization_bit 8 --lora_rank 4", {"quantization": "8bit", "lora_rank": 4}),
        ("--base_model X --sequence_len 64", {"model": "X", "seq_len": 64}),
        ("--micro_batch_size 2", {"batch_size": 2}),
        ("--fsdp_cpu_offload --log_every_n_steps 3", {"cpu_offload": True, "log_every": 3}),
    ],
)  # fmt: skip
def test_what_means_the_same_is_understood(argv, expected):
    assert understood(*argv.split()) == expected


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            "--deepspeed ds.json",
            "--deepspeed: there is no DeepSpeed here (fix: leave it out; stage 2 is --reshard",
        ),
        (
            "--warmup_ratio 0.1",
            "--warmup_ratio 0.1: --warmup counts steps, and left out it is 3 % of them (fix: ",
        ),
        (
            "--neftune_noise_alpha 5",
            "--neftune_noise_alpha 5: no noise is added to embeddings (fix: leave it out)",
        ),
        (
            "--optim lomo",
            "--optim lomo: it is no optimizer of this recipe (fix: --optimizer adamw, ",
        ),
        ("--adam_beta2 0.999", "--adam_beta2 0.999: it is 0.95 here (fix: "),
        ("--load_best_model_at_end", "OUT/model is the last one (fix: "),
        ("--push_to_hub", "--push_to_hub: nothing is uploaded (fix: hf upload"),
        ("--stage dpo", "--stage dpo: this recipe is supervised fine-tuning (fix: leave it out)"),
        ("--save_strategy epoch", "checkpoints are counted in steps (fix: --save_every STEPS)"),
        ("--save_steps 0.5", "--save_steps takes a whole number"),
        ("--label_smoothing_factor 0.1", "the loss is plain cross-entropy (fix: leave it out)"),
        (
            "--model_name_or_path a --model b",
            "--model is given twice (--model_name_or_path, --model)",
        ),
        ("--bf16 maybe", "--bf16 maybe is not possible here: leave it out, or write true or false"),
    ],
)
def test_what_would_change_the_run_is_refused_with_what_to_write(argv, says):
    (line,) = refusal(*argv.split())
    assert says in line


def test_a_flag_without_a_meaning_here_says_why(capsys):
    assert understood("--run_name", "first", "--dataloader_num_workers", "4") == {}
    assert capsys.readouterr().out.splitlines() == [
        "--run_name has no meaning here: set WANDB_NAME",
        "--dataloader_num_workers has no meaning here: rows are tokenized before the first step",
    ]


def test_all_flags_that_nobody_knows_are_told_at_once(tmp_path):
    (tmp_path / "a.yaml").write_text("learing_rate: 1\nzzz: 2\nlr: 1e-4\n")
    flags = "--modle X --nonsense 1 --deepspeed a.json --lr 1e-4".split()
    assert refusal(*flags, "--config", str(tmp_path / "a.yaml")) == [
        "unknown flag --modle (did you mean --model?)",
        "unknown flag --nonsense (--help lists them all)",
        *refusal("--deepspeed", "a.json"),
        f"{tmp_path}/a.yaml:1: learing_rate is no setting (did you mean lr?)",
        f"{tmp_path}/a.yaml:2: zzz is no setting (--help lists them all)",
    ]


def test_the_plan_understands_them_too():
    argv = "--model 7B --per_device_train_batch_size 4 --gradient_checkpointing --load_in_4bit --lora_r 8"
    assert understood(*argv.split(), cls=plan.Config) == {
        "model": "7B", "batch_size": 4, "activation_checkpointing": "full", "quantization": "4bit",
        "lora_rank": 8,
    }  # fmt: skip
    (line,) = refusal("--learning_rate", "1e-4", cls=plan.Config)
    assert line == "--learning_rate needs --lr, which is not here yet (fix: leave it out)"


# --- hints


def hinted(said: str) -> str:
    found = re.fullmatch(r"did you mean (?:--)?(\w+)(?: false)?\?", said)
    return found[1] if found else ""


@pytest.mark.parametrize("recipe", [finetune, generate, export, plan, bench])
def test_no_hint_ever_names_a_flag_of_another_meaning(recipe):
    """Of every name in every table, as a recipe without tables sees them."""
    kinds, same = kinds_of(recipe.Config), renamed() | SHORT
    names = [name for name in sorted(known_names() - set(kinds)) if re.fullmatch(r"\w+", name)]
    assert len(names) > 500
    for name in names:
        hint = hinted(near_setting(name, kinds))
        assert hint in ("", same.get(name)), (name, hint)


def test_a_slip_in_a_foreign_name_leads_to_what_it_means_or_nowhere():
    same = renamed() | {key: key for key in KINDS}
    names = [name for name in sorted(known_names() - set(same)) if re.fullmatch(r"\w{8,}", name)]
    assert len(names) > 300
    for name in names[::9]:
        slip = name[:4] + name[5:]
        hint = hinted(near_setting(slip, KINDS, "--", renamed(), known_names()))
        assert not hint or any(
            edits(slip, other) <= 1 for other, ours in same.items() if ours == hint
        ), slip


@pytest.mark.parametrize(
    "name", ["save_steps", "deepspeed", "base_model", "use_model", "eval_strategy", "no_cuda"]
)
def test_the_wrong_hints_of_old_are_gone(name):
    for recipe in (generate, export, finetune):
        kinds = kinds_of(recipe.Config)
        assert hinted(near_setting(name, kinds, "--", renamed(), known_names())) in (
            "",
            renamed().get(name),
        )


def test_edits_are_letters_added_lost_or_swapped():
    pairs = {
        ("modle", "model"): 1,
        ("lr", "lr"): 0,
        ("base_model", "save_model"): 3,
        ("top_k", "top_p"): 2,
        ("a", "abcd"): 3,
    }
    pairs |= {("conifg", "config"): 1, ("learing_rate", "learning_rate"): 1, ("steps", "step"): 1}
    assert {pair: edits(*pair) for pair in pairs} == pairs


# --- their files


def from_file(tmp_path, text: str) -> dict:
    (tmp_path / "theirs.yaml").write_text(text)
    return understood("--config", str(tmp_path / "theirs.yaml"))


AXOLOTL = """
base_model: org/model
load_in_4bit: true
datasets:
  - path: a.jsonl
    type: alpaca
  - {path: b.jsonl, type: chat_template, split: train}
dataset_prepared_path:
val_set_size: 0.05
adapter: qlora
lora_r: 16
lora_target_modules:
  - q_proj
  - v_proj
sequence_len: 1024
sample_packing: true
batch_size: 32
micro_batch_size: 2
num_epochs: 2
optimizer: paged_adamw_8bit
lr_scheduler: linear
learning_rate: 0.0002
bf16: auto
fp16:
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
flash_attention: true
warmup_steps: 10
saves_per_epoch: 1
weight_decay: 0.1
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_offload_params: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
special_tokens:
  pad_token: <pad>
wandb_project:
"""
LLAMA_FACTORY = """
model_name_or_path: org/model
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: a.jsonl,b.jsonl
cutoff_len: 1024
val_size: 0.1
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
bf16: true
save_steps: 100
ddp_timeout: 1800
"""
TORCHTUNE = """
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /m/tokenizer.model
  max_seq_len: 512
dataset:
  _component_: torchtune.datasets.chat_dataset
  source: a.jsonl
  packed: True
seed: null
model:
  _component_: torchtune.models.llama3.lora_llama3_8b
  lora_rank: 8
  lora_alpha: 32
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /m
  checkpoint_files: [a.safetensors, b.safetensors]
batch_size: 2
epochs: 3
optimizer:
  _component_: bitsandbytes.optim.PagedAdamW8bit
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
max_steps_per_epoch: null
compile: False
dtype: bf16
metric_logger:
  _component_: torchtune.training.metric_logging.WandBLogger
output_dir: /tmp/out
profiler:
  enabled: False
"""


def test_an_axolotl_file_is_understood(tmp_path, capsys):
    assert from_file(tmp_path, AXOLOTL) == {
        "model": "org/model", "quantization": "4bit", "dataset": "a.jsonl,b.jsonl", "eval_share": 0.05,
        "lora_rank": 16, "lora_alpha": 8.0, "lora_targets": "q_proj,v_proj", "seq_len": 1024, "packing": True,
        "global_batch_size": 32, "batch_size": 2, "epochs": 2, "optimizer": "paged_adamw_8bit",
        "schedule": "linear", "lr": 2e-4, "activation_checkpointing": "full", "attn": "flash_attention_2",
        "warmup": 10, "weight_decay": 0.1, "cpu_offload": True,
    }  # fmt: skip
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{tmp_path}/theirs.yaml:2: base_model is --model here"
    assert f"{tmp_path}/theirs.yaml:17: batch_size is --global_batch_size here" in said
    assert f"{tmp_path}/theirs.yaml:32: fsdp full_shard auto_wrap is what happens here" in said


def test_a_llama_factory_file_is_understood(tmp_path, capsys):
    assert from_file(tmp_path, LLAMA_FACTORY) == {
        "model": "org/model", "lora_rank": 8, "dataset": "a.jsonl,b.jsonl", "seq_len": 1024,
        "eval_share": 0.1,
        "grad_accum": 8, "lr": 1e-4, "epochs": 3, "dtype": "bf16", "save_every": 100, "timeout": 1800,
    }  # fmt: skip
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("LLaMA-Factory itself would take warmup 0, weight_decay 0.0, ")
    assert last.endswith(
        "here it is warmup -1, weight_decay 0.01 (to match: --warmup 0 --weight_decay 0.0)"
    )


def test_a_torchtune_file_is_understood(tmp_path):
    assert from_file(tmp_path, TORCHTUNE) == {
        "seq_len": 512, "dataset": "a.jsonl", "packing": True, "lora_rank": 8, "lora_alpha": 32.0,
        "model": "/m",
        "batch_size": 2, "epochs": 3, "optimizer": "paged_adamw_8bit", "lr": 3e-4, "warmup": 100,
        "dtype": "bf16",
        "wandb": True, "output_dir": "/tmp/out",
    }  # fmt: skip


def test_everything_in_a_file_that_cannot_be_is_told_at_once(tmp_path):
    text = AXOLOTL + "rl: dpo\nneftune_noise_alpha: 5\nlora_rr: 5\nmodel_config:\n  rope_theta: 1\n"
    (tmp_path / "theirs.yaml").write_text(text)
    lines = refusal("--config", str(tmp_path / "theirs.yaml"))
    assert [line.partition("theirs.yaml:")[2] for line in lines] == [
        "39: rl: this recipe is supervised fine-tuning (fix: leave it out)",
        "40: neftune_noise_alpha 5: no noise is added to embeddings (fix: leave it out)",
        "41: lora_rr is no setting (did you mean lora_rank?)",
        "43: model_config.rope_theta: the model is what its config.json says (fix: change it there)",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lora_r: 4\nlora_rank: 8", "2: lora_rank is set twice: write it once"),
        (
            "lora_rank: 8\nlora_r: 4",
            "2: lora_r is lora_rank here, which is set before (fix: write one of them)",
        ),
        ("base_model: {a: 1}", "1: base_model takes one value, not a list or a mapping"),
        ("base_model: !!python/name:os.system x", "takes a plain value"),
        ("learning_rate: fast", "learning_rate takes a finite number"),
        ("datasets: &a [*a]", "theirs.yaml"),
        ("a: &a {x: 1}\nb: &b {x: *a, y: *a}\ndatasets: [{path: *b}]", "theirs.yaml"),
    ],
)
def test_a_wrong_value_in_their_file_is_one_line(tmp_path, text, says):
    (tmp_path / "theirs.yaml").write_text(text)
    assert any(says in line for line in refusal("--config", str(tmp_path / "theirs.yaml")))


def test_a_file_that_unfolds_without_end_is_refused_at_once(tmp_path):
    names = "abcdefghi"
    bomb = "a: &a {path: x, type: y}\n" + "".join(
        f"{c}: &{c} {{path: *{p}, type: *{p}, split: *{p}}}\n"
        for p, c in zip(names, names[1:], strict=False)
    )
    (tmp_path / "theirs.yaml").write_text(bomb + "datasets: [" + "*i, " * 900 + "*i]\n")
    assert len(refusal("--config", str(tmp_path / "theirs.yaml"))) < 3000


def test_a_file_of_ours_is_read_as_before(tmp_path):
    """adapter and batch_size mean something else in axolotl: only in its files."""
    assert from_file(tmp_path, "adapter: lora\nlora_rank: 4\nbatch_size: 8\n") == {
        "adapter": "lora", "lora_rank": 4, "batch_size": 8
    }  # fmt: skip


# --- what the other project would have done


def test_the_defaults_of_llama_recipes_are_said_for_what_was_left_out(capsys):
    understood(
        "--model_name", "X", "--batch_size_training", "4", "--use_peft", "--context_length", "4096"
    )
    assert capsys.readouterr().out.splitlines()[-1] == (
        "llama-recipes itself would take lr 1e-4, weight_decay 0.0, warmup 0, clip_norm 0, epochs 3, "
        "packing true, AdamW's second beta 0.999 in place of 0.95, and a rate that gamma lowers to 0.85 "
        "of it after each epoch; here it is lr 2e-05, weight_decay 0.01, warmup -1, clip_norm 1.0, "
        "epochs 1, packing false (to match: "
        "--lr 1e-4 --weight_decay 0.0 --warmup 0 --clip_norm 0 --epochs 3 --packing true)"
    )


def test_defaults_are_said_of_the_project_whose_names_are_used_and_only_with_a_model(capsys):
    understood("--model_name_or_path", "X", "--per_device_train_batch_size", "1")
    assert (
        capsys.readouterr().out.splitlines()[-1].startswith("TRL's SFTTrainer itself would take ")
    )
    understood("--enable_fsdp")
    understood("--model", "X")
    assert "itself would take" not in capsys.readouterr().out
    every = "--lr 1 --weight_decay 1 --warmup 1 --clip_norm 1 --epochs 1 --batch_size 1 --seq_len 9 --packing"
    understood("--model_name", "X", *every.split())
    assert "itself would take" not in capsys.readouterr().out


def test_the_defaults_told_are_not_those_of_the_recipe():
    for name in PROJECTS:
        for flag, value in project(name).defaults.items():
            kind = KINDS[flag][0]
            assert typing.get_args(kind) or kind in (int, float, bool), (name, flag, value)
