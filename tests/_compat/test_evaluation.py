import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_ups._compat.evaluation import move_all_but_parameters, without_inference_mode
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
