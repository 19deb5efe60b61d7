import io
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_ups.models.field_pictures import colored, log_picture, log_video, rollout_strip, rollout_video


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


def test_a_video_has_target_prediction_and_error_side_by_side_in_each_frame():
    images = pytest.importorskip("PIL.Image")
    target = torch.randn(5, 64, 48)
    prediction = target.clone()
    prediction[3] += 1
    with images.open(io.BytesIO(rollout_video(target, prediction, seconds=0.5))) as video:
        assert (video.n_frames, video.size, video.info["duration"]) == (5, (3 * 96 + 2 * 2, 128), 500)
        for index in range(5):
            video.seek(index)
            frame = torch.tensor([*video.convert("RGB").tobytes()]).view(128, -1, 3).movedim(-1, 0)
            expected = colored(target[index], limit=target.abs().max()).repeat_interleave(2, 1).repeat_interleave(2, 2)
            assert (frame[:, :, :96] - expected).abs().max() <= 4  # 255 shades
            assert (frame[:, :, 96:98] == 255).all()
            assert torch.equal(frame[:, :, :96], frame[:, :, 98:194]) == (index != 3)
            assert (frame[:, :, 196:] == 247).all() == (index != 3)


def test_tensorboard_keeps_a_video(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger, video = TensorBoardLogger(tmp_path), rollout_video(torch.randn(3, 64, 64), torch.randn(3, 64, 64))
    log_video([CSVLogger(tmp_path), logger], "rollout_video/u", video, step=7)
    logger.experiment.flush()
    (image,) = EventAccumulator(logger.log_dir).Reload().Images("rollout_video/u")
    assert (image.step, image.width, image.height) == (7, 3 * 128 + 2 * 2, 128)
    assert image.encoded_image_string == video


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
