from types import SimpleNamespace

from torch import nn

from lightning_ups.transforms.fsdp.random_layers import layer_drop


def net(**rates):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].config = SimpleNamespace(**rates)
    return model


def test_a_model_that_skips_layers_is_known_by_its_config_or_itself():
    assert layer_drop(net(layerdrop=0.1)) == "1.config.layerdrop=0.1"
    assert layer_drop(net(encoder_layerdrop=0.0, decoder_layerdrop=0.5)) == "1.config.decoder_layerdrop=0.5"
    own = net()
    own.layerdrop = 0.25
    assert layer_drop(own) == "layerdrop=0.25"


def test_another_skips_none():
    assert layer_drop(net(layerdrop=0.0, encoder_layerdrop=0)) is None
    assert layer_drop(nn.Linear(2, 2)) is None
