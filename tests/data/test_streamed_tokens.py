import multiprocessing
import warnings
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ups.callbacks import DevicePrefetch, ExactResume, TextSample
from lightning_ups.data import PackedTokens, StreamedTokens
from lightning_ups.models import GPTModule
from tests.data.test_packed_tokens import Seen
from tests.token_files import jsonl
from tests.toys import QUIET

pytest.importorskip("tokenizers")
TEXTS = [f"document {index} " * (index % 7 + 1) for index in range(300)]
OPTIONS = {"tokenizer": "bytes", "seq_len": 32, "batch_size": 2, "num_workers": 0}


def data(sources=None, *, rank=0, num_ranks=1, **options):
    made = StreamedTokens([TEXTS] if sources is None else sources, **{**OPTIONS, **options})
    strategy = SimpleNamespace(
        distributed_sampler_kwargs={"num_replicas": num_ranks, "rank": rank}, root_device=torch.device("cpu")
    )
    made.trainer = SimpleNamespace(strategy=strategy, max_epochs=-1, max_steps=-1, limit_train_batches=1.0)
    made.setup("fit")
    return made


def documents_in(made, batches):
    return [made.decode(row.tolist()) for batch in batches for row in batch.tokens]


def test_training_and_validation_have_documents_of_their_own():
    made = data(val_fraction=0.2, seq_len=256)
    rows = documents_in(made, made.val_dataloader())
    held_out = {text for text in TEXTS if any(text in row for row in rows)}
    loader = iter(made.train_dataloader())
    train = "".join(documents_in(made, [next(loader) for _ in range(20)]))
    assert len(held_out) > 10
    assert not [text for text in held_out if text in train and len(text) > 30]


def test_validation_has_the_documents_of_packed_tokens(tmp_path):
    from lightning_ups.__main__ import main

    path = jsonl(tmp_path / "texts.jsonl", TEXTS)
    main(["tokenize", "--source", path, "--tokenizer", "bytes", "--output", str(tmp_path / "tokens")])
    packed = PackedTokens(str(tmp_path / "tokens"), seq_len=32, batch_size=2, val_fraction=0.1, packing="greedy")
    packed.setup("fit")
    rows = packed.val_rows
    made = data(val_fraction=0.1, val_rows=10_000)
    streamed = torch.cat([batch.tokens for batch in made.val_dataloader()])
    assert streamed.tolist() == rows.__getitems__(range(len(rows))).tokens.tolist()


def test_validation_takes_its_first_rows_in_the_shares_of_training():
    a, b = ["a" * 40] * 200, ["b" * 40] * 300
    made = data([a, b], weights=[1, 3], val_fraction=0.999, val_rows=4)
    text = "".join(documents_in(made, made.val_dataloader()))
    assert 0 < text.count("a") < 0.5 * text.count("b")


def test_text_is_encoded_and_decoded():
    made = data()
    assert made.vocab_size == StreamedTokens([TEXTS], **OPTIONS).vocab_size == 257
    assert made.decode(made.encode("Größe")) == "Größe"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sources": {}}, "at least one source"),
        ({"sources": {"a": 0}}, "a weight above 0 for each"),
        ({"sources": ["a", "b"], "weights": [1]}, "a weight above 0 for each"),
        ({"seq_len": 0}, "at least one token"),
        ({"val_fraction": 1}, "val_fraction from 0"),
    ],
)
def test_wrong_arguments_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        StreamedTokens(**{"sources": [TEXTS], **OPTIONS, **options})


def test_training_without_an_end_is_refused():
    made = data()
    made.trainer.max_epochs = 3
    with pytest.raises(ValueError, match=r"Trainer\(max_steps=\.\.\.\)"):
        made.train_dataloader()


def test_no_document_for_validation_is_named():
    with pytest.raises(ValueError, match="finds no document for validation"):
        data([["a", "b"]], val_fraction=1e-9).val_dataloader()
    assert data(val_fraction=0).val_dataloader() == []


def test_gpt_trains_and_validates_with_callbacks_that_read_the_data(tmp_path):
    made = StreamedTokens([TEXTS], **{**OPTIONS, "val_fraction": 0.1, "num_workers": 1})
    callbacks = [TextSample(prompt="a", num_tokens=2), DevicePrefetch(), ExactResume(on_unreplayable="refuse")]
    run = Trainer(
        accelerator="cpu", max_steps=4, val_check_interval=2, default_root_dir=tmp_path, callbacks=callbacks, **QUIET
    )
    run.fit(GPTModule(size="tiny", vocab_size=257), made)
    assert run.callback_metrics["val_loss"].isfinite()


# Resuming


def run(root, sources, *, devices, ckpt_path=None, steps=9, exact=True, **options):
    """Return the batches of this rank in epochs of 5."""
    warnings.simplefilter("ignore")
    made = StreamedTokens(sources, **{**OPTIONS, "val_fraction": 0, "shuffle": 20, **options})
    saver = ModelCheckpoint(root, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        limit_train_batches=5,
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        default_root_dir=root,
        callbacks=[
            *([ExactResume(on_unreplayable="refuse")] if exact else []),
            *([saver] if ckpt_path is None else []),
        ],
        **{**QUIET, "enable_checkpointing": True},
    )
    module = Seen()
    trainer.fit(module, made, ckpt_path=ckpt_path)
    return module.seen


def mixture(kind, tmp_path):
    upper = [text.upper() for text in TEXTS]
    if kind == "lists":
        return {"sources": [TEXTS, upper], "weights": [3, 7]}
    pytest.importorskip("datasets")
    return {"sources": {jsonl(tmp_path / "one.jsonl", TEXTS): 0.3, jsonl(tmp_path / "two.jsonl", upper): 0.7}}


def resumed_on_every_rank(path, options):
    # Ranks of tests have no workers otherwise, or some that import everything anew.
    multiprocessing.current_process()._config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)
    whole = run(path / "c", devices=2, num_workers=2, **options)
    found = []
    for step in (3, 6):  # within an epoch, and within the next one
        saved = path / "c" / f"step={step}.ckpt"
        found.append(run(path / str(step), devices=2, num_workers=2, ckpt_path=saved, **options) == whole[step:])
    return len(whole), found


@pytest.mark.parametrize("kind", ["lists", "files"])
def test_resuming_a_shuffled_mixture_on_two_ranks_with_two_workers_is_bit_equal(ranks, tmp_path, kind):
    assert ranks(resumed_on_every_rank, tmp_path, mixture(kind, tmp_path)) == (9, [True, True])


def tokens_until_the_checkpoint(path, sources):
    import torch.distributed as dist

    seen = run(path, sources, devices=2, steps=5)
    gathered = [None] * 2
    dist.all_gather_object(gathered, seen)
    return [token for rank in gathered for tokens, _ in rank[:3] for token in tokens]


def numbered(count, length=9):
    return [[*range(start, start + length)] for start in range(0, count * length, length)]


def test_on_fewer_ranks_streams_go_on_without_loss_or_repetition(ranks, tmp_path):
    sources = [numbered(200)]
    before = ranks(tokens_until_the_checkpoint, tmp_path, sources)
    resumed = run(tmp_path / "d", sources, devices=1, ckpt_path=tmp_path / "step=3.ckpt", steps=5)
    after = [token for tokens, _ in resumed for token in tokens]
    assert len(before) == 2 * 3 * 64
    assert len(after) == 2 * 64
    assert len({*before, *after}) == len(before) + len(after)


def test_one_device_needs_no_callback(tmp_path):
    """Lightning itself saves the state of a loader that has one."""
    whole = run(tmp_path, [TEXTS], devices=1, exact=False)
    assert run(tmp_path / "d", [TEXTS], devices=1, exact=False, ckpt_path=tmp_path / "step=3.ckpt") == whole[3:]
