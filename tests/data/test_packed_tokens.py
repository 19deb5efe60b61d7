import multiprocessing
import pickle
import warnings
from collections import Counter
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F  # noqa: N812

from lightning_ups._compat.lightning.loaders import read_ahead, why_not
from lightning_ups.callbacks import ExactResume
from lightning_ups.data import PackedTokens
from lightning_ups.models import GPTModule
from tests.token_files import numbered_documents, random_documents, token_folder
from tests.toys import QUIET

OPTIONS = {"seq_len": 32, "batch_size": 4, "val_fraction": 0, "num_workers": 0}


def made(folders, *, rank=0, num_ranks=1, **options):
    data = PackedTokens(folders, **{**OPTIONS, **options})
    strategy = SimpleNamespace(
        distributed_sampler_kwargs={"num_replicas": num_ranks, "rank": rank}, root_device=torch.device("cpu")
    )
    data.trainer = SimpleNamespace(strategy=strategy)
    data.setup("fit")
    return data


def epoch(data, number=0):
    loader = data.train_dataloader()
    loader.sampler.set_epoch(number)
    return [*loader]


def test_a_batch_has_inputs_targets_positions_and_boundaries(tmp_path):
    data = made(token_folder(tmp_path, [[1, 2, 3, 4, 0], [5, 6, 0]]), seq_len=8, batch_size=1, packing="greedy")
    (batch,) = epoch(data)
    first = batch.tokens[0, 0].item()
    order = [1, 2, 3, 4, 5, 6] if first == 1 else [5, 6, 1, 2, 3, 4]
    assert batch.tokens.tolist() == [[*order, 0, 0]]
    after = {1: 2, 2: 3, 3: 4, 4: 0, 5: 6, 6: 0}
    assert batch.targets.tolist() == [[*(after[token] for token in order), -100, -100]]
    assert batch.positions[0, :6].tolist() == [0, 1, 2, 3, 0, 1] if first == 1 else [0, 1, 0, 1, 2, 3]
    assert batch.documents.cu_seqlens.tolist() == ([0, 4, 6, 8] if first == 1 else [0, 2, 6, 8])


def gpt(**options):
    torch.manual_seed(0)
    module = GPTModule(size="tiny", vocab_size=60, **options)
    module.configure_model()
    return module


@pytest.mark.parametrize(("packing", "loss"), [("greedy", "logits"), ("best_fit", "logits"), ("best_fit", "chunked")])
def test_the_packed_loss_is_that_of_one_document_after_another(tmp_path, packing, loss):
    documents = random_documents(15, longest=33)
    module = gpt(loss=loss)
    rows = made(token_folder(tmp_path, documents), packing=packing, batch_size=1).train_rows
    packed = rows.__getitems__(range(len(rows)))
    value = module.loss(packed)
    value.backward()
    gradients = [parameter.grad.clone() for parameter in module.parameters()]
    if packing == "greedy":  # those that a row's end cuts are compared as they are cut
        parts = [np.split(*each) for each in pieces_of(documents, rows)]
        documents = [part.tolist() for part in chain.from_iterable(parts)]
    module.zero_grad()
    documents = [torch.tensor(document) for document in documents if len(document) > 1]
    count = sum(len(document) - 1 for document in documents)
    losses = [F.cross_entropy(module(d[None, :-1])[0], d[1:], reduction="sum") for d in documents]
    expected = sum(losses) / count
    expected.backward()
    torch.testing.assert_close(value, expected)
    for found, parameter in zip(gradients, module.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, atol=1e-5, rtol=1e-3)


def pieces_of(documents, rows):
    """Yield each piece of ``rows``, with its last target, and no place to split it further."""
    flat = np.array([token for document in documents for token in document])
    for index in range(len(rows)):
        for start, length in zip(*rows.pieces(index)[1:], strict=True):
            yield flat[start : start + length + 1], []


def test_the_loss_without_documents_differs(tmp_path):
    rows = made(token_folder(tmp_path, random_documents(40, longest=20))).train_rows
    packed, module = rows.__getitems__(range(4)), gpt()
    assert not torch.isclose(module.loss(packed), module.model(packed.tokens, packed.targets))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("packing", ["greedy", "best_fit"])
def test_no_prediction_is_lost_or_repeated_over_ranks_and_workers(tmp_path, num_ranks, num_workers, packing):
    documents = numbered_documents(96, length=9)  # 8 predictions each: rows of four documents, 24 in all
    path = token_folder(tmp_path, documents)
    options = {"num_ranks": num_ranks, "num_workers": num_workers, "packing": packing}
    batches = [epoch(made(path, rank=rank, **options)) for rank in range(num_ranks)]
    seen = Counter(torch.cat([batch.tokens for batch in chain(*batches)]).flatten().tolist())
    assert seen == Counter(token for document in documents for token in document[:-1])


def test_all_ranks_together_have_one_order(tmp_path):
    path = token_folder(tmp_path, numbered_documents(96))
    alone = [batch.tokens for batch in epoch(made(path, batch_size=8), 3)]
    pairs = zip(*(epoch(made(path, rank=rank, num_ranks=2), 3) for rank in range(2)), strict=True)
    for whole, (even, odd) in zip(alone, pairs, strict=True):
        assert torch.equal(whole[::2], even.tokens)
        assert torch.equal(whole[1::2], odd.tokens)


def test_epochs_and_seeds_differ_and_repeat(tmp_path):
    path = token_folder(tmp_path, numbered_documents(96))
    orders = [
        torch.cat([batch.tokens for batch in epoch(made(path, seed=seed), number)]).tolist()
        for seed, number in ((0, 0), (0, 1), (1, 0), (0, 0))
    ]
    assert orders[0] == orders[3]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


def test_weights_hold_and_the_rest_of_a_source_comes_in_later_epochs(tmp_path):
    small = token_folder(tmp_path / "a", numbered_documents(100))
    large = token_folder(tmp_path / "b", [[token + 10_000 for token in each] for each in numbered_documents(1000)])
    data = made({small: 1, large: 3}, batch_size=1)
    sizes = data.train_rows.sizes
    seen = []
    for number in range(4):
        loader = data.train_dataloader()
        loader.sampler.set_epoch(number)
        rows = [*loader.sampler]
        share = np.mean(np.array(rows) >= sizes[0])
        assert share == pytest.approx(0.75, abs=0.01)
        assert len(rows) == len({*rows}) == pytest.approx(4 * sizes[0], abs=2)
        seen += [row for row in rows if row >= sizes[0]]
    assert len({*seen}) == sizes[1], "each row of the large source, before one comes again"
    tokens = torch.cat([batch.tokens for batch in epoch(data)])
    assert ((tokens >= 10_000).any(1) == (tokens >= 10_000).all(1)).all(), "a row is of one source"


def test_training_and_validation_have_documents_of_their_own(tmp_path):
    documents = numbered_documents(300)
    path = token_folder(tmp_path, documents)
    data = made(path, val_fraction=0.2, batch_size=1)
    held_out = {token for batch in data.val_dataloader() for token in batch.tokens.flatten().tolist()}
    trained = {token for batch in epoch(data) for token in batch.tokens.flatten().tolist()}
    assert (held_out & trained) <= {0}  # padding
    assert len(held_out | trained) == 8 * 300
    again = made(path, val_fraction=0.2, batch_size=1, seed=5)
    assert held_out == {token for batch in again.val_dataloader() for token in batch.tokens.flatten().tolist()}


def test_wrong_arguments_are_refused(tmp_path):
    path = token_folder(tmp_path / "a", random_documents(3))
    for wrong in ({"seq_len": 0}, {"packing": "first"}, {"val_fraction": 1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            made(path, **wrong)
    with pytest.raises(ValueError, match="weights above 0"):
        made({path: 0})
    with pytest.raises(ValueError, match="leaves validation without"):
        made(path, val_fraction=1e-9)
    with pytest.raises(ValueError, match="less than a batch"):
        made(path, batch_size=1000).train_dataloader()
    other = token_folder(tmp_path / "b", random_documents(3), name="another")
    with pytest.raises(ValueError, match="different tokenizers"):
        made([path, other])


def test_text_is_encoded_and_decoded(tmp_path):
    data = made(token_folder(tmp_path, random_documents(90)))
    assert data.vocab_size == 61
    assert data.encode("w3 w5") == [4, 6]
    assert data.decode([4, 6, 0]) == "w3 w5 <eos>"


def test_rows_can_be_sent_to_a_worker(tmp_path):
    rows = made(token_folder(tmp_path, random_documents(90))).train_rows
    again = pickle.loads(pickle.dumps(rows))
    assert torch.equal(again[3].tokens, rows[3].tokens)


@pytest.mark.filterwarnings("ignore:.*num_workers")
def test_batches_can_be_read_ahead_of_their_step(tmp_path):
    loader = made(token_folder(tmp_path, random_documents(50)), num_workers=1).train_dataloader()
    iterator = iter(loader)
    assert why_not(loader, iterator) is None
    ahead = read_ahead(iterator)
    assert next(iterator) is ahead


def test_gpt_trains_and_validates(tmp_path):
    data = PackedTokens(
        token_folder(tmp_path, random_documents(300, longest=30)), **{**OPTIONS, "val_fraction": 0.1, "num_workers": 1}
    )
    run = Trainer(max_epochs=1, limit_train_batches=3, accelerator="cpu", default_root_dir=tmp_path, **QUIET)
    run.fit(GPTModule(size="tiny", vocab_size=61), data)
    assert run.callback_metrics["val_loss"].isfinite()


# Resuming


class Seen(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(1, 1), []

    def training_step(self, batch, _):
        self.seen.append([batch.tokens.flatten().tolist(), batch.documents.cu_seqlens.tolist()])
        return self.layer(batch.tokens[:, :1].float() / 1000).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(root, folders, *, devices, ckpt_path=None, num_workers=2, every=3, **options):
    """Return the batches of this rank in two epochs."""
    warnings.simplefilter("ignore")
    data = PackedTokens(folders, **{**OPTIONS, "num_workers": num_workers, **options})
    saver = ModelCheckpoint(root, filename="{step}", every_n_train_steps=every, save_top_k=-1)
    quiet = {**QUIET, "enable_checkpointing": True}
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        default_root_dir=root,
        callbacks=[ExactResume(on_unreplayable="refuse"), *([saver] if ckpt_path is None else [])],
        **quiet,
    )
    module = Seen()
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module.seen


def mixture(tmp_path):
    first = token_folder(tmp_path / "one", numbered_documents(20))
    second = token_folder(tmp_path / "two", [[token + 10_000 for token in each] for each in numbered_documents(100)])
    return {first: 0.3, second: 0.7}


def resumed_on_every_rank(path, folders):
    # Ranks of tests have no workers otherwise, or some that import everything anew.
    multiprocessing.current_process()._config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)
    whole = run(path / "c", folders, devices=2, batch_size=1)
    resumed = run(path / "again", folders, devices=2, batch_size=1, ckpt_path=path / "c" / "step=3.ckpt")
    return len(whole), resumed == whole[3:]


def test_resuming_a_shuffled_mixture_on_two_ranks_with_two_workers_is_bit_equal(ranks, tmp_path):
    assert ranks(resumed_on_every_rank, tmp_path, mixture(tmp_path)) == (16, True)


def tokens_of_all_ranks(path, folders, devices, ckpt_path, options):
    import torch.distributed as dist

    seen = run(path, folders, devices=devices, ckpt_path=ckpt_path, num_workers=0, **options)
    gathered = [None] * devices
    dist.all_gather_object(gathered, seen)
    return gathered


@pytest.mark.parametrize("step", [3, 4])
def test_from_two_to_four_ranks_no_row_is_lost_or_repeated(ranks, four_ranks, tmp_path, step):
    """Also after an odd number of steps, when half a batch of four ranks has been trained on."""
    path = token_folder(tmp_path / "data", numbered_documents(40 * 4))  # 40 rows
    options = {"batch_size": 2, "packing": "greedy", "every": step}
    whole = ranks(tokens_of_all_ranks, tmp_path / "c", path, 2, None, options)
    saved = tmp_path / "c" / f"step={step}.ckpt"
    resumed = four_ranks(tokens_of_all_ranks, tmp_path / "d", path, 4, saved, options)
    before = [token for rank in whole for tokens, _ in rank[:step] for token in tokens]
    steps = (40 - 4 * step) // 8  # of the first epoch, on four ranks
    after = [token for rank in resumed for tokens, _ in rank[:steps] for token in tokens]
    assert len({*before}) == len(before) == 4 * step * 32
    assert not {*before} & {*after}
    left = (40 - 4 * step) % 8
    assert len({*after}) == len(after) == (40 - 4 * step - left) * 32, "fewer than a batch are left out"
    assert all(len(rank) == steps + 5 for rank in resumed), "and a whole second epoch"
    second = Counter(token for rank in resumed for tokens, _ in rank[steps:] for token in tokens)
    assert second == Counter({token: 1 for each in numbered_documents(160) for token in each[:-1]})


@pytest.mark.parametrize("done", [3, 8, 9, 14])
def test_the_rest_of_an_epoch_is_divided_anew_and_has_as_many_batches_in_all(tmp_path, done):
    data = made(token_folder(tmp_path, numbered_documents(42 * 4)), batch_size=5)  # 42 rows
    sampler = data.train_dataloader().sampler
    first = [*sampler][: done * 2]  # in batches of 2
    sampler.continue_after(done * 2, epoch=0, batch_size=5)
    again = [*sampler][sampler.batches_done * 5 :]
    assert [*first, *again] == sampler.order().tolist()
    assert sampler.batches_done + len(again) // 5 == 42 // 5
    sampler.continue_after(sampler.skipped(0) + (sampler.batches_done + 1) * 5, epoch=0, batch_size=3)
    assert [*sampler][sampler.batches_done * 3 :] == again[5:], "resumed twice"
    sampler.set_epoch(1)
    assert len([*sampler]) == 42


def test_a_checkpoint_of_other_data_is_named(tmp_path):
    data = made(token_folder(tmp_path, random_documents(90)))
    data.load_state_dict({"epoch": 0, "skipped": 0, "rows": 4, "data": 1})
    with pytest.warns(UserWarning, match="other documents"):
        data.train_dataloader()
