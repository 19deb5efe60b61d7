import pickle

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_ups.callbacks import Compile
from lightning_ups.transforms.compile import loss_calls
from lightning_ups.transforms.compile.loss_calls import large_cross_entropies
from tests.callbacks.test_compile import Classifier, Look
from tests.toys import loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
LOGITS, TARGET = torch.randn(4, 8), torch.arange(4)


@pytest.fixture(autouse=True)
def every_call_is_large(monkeypatch):
    monkeypatch.setattr(loss_calls, "LEAST_LOGITS", 32)
    torch.compiler.reset()


class Calls(Classifier):
    def training_step(self, batch, index):
        logits = self.net(batch)
        loss = F.cross_entropy(logits.unflatten(0, (1, -1)).transpose(1, 2), batch.argmax(-1)[None], reduction="none")
        self.losses.append(loss.mean().item())
        return loss.mean()


@pytest.mark.parametrize(("losses", "graphs"), [(None, 2), (False, 1)])
@pytest.mark.parametrize("kind", [Calls, Classifier])
def test_a_large_cross_entropy_in_a_step_is_compiled(tmp_path, losses, graphs, kind):
    expected, model, look = kind(), kind(), Look()
    trainer(tmp_path).fit(expected, loader(4))
    compile_ = Compile(scope="auto", losses=losses, backend="aot_eager")
    trainer(tmp_path, callbacks=[compile_, look]).fit(model, loader(4))
    assert look.facts["graphs"] == graphs
    assert model.losses == expected.losses


def test_a_second_run_has_the_graphs_of_the_first(tmp_path):
    for new in (2, 0):
        look = Look()
        compile_ = Compile(scope="auto", backend="aot_eager")
        trainer(tmp_path, callbacks=[compile_, look]).fit(Calls(), loader(4))
        assert look.facts["new_graphs"] == new


class RefusedError(Exception):
    pass


def by_forward_ad():
    with forward_ad.dual_level():
        loss = F.cross_entropy(forward_ad.make_dual(LOGITS, torch.ones(4, 8)), TARGET)
        return forward_ad.unpack_dual(loss).tangent


def refuse(modules):
    raise RefusedError


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: F.cross_entropy(LOGITS[:, :4], TARGET % 4), id="small"),
        pytest.param(lambda: torch.compile(F.cross_entropy, backend="aot_eager")(LOGITS, TARGET), id="compiled"),
        pytest.param(lambda: checkpoint(F.cross_entropy, LOGITS, TARGET, use_reentrant=False), id="checkpoint"),
        pytest.param(lambda: torch.func.grad(F.cross_entropy)(LOGITS, TARGET).sum(), id="torch.func"),
        pytest.param(by_forward_ad, id="forward AD"),
        pytest.param(
            lambda: torch.jit.trace(F.cross_entropy, (LOGITS, TARGET), check_trace=False)(LOGITS, TARGET), id="traced"
        ),
        pytest.param(lambda: torch.jit.script(nn.CrossEntropyLoss())(LOGITS, TARGET), id="script"),
        pytest.param(lambda: F.cross_entropy(nn.Parameter(LOGITS), TARGET), id="parameter"),
    ],
)
def test_others_are_left_as_they_are(call):
    expected = call()
    with large_cross_entropies(refuse):
        assert torch.equal(call(), expected)
        with pytest.raises(RefusedError):
            F.cross_entropy(input=LOGITS, target=TARGET)
    with large_cross_entropies(None):
        assert torch.equal(F.cross_entropy(LOGITS, TARGET), nn.CrossEntropyLoss()(LOGITS, TARGET))


def test_the_function_can_be_pickled():
    with large_cross_entropies(refuse):
        assert pickle.loads(pickle.dumps(F.cross_entropy)) is F.cross_entropy


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize(
    "options",
    [{}, {"weight": torch.rand(8)}, {"ignore_index": 1}, {"label_smoothing": 0.2}, {"target": LOGITS.softmax(1)}],
)
def test_all_arguments_reach_it(reduction, options):
    kinds = []
    options = {"target": TARGET, "reduction": reduction, **options}
    expected = F.cross_entropy(LOGITS, **options)
    with large_cross_entropies(lambda modules: kinds.extend(map(type, modules.values()))):
        assert torch.equal(F.cross_entropy(LOGITS, **options), expected)
    assert kinds == [loss_calls.CrossEntropy]


class Tokens(LightningModule):
    """Returns logits in the layout of a language model, and computes their loss in another one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(8192, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8192))
        self.losses = []

    def training_step(self, batch, index):
        logits = self.net(batch[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").sum(1).mean()
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, *args):
        if self.trainer.global_step == 70:  # after the ways to run a step were compared, one of them uncompiled
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.peak = torch.cuda.max_memory_allocated()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_on_a_gpu_losses_are_equal_and_less_memory_is_taken(monkeypatch, tmp_path):
    monkeypatch.setattr(loss_calls, "LEAST_LOGITS", 2**22)
    batches = [torch.randint(0, 8192, (8, 257), device="cuda") for _ in range(90)]
    found = {}
    for name, callbacks in {"stock": [], "compiled": [Compile(scope="auto", mode="auto"), look := Look()]}.items():
        module = Tokens()
        Trainer(
            accelerator="gpu",
            devices=1,
            precision="bf16-mixed",
            callbacks=callbacks,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        ).fit(module, DataLoader(batches, batch_size=None))
        found[name] = torch.stack(module.losses).tolist(), module.peak
    assert "F.cross_entropy" in [block for group in look.facts["groups"] for block in group["blocks"]]
    assert found["compiled"][0] == pytest.approx(found["stock"][0], rel=2e-3)
    assert found["compiled"][1] < 0.7 * found["stock"][1]
