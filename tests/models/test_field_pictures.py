from types import SimpleNamespace

import torch

from lightning_ups.models.field_pictures import colored, log_picture, rollout_strip


def test_colors_are_blue_white_and_red():
    low, zero, high = colored(torch.tensor([-2.0, 0.0, 2.0]), limit=2).T.tolist()
    assert low[2] > low[0]
    assert zero == [247, 247, 247]
    assert high[0] > high[2]
    assert colored(torch.tensor([-9.0, 9.0]), limit=2).T.tolist() == [low, high]


def test_values_that_are_not_finite_can_be_shown():
    assert colored(torch.tensor([float("nan")]), limit=1).T.tolist() == [[247, 247, 247]]


def test_a_strip_has_target_prediction_and_error_at_some_times():
    target = torch.randn(10, 8, 6)
    strip = rollout_strip(target, target, columns=3)
    assert strip.shape == (3, 3 * 8 + 2 * 2, 3 * 6 + 2 * 2)
    assert strip.dtype == torch.uint8
    assert torch.equal(strip[:, :8], strip[:, 10:18])
    assert (strip[:, 20:, :6] == 247).all()  # no error
    assert torch.equal(strip[:, :8, :6], colored(target[0], limit=target.abs().max()))
    assert torch.equal(strip[:, :8, -6:], colored(target[9], limit=target.abs().max()))


def test_fields_of_one_dimension_are_shown_over_time():
    target = torch.randn(32, 20)
    assert rollout_strip(target, target + 1).shape == (3, 3 * 64 + 2 * 2, 20)


class Calls(list):
    def __call__(self, *args, **options):
        self.append((args, options))


def test_each_logger_is_asked_in_its_own_way():
    image = torch.zeros(3, 4, 5, dtype=torch.uint8)
    tensorboard, wandb, mlflow, comet = (Calls() for _ in range(4))
    log_picture(
        [
            SimpleNamespace(experiment=SimpleNamespace(add_image=tensorboard)),
            SimpleNamespace(experiment=SimpleNamespace(), log_image=wandb),
            SimpleNamespace(experiment=SimpleNamespace(log_image=mlflow), run_id="run"),
            SimpleNamespace(experiment=SimpleNamespace(log_image=comet)),
            SimpleNamespace(experiment=SimpleNamespace()),
        ],
        "rollout/u", image, step=7,
    )  # fmt: skip
    assert tensorboard[0][0][0] == "rollout/u"
    assert tensorboard[0][0][2] == 7
    assert wandb[0][1]["images"][0].shape == (4, 5, 3)
    assert (mlflow[0][0][0], mlflow[0][1]) == ("run", {"key": "rollout_u", "step": 7})
    assert comet[0][1] == {"name": "rollout/u", "step": 7}
