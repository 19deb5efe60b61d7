import torch

from lightning_ups.transforms.te import RECIPES
from tests import fake_te


def test_recipes_make_what_transformer_engine_has():
    with fake_te.installed():
        delayed = RECIPES["delayed"].make(
            number_format="e4m3", amax_history=16, amax_compute="most_recent", reduce_amax=False
        )
        assert (delayed.fp8_format, delayed.amax_history_len) == (fake_te.Format.E4M3, 16)
        assert (delayed.amax_compute_algo, delayed.reduce_amax) == ("most_recent", False)
        assert RECIPES["delayed"].make().fp8_format is fake_te.Format.HYBRID
        assert type(RECIPES["current"].make()) is fake_te.Float8CurrentScaling
        assert type(RECIPES["block"].make()) is fake_te.Float8BlockScaling
        assert type(RECIPES["mxfp8"].make()) is fake_te.MXFP8BlockScaling


def test_why_a_device_cannot():
    with fake_te.installed(everywhere=False):
        assert RECIPES["current"].why_not(torch.device("cpu")) == "it runs on cuda devices alone"
        assert RECIPES["mxfp8"].why_not(torch.device("cuda")).endswith("required for MXFP8 execution")
        assert RECIPES["block"].why_not(torch.device("cuda")) is None
