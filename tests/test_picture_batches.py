"""Examples with pictures -> global batches.

Alone: .venv/bin/python -m pytest tests/test_picture_batches.py
"""

import json
import multiprocessing
import os
import re
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import pytest
import torch
from picture_families import NAMES, family_folder
from PIL import Image
from torch.utils.data import _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from transformers import AutoModelForImageTextToText

from utils.data.encode import Rows
from utils.data.examples import load_examples
from utils.data.picture_batches import PictureBatches
from utils.data.pictures import load_processor, read_pictured
from utils.data.tokens import load_tokenizer, pad_id, render
from utils.model.loss import arguments
from utils.run.errors import ConfigError
from utils.run.units import IGNORE

# mllama skips layers where there is no picture: rows with and without are not in one micro-batch.
MIXING = [name for name in NAMES if name != "mllama"]
SIZES = {"a.png": (60, 40), "b.png": (200, 100), "c.png": (30, 90)}
ANSWER = {"role": "assistant", "content": "A picture."}


def row(*names: str, words: str = "What?") -> dict:
    parts = [{"type": "image", "path": name} for name in names]
    return {
        "messages": [
            {"role": "user", "content": [*parts, {"type": "text", "text": words}]},
            ANSWER,
        ]
    }


class Family:
    def __init__(self, folder):
        self.folder = folder
        self.tokenizer = load_tokenizer(folder)
        self.processor = load_processor(str(folder), self.tokenizer)

    @cached_property
    def model(self):
        return AutoModelForImageTextToText.from_pretrained(self.folder).eval()

    def loader(self, rows, batch_size=1, rank=0, ranks=1, global_batch=0, workers=0, **settings):
        with open("t.jsonl", "w") as file:
            file.write("\n".join(map(json.dumps, rows)))
        source = Rows("t.jsonl", 4000, processor=str(self.folder), **settings)
        return PictureBatches(
            load_examples(source, self.tokenizer),
            0,
            global_batch or len(rows),
            batch_size,
            rank,
            ranks,
            pad_id(self.tokenizer),
            source=source,
            processor=self.processor,
            workers=workers,
        )


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    base = tmp_path_factory.mktemp("families")
    made: dict[str, Family] = {}

    def family_of(name) -> Family:
        if name not in made:
            made[name] = Family(family_folder(name, base))
        return made[name]

    return family_of


@pytest.fixture(autouse=True)
def _pictures(tmp_path, monkeypatch):
    for i, (name, size) in enumerate(SIZES.items()):
        torch.manual_seed(i)
        noise = torch.randint(256, (size[1], size[0], 3), dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def _torch_looks_more_often():
    """Whether its workers live, and how they end: each 5 seconds, else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
        patch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))
        yield


def forward(model, batch) -> torch.Tensor:
    """(B, T, V) logits."""
    options = arguments(batch)
    del options["labels"], options["places"]
    with torch.no_grad():
        return model(input_ids=batch.ids, **options).logits


def loss_of(model, batch) -> torch.Tensor:
    """The sum over the trained tokens."""
    logits = (
        forward(model, batch)
        if not torch.is_grad_enabled()
        else model(
            input_ids=batch.ids,
            **{k: v for k, v in arguments(batch).items() if k not in ("labels", "places")},
        ).logits
    )
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(),
        batch.labels[:, 1:].flatten(),
        ignore_index=IGNORE,
        reduction="sum",
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_what_the_processor_gives_for_its_rows_padded_on_the_right(name, family):
    made = family(name)
    names = [["b.png", "c.png"], ["a.png"]]
    if name == "mllama":  # rows with equally many pictures share a batch
        names[1].append("c.png")
    rows = [row(*names[0], words="Which is larger? " * 3), row(*names[1])]
    loader = made.loader(rows, batch_size=2)
    loader.multiple = 1
    (batch,) = loader.batches(0)
    messages = [read_pictured(r, "chat", {})[0] for r in rows]
    images = [[Image.open(n) for n in of_row] for of_row in names]
    theirs = dict(
        made.processor(
            text=[render(made.tokenizer, m) for m in messages],
            images=images,
            add_special_tokens=False,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
    )
    assert [where[-1] for where in batch.where] == ["1", "2"]
    assert torch.equal(theirs.pop("input_ids"), batch.ids)
    assert torch.equal(theirs.pop("attention_mask").bool(), batch.mask)
    assert theirs.keys() == batch.extra.keys()
    for key, value in theirs.items():
        assert value.shape == batch.extra[key].shape, key
        assert torch.equal(value, batch.extra[key]), key


@pytest.mark.parametrize("name", MIXING)
def test_rows_with_and_without_pictures_do_not_see_each_other(name, family):
    made = family(name)
    model = made.model
    rows = [row("b.png", "c.png"), row(words="No picture."), row("a.png")]
    (batch,) = made.loader(rows, batch_size=3).batches(0)
    together = forward(model, batch)
    for i, where in enumerate(batch.where):
        (alone,) = made.loader([rows[int(where[-1]) - 1]]).batches(0)
        size = alone.tokens
        torch.testing.assert_close(
            together[i, :size], forward(model, alone)[0, :size], atol=2e-5, rtol=1e-4
        )


@pytest.mark.parametrize("name", MIXING)
def test_a_blank_picture_behind_a_row_changes_no_bit_of_loss_and_gradients(name, family):
    made = family(name)
    model = made.model
    loader = made.loader([row(words="No picture, only text. " * 4), row("a.png")])
    loader.multiple = 256  # so that both are equally long
    text = int((loader.patches == 0).nonzero()[0])
    results = []
    for blank in (False, True):
        batch = loader.batch([text], blank).to(torch.device("cpu"))
        assert (("pixel_values" in batch.extra), batch.ids.shape[1]) == (blank, 256)
        model.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((loss.item(), batch.trained_tokens, grads))
    (loss, trained, grads), (loss_too, trained_too, grads_too) = results
    assert (loss, trained) == (loss_too, trained_too)
    for key, grad in grads.items():
        if "experts" in key or "mlp.gate" in key:  # sums over all tokens, in another order
            torch.testing.assert_close(grad, grads_too[key], atol=1e-6, rtol=1e-5)
        else:
            assert torch.equal(grad, grads_too[key]), key
    towers = grads_too.keys() - grads.keys()
    assert all(not grads_too[key].any() for key in towers)
    assert towers, "the tower has run"


def test_every_micro_batch_of_a_step_has_a_picture_where_one_has_and_none_where_none_has(family):
    made = family("llava")
    rows = [row(words="x" * n) for n in (50, 45, 40, 35)] + [row("a.png"), row()]
    seen = [made.loader(rows, ranks=2, rank=rank).batches(0) for rank in range(2)]
    pictures = [["pixel_values" in batch.extra for batch in batches] for batches in seen]
    assert pictures[0] == pictures[1]
    assert all(pictures[0])
    blank = [batch for batches in seen for batch in batches if "pixel_values" in batch.extra]
    assert sorted(len(batch.extra["pixel_values"]) for batch in blank) == [1] * 6
    text_only = made.loader([row(words="a"), row(words="b")], ranks=2)
    assert "pixel_values" not in text_only.batches(0)[0].extra


def test_a_rank_without_rows_gives_a_filler_with_a_picture(family):
    made = family("qwen2_5_vl")
    (batch,) = made.loader([row("a.png")], ranks=2, rank=1).batches(0)
    assert batch.trained_tokens == 0
    assert "pixel_values" in batch.extra
    assert forward(made.model, batch).isfinite().all()


def test_where_a_text_skips_layers_each_micro_batch_is_of_one_kind_on_all_ranks(family):
    made = family("mllama")
    rows = [row(words="x" * n) for n in (50, 45, 40)] + [row("a.png"), row("b.png"), row("c.png")]
    seen = [made.loader(rows, ranks=2, rank=rank).batches(0) for rank in range(2)]
    pictures = [["pixel_values" in batch.extra for batch in batches] for batches in seen]
    assert pictures == [[False, False, True, True]] * 2
    names = [where for batches in seen for batch in batches for where in batch.where]
    assert sorted(names) == ["filler"] * 2 + [f"t.jsonl:{n}" for n in range(1, 7)]
    model = made.model
    for batches in seen:
        assert all(forward(model, batch).isfinite().all() for batch in batches)
    assert made.loader([row(), row()], ranks=2).batches(0)[0].extra == {}


def test_rows_are_dealt_by_tokens_and_patches_and_each_once(family):
    made = family("qwen3_vl")
    rows = [row("b.png", "c.png"), row("a.png"), row(words="x" * 30), row(words="y" * 300)]
    loaders = [made.loader(rows, ranks=2, rank=rank) for rank in range(2)]
    shares = loaders[0].shares(0)
    assert shares == loaders[1].shares(0)
    flat = [[number for micro in share for number in micro] for share in shares]
    assert sorted(flat[0] + flat[1]) == [0, 1, 2, 3]
    costs = loaders[0].costs(list(range(4)))
    heaviest = int(costs.argmax())
    assert [heaviest, int(costs.argmin())] in [sorted(f, key=lambda i: -costs[i]) for f in flat]


def equal(one, other) -> bool:
    return (
        one.where == other.where
        and torch.equal(one.ids, other.ids)
        and all(torch.equal(value, other.extra[key]) for key, value in one.extra.items())
    )


def test_workers_give_the_same_batches_from_any_step_and_draw_no_random_numbers(family):
    made = family("llava")
    rows = [row("a.png", words=f"{i}") for i in range(5)]
    plain, ahead, later = (
        made.loader(rows, batch_size=2, global_batch=4, workers=n) for n in (0, 2, 1)
    )
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    for step in range(4):
        batches = ahead.batches(step)
        assert all(map(equal, batches, plain.batches(step)))
        if step >= 2:
            assert all(map(equal, batches, later.batches(step)))
    assert torch.equal(torch.rand(3), expected)


def test_workers_end_with_the_loader(family):
    def children() -> set[str]:
        return set(open(f"/proc/self/task/{os.getpid()}/children").read().split())

    before = children()
    loader = family("llava").loader([row("a.png")], workers=2)
    loader.batches(0)
    assert len(children() - before) == 2
    del loader
    deadline = time.monotonic() + 20
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children() - before == set()


def test_a_run_that_is_told_to_stop_still_has_its_last_step(family, capfd):
    """A scheduler sends SIGTERM to every process of a job."""
    made = family("llava")
    plain, ahead = (made.loader([row("a.png"), row("b.png")], workers=n) for n in (0, 1))
    others = set(multiprocessing.active_children())  # ranks that other tests have started
    first = ahead.batches(0)
    for worker in set(multiprocessing.active_children()) - others:
        os.kill(worker.pid, signal.SIGTERM)
        worker.join()
    for step in (1, 2, 3, 4):
        assert all(map(equal, ahead.batches(step), plain.batches(step)))
    assert all(map(equal, first, plain.batches(0)))
    assert "the process that trains decodes" in capfd.readouterr().out


def test_without_room_in_shared_memory_it_decodes_itself(family, capfd):
    """A limit on files holds there too; Docker gives a container 64 MiB."""
    made = family("llava")
    plain, ahead = (made.loader([row("a.png"), row("b.png")], workers=n) for n in (0, 1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("waits for a batch that is lost"))
    signal.alarm(60)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        found = ahead.batches(0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for step in (0, 1):
        assert all(map(equal, found if step == 0 else ahead.batches(step), plain.batches(step)))
    (line,) = capfd.readouterr().out.splitlines()
    worker = re.search(
        r"decodes the pictures: RuntimeError: unable to resize.*</(torch_\d+_)", line
    )
    for empty in Path("/dev/shm").glob(f"{worker[1]}*"):  # torch leaves them there
        empty.unlink()


def test_below_a_tmpdir_of_too_many_letters_it_decodes_itself(family, capfd, monkeypatch, tmp_path):
    """Workers pass batches on through a socket, whose path has at most 107 bytes."""
    made = family("llava")
    plain, ahead = (made.loader([row("a.png"), row("b.png")], workers=n) for n in (0, 1))
    long = tmp_path / ("long" * 25)
    long.mkdir()
    # where multiprocessing keeps the folder that it has made below TMPDIR
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(long))
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("waits for a batch that is lost"))
    signal.alarm(60)
    try:
        found = ahead.batches(0)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert all(map(equal, found, plain.batches(0)))
    assert "decodes the pictures: OSError: AF_UNIX path too long" in capfd.readouterr().out


def test_a_thread_that_may_set_no_signals_decodes_itself(family):
    made = family("llava")
    plain, ahead = (made.loader([row("a.png"), row("b.png")], workers=n) for n in (0, 1))
    with ThreadPoolExecutor() as pool:
        found = pool.submit(ahead.batches, 0).result()
    assert all(map(equal, found, plain.batches(0)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_picture_that_cannot_be_decoded_names_its_row(workers, family, tmp_path):
    Image.effect_noise((200, 200), 80).convert("RGB").save("d.jpg")
    whole = (tmp_path / "d.jpg").read_bytes()
    loader = family("llava").loader([row("d.jpg")], workers=workers)
    (tmp_path / "d.jpg").write_bytes(whole[:-3000])
    with pytest.raises(ConfigError, match=r"^t.jsonl:1: picture 'd.jpg': OSError.*truncated"):
        loader.batches(0)


@pytest.mark.parametrize("other_size", [True, False])
def test_a_picture_that_was_changed_since_it_was_read_names_its_row(other_size, family):
    loader = family("llava").loader([row("a.png")])
    with Image.open("a.png") as image:
        size = (5, 5) if other_size else image.size
    Image.effect_noise(size, 40).save("a.png")
    with pytest.raises(
        ConfigError, match=r"^t.jsonl:1: picture 'a.png'.*changed since its tokens were made"
    ):
        loader.batches(0)


def test_image_max_pixels_holds_for_pixels_as_for_tokens(family):
    made = family("qwen2_5_vl")
    model = made.model
    small, large = (made.loader([row("b.png")], image_max_pixels=n) for n in (70 * 70, 0))
    batches = [loader.batches(0)[0] for loader in (small, large)]
    assert batches[0].extra["pixel_values"].shape[0] < batches[1].extra["pixel_values"].shape[0]
    assert forward(model, batches[0]).isfinite().all()  # as many features as tokens
