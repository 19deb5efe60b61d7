import os
import warnings
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_ups.models import HFCausalLM
from lightning_ups.models.hf.loading import from_config, has_plain_head
from lightning_ups.state.checkpoint import load_weights
from tests.hf_models import MORE, config, pretrained
from tests.strategies.cases import two_ranks
from tests.toys import trainer

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and PEFT, about small models


@pytest.mark.parametrize(
    ("kind", "plain"),
    [(kind, kind not in ("cohere", "gemma2", "gptj", "granite", "llama4_text", "mixtral")) for kind in MORE],
)
def test_what_is_done_to_logits_is_seen(kind, plain):
    model = from_config(config(kind), {})
    assert has_plain_head(model) is plain
    assert "forward" not in vars(model.base_model)


def test_nothing_is_read_on_the_meta_device(tmp_path):
    module = HFCausalLM(pretrained=pretrained(tmp_path), lora={"r": 4})
    with torch.device("meta"):  # as `plan` builds it
        module.configure_model()
    assert all(p.is_meta for p in module.parameters())


@pytest.mark.parametrize("argument", ["pretrained", "config"])
def test_without_a_network_a_name_is_refused_with_the_local_alternative(argument, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"(?s)someone/nothing.*Without a network, name a folder"):
        HFCausalLM(**{argument: "someone/nothing"}).configure_model()


def test_weights_for_a_model_that_is_not_built_yet_are_refused_with_what_builds_it(tmp_path):
    made = HFCausalLM(pretrained=pretrained(tmp_path / "model"))
    made.configure_model()
    torch.save({"state_dict": made.state_dict(), "pytorch-lightning_version": "2.6.6"}, tmp_path / "a.ckpt")
    other = HFCausalLM(pretrained=tmp_path / "model")
    with pytest.raises(ValueError, match=r"has no weights yet.*configure_model\(\) first"):
        load_weights(other, tmp_path / "a.ckpt")
    other.configure_model()
    load_weights(other, tmp_path / "a.ckpt")


class Fitted(HFCausalLM):
    """Keeps what it had when training began."""

    def on_train_start(self):
        tensors = self.state_dict()
        self.first = {name: getattr(p, "full_tensor", lambda p=p: p)().clone() for name, p in tensors.items()}


def fit(path, module, **options):
    tokens = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader([{"input_ids": row} for row in tokens], batch_size=2)
    options = {"max_steps": 2, "accumulate_grad_batches": 1, "use_distributed_sampler": True, **options}
    run = trainer(path, **options)
    run.fit(module, loader, loader)
    return run


def sharded(path, module, **options):
    from lightning_ups.strategies import FSDP2Strategy

    return fit(path, module, strategy=FSDP2Strategy(), devices=2, **options)


@two_ranks
def weights_are_those_of_a_whole_model(path, folder, lora):
    os.environ.pop("PL_GLOBAL_SEED", None)  # of an earlier test on these ranks, with which a strategy seeds anew
    torch.manual_seed(0)
    whole, parts = (Fitted(pretrained=folder, lora=lora) for _ in range(2))
    whole.configure_model()
    expected = whole.state_dict()
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        sharded(path, parts)
    assert not [each for each in caught if "outside the forward of their module" in str(each.message)]
    assert parts.first.keys() == expected.keys()
    assert [name for name, p in expected.items() if not torch.equal(parts.first[name], p)] == []
    assert any("lora" in name for name in expected) is (lora is not None)


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("llama", None),
        ("gpt2", None),
        ("mixtral", None),  # transformers stacks experts as it reads them
        ("llama", {"r": 4}),
        ("llama", {"r": 4, "use_dora": True, "target_modules": "all-linear"}),
    ],
)
def test_weights_are_read_into_shards(ranks, tmp_path, kind, lora):
    folder = pretrained(tmp_path / "model", kind, tie_word_embeddings=kind == "llama")
    weights_are_those_of_a_whole_model(ranks, path=tmp_path, folder=folder, lora=lora)


@two_ranks
def no_rank_holds_all(path, folder):
    module = HFCausalLM(pretrained=folder, schedule="constant")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        sharded(path, module, max_steps=0, limit_val_batches=0)
    mapped, held, most = Path(folder, "model.safetensors").stat().st_size, 0, 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]" and abs(event.nbytes()) < mapped:  # not the file, which is mapped, not read
            held += event.nbytes()
            most = max(most, held)
    sizes = [p.numel() * 4 for p in module.parameters()]
    assert sum(p.to_local().numel() * 4 for p in module.parameters()) <= most
    assert most < sum(sizes) / 2 + 2 * max(sizes)


def test_no_rank_holds_the_model(ranks, tmp_path):
    folder = pretrained(tmp_path / "model", num_hidden_layers=8, hidden_size=64, intermediate_size=256)
    no_rank_holds_all(ranks, path=tmp_path, folder=folder)
