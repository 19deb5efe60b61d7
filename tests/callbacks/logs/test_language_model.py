import math
import sys

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import nn

from lightning_ups.callbacks.logs.language_model import TextSample, UnigramBaseline
from lightning_ups.precision import BF16Precision
from tests.toys import Net, data, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Letters(LightningDataModule):
    def train_dataloader(self):
        return loader()

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, tokens):
        return "".join(map(chr, tokens))


class Writer(Net):
    """Writes the alphabet on, and remembers in what state it was."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Dropout().eval()

    def generate(self, tokens, **options):
        self.modes = (self.training, self.frozen.training)
        self.options, self.computed_in = options, nn.functional.linear(data(), self.head.weight).dtype
        self.layers[0](data()[: torch.randint(1, 8, ())])
        follow = tokens[:, -1:] + torch.arange(1, 1 + options["num_tokens"], device=tokens.device)
        return torch.cat((tokens, follow), dim=1)


def fit(tmp_path, sample, *, module=None, datamodule=None, **options):
    module = module or Writer()
    run = trainer(tmp_path, callbacks=[sample], epochs=1, **options)
    run.fit(module, datamodule=datamodule or Letters())
    return module


def test_prints_prompt_and_continuation(tmp_path, capsys):
    fit(tmp_path, TextSample(prompt="ab", num_tokens=3))
    assert "A sample, after 'ab':\n" + "-" * 80 + "\nabcde\n" in capsys.readouterr().out


def test_any_terminal_can_show_it(tmp_path, capsys, monkeypatch):
    class Wild(Letters):
        def decode(self, tokens):
            return "tab\there\n\x1b[31m caf\u00e9"

    fit(tmp_path, TextSample(), datamodule=Wild())
    assert "\ntab\there\n\\x1b[31m caf\u00e9\n" in capsys.readouterr().out
    monkeypatch.setattr(type(sys.stdout), "encoding", "ascii")
    fit(tmp_path, TextSample(), datamodule=Wild())
    assert "\\x1b[31m caf\\xe9\n" in capsys.readouterr().out


def test_hands_on_how_to_draw(tmp_path):
    module = fit(tmp_path, TextSample(num_tokens=2, temperature=0.5, top_k=7, seed=3))
    assert module.options == {"num_tokens": 2, "temperature": 0.5, "top_k": 7, "seed": 3}


def test_evaluates_and_leaves_every_mode_as_it_was(tmp_path):
    module = fit(tmp_path, TextSample())
    assert module.modes == (False, False)
    assert (module.training, module.layers[0].training, module.frozen.training) == (True, True, False)


def test_computes_in_the_precision_of_the_run(tmp_path):
    assert fit(tmp_path, TextSample(), precision="bf16-mixed").computed_in == torch.bfloat16


def test_compiles_nothing_for_the_growing_text(tmp_path):
    sizes = []

    def backend(graph, inputs):
        sizes.append([tuple(i.shape) for i in inputs if isinstance(i, torch.Tensor)])
        return graph

    class Compiled(Writer):
        def __init__(self):
            super().__init__()
            self.twice = torch.compile(lambda tokens: tokens * 2, backend=backend)

        def training_step(self, batch, batch_idx):
            self.twice(batch)
            return super().training_step(batch, batch_idx)

        def generate(self, tokens, **options):
            self.doubled = self.twice(tokens)
            return super().generate(tokens, **options)

    module = fit(tmp_path, TextSample(prompt="ab"), module=Compiled())
    assert sizes == [[(8, 8)]]
    assert module.doubled.tolist() == [[2 * ord("a"), 2 * ord("b")]]


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("num_tokens", -1, "Use 0 or more."),
        ("temperature", -0.1, "Use a finite number, 0 or more"),
        ("top_k", 0, "Use 1 or more, or None."),
    ],
)
def test_what_is_out_of_range_is_told_at_construction(name, value, cure):
    with pytest.raises(ValueError, match=rf"TextSample\({name}={value}\) is out of range\..*{cure}"):
        TextSample(**{name: value})


def test_a_prompt_without_tokens_is_told_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"TextSample\(prompt=''\).*a text that the datamodule has tokens for\.$"):
        fit(tmp_path, TextSample(prompt=""))

    class Begun(Letters):
        def encode(self, text):
            return [1, *super().encode(text)]

    fit(tmp_path, TextSample(prompt="", num_tokens=1), datamodule=Begun())


def test_tokens_may_be_a_tensor(tmp_path, capsys):
    class Ready(Letters):
        def encode(self, text):
            return torch.tensor(super().encode(text), dtype=torch.int32)

    fit(tmp_path, TextSample(prompt="ab", num_tokens=3), datamodule=Ready())
    assert "\nabcde\n" in capsys.readouterr().out


def test_a_module_that_cannot_write_is_told_before_training(tmp_path):
    with pytest.raises(TypeError, match=r"no generate in Net\..*take TextSample out of the callbacks\.$"):
        fit(tmp_path, TextSample(), module=Net())


def test_a_datamodule_without_letters_is_told_before_training(tmp_path):
    class Numbers(LightningDataModule):
        train_dataloader = Letters.train_dataloader

    with pytest.raises(TypeError, match=r"no encode and no decode in Numbers\..*out of the callbacks\.$"):
        fit(tmp_path, TextSample(), datamodule=Numbers())
    with pytest.raises(TypeError, match=r"in a run without a datamodule\..*out of the callbacks\.$"):
        trainer(tmp_path, callbacks=[TextSample()]).fit(Writer(), loader())


class Data(LightningDataModule):
    unigram_entropy = 2.0

    def train_dataloader(self):
        return loader()

    val_dataloader = train_dataloader


class Validated(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", batch.sum() * 0 + 1.5)


def test_prints_loss_entropy_and_ratio(tmp_path, capsys):
    trainer(tmp_path, callbacks=[UnigramBaseline()], epochs=1).fit(Validated(), datamodule=Data())
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines == [
        f"Validation loss  1.500 nats a token ({1.5 / math.log(2):.3f} bits)",
        f"Unigram entropy  2.000 nats a token ({2 / math.log(2):.3f} bits)",
        "Ratio            0.750",
    ]


def test_without_a_validation_it_says_so(tmp_path, capsys):
    trainer(tmp_path, callbacks=[UnigramBaseline()], epochs=1, limit_val_batches=0).fit(Validated(), datamodule=Data())
    assert "No val_loss was logged; the unigram entropy is 2.000 nats" in capsys.readouterr().out


def test_a_datamodule_without_entropy_is_told_before_training(tmp_path):
    class Bare(LightningDataModule):
        train_dataloader = Data.train_dataloader

    with pytest.raises(TypeError, match=r"in Bare\..*take UnigramBaseline out of the callbacks\.$"):
        trainer(tmp_path, callbacks=[UnigramBaseline()]).fit(Validated(), datamodule=Bare())


def test_says_nothing_of_the_precision_once_the_run_has_said_it(tmp_path, caplog):
    with caplog.at_level("INFO"):
        fit(tmp_path, TextSample(), plugins=[BF16Precision()])
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Precision:")]
    assert said == ["Precision: BF16Precision computes in bfloat16, by autocast"]


@pytest.mark.parametrize("tokens", [torch.tensor([[97, 98]]), [[97, 98]], [0.5], "ab", object()])
def test_what_is_no_list_of_tokens_is_told_before_training(tmp_path, tokens):
    class Odd(Letters):
        def encode(self, text):
            return tokens

    module, kind = Writer(), type(tokens).__name__
    with pytest.raises(TypeError, match=rf"Odd\.encode returned a {kind} .*Let encode return a list of integers\.$"):
        fit(tmp_path, TextSample(prompt="ab"), module=module, datamodule=Odd())
    assert module.losses == []


def test_a_prompt_of_unknown_letters_is_told_before_training(tmp_path):
    class Few(Letters):
        def encode(self, text):
            return [ord(letter) for letter in text if letter in "xyz"]

    with pytest.raises(ValueError, match=r"TextSample\(prompt='ab'\).*a text that the datamodule has tokens for\.$"):
        fit(tmp_path, TextSample(prompt="ab"), datamodule=Few())
