import pytest
import torch
from torch import nn

from lightning_ups._compat.torch.fsdp.recording import InitialisingOnMeta, record_resets, recording, replay
from lightning_ups.models.gpt import GPT, GPTConfig

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")


def gpt(*, tie=False):
    return GPT(
        GPTConfig(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=32, vocab_size=32, max_seq_len=8, tie=tie)
    )


def llama(*, tie=False):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32,
            tie_word_embeddings=tie,
        )
    )  # fmt: skip


def bert():
    return transformers.BertModel(
        transformers.BertConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
        )
    )


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)


class Wild(nn.Module):
    """Every way of giving a value that a constructor has."""

    def __init__(self):
        super().__init__()
        self.p, self.q = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.tensor([1.0, 2.0]))
        self.l, self.e = nn.Linear(4, 4), nn.Embedding(5, 4, padding_idx=1)
        nn.init.orthogonal_(self.l.weight)
        nn.init.trunc_normal_(self.e.weight, std=0.02)
        self.apply(self.init)
        torch.manual_seed(7)  # as a careless library does
        self.lstm, self.bn, self.half = nn.LSTM(3, 4), nn.BatchNorm1d(3), nn.Linear(3, 3).to(torch.bfloat16)
        self.register_buffer("t", torch.arange(6).float().view(2, 3).T.contiguous())

    def init(self, module):
        if isinstance(module, nn.Linear):
            module.bias.data.normal_(0, 0.1)
            module.weight.data[1:3].uniform_()


def values(module):
    tensors = dict(module.named_parameters(remove_duplicate=False))
    return tensors | dict(module.named_buffers(remove_duplicate=False))


def compare(build, record, model):
    torch.manual_seed(0)
    expected, after = values(build()), torch.rand(2)
    torch.manual_seed(0)
    got = {}
    missing = replay(record, record.places(model), lambda name, t: got.update({name: t.clone()}), device=CPU)
    assert missing == []
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []
    assert torch.equal(torch.rand(2), after)  # the generator goes on as if the model had been built


BUILDS = {"gpt": gpt, "llama": llama, "tied": lambda: llama(tie=True), "bert": bert, "encoder": encoder, "wild": Wild}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_what_a_constructor_did_is_done_again_bit_for_bit(build):
    torch.manual_seed(0)
    with recording() as record, torch.device("meta"):
        model = build()
    compare(build, record, model)


@pytest.mark.parametrize("name", ["gpt", "llama", "bert"])
def test_resets_are_what_constructors_did(name):
    with torch.device("meta"):
        model = BUILDS[name]()
    record, unknown = record_resets(model)
    assert unknown == []
    compare(BUILDS[name], record, model)


@pytest.mark.parametrize(("build", "names"), [(encoder, ["TransformerEncoder"]), (Wild, ["Wild"])])
def test_constructors_that_do_more_are_named(build, names):
    with torch.device("meta"):
        model = build()
    assert record_resets(model)[1][:1] == names


def test_a_tie_whose_value_is_not_known_is_named():
    with torch.device("meta"):
        model = llama(tie=True)
    assert set(record_resets(model)[1]) == {"lm_head.weight", "model.embed_tokens.weight"}


def test_only_one_whole_tensor_is_alive_at_a_time():
    with recording() as record, torch.device("meta"):
        model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))
        model.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)
    alive = []
    places = record.places(model)
    from lightning_ups._compat.torch.fsdp import recording as module

    engine = module._Replay(record, CPU, lambda *_: alive.append(len(engine._memory)))
    engine.run()
    assert len(places) == 8
    assert set(alive) == {0}  # beside the one that is handed over


def test_what_nothing_wrote_is_told():
    with torch.device("meta"):
        lost = nn.Parameter(torch.empty(3))
    model = nn.ParameterDict({"lost": lost})
    record, _ = record_resets(model)
    assert replay(record, record.places(model), lambda *_: None, device=CPU) == ["lost"]


hugging_face = pytest.importorskip("hugging_face")


def llama_class():
    config = hugging_face.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    with torch.device("meta"):
        return hugging_face.LlamaForCausalLM(config)


def test_a_model_initialises_itself_on_meta_only_while_asked():
    original = hugging_face.PreTrainedModel.init_weights
    with recording() as asked:
        llama_class()
    assert hugging_face.PreTrainedModel.init_weights is original
    normals = [o for o in asked.operations if "normal_" in str(o.function)]
    assert len(normals) > 8  # every matrix, and not only the embedding's own constructor
    twice = InitialisingOnMeta()
    twice.ensure()
    twice.ensure()
    assert hugging_face.PreTrainedModel.init_weights is not original
    twice.end()
    twice.end()
    assert hugging_face.PreTrainedModel.init_weights is original
