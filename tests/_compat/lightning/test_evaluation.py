import weakref

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_ups._compat.lightning import evaluation
from lightning_ups._compat.lightning.evaluation import (
    has_weak_references,
    keeping_attributes,
    move_all_but_parameters,
    without_inference_mode,
)
from tests.toys import Net, trainer


def test_inference_mode_is_the_users_again(tmp_path):
    lightning = trainer(tmp_path, inference_mode=True)
    seen = []

    def fail():
        with without_inference_mode(lightning):
            seen.extend([lightning.validate_loop.inference_mode, lightning.predict_loop.inference_mode])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert seen == [False, False]
    assert lightning.validate_loop.inference_mode
    assert lightning.predict_loop.inference_mode


def test_metrics_move_and_parameters_do_not():
    net = Net()
    net.metric, net.table = MeanMetric(), nn.Identity()
    net.table.register_buffer("angles", torch.zeros(2))
    move_all_but_parameters(net, torch.device("meta"))
    assert net.metric.device.type == net.table.angles.device.type == "meta"
    assert net.head.weight.device.type == "cpu"
    assert net.device.type == "meta"


def test_attributes_of_parameters_outlive_a_move():
    layer = nn.Linear(2, 2)
    layer.weight.no_decay = True
    with keeping_attributes(layer):
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        layer.weight.new = 1
    assert vars(layer.weight) == {"no_decay": True, "new": 1}


def test_weak_references_but_those_that_a_recurrent_layer_renews(monkeypatch):
    monkeypatch.setattr(evaluation, "DTensor", nn.Parameter)  # as if all were sharded
    layers = nn.ModuleList([nn.GRU(2, 2), nn.GRU(2, 2), nn.Linear(2, 2)])
    assert not has_weak_references(layers)
    reference = weakref.ref(layers[2].weight)
    assert has_weak_references(layers)
    del reference
    layers[1].weight_ih_l0 = layers[0].weight_ih_l0
    assert has_weak_references(layers)
