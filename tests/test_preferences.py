"""Rows of preferences -> pairs and labels -> global batches.

python -m pytest tests/test_preferences.py
"""

import json
from pathlib import Path

import pytest
import torch
from templates import KINDS
from test_data import examples_of, refusal
from test_tokens import byte_level

from utils.data import cache
from utils.data import examples as data
from utils.data.encode import Part
from utils.data.examples import Examples, Rows, load_data
from utils.data.formats import LEADING
from utils.data.held_out import split_by_hash
from utils.data.pairs import LabelBatches, PackedPairs, PairBatches, sequences
from utils.data.preferences import EQUAL
from utils.data.tokens import load_tokenizer
from utils.model.log_probs import per_sequence
from utils.run.errors import ConfigError
from utils.run.units import IGNORE


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


def shares(*turns):
    return [
        {"from": "gpt" if turn["role"] == "assistant" else "human", "value": turn["content"]}
        for turn in turns
    ]


ASK, GOOD, BAD = user("Say hi"), says("Hi to you"), says("Hi, no")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
TEXTS = {"prompt": "Say hi", "chosen": "Hi to you", "rejected": "Hi, no"}
EARLIER = [user("One"), says("Two")]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A tokenizer without a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level(True).save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return of_kind("plain", tmp_path_factory.mktemp("templated"))


def of_kind(kind, folder):
    made = byte_level(True)
    made.chat_template = KINDS[kind].template
    made.save_pretrained(folder)
    return load_tokenizer(folder)


def load(rows, tokenizer, task="pairs", seq_len=256, name="p.jsonl", **settings) -> Examples:
    Path(name).write_text("\n".join(map(json.dumps, rows)))
    return data.load_examples(Rows(name, seq_len, task=task, **settings), tokenizer)


def tokens(examples) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of each row."""
    return [(item.ids.tolist(), item.labels.tolist()) for item in examples]


def told(row, tokenizer, task="pairs", **settings) -> str:
    """What is said of a row that is wrong, after its place."""
    Path("bad.jsonl").write_text("\n" + json.dumps(row))
    rows = Rows("bad.jsonl", 256, task=task, **settings)
    line = refusal(data.load_examples, rows, tokenizer)
    assert line.startswith("bad.jsonl:2: ")
    assert "\n" not in line
    return line.removeprefix("bad.jsonl:2: ")


def transcript(*turns):
    return "".join(
        f"\n\n{'Human' if turn['role'] == 'user' else 'Assistant'}: {turn['content']}"
        for turn in turns
    )


# --- forms

PAIRS = [  # (row, the turns before the answers)
    (TEXTS, [ASK]),
    ({**TEXTS, "prompt": [ASK]}, [ASK]),
    ({**TEXTS, "prompt": [*EARLIER, ASK], "chosen": [GOOD], "rejected": [BAD]}, [*EARLIER, ASK]),
    ({**TEXTS, "chosen": [GOOD], "rejected": [BAD]}, [ASK]),
    ({"chosen": [*EARLIER, ASK, GOOD], "rejected": [*EARLIER, ASK, BAD]}, [*EARLIER, ASK]),
    (
        {
            "prompt": "Say hi",
            "chosen": [ASK, GOOD],
            "rejected": [ASK, BAD],
            "messages": [ASK, GOOD],
            "score_chosen": 8.0,
        },
        [ASK],
    ),
    (  # OpenAI
        {
            "input": {"messages": [*EARLIER, ASK], "parallel_tool_calls": True},
            "preferred_output": [GOOD],
            "non_preferred_output": [BAD],
        },
        [*EARLIER, ASK],
    ),
    (  # ORPO-DPO-mix: the prompt is the first question
        {
            "prompt": "One",
            "chosen": [*EARLIER, ASK, GOOD],
            "rejected": [*EARLIER, ASK, BAD],
        },
        [*EARLIER, ASK],
    ),
    ({"messages": [ASK], "chosen": GOOD, "rejected": BAD}, [ASK]),
    (
        {
            "conversations": shares(*EARLIER, ASK),
            "chosen": shares(GOOD)[0],
            "rejected": shares(BAD)[0],
        },
        [*EARLIER, ASK],
    ),
    (
        {"instruction": "Say", "input": "hi", "chosen": "Hi to you", "rejected": "Hi, no"},
        [user("Say\n\nhi")],
    ),
    (
        {
            "chosen": transcript(*EARLIER, ASK, GOOD),
            "rejected": transcript(*EARLIER, ASK, BAD),
        },
        [*EARLIER, ASK],
    ),
    (  # Dahoas/full-hh-rlhf
        {**TEXTS, "prompt": transcript(*EARLIER, ASK, says("")).rstrip()},
        [*EARLIER, ASK],
    ),
    (  # there the answers begin with the space behind "Assistant:"
        {
            "prompt": transcript(*EARLIER, ASK, says("")).rstrip(),
            "chosen": f" {GOOD['content']}",
            "rejected": f" {BAD['content']}",
        },
        [*EARLIER, ASK],
    ),
    (  # the answers repeat turns of the prompt, not all of them
        {
            "prompt": [*EARLIER, ASK],
            "chosen": [ASK, GOOD],
            "rejected": [ASK, BAD],
        },
        [*EARLIER, ASK],
    ),
    (
        {
            "messages": [*EARLIER, ASK],
            "chosen": [ASK, GOOD],
            "rejected": [ASK, BAD],
        },
        [*EARLIER, ASK],
    ),
    (  # as in a table
        {
            "prompt": json.dumps([*EARLIER, ASK]),
            "chosen": json.dumps([GOOD]),
            "rejected": json.dumps([BAD], indent=1),
        },
        [*EARLIER, ASK],
    ),
    (  # a question about a transcript is none
        {**TEXTS, "prompt": "Human: One\n\nAssistant: Two\n\nIs it good?"},
        [user("Human: One\n\nAssistant: Two\n\nIs it good?")],
    ),
]


@pytest.mark.parametrize(("row", "prompt"), PAIRS)
@pytest.mark.parametrize("more", [{}, {"system": "Be kind."}, {"tools": TOOLS}])
def test_a_pair_of_each_form_is_two_conversations_of_finetune(tokenizer, row, prompt, more):
    pair = load([row | more], tokenizer)
    answers = [{"messages": [*prompt, answer], **more} for answer in (GOOD, BAD)]
    want = load(answers, tokenizer, task="rows", train_on="last_assistant")
    assert tokens(sequences(pair)) == tokens(want)
    assert len(pair) == 1
    labels = load([row | more], tokenizer, task="labels")
    assert tokens(labels) == tokens(want)
    assert labels.row_sizes.tolist() == [len(want[0].ids), 0]


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"prompt": "Say hi", "completion": "Hi to you"}, [ASK, GOOD]),
        ({"prompt": [*EARLIER, ASK], "completion": [GOOD]}, [*EARLIER, ASK, GOOD]),
        ({"messages": [*EARLIER, ASK, GOOD]}, [*EARLIER, ASK, GOOD]),
        ({"conversations": shares(ASK, GOOD)}, [ASK, GOOD]),
        ({"instruction": "Say hi", "output": "Hi to you"}, [ASK, GOOD]),
        ({"prompt": [*EARLIER, ASK], "completion": [ASK, GOOD]}, [*EARLIER, ASK, GOOD]),
    ],
)
def test_an_answer_with_a_label_is_the_conversation_of_finetune(tokenizer, row, turns):
    rows = [row | {"label": True}, row | {"label": False}, row | {"kto_tag": False}]
    for yes, no in ((1, 0), (1.0, 0.0), ("True", "false"), ("1", "0")):  # in CSV all is text
        others = load([row | {"label": yes}, row | {"kto_tag": no}], tokenizer, "labels")
        assert others.row_sizes.tolist() == [len(others[0].ids), 0]
        assert tokens(others) == tokens(load(rows[:2], tokenizer, "labels"))
    labels = load(rows, tokenizer, task="labels")
    want = load([{"messages": turns}], tokenizer, task="rows", train_on="last_assistant")
    assert tokens(labels) == tokens(want) * 3
    assert labels.row_sizes.tolist() == [len(want[0].ids), 0, 0]


def test_texts_are_plain_without_a_template_and_on_demand(tokenizer, plain):
    texts = {"prompt": "Say hi:", "chosen": " Hi to you", "rejected": " Hi, no"}
    rows = [{"prompt": "Say hi:", "completion": texts[key]} for key in ("chosen", "rejected")]
    for reader, settings in ((plain, {}), (tokenizer, {"format": "completion"})):
        want = load(rows, reader, task="rows")
        assert tokens(sequences(load([texts], reader, **settings))) == tokens(want)
        assert want[0].ids[-1] == reader.eos_token_id
        one = load([rows[0] | {"label": True}], reader, task="labels", **settings)
        assert tokens(one) == tokens(want)[:1]
    messages = load([{"messages": [ASK, GOOD]}], plain, task="rows")
    pair = {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}
    assert tokens(sequences(load([pair], plain)))[0] == tokens(messages)[0]


def test_what_is_left_out_of_both_sides_is_counted_once_a_row(tokenizer):
    notes = load([{**TEXTS, "prompt": "Say <|im_end|>"}], tokenizer).notes
    assert [count for what, count in notes.items() if "spells a special token" in what] == [1]
    greeted = {"conversations": shares(GOOD, ASK, GOOD), "label": None, "kto_tag": True}
    read = load([greeted], tokenizer, "labels")
    assert tokens(read) == tokens(load([{"messages": [ASK, GOOD]}], tokenizer, "rows"))
    assert read.notes[LEADING] == 1


@pytest.mark.parametrize("task", ["pairs", "labels"])
def test_other_keys_are_ignored_by_name_and_those_of_preferences_are_not(tokenizer, task):
    row = TEXTS if task == "pairs" else {"prompt": "Say hi", "completion": "Hi", "label": True}
    rows = [row | {"mood": 1, "score_chosen": 2}, row | {"mood": 1}]
    assert load(rows, tokenizer, task).remarks().endswith(", ignored keys: 'mood', 'score_chosen'")


def test_columns_name_the_keys_of_preferences(tokenizer):
    row = {"q": "Say hi", "good": "Hi to you", "worse": "Hi, no"}
    read = load([row], tokenizer, columns="prompt=q,chosen=good,rejected=worse")
    assert tokens(read) == tokens(load([TEXTS], tokenizer))
    row = {"q": "Say hi", "a": "Hi to you", "liked": True}
    read = load([row], tokenizer, "labels", columns="prompt=q,completion=a,label=liked")
    assert len(read) == 1


def test_the_prompt_is_the_same_and_what_follows_is_trained(tokenizer):
    """Two answers that begin with the same words lose none of them to the prompt."""
    pair = load(
        [{"chosen": transcript(ASK, GOOD), "rejected": transcript(ASK, BAD)}],
        tokenizer,
    )
    chosen, rejected = sequences(pair)
    begins = [int((side.labels != IGNORE).nonzero()[0]) for side in (chosen, rejected)]
    assert begins[0] == begins[1]
    assert torch.equal(chosen.ids[: begins[0]], rejected.ids[: begins[0]])
    for side, text in ((chosen, "Hi to you<|im_end|>"), (rejected, "Hi, no<|im_end|>")):
        trained = [label for label in side.labels.tolist() if label != IGNORE]
        assert tokenizer.decode(trained) == text


def test_answers_of_several_turns_are_trained_whole(tokenizer):
    more = [user("More"), says("Yes")]
    pair = load([{"prompt": [ASK], "chosen": [GOOD, *more], "rejected": [BAD]}], tokenizer)
    trained = [label for label in sequences(pair)[0].labels.tolist() if label != IGNORE]
    assert tokenizer.decode(trained) == "Hi to you<|im_end|>Yes<|im_end|>"


# --- what is wrong with a row

WRONG = [
    ({"messages": [ASK, GOOD]}, "expected chosen and rejected, or a label"),
    ({"prompt": "a", "chosen": "b"}, "expected chosen and rejected, or a label"),
    (
        {"context": [ASK], "response1": "b", "response2": "c", "overall_preference": 2},
        "rejected=THEIRS; first sort both by a label of the best)",
    ),
    ({"prompt": "a", "completion": "b", "label": True}, "or a label with prefer.py --loss kto"),
    ({"chosen": "a", "rejected": "b"}, "prompt: missing; the row has 'chosen', 'rejected'"),
    ({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD, ASK, BAD]}, "after 2 turns of the prompt"),
    ({"chosen": [ASK, GOOD], "rejected": [user("x"), BAD]}, "which is the prompt (fix: "),
    (  # a transcript that goes on with a question
        {"chosen": transcript(ASK, GOOD, user("x")), "rejected": transcript(ASK, BAD)},
        "none of the user at the end (fix: remove these rows;",
    ),
    (
        {**TEXTS, "chosen": [user("x"), GOOD], "rejected": [user("x"), BAD]},
        "before the answers (fix: ",
    ),
    ({**TEXTS, "rejected": " "}, "rejected: empty"),
    ({**TEXTS, "rejected": None}, "rejected: expected text, got null"),
    ({**TEXTS, "chosen": [3]}, "prompt + chosen[1]: expected object, got number"),
    ({**TEXTS, "prompt": 5}, "prompt: expected list, got number"),
    ({**TEXTS, "prompt": ""}, "prompt: empty"),
    ({"prompt": [ASK, GOOD], "chosen": [GOOD], "rejected": [BAD]}, "prompt + chosen[2].role"),
    ({**TEXTS, "images": ["a.png"]}, "vision.py also pictures"),
    ({**TEXTS, "weight": 0.5}, "weight: 0.5: whole rows cannot be weighted"),
    ({**TEXTS, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs: a run has one template"),
]


@pytest.mark.parametrize(("row", "why"), WRONG)
def test_a_row_that_is_wrong_is_told_by_its_place(tokenizer, row, why):
    assert why in told(row, tokenizer)


@pytest.mark.parametrize("value", [2, -1, "yes", "good", [True]])
@pytest.mark.parametrize("key", ["label", "kto_tag"])
def test_only_true_and_false_and_1_and_0_are_labels(tokenizer, key, value):
    said = told({"prompt": "a", "completion": "b", key: value}, tokenizer, "labels")
    assert said.startswith(f"{key}: expected true or false, got {value!r}")
    assert "(fix: true or false, without quotes" in said


def test_a_label_needs_its_answer(tokenizer):
    for row, why in (
        ({"messages": [ASK, GOOD]}, "expected chosen and rejected, or a label"),
        ({"prompt": "a", "label": True}, "completion: missing"),
        ({"messages": [ASK, GOOD, ASK], "label": True}, "expected one of the assistant"),
    ):
        assert why in told(row, tokenizer, "labels")


def test_an_answer_that_would_be_several_sequences_is_refused(tmp_path):
    tokenizer = of_kind("empty thoughts in the last answer", tmp_path)
    row = {"prompt": [ASK], "chosen": [GOOD, ASK, GOOD], "rejected": [BAD]}
    assert "an answer of several turns" in told(row, tokenizer)
    assert len(load([row | {"chosen": [GOOD]}], tokenizer)) == 1


def test_prompts_with_other_tokens_are_refused(plain):
    """The last character of the prompt is one token with the chosen answer, and not with the rejected one."""
    row = {"prompt": "Say hi: ", "chosen": "the", "rejected": "\n9"}
    assert "the prompt has other tokens before chosen than before" in told(row, plain)
    assert len(load([row | {"prompt": "Say hi:", "chosen": " the"}], plain)) == 1


def test_finetune_sends_preferences_to_their_recipe(tokenizer):
    assert "(fix: recipes/prefer.py)" in told(TEXTS, tokenizer, "rows")


# --- long rows, counts


def test_equal_answers_and_full_prompts_are_dropped_and_counted(tokenizer):
    equal = TEXTS | {"rejected": "Hi to you"}
    ultra = {"prompt": "Say hi", "chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}
    whole = {"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}
    said = dict.fromkeys(whole, transcript(ASK, GOOD))
    full = TEXTS | {"prompt": "so many words " * 50}
    for task, kept in (("pairs", 1), ("labels", 2)):
        read = load([TEXTS, equal, ultra, whole, said, full], tokenizer, task=task, seq_len=48)
        assert len(read) == kept
        assert read.dropped == {EQUAL: 4, "no trained token in the first 48 tokens": 1}
        assert read.summary().startswith(f"{kept} {task}, ")


def test_long_answers_are_cut_dropped_or_refused(tokenizer):
    rows = [TEXTS, TEXTS | {"chosen": "so many words " * 50}]
    cut = load(rows, tokenizer, seq_len=48)
    assert sequences(cut).lengths.max() == 48
    assert cut.notes["cut at --seq_len"] == 1
    whole = load(rows, tokenizer, seq_len=1000)
    assert sequences(cut)[2].ids.tolist() == sequences(whole)[2].ids[:48].tolist()
    assert sequences(cut)[3].ids.tolist() == sequences(whole)[3].ids.tolist()
    dropped = load(rows, tokenizer, seq_len=48, too_long="drop")
    assert (len(dropped), dropped.dropped) == (1, {"longer than --seq_len": 1})
    with pytest.raises(ConfigError, match=r"p.jsonl:2: .* more than --seq_len 48"):
        load(rows, tokenizer, seq_len=48, too_long="error")


def test_answers_that_are_equal_once_they_are_cut_are_dropped(tokenizer):
    words = "so many words " * 50
    late = TEXTS | {"chosen": f"{words} a", "rejected": f"{words} b"}
    assert load([TEXTS, late], tokenizer, seq_len=48).dropped == {EQUAL: 1}


def test_the_fingerprint_follows_the_answers_the_label_and_the_task(tokenizer):
    turned = TEXTS | {"chosen": "Hi, no", "rejected": "Hi to you"}
    label = {"prompt": "a", "completion": "b", "label": True}
    prints = [load([row], tokenizer).fingerprint for row in (TEXTS, turned)]
    prints += [load([row], tokenizer, "labels").fingerprint for row in (TEXTS, turned, label)]
    prints.append(load([label | {"label": False}], tokenizer, "labels").fingerprint)
    assert len({*prints}) == len(prints)


def many(count: int) -> list[dict]:
    return [
        {"prompt": f"Say {i}", "chosen": f"{i} " * (1 + i % 5), "rejected": f"no {i}"}
        for i in range(count)
    ]


def test_bad_rows_weights_and_columns_work_as_for_answers(tokenizer):
    load(many(40), tokenizer, name="a.jsonl")
    load(many(30), tokenizer, name="b.jsonl")
    mixed = data.load_examples(Rows("a.jsonl:3,b.jsonl:1", 64, task="pairs"), tokenizer)
    assert len(mixed) == 53
    assert len(sequences(mixed)) == 106
    read = load([TEXTS, {"chosen": 3}, TEXTS], tokenizer, bad_rows="drop")
    assert (len(read), len(read.bad)) == (2, 1)
    assert read.notes["the same as a row before"] == 1


def test_a_pair_is_held_out_whole(tokenizer):
    examples = load(many(200), tokenizer)
    train, held_out = split_by_hash(examples, 0.3)
    assert len(train) + len(held_out) == 200
    sides = [{item.where for item in sequences(part)} for part in (train, held_out)]
    assert not sides[0] & sides[1]
    for part in (train, held_out):
        both = sequences(part)
        for i in range(len(part)):
            assert part[i].where == both[2 * i].where == both[2 * i + 1].where
            joined = torch.cat([both[2 * i].ids, both[2 * i + 1].ids])
            assert torch.equal(part[i].ids, joined)
    rows = Rows("p.jsonl", 64, task="pairs", eval_share=0.3)
    assert load_data(rows, tokenizer)[1].summary().count(" pairs, ") == 1


def test_the_cache_holds_what_memory_would_hold(plain, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for task in ("pairs", "labels"):
        memory = load([*many(150), TEXTS | {"rejected": "Hi to you"}], plain, task)
        with monkeypatch.context() as patch:
            patch.setattr(data, "SMALL", 0)
            patch.setattr(cache, "in_processes", map)
            mapped = data.load_examples(Rows("p.jsonl", 256, task=task), plain)
        assert mapped.fingerprint == memory.fingerprint
        assert torch.equal(mapped.row_sizes, memory.row_sizes)
        assert mapped.summary() == memory.summary()
    assert len([*(tmp_path / "cache/raw_fsdp/data").glob("*.lock")]) == 2


# --- batches


def numbered(count: int) -> Examples:
    """Pair i: the prompt [i, i], the chosen answer 1000 + i some times, the rejected one 2000 + i."""
    part = Part()
    part.rows = count
    for i in range(count):
        chosen = [i, i] + [1000 + i] * (1 + 7 * i % 20)
        rejected = [i, i] + [2000 + i] * (1 + 3 * i % 11)
        mask = b"".join(b"\0\0" + b"\1" * (len(ids) - 2) for ids in (chosen, rejected))
        part.add(chosen + rejected, mask, f"f:{i}")
        part.row_sizes.append(len(chosen))
    return with_rejected(part)


def with_rejected(part: Part) -> Examples:
    examples = examples_of(part)
    object.__setattr__(examples, "row_sizes", torch.tensor(part.row_sizes))
    return examples


def labelled(count: int) -> Examples:
    """Row i: the prompt [i, i] and the answer 1000 + i some times; every third is desirable."""
    part = Part()
    part.rows = count
    for i in range(count):
        ids = [i, i] + [1000 + i] * (1 + 7 * i % 20)
        part.add(ids, b"\0\0" + b"\1" * (len(ids) - 2), f"f:{i}")
        part.row_sizes.append(len(ids) * (i % 3 == 0))
    return with_rejected(part)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_the_pairs_of_a_global_batch(ranks):
    examples = numbered(23)
    alone = PairBatches(examples, 7, 8, 8, 0, 1, pad_id=0)
    loaders = [PairBatches(examples, 7, 8, 2, rank, ranks, pad_id=0) for rank in range(ranks)]
    for step in range(2 * alone.per_epoch):
        dealt = [loader.batches(step) for loader in loaders]
        assert len({len(batches) for batches in dealt}) == 1
        found = []
        for batch in (batch for batches in dealt for batch in batches):
            assert len(batch.ids) == max(1, 2 * batch.pairs)
            answers = batch.labels.max(dim=1).values[: 2 * batch.pairs].view(-1, 2)
            chosen, rejected = answers.T
            assert len({*batch.keys}) == 2 * batch.pairs
            assert [int(c) + 1000 for c in chosen] == [int(r) for r in rejected]
            assert (batch.trained_tokens == 0) == (batch.pairs == 0)
            found += [int(c) - 1000 for c in chosen]
        want = [int(place.removeprefix("f:")) for place in alone.batches(step)[0].where]
        assert sorted(found) == sorted({*want})


def test_a_rank_without_pairs_gives_a_filler_that_moves_to_a_device():
    real, filler = (PairBatches(numbered(1), 0, 4, 1, r, 2, pad_id=9).batches(0)[0] for r in (0, 1))
    assert (real.pairs, filler.pairs) == (1, 0)
    assert filler.ids.tolist() == [[9] * 8]
    moved = real.to(torch.device("cpu"))
    assert moved.pairs == 1
    assert len(moved.places) == real.trained_tokens
    label = LabelBatches(labelled(1), 0, 4, 1, 1, 2, pad_id=9, seq_len=8).batches(0)[0]
    assert (label.pairs, len(label.desirable), label.trained_tokens) == (0, 0, 0)


def test_labels_stand_beside_their_sequences():
    loader = LabelBatches(labelled(20), 0, 8, 3, 0, 1, pad_id=0, seq_len=64)
    for step in range(loader.per_epoch):
        for batch in loader.batches(step):
            assert batch.desirable.dtype == torch.bool
            assert [int(ids[0]) % 3 == 0 for ids in batch.ids] == batch.desirable.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_mismatched_answers_rotate_through_the_global_batch_on_any_number_of_ranks(ranks):
    examples = labelled(23)
    loaders = [LabelBatches(examples, 3, 8, 2, rank, ranks, 0, seq_len=12) for rank in range(ranks)]
    alone = LabelBatches(examples, 3, 8, 8, 0, 1, 0, seq_len=12)

    def answer_of(batches) -> dict[int, int]:
        """The row of each prompt -> the row of the answer behind it."""
        return {
            int(ids[0]): int(labels.max()) - 1000
            for batch in batches
            for ids, labels in zip(batch.ids, batch.labels, strict=True)
            if batch.pairs
        }

    for step in range(loaders[0].per_epoch):
        found = {}
        for loader in loaders:
            batches, mismatched = loader.batches(step), loader.mismatched(step)
            assert [batch.where for batch in batches] == [batch.where for batch in mismatched]
            for batch, other in zip(batches, mismatched, strict=True):
                assert torch.equal(batch.desirable, other.desirable)
                assert other.mask.sum(dim=1).max() <= 12
            assert answer_of(batches) == {row: row for row in answer_of(batches)}
            found |= answer_of(mismatched)
        assert found == answer_of(alone.mismatched(step))
        assert sorted(found.values()) == sorted(found)  # each answer once
        assert all(prompt != answer for prompt, answer in found.items())


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_packs_hold_whole_pairs_and_sums_over_them_are_those_of_their_sequences(ranks, flat):
    examples = numbered(23)
    found = {}
    for rank in range(ranks):
        loader = PackedPairs(examples, 7, 4, 2, rank, ranks, 0, 64, flat)
        for step in range(loader.per_epoch):
            for batch in loader.batches(step):
                trained = (batch.labels != IGNORE).float()
                counts = per_sequence(batch, trained)
                sums = per_sequence(batch, batch.labels.clamp(min=0).float())
                assert len(counts) == max(1, 2 * batch.pairs)
                for key, *numbers in zip(batch.keys, counts, sums, strict=False):
                    found[key] = [int(number) for number in numbers]
    plain = PairBatches(examples, 7, 23, 23, 0, 1, pad_id=0).batches(0)[0]
    sums = [per_sequence(plain, plain.labels.clamp(min=0).float()).int().tolist()]
    counts = per_sequence(plain, (plain.labels != IGNORE).float()).int().tolist()
    assert found == dict(zip(plain.keys, map(list, zip(counts, *sums, strict=True)), strict=True))
