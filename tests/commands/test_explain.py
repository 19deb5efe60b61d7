import pytest
from torch import nn

from lightning_ups.callbacks import ActivationCheckpoint, ActivationOffload, Compile
from lightning_ups.commands.explain import show
from lightning_ups.config.requested_run import RequestedRun, run_of
from lightning_ups.order import Stage
from lightning_ups.precision import BF16Precision, Float8Precision
from lightning_ups.strategies import FSDP2Strategy
from tests.cli_toys import Data, Late, Toy
from tests.config.test_requested_run import DEFAULTS


@pytest.fixture
def lines(capsys):
    def lines(*callbacks, module=None, optimizer=None, preset=None, notes=(), data=None, **settings):
        run = run_of(module or Toy(), DEFAULTS | settings, callbacks)
        asked = RequestedRun(
            run=run,
            optimizer=optimizer,
            config={"trainer": DEFAULTS},
            slots={},
            preset=preset,
            notes=notes,
            data=data,
        )
        code = show(asked)
        return code, capsys.readouterr().out.splitlines()

    return lines


def row(lines, name):
    return next(line for line in lines if line[10:].startswith(name))[27:]


def test_essentials(lines):
    code, out = lines(accelerator="gpu", devices=8, strategy="fsdp2", plugins=[BF16Precision()], preset="a100")
    assert code == 0
    assert out[0] == "run       tests.cli_toys.Toy, 288 parameters"
    assert out[1].strip() == "FSDP2Strategy, 8 x cuda"
    assert out[2].strip().startswith("BF16Precision (bf16-mixed): computes in bfloat16, reduces in float32")
    assert out[3].strip() == "with the preset a100"
    assert out[4] == "blocks    2 x Sequential: blocks.0 to blocks.1"
    assert out[-1] == "refused   nothing"


def test_what_stays_in_float32_is_said(lines):
    _, out = lines(plugins=[BF16Precision(in_float32=["blocks.0", "head"])])
    assert "returns float32; blocks.0, head in float32" in " ".join(line.strip() for line in out)


class Wide(Toy):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(2))


@pytest.mark.parametrize(
    ("accelerator", "module", "said"),
    [
        ("gpu", Toy(), "No linear layer of Toy can compute in float8. blocks.0.0: 8 x 8 is no multiple of 16"),
        ("cpu", Wide(), "cannot run on this device: cpu. "),
        ("gpu", Wide(), "nothing"),
    ],
)
def test_what_float8_refuses_is_known_before(lines, accelerator, module, said):
    code, out = lines(accelerator=accelerator, module=module, plugins=[Float8Precision()])
    assert code == (0 if said == "nothing" else 2)
    assert said in " ".join(line[10:].strip() for line in out[-5:])


def test_the_one_order_whatever_the_order_of_the_list(lines):
    _, out = lines(Compile(backend="aot_eager"), ActivationCheckpoint(), strategy="fsdp2", devices=2)
    names = [line[10:26].strip() for line in out[out.index(next(x for x in out if x.startswith("order"))) : -1]]
    assert names == ["configure_model", *(stage.name.lower() for stage in sorted(Stage))]
    assert row(out, "recompute").startswith("ActivationCheckpoint")
    assert row(out, "compile").startswith("Compile")
    assert row(out, "shard") == "FSDP2Strategy"
    assert row(out, "tensor_parallel") == "-"


def test_a_strategy_that_compiles_says_so_unless_a_compile_is_given(lines):
    compiling = {"strategy": "simple_fsdp", "devices": 2}
    assert row(lines(**compiling)[1], "compile") == "SimpleFSDPStrategy"
    assert row(lines(Compile(backend="aot_eager"), **compiling)[1], "compile").startswith("Compile")


@pytest.mark.parametrize("strategy", ["fsdp2", "simple_fsdp"])
def test_a_recurrent_layer_is_not_refused(lines, strategy):
    module = Toy()
    module.memory = nn.LSTM(8, 8)
    assert lines(strategy=strategy, module=module)[0] == 0


def test_who_makes_the_optimizer(lines):
    assert row(lines()[1], "optimizers") == "Toy.configure_optimizers"
    assert row(lines(optimizer="torch.optim.AdamW")[1], "optimizers") == "AdamW (section 'optimizer')"


def test_configure_model_is_named(lines):
    module = Late()
    module.configure_model()
    _, out = lines(module=module)
    assert row(out, "configure_model") == "Late"
    assert "blocks    3 x Sequential: blocks.0 to blocks.2" in out


def test_every_refusal_and_exit_code_2(lines):
    code, out = lines(
        Compile(scope="model"),
        Compile(blocks=["blockz.*"]),
        strategy="fsdp2",
        devices=2,
        precision="16-mixed",
    )
    text = " ".join(" ".join(out).split())
    assert code == 2
    refused = text[text.index("refused") :]
    assert "Two callbacks of one class are given" in refused
    assert "precision='16-mixed' is given with FSDP2Strategy" in refused
    assert "Use scope='blocks'." in refused
    assert "Compile: The pattern 'blockz.*' matches no" in refused
    assert max(map(len, out)) <= 110


def test_notes_frozen_parameters_and_large_numbers(lines):
    module = Toy(width=100_000)
    module.blocks[0].requires_grad_(False)
    _, out = lines(module=module, notes=["something could not be known"])
    assert out[0] == "run       tests.cli_toys.Toy, 3.4 M parameters, 1.7 M of them frozen"
    assert "notes     something could not be known" in out


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"blocks": ["blockz.*"]}, "The pattern 'blockz.*' matches no submodule"),
        ({"outside": ["head.weights"]}, "The pattern 'head.weights' matches no parameter"),
        ({"tensor_parallel_size": 2, "tensor_parallel_plan": {"heat": "colwise"}}, "The pattern 'heat' matches no"),
        ({"tensor_parallel_size": 3, "tensor_parallel_plan": {"head": "colwise"}}, "cannot be split along dimension 0"),
    ],
)
def test_settings_of_the_strategy_that_do_not_fit_the_module(lines, settings, said):
    module = Toy()
    module.head = nn.Linear(8, 8)
    code, out = lines(strategy=FSDP2Strategy(**settings), devices=6, module=module)
    assert code == 2
    assert said in " ".join(" ".join(out).split())


def test_offloading_that_would_move_nothing_is_known_before(lines):
    code, out = lines(ActivationOffload(), data=Data)
    assert code == 2
    assert "refused   ActivationOffload would move nothing" in "\n".join(out)
    code, out = lines(ActivationOffload(on_no_effect="warn"), data=Data)
    assert code == 0
    assert "notes     ActivationOffload would move nothing" in "\n".join(out)
    code, out = lines(ActivationOffload())  # without data there is no batch
    assert code == 0
    assert "notes     Whether ActivationOffload moves anything is unknown here" in "\n".join(out)
