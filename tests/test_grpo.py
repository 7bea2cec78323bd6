"""recipes/grpo.py: what is drawn, rewarded and learned is the same on any number of ranks, and as a page of
PyTorch does it.

python -m pytest tests/test_grpo.py -m ""
"""

import contextlib
import json
import re
import shutil
from functools import cache

import grpo
import pytest
import reward
import torch
from launch import forked
from metrics import read_metrics
from ranks import run_ranks
from safetensors.torch import load_file
from shell import QUOTED, ROOT
from tiny import tiny_model_folder
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from utils.data.batches import GlobalBatches
from utils.data.examples import Rows, load_data
from utils.data.questions import Question, load_questions
from utils.data.tokens import end_of_turn_ids, load_tokenizer, pad_id
from utils.model.loss import add_chunked_loss
from utils.plan.generation import plan_rollout
from utils.run.distributed import ALONE, build_mesh
from utils.run.errors import ConfigError
from utils.run.help import described
from utils.train.rollout import Sampling, generate
from utils.train.trained_run import frozen_copy, open_reward_model

slow = pytest.mark.slow
STEPS = 3
RULES = """
def remainder(completions, answer, **columns):
    return [sum(map(ord, completion)) % 7 for completion in completions]

def fails(completions, **columns):
    raise KeyError("no such rule")
"""
HELD_OUT = {"eval_share": 0.3, "eval_every": 2}
ALL_AT_ONCE = {"batch_size": 12}  # the micro-batch of one rank
RUN = {
    "steps": STEPS,
    "lr": 1e-4,
    "warmup": 1,
    "global_batch_size": 3,
    "group_size": 4,
    "max_new_tokens": 6,
    "seq_len": 128,
    "generate_batch_size": 5,
    "seed": 3,
    "save_every": 0,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, prompts of unlike lengths, and a reward that differs within a group."""
    root = tmp_path_factory.mktemp("grpo")
    rows = [{"prompt": f"Say {i} " * (1 + i % 4), "answer": str(i)} for i in range(8)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "rules.py").write_text(RULES)
    folder = tiny_model_folder(root / "model", vocab_size=271)
    rules = f"{root}/rules.py:remainder"
    return {"model": str(folder), "dataset": str(root / "prompts.jsonl"), "rewards": rules}


def train(world, flags):
    return grpo.main(grpo.Config(**flags))


def trained(ranks, out, files, train=train, **flags):
    """(metrics by step, final weights, samples)."""
    flags = RUN | files | {"output_dir": str(out)} | flags
    out = run_ranks(train, ranks, flags)[0]
    (result,) = out.glob("*/*model.safetensors")
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    return read_metrics(out / "metrics.jsonl"), load_file(result), samples


@pytest.fixture(scope="module")
def run_of(files, tmp_path_factory):
    """(run folder, what trained() returns) of ranks and flags: tests that ask for the same share one run."""

    @cache
    def run(ranks, **flags):
        out = tmp_path_factory.mktemp("run") / "out"
        return out, trained(ranks, out, files, **flags)

    return run


def of_steps(metrics):
    """Those of training steps; an evaluation has its own."""
    return [numbers for numbers in metrics if "loss" in numbers]


def assert_alike(found, wanted, rtol=1e-5):
    for name in ("reward", "completion_length", "entropy", "loss", "grad_norm"):
        ours, theirs = ([numbers[name] for numbers in of_steps(run[0])] for run in (found, wanted))
        torch.testing.assert_close(ours, theirs, rtol=10 * rtol, atol=rtol)
    assert [one["text"] for one in found[2]] == [one["text"] for one in wanted[2]]
    for name, tensor in wanted[1].items():
        assert (found[1][name] - tensor).norm() <= rtol * tensor.norm(), name


SAVES = {"save_every": 1, "keep": 0}
# Runs that other tests look at, too.
PLAIN = {"ranks": 2, "batch_size": 2, **HELD_OUT}
CUT = {
    "ranks": 2,
    "batch_size": 3,
    "loss": "grpo",
    "epochs_per_rollout": 2,
    "kl_beta": 0.05,
    **SAVES,
}
WITH_START = {"ranks": 2, "batch_size": 4, "loss": "dr_grpo", "kl_beta": 0.05}


@pytest.mark.parametrize(
    "how",
    [
        PLAIN,
        CUT,
        WITH_START,
        pytest.param(
            HELD_OUT
            | {
                "ranks": 2,
                "batch_size": 4,
                "activation_checkpointing": "full",
                "cpu_offload": True,
            },
            marks=slow,
        ),
        pytest.param({"ranks": 4, "batch_size": 2, "kl_beta": 0.05, "replicate": 2}, marks=slow),
    ],
    ids=str,
)
def test_any_ranks_and_micro_batches_draw_and_learn_the_same(run_of, how):
    learned = ("loss", "epochs_per_rollout", "kl_beta", *HELD_OUT)
    loss = {name: how[name] for name in learned if name in how}
    _, one = run_of(1, **ALL_AT_ONCE, **loss)
    _, many = run_of(**how)
    assert_alike(many, one)
    metrics = of_steps(many[0])
    assert all(numbers["mismatch"] < 1e-5 for numbers in metrics)
    assert metrics[0]["grad_norm"] > 0
    if "epochs_per_rollout" not in loss:  # whose later epochs are no longer at the start
        assert metrics[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert (metrics[-1]["kl"] > 0) == ("kl_beta" in loss)


def test_a_program_that_names_no_model_gets_the_tiny_one_too():
    assert grpo.settle(grpo.Config(), ALONE).model == f"{ROOT}/recipes/tiny/started"


def test_it_learns_what_a_page_of_pytorch_learns(files, tmp_path):
    """Full logits, no FSDP, no chunks, no micro-batches; GRPO's loss with a KL to a second model."""
    tokenizer = load_tokenizer(files["model"])
    questions = load_questions(Rows(files["dataset"], 122, too_long="drop"), tokenizer)
    order = GlobalBatches(questions, RUN["seed"], 3, 1, 0, 1, 0)
    policy, start = (
        AutoModelForCausalLM.from_pretrained(files["model"], dtype=torch.float32) for _ in range(2)
    )
    decaying = [p for p in policy.parameters() if p.ndim > 1]
    others = [p for p in policy.parameters() if p.ndim == 1]
    groups = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01)
    ends = {*end_of_turn_ids(tokenizer), policy.generation_config.eos_token_id}
    sampling = Sampling(6, 0.9, ends, pad_id(tokenizer), 5)

    def log_probs(model, prompt, ids):
        row = torch.tensor([prompt + ids])
        all_log_probs = (model(row, use_cache=False).logits[0, :-1] / 0.9).log_softmax(-1)
        return all_log_probs.gather(1, row[0, 1:, None])[len(prompt) - 1 :, 0]

    losses, rewards = [], []
    for step in range(STEPS):
        asked = [questions[row] for row in order.rows_of(step) for _ in range(4)]
        keys = [(RUN["seed"], step, place // 4, place % 4) for place in range(len(asked))]
        drawn = generate(policy, [q.ids for q in asked], keys, sampling, ALONE)
        texts = [
            tokenizer.decode(drawn[i].ids, skip_special_tokens=True) for i in range(len(asked))
        ]
        found = torch.tensor([float(sum(map(ord, text)) % 7) for text in texts]).view(-1, 4)
        advantages = (found - found.mean(1, keepdim=True)) / (found.std(1, keepdim=True) + 1e-4)
        loss = 0.0
        for i, advantage in enumerate(advantages.flatten().tolist()):
            now = log_probs(policy, asked[i].ids, drawn[i].ids)
            with torch.no_grad():
                lead = log_probs(start, asked[i].ids, drawn[i].ids) - now
            ratio = torch.exp(now - now.detach())
            lead = lead.detach() + now.detach() - now
            kl = (torch.exp(lead) - lead - 1) * ratio
            loss = loss + (-ratio * advantage + 0.1 * kl).mean() / len(asked)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        share = max(0.0, (step - RUN["warmup"]) / (STEPS - RUN["warmup"]))
        for group in optimizer.param_groups:
            group["lr"] = RUN["lr"] * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * share)).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        rewards.append(found.mean().item())
    flags = {"loss": "grpo", "kl_beta": 0.1, "temperature": 0.9, "batch_size": 3}
    metrics, weights, _ = trained(2, tmp_path / "out", files, **flags)
    assert [m["reward"] for m in metrics] == pytest.approx(rewards)
    torch.testing.assert_close([m["loss"] for m in metrics], losses, rtol=1e-4, atol=1e-6)
    for name, tensor in policy.state_dict().items():
        if name in weights:
            assert (weights[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def test_a_completion_also_ends_with_the_tokens_that_the_model_folder_names(files, tmp_path):
    """As eval.py and generate.py end it: those of a base model are no end of a turn."""
    folder = shutil.copytree(files["model"], tmp_path / "model")
    ends = {"eos_token_id": list(range(271))}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    metrics, _, _ = trained(1, tmp_path / "out", files, model=str(folder), batch_size=12)
    for numbers in metrics:
        assert (numbers["completion_length"], numbers["truncated"]) == (1.0, 0.0)


@pytest.mark.parametrize("quantization", [pytest.param("none", marks=slow), "8bit"])
def test_adapters_learn_from_rewards_with_their_base_as_the_start(files, tmp_path, quantization):
    lora = {"lora_rank": 4, "quantization": quantization, "kl_beta": 0.05, "lr": 1e-3}
    one = trained(1, tmp_path / "one", files, **lora, batch_size=12)
    two = trained(2, tmp_path / "two", files, **lora, batch_size=2)
    assert_alike(two, one, rtol=1e-3)  # lora_B begins at 0, so it is all rounding's steps
    assert two[0][0]["kl"] == pytest.approx(0, abs=1e-7)
    assert two[0][-1]["kl"] > 0
    assert all(tensor.abs().sum() > 0 for name, tensor in two[1].items() if "lora_B" in name)


@pytest.mark.parametrize(
    "how",
    [pytest.param({"ranks": 2, "batch_size": 3, **SAVES}, marks=slow), CUT],
    ids=str,
)
def test_a_run_that_was_cut_goes_on_bit_for_bit(files, run_of, tmp_path, how):
    made, whole = run_of(**how)
    out = shutil.copytree(made, tmp_path / "out")
    for step in (2, 3):
        shutil.rmtree(out / "checkpoints" / f"step_0000000{step}")
    shutil.rmtree(out / "model")
    (out / "plan.json").unlink()
    with open(out / "samples.jsonl", "ab") as file:
        file.write('{"step": 3, "prompt": "火'.encode()[:-1])  # a full disk cuts within a character
    again = trained(out=out, files=files, **how)
    assert all(torch.equal(again[1][name], tensor) for name, tensor in whole[1].items())
    assert again[2][-8:] == whole[2][-8:]


@pytest.mark.parametrize(
    "how",
    [
        {"ranks": 2, "generate_ranks": 1},
        pytest.param(
            {"ranks": 3, "generate_ranks": 1, "kl_beta": 0.05, "epochs_per_rollout": 2}, marks=slow
        ),
        pytest.param(
            {"ranks": 3, "generate_ranks": 2, "lora_rank": 4, "quantization": "8bit"}, marks=slow
        ),
        pytest.param({"ranks": 4, "generate_ranks": 2, "cpu_offload": True}, marks=slow),
    ],
    ids=str,
)
def test_ranks_that_only_draw_change_nothing(files, run_of, tmp_path, how):
    """Nor does a start that goes on from a checkpoint."""
    changes = ("ranks", "generate_ranks", "cpu_offload")
    loss = {name: how[name] for name in how if name not in changes}
    _, one = run_of(1, **ALL_AT_ONCE, **loss, **HELD_OUT)
    out, saves = tmp_path / "apart", SAVES | HELD_OUT
    how = dict(how)
    apart = trained(how.pop("ranks"), out, files, batch_size=3, **how, **saves)
    assert held_out(apart[0]) == held_out(one[0])
    assert_alike(apart, one, rtol=1e-3 if "lora_rank" in how else 1e-5)
    for step in (2, 3):
        shutil.rmtree(out / "checkpoints" / f"step_0000000{step}")
    shutil.rmtree(out / ("adapter" if "lora_rank" in how else "model"))
    (out / "plan.json").unlink()
    again = trained(how["generate_ranks"] + 1, out, files, batch_size=3, **how, **saves)
    for name, tensor in apart[1].items():
        assert (again[1][name] - tensor).norm() <= 1e-3 * tensor.norm()


def test_a_generator_alone_holds_each_weight_once(files, tmp_path):
    """In 16 bit it gathers no copy of what it stores, nor is one planned."""
    how = {"dtype": "bf16", "batch_size": 3, "generate_ranks": 1, "steps": 1}
    flags = RUN | files | how | {"output_dir": str(tmp_path / "out")}
    (learner, _), (generator, text) = run_ranks(cut_parameters, 2, flags)
    assert learner > 0
    assert generator == 0
    (parts,) = re.findall(r"rollout +(.*) = ", text)
    assert "weights" in parts
    assert "gathered" not in parts


def cut_parameters(world, flags):
    """How many parameters of this rank FSDP2 has, and the plan."""
    models, plans = [], []

    def add(model):
        models.append(model)
        return add_chunked_loss(model)

    def plan(*args):
        plans.append(plan_rollout(*args))
        return plans[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "add_chunked_loss", add)
        patch.setattr(grpo, "plan_rollout", plan)
        grpo.main(grpo.Config(**flags))
    return sum(isinstance(p, DTensor) for p in models[0].parameters()), plans[0][1].text


def test_help_says_what_each_flag_means():
    for group in described(grpo.Config).values():
        assert all(group.values()), group


def test_all_ranks_drawing_is_refused(files, tmp_path):
    with pytest.raises(AssertionError, match=r"--generate_ranks 2 of 2 ranks.*\(fix: fewer"):
        trained(2, tmp_path / "out", files, generate_ranks=2)


def test_copies_of_the_learners_are_refused(files, tmp_path):
    for flag in ("shard", "replicate"):
        how = {"generate_ranks": 1, flag: 1 + (flag == "replicate")}
        with pytest.raises(AssertionError, match=f"--{flag}.*share one copy .fix: leave both out"):
            trained(3, tmp_path / flag, files, **how)


def test_completions_that_are_all_alike_teach_nothing_and_a_warning_says_so(files, tmp_path):
    """Ranks without a completion to learn take part with fillers."""
    metrics, weights, _ = trained(
        2, tmp_path / "out", files, train_told, rewards="exact", batch_size=2, weight_decay=0.0
    )
    said = (tmp_path / "out_0.txt").read_text() + (tmp_path / "out_1.txt").read_text()
    assert re.findall("warning: .* learns nothing from rewards", said) == [
        "warning: step 1 learns nothing from rewards"
    ]
    start = load_file(f"{files['model']}/model.safetensors")
    assert all(torch.equal(tensor, start[name]) for name, tensor in weights.items())
    assert all(m["ties"] == 1 and m["loss"] == 0 and m["grad_norm"] == 0 for m in metrics)
    assert all(m["entropy"] is None and m["mismatch"] is None for m in metrics)  # of no token


def train_told(world, flags):
    with (
        open(f"{flags['output_dir']}_{world.rank}.txt", "w") as file,
        contextlib.redirect_stdout(file),
    ):
        return train(world, flags)


@slow
def test_gspo_as_the_readme_has_it_learns_the_same_beside_fillers(files, tmp_path):
    """Of four completions, two of three ranks learn one each, and then a filler, which has no tokens."""
    flags = {"loss": "grpo", "epochs_per_rollout": 2, "global_batch_size": 1, "lr": 1e-3}
    one = trained(1, tmp_path / "one", files, train=train_gspo, **ALL_AT_ONCE, **flags)
    three = trained(3, tmp_path / "three", files, train=train_gspo, batch_size=1, **flags)
    assert_alike(three, one)
    grpo_itself = trained(1, tmp_path / "grpo", files, **ALL_AT_ONCE, **flags)
    assert abs(one[0][0]["loss"] - grpo_itself[0][0]["loss"]) > 1e-5


def train_gspo(world, flags):
    def gspo(cfg, batch, now, old, start):
        tokens = (batch.labels >= 0).sum(1, keepdim=True).clamp(min=1)
        mean = (now - old).sum(1, keepdim=True) / tokens
        return token_ratios(cfg, batch, mean.expand_as(now), torch.zeros_like(now), None)

    token_ratios = grpo.policy_loss
    with pytest.MonkeyPatch.context() as edits:  # other tests use the same processes
        edits.setattr(grpo, "policy_loss", gspo)
        return grpo.main(grpo.Config(**flags))


def test_layers_are_gathered_in_each_forward_where_the_whole_does_not_fit(files, run_of, tmp_path):
    _, once = run_of(**PLAIN)
    flags = {name: PLAIN[name] for name in PLAIN if name != "ranks"}
    flags |= RUN | files | {"output_dir": str(tmp_path / "each")}
    each = run_ranks(train_in_lockstep, 2, flags)
    (result,) = each[0].glob("model/*model.safetensors")
    for name, tensor in load_file(result).items():
        assert torch.equal(tensor, once[1][name])


def train_in_lockstep(world, flags):
    with pytest.MonkeyPatch.context() as edits:  # other tests use the same processes
        edits.setattr(grpo, "plan_rollout", lambda setting, plan, *args: (False, plan))
        return grpo.main(grpo.Config(**flags))


def held_out(metrics):
    return [numbers["eval_reward"] for numbers in metrics if "eval_reward" in numbers]


def test_held_out_prompts_are_answered_with_the_likeliest_tokens(files, run_of):
    _, one = run_of(1, **ALL_AT_ONCE, **HELD_OUT)
    out, two = run_of(**PLAIN)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval_reward" in line]
    assert [line["step"] for line in evaluations] == [2, 3]
    assert evaluations[0]["eval_reward"] == evaluations[0]["eval_rewards/remainder"]
    assert held_out(one[0]) == held_out(two[0])
    tokenizer = load_tokenizer(out / "model")
    rows = Rows(files["dataset"], 122, eval_share=HELD_OUT["eval_share"])
    _, asked = load_data(rows, tokenizer, load=load_questions)
    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    found = []
    for question in asked:
        ids = torch.tensor([question.ids])
        ids = model.generate(ids, do_sample=False, max_new_tokens=6)[0, ids.shape[1] :]
        found.append(sum(map(ord, tokenizer.decode(ids, skip_special_tokens=True))) % 7)
    assert evaluations[-1]["eval_reward"] == pytest.approx(sum(found) / len(found))
    assert any(found)


def test_an_evaluation_that_a_signal_did_not_end_is_not_left_to_the_resume(
    files, tmp_path, monkeypatch
):
    signals = iter(["", "", "SIGTERM"])  # after each of two steps, and after the evaluation
    monkeypatch.setattr(grpo, "stop_asked", lambda group: next(signals))
    out = grpo.main(
        grpo.Config(**RUN | files | ALL_AT_ONCE | HELD_OUT, output_dir=str(tmp_path / "out"))
    )
    assert [line["step"] for line in read_metrics(out / "metrics.jsonl") if "eval_reward" in line]
    (state,) = out.glob("checkpoints/*/state.json")
    assert not json.loads(state.read_text())["eval_left"]


@pytest.fixture(scope="module")
def judge(files, tmp_path_factory):
    """A reward model that nobody has trained."""
    out = tmp_path_factory.mktemp("judge") / "out"
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    pairs = out.parent / "pairs.jsonl"
    pairs.write_text(json.dumps(pair) + "\n")
    flags = {"dataset": str(pairs), "output_dir": str(out), "steps": 1, "lr": 1e-30}
    run_ranks(train_reward_model, 1, flags | {"model": files["model"]})
    return str(out / "model")


def train_reward_model(world, flags):
    return reward.main(reward.Config(**flags))


@pytest.mark.parametrize(
    "how",
    [{"ranks": 2}, pytest.param({"ranks": 3, "generate_ranks": 1}, marks=slow)],
    ids=str,
)
def test_a_reward_model_scores_as_plain_transformers_does(files, tmp_path, judge, how):
    flags = {"reward_model": judge, "reward_model_weight": 2.0, "eval_dataset": files["dataset"]}
    one = trained(1, tmp_path / "one", files, batch_size=12, **flags)
    many = trained(how.pop("ranks"), tmp_path / "many", files, batch_size=2, **flags, **how)
    for metrics, _, _ in (one, many):
        assert "eval_rewards/model" in metrics[-1]
    assert_alike(many, one, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32)
    for sample in many[2]:
        question = {"role": "user", "content": sample["prompt"]}
        chat = [question, {"role": "assistant", "content": sample["text"]}]
        ids = tokenizer.apply_chat_template(chat, return_dict=True, return_tensors="pt")
        with torch.no_grad():
            score = model(**ids).logits.item()
        assert sample["rewards/model"] == pytest.approx(score, abs=1e-4)
        total = 2 * score + sample["rewards/remainder"]
        assert sample["reward"] == pytest.approx(total, abs=1e-4)


def test_models_that_do_not_train_hold_only_their_shards_between_two_uses(judge):
    """No backward follows their forwards, which would free what these have gathered."""
    assert run_ranks(kinds_of_parameters, 2, judge) == [{"DTensor"}, {"DTensor"}]


def kinds_of_parameters(world, folder):
    found = open_reward_model(folder, torch.float32, world, False)
    mesh = build_mesh(world)
    found.model = frozen_copy(
        found.model, found.pieces, mesh, torch.float32, world.device, cpu_offload=False
    )
    asked = [Question([], content, {}, "", None) for content in ("a", "b", "c")]
    assert len(found.scores(2, world, asked, ["d", "e f", ""])) == 3
    tools = [{"type": "function", "function": {"name": "sum", "parameters": {}}}]
    with_tools = found.tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "d"}],
        tools=tools,
        return_dict=True,
    )
    assert found.ids_of(asked[0]._replace(tools=tools), "d") == with_tools["input_ids"]
    return {type(p.data).__name__ for p in found.model.parameters()}


def test_what_is_no_reward_model_is_refused(files, tmp_path):
    with pytest.raises(AssertionError, match=r"--reward_model .* has 2 labels.*\(fix: "):
        trained(1, tmp_path / "out", files, reward_model=files["model"])


def test_the_copy_of_the_start_is_planned_for(run_of):
    plans = []
    for how in (PLAIN, WITH_START):
        out, _ = run_of(**how)
        plans.append(json.loads((out / "plan.json").read_text())["planned"])
    weights = [plan["weights"] for plan in plans]
    assert weights[1] == 2 * weights[0]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"temperature": 0.0}, "--temperature 0.0: all completions"),
        ({"group_size": 1}, "--group_size 1"),
        ({"max_new_tokens": 200, "seq_len": 100}, "--max_new_tokens 200 leaves no prompt"),
        ({"kl_beta": 0.1, "model": "m", "adapter": "a"}, "--kl_beta: an --adapter"),
        ({"adapter": "a"}, "--adapter belongs to one base"),
        ({"reward_model_weight": 0.3}, "--reward_model_weight is for --reward_model"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags, says):
    with pytest.raises(ConfigError, match=f"{says}.* \\(fix: "):
        grpo.Config(**flags)


def test_prompts_and_completions_beyond_the_positions_are_refused(files, tmp_path):
    with pytest.raises(AssertionError, match=r"more than the model's 256 positions \(fix: "):
        trained(1, tmp_path / "out", files, max_new_tokens=250, seq_len=2048)


def test_a_reward_that_fails_is_named_with_its_row_and_completion(files, tmp_path):
    rules = files["rewards"].replace("remainder", "fails")
    words = " ".join(f"--{name} {value}" for name, value in (RUN | files).items())
    command = f"python {QUOTED}/recipes/grpo.py {words} --rewards {rules} --output_dir out"
    run = forked(command, tmp_path, apart=True)
    assert run.returncode == 2
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error")]
    assert "no such rule" in line
    assert "prompts.jsonl:" in line
    assert "completion '" in line
