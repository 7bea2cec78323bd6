"""Documents as an endless stream of tokens: nothing lost, nothing twice, the same on any number of ranks.

python -m pytest tests/test_stream.py
"""

import json
import math
import random
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from shell import ROOT
from tiny import tiny_model, tiny_model_folder, tiny_tokenizer

from utils.data.examples import Rows, load_data
from utils.data.stream import PERIOD, StreamBatches
from utils.data.tokens import load_tokenizer
from utils.model.loss import add_chunked_loss, summed_cross_entropy
from utils.run.errors import ConfigError
from utils.run.units import IGNORE

T = 16  # tokens of a row
CPU = torch.device("cpu")
WORDS = "the small red boat säng 早上好 and went 12 times around <|im_end|> it".split()


def texts_of(count, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 9))) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return load_tokenizer(folder)


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def documents(tokenizer, dataset, **options):
    rows = Rows(dataset, T, task="documents", **options)
    return load_data(rows, tokenizer)


def batches(examples, rank=0, ranks=1, batch_size=2, size=4, **options):
    return StreamBatches(examples, 7, size, batch_size, rank, ranks, 0, T, **options)


def line_of(loader, rows):
    """The tokens of rows 0, 1, ... joined again where they overlap."""
    ids = []
    for row in range(rows):
        found = torch.cat([part.ids for part in loader.items([row])]).tolist()
        assert not row or ids[-1] == found[0]
        ids += found[bool(row) :]
    return ids


def refusal(call, *args, **options) -> str:
    with pytest.raises(ConfigError) as refused:
        call(*args, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_line_is_every_text_once_an_epoch_with_its_end_of_text_token(tokenizer, tmp_path):
    """Also texts that spell a special token, and the second epoch in another order."""
    texts = texts_of(40)
    examples, _ = documents(tokenizer, write(tmp_path / "a.jsonl", texts))
    loader = batches(examples)
    tokens = loader.streams[0].tokens
    rows = math.ceil(2 * tokens / (T - 1))
    ids = line_of(loader, rows)
    orders = []
    for epoch in range(2):
        part = ids[epoch * tokens : (epoch + 1) * tokens]
        assert part[-1] == tokenizer.eos_token_id
        ends = [i for i, token in enumerate(part) if token == tokenizer.eos_token_id]
        begins = [0, *(end + 1 for end in ends[:-1])]
        found = [tokenizer.decode(part[a:b]) for a, b in zip(begins, ends, strict=True)]
        assert sorted(found) == sorted(texts)
        orders.append(found)
    assert orders[0] != orders[1]
    assert orders[0] != texts


def test_every_token_is_predicted_once_by_full_rows(tokenizer, tmp_path):
    """Without the mask all of them, with it all but the first of each document."""
    examples, _ = documents(tokenizer, write(tmp_path / "a.jsonl", texts_of(40)))
    for mask in (False, True):
        loader = batches(examples, document_mask=mask)
        first, *more = (loader.batches(step) for step in range(loader.per_epoch))
        predicted = []
        for found in (first, *more):
            for batch in found:
                assert batch.ids.shape == (2, T)
                assert batch.tokens == 2 * T
                predicted += batch.labels[batch.labels != IGNORE].tolist()
        rows = loader.per_epoch * 4
        whole = line_of(loader, rows)
        if not mask:
            assert first[0].positions is None
            assert sorted(predicted) == sorted(whole[1:])
        else:
            begins = [0, *(i + 1 for i, t in enumerate(whole) if t == tokenizer.eos_token_id)]
            inside = [token for i, token in enumerate(whole) if i not in begins]
            assert sorted(predicted) == sorted(inside)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_global_batch_is_the_same_rows_on_any_number_of_ranks(tokenizer, tmp_path, ranks):
    examples, _ = documents(tokenizer, write(tmp_path / "a.jsonl", texts_of(40)))
    one = batches(examples, batch_size=4)
    for step in (0, 3, 10**6):
        (whole,) = one.batches(step)
        rows = []
        for rank in range(ranks):
            for batch in batches(examples, rank, ranks, batch_size=1).batches(step):
                rows += batch.ids.tolist()
        assert sorted(rows) == sorted(whole.ids.tolist())


def test_a_document_that_is_cut_goes_on_in_the_next_row(tokenizer, tmp_path):
    text = "abcdefghijklmnopqrstuvwxyz" * 3
    examples, _ = documents(tokenizer, write(tmp_path / "a.jsonl", [text]))
    loader = batches(examples)
    assert tokenizer.decode(line_of(loader, 6)[: len(text)]) == text
    (batch,) = loader.batches(0)[:1]
    assert batch.positions[1].tolist() == list(range(T))  # positions are those of the row
    assert batch.where == [f"{tmp_path}/a.jsonl:1"] * 2


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_loss_with_document_mask_is_that_of_the_pieces_alone(tokenizer, tmp_path, kind):
    examples, _ = documents(tokenizer, write(tmp_path / "a.jsonl", texts_of(20)))
    loader = batches(examples)
    model = add_chunked_loss(tiny_model(kind))
    found = wanted = 0.0
    for step in range(2):
        for batch in loader.batches(step):
            found += summed_cross_entropy(model, batch.to(CPU)).item()
        for row in loader.rows_of(step):
            for part in loader.items([row]):
                ids = part.ids.long()[None]
                logits = model(ids).logits[0, :-1]
                wanted += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    assert found == pytest.approx(wanted, rel=1e-5)


def test_a_source_that_eval_share_holds_out_whole_is_refused_by_that_name(tokenizer, tmp_path):
    large = write(tmp_path / "large.jsonl", [f"number {i}" for i in range(40)])
    small = write(tmp_path / "small.jsonl", ["alone"])
    examples, _ = documents(tokenizer, f"{large}:0.7,{small}:0.3", eval_share=0.9)
    with pytest.raises(ConfigError, match=r"small.jsonl: no document .* a smaller --eval_share"):
        batches(examples).summary()


def test_a_mixture_has_its_shares_in_every_thousand_rows(tokenizer, tmp_path):
    """Each source has a stream of its own, and none of its rows is left out. The source of a row depends on
    the seed and the number of the row alone.
    """
    a = write(tmp_path / "a.jsonl", ["a" * 40] * 3)
    b = write(tmp_path / "b.jsonl", ["b" * 7] * 5)
    examples, _ = documents(tokenizer, f"{a}:0.7,{b}:0.1004,{a}:0.1996")
    loader = batches(examples)
    assert loader.pattern.bincount().tolist() == [700, 100, 200]
    seen = [0, 0, 0]
    for row in range(2 * PERIOD):
        source = int(loader.pattern[row % PERIOD])
        parts = loader.items([row])
        name = "b" if source == 1 else "a"
        assert all(part.where.startswith(f"{tmp_path}/{name}.jsonl") for part in parts)
        stream = loader.streams[source]
        first = seen[source] * (T - 1)
        same = zip(parts, stream.read(first, first + T), strict=True)
        assert all(torch.equal(ours.ids, theirs.ids) for ours, theirs in same)
        seen[source] += 1
    assert seen == [1400, 200, 400]
    examples, _ = documents(tokenizer, f"{a}:1,{b}:0.0001")
    assert "larger weight" in refusal(lambda: batches(examples).batches(0))


def test_held_out_documents_are_read_once_in_their_order(tokenizer, tmp_path):
    texts = texts_of(30)
    examples, held_out = documents(tokenizer, write(tmp_path / "a.jsonl", texts), eval_share=0.3)
    loader = batches(held_out, held_out=True, document_mask=False)
    rows = [row for step in range(loader.per_epoch) for row in loader.rows_of(step)]
    assert rows == [*range(loader.rows())]
    ids = line_of(loader, len(rows))
    wanted = torch.cat(
        [held_out.ids[held_out.bounds[i] : held_out.bounds[i + 1]].int() for i in held_out.rows]
    )
    assert ids == wanted.tolist()
    assert len(examples) + len(held_out) == 30


@pytest.mark.parametrize("mask", [False, True])
def test_bits_per_byte_are_all_nats_over_the_bytes_of_the_texts(tokenizer, tmp_path, mask):
    texts = texts_of(12)
    file = write(tmp_path / "a.jsonl", texts)
    examples, _ = documents(tokenizer, file)
    loader = batches(examples, held_out=True, document_mask=mask)
    model = add_chunked_loss(tiny_model("llama"))
    nats, predicted = 0.0, 0
    for step in range(loader.per_epoch):
        for batch in loader.batches(step):
            nats += summed_cross_entropy(model, batch.to(CPU)).item()
            predicted += batch.trained_tokens
    size_bytes = sum(len(text.encode()) for text in texts)
    bits = nats / predicted * loader.bits_per_byte()
    assert bits == pytest.approx(nats / math.log(2) / size_bytes)


def test_ids_have_the_bytes_of_their_text(tokenizer, tmp_path):
    """The end-of-text token is no text: its name has bytes that no text of the same documents has."""
    texts = texts_of(12)
    examples, _ = documents(tokenizer, write(tmp_path / "a.jsonl", texts))
    bounds = examples.bounds.tolist()
    found = [examples.ids[begin:end].tolist() for begin, end in pairwise(bounds)]
    rows = [json.dumps({"input_ids": ids}) for ids in found]
    (tmp_path / "ids.jsonl").write_text("\n".join(rows))
    ids, _ = documents(tokenizer, str(tmp_path / "ids.jsonl"))
    assert ids.fingerprint == examples.fingerprint  # which holds the bytes
    assert ids.row_sizes.tolist() == [len(text.encode()) for text in texts]


def test_rows_of_every_form_become_documents(tokenizer, tmp_path):
    """Conversations as the template writes them, prompt and completion as one text, ids as they are."""
    turns = [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "2", "weight": 0},
    ]
    eos = tokenizer.eos_token_id
    rows = [
        {"messages": turns},
        {"prompt": "one ", "completion": "two"},
        {"input_ids": [9, 8, 7], "labels": [-100, -100, 7]},
        {"input_ids": [9, 8, eos]},
        {"text": " \n"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples, _ = documents(tokenizer, str(file))
    found = [
        examples.ids[begin:end].tolist()
        for begin, end in zip(examples.bounds[:-1], examples.bounds[1:], strict=True)
    ]
    plain = [{key: turn[key] for key in ("role", "content")} for turn in turns]
    assert found[0] == [*tokenizer.apply_chat_template(plain)["input_ids"], eos]
    assert found[1] == [*tokenizer("one two")["input_ids"], eos]
    assert found[2:] == [[9, 8, 7, eos], [9, 8, eos]]  # the token is there once
    assert examples.dropped == {"empty documents": 1}


def test_bos_comes_where_the_tokenizer_adds_one(tmp_path):
    folder = tiny_model_folder(tmp_path / "model", vocab_size=271)
    for model, first in ((folder, None), (ROOT / "recipes" / "tiny", 1)):
        examples, _ = documents(load_tokenizer(model), write(tmp_path / "a.jsonl", ["Anna", "Ben"]))
        begins = examples.ids[examples.bounds[:-1]].tolist()
        assert (begins == [first, first]) == (first is not None)


def test_ids_take_two_bytes_where_the_vocabulary_allows_and_masks_none(
    tokenizer, tmp_path, monkeypatch
):
    """In memory, and in the cache on the disk, which gives the same documents."""
    from utils.data import cache
    from utils.data import examples as module

    file = write(tmp_path / "a.jsonl", texts_of(200))
    small, _ = documents(tokenizer, file)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "SMALL", 0)
    monkeypatch.setattr(cache, "in_processes", map)
    cached, _ = documents(tokenizer, file)
    assert cached.ids.dtype == small.ids.dtype == torch.uint16
    assert len(cached.loss_mask) == 0
    assert cached.fingerprint == small.fingerprint
    (ids,) = (tmp_path / "cache").rglob("ids")
    assert ids.stat().st_size == 2 * int(cached.bounds[-1])


def test_a_large_vocabulary_takes_four_bytes(tokenizer, tmp_path):
    tokenizer = load_tokenizer(tiny_model_folder(tmp_path / "model", vocab_size=271))
    tokenizer.add_tokens([f"word{i}" for i in range(2**16)])
    texts = ["word65535 word1 word65000", "word7"]
    examples, _ = documents(tokenizer, write(tmp_path / "a.jsonl", texts))
    assert examples.ids.dtype == torch.int32
    ids = examples.ids[: examples.bounds[1]].tolist()
    assert max(ids) > 2**16
    assert tokenizer.decode(ids[:-1]).split() == texts[0].split()


def test_steps_follow_from_tokens_or_epochs(tokenizer, tmp_path):
    examples, _ = documents(tokenizer, write(tmp_path / "a.jsonl", ["x" * 149]))  # 150 with the end
    loader = batches(examples)
    assert loader.rows() == 10
    assert loader.steps(0, 2) == 5
    assert loader.steps(61, 2) == 2  # of 4 rows with 15 predicted tokens each
