import pytest
import torch
from torch import nn

from lightning_ups.models.gpt import GPT, GPTConfig
from lightning_ups.transforms.pipeline import absent_state, cut_model, cut_of, drop_others, showing_others

SHAPE = {"dim": 16, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 32, "vocab_size": 32, "max_seq_len": 8}


def gpt(layers=4, **options):
    return GPT(GPTConfig(**SHAPE, num_layers=layers, **options))


@pytest.mark.parametrize(
    ("size", "schedule", "stages", "ranks"),
    [
        (2, "1F1B", [[0, 1, 2], [3, 4]], (0, 1)),
        (2, "interleaved", [[0, 1], [2], [3], [4]], (0, 1, 0, 1)),
        (2, "zero-bubble", [[0, 1], [2], [3], [4]], (0, 1, 1, 0)),
    ],
)
def test_blocks_are_divided(size, schedule, stages, ranks):
    cut = cut_model(gpt(5), size=size, schedule=schedule, rank=0)
    assert [[*stage] for stage in cut.stages] == stages
    assert cut.ranks == ranks


@pytest.mark.parametrize("schedule", ["1F1B", "interleaved", "zero-bubble"])
def test_each_entry_of_the_state_dict_is_on_one_rank(schedule):
    names = {*gpt().state_dict()}
    seen = []
    for rank in range(2):
        model = gpt()
        cut = cut_model(model, size=2, schedule=schedule, rank=rank)
        drop_others(model, cut, device=torch.device("cpu"))
        assert {*model.state_dict()} == {name for name, _ in model.named_parameters()}
        assert absent_state(model) == names - {*model.state_dict()}
        assert cut_of(model) is cut
        seen += model.state_dict()
    assert sorted(seen) == sorted(names)


def test_the_embedding_is_on_the_first_rank_and_the_head_on_the_last():
    homes = cut_model(gpt(), size=2, schedule="1F1B", rank=0).homes
    assert homes["embedding.weight"] == 0
    assert homes["head.weight"] == homes["norm.weight"] == 1


def test_what_was_dropped_gives_nan():
    model = gpt()
    drop_others(model, cut_model(model, size=2, schedule="1F1B", rank=1), device=torch.device("cpu"))
    assert model.embedding(torch.zeros(1, 2, dtype=torch.long)).isnan().all()
    assert not model.head(torch.zeros(1, 2, 16)).isnan().any()


def test_parameters_of_other_ranks_are_shown_as_nan():
    model, whole = gpt(), gpt()
    model.embedding.requires_grad_(False)
    drop_others(model, cut_model(model, size=2, schedule="1F1B", rank=1), device=torch.device("cpu"))
    own = [*model.parameters()]
    with showing_others(model):
        shown = dict(model.named_parameters())
        assert {*shown} == {name for name, _ in whole.named_parameters()}
        assert shown["embedding.weight"].isnan().all()
        assert [name for name, p in shown.items() if not p.requires_grad] == ["embedding.weight"]
    assert [id(p) for p in model.parameters()] == [id(p) for p in own]


def test_statistics_of_other_ranks_are_not_in_the_state_dict():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
    model.insert(0, nn.Linear(4, 4))
    model[2] = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2))
    cut = cut_model(model, size=2, schedule="1F1B", rank=1, blocks=["2.*"])
    drop_others(model, cut, device=torch.device("cpu"))
    assert "1.running_mean" in absent_state(model)
    assert "1.running_mean" not in model.state_dict()
    assert "1.running_mean" in dict(model.named_buffers())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.two(self.one(x))


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("left", "right"):
            setattr(self, name, nn.ModuleList(Block() for _ in range(2)))


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (nn.Sequential(nn.Linear(4, 4)), {}, "none. Put them into an nn.ModuleList"),
        (Towers(), {}, r"left, right. Name one of them: blocks=\['left"),
        (gpt(3), {"schedule": "interleaved"}, "3 in layers, fewer than its 4 stages"),
        (gpt(tie=True), {}, "embedding.weight and head.weight are one parameter.*Use schedule='zero-bubble'"),
    ],
    ids=["no blocks", "two lists", "few blocks", "tied"],
)
def test_what_cannot_be_cut_is_refused(model, options, words):
    with pytest.raises(ValueError, match=words):
        cut_model(model, **{"size": 2, "schedule": "1F1B", "rank": 0, **options})


def test_blocks_that_share_a_weight_are_refused():
    model = gpt()
    model.layers[3].ffn.up.weight = model.layers[0].ffn.up.weight
    with pytest.raises(ValueError, match="Give each module a parameter of its own"):
        cut_model(model, size=2, schedule="1F1B", rank=0)


def test_tied_ends_are_possible_with_zero_bubble():
    assert cut_model(gpt(tie=True), size=2, schedule="zero-bubble", rank=0).homes["head.weight"] == 0


def test_a_second_run_keeps_the_cut_or_is_refused():
    model = gpt()
    cut = cut_model(model, size=2, schedule="1F1B", rank=0)
    drop_others(model, cut, device=torch.device("cpu"))
    assert cut_model(model, size=2, schedule="1F1B", rank=0) is cut
    with pytest.raises(ValueError, match="pipeline_parallel_size=2, schedule='1F1B'"):
        cut_model(model, size=4, schedule="1F1B", rank=0)
