import pytest
import yaml

from lightning_ups.insight.diagnose import TREE, Facts, findings

HEALTHY = {
    "device": "cpu",
    "mean_s": 0.1,
    "full_s": 0.1,
    "steps": 50,
    "accumulate": 1,
    "shares": {"forward": 0.4, "backward": 0.5, "optimizer": 0.04, "data": 0.02},
    "cores": 8,
    "batch_size": 8,
    "rate_half": 80.0,
    "rate_same": 80.0,
    "rate_twice": 80.0,
    "reference_optimizer_s": 0.003,
}
GPU = {"device": "NVIDIA H100 80GB HBM3"}
SLOWED = {"clock_mhz": 900.0, "max_clock_mhz": 1800.0, "slowed_by": ["too hot"]}
FACTS = {
    "slow loader": {"shares": {"data": 0.15}, "loader_rate": 70.0, "device_rate": 90.0, "workers": 2},
    "unpinned memory": GPU | {"shares": {"transfer": 0.15}, "is_pinned": False},
    "host sync": GPU | {"idle": 0.17, "waits": [("model.py:3 (training_step)", 2)]},
    "tiny batch": {"rate_half": 4 / 0.0575, "rate_twice": 16 / 0.185},
    "slow launches": GPU | {"idle": 0.17},
    "slow exchange": {"exchange_s": 0.09, "silent_s": 0.075},
    "uneven ranks": {"slowest_s": 0.055, "others_s": 0.04, "slowest_rank": 1},
    "recompilations": {"compile_share": 0.15, "compilations": 9},
    "fp32 matmuls without TF32": GPU | {"tf32_saves_s": 0.015},
    "CPU-bound optimizer": {"shares": {"optimizer": 0.2}, "is_torch_optimizer": True, "is_fused": False},
    "excessive logging": {"shares": {"logging": 0.15}, "log_every": 1, "is_logging": True},
    "checkpoint stalls": {"checkpoint_share": 0.15, "save_every": 10, "save_s": 0.18},
    "allocator thrashing": GPU | {"allocations_per_step": 3.0, "allocation_s": 0.015},
    "slow callback": {"hooks": {"Mine.on_train_batch_end": 0.15}},
    "slow ends of epochs": {"shares": {"between epochs": 0.15}, "workers": 2, "persistent": False},
    "throttled GPU": GPU | {"gpu": SLOWED},
}


def test_every_cause_is_tested():
    assert [cause.name for cause in TREE] == [*FACTS]


@pytest.mark.parametrize("name", FACTS)
def test_a_cause_is_named_with_its_sentence_and_fix(name):
    (found,) = findings(HEALTHY | FACTS[name])
    assert found.name == name
    assert found.lost == pytest.approx(0.5 if name == "throttled GPU" else 0.15, abs=0.01)
    assert found.sentence
    assert "None" not in found.sentence
    assert found.fix.text
    if found.fix.text.startswith(("trainer:", "data:", "flags:", "optimizer:")):
        assert yaml.safe_load(found.fix.text)


@pytest.mark.parametrize("extra", [{}, GPU, {"idle": None}, {"memory_used": 0.9}])
def test_nothing_stands_out_without_a_figure_above_its_threshold(extra):
    assert findings(HEALTHY | {name: value for name, value in extra.items() if value is not None}) == []
    assert findings({}) == []


def test_the_most_expensive_comes_first_and_a_cause_is_left_out_if_another_explains_it():
    both = HEALTHY | {"shares": {"data": 0.2, "logging": 0.1}}
    assert [each.name for each in findings(both)] == ["slow loader", "excessive logging"]
    waiting = HEALTHY | FACTS["host sync"] | FACTS["tiny batch"]
    assert [each.name for each in findings(waiting)] == ["host sync"]


def test_the_sentence_has_the_figures():
    (found,) = findings(HEALTHY | FACTS["slow loader"])
    assert found.sentence == (
        "The step waits for data 15 % of the time: 2 workers load 70 samples/s, the model could take 90"
    )
    assert found.fix.loader == {"num_workers": 4}


def test_a_setting_of_the_data_is_changed_in_yaml():
    (found,) = findings(HEALTHY | FACTS["slow loader"] | {"data_settings": ["self", "num_workers"]})
    assert found.fix.options == ["--data.num_workers=4"]
    assert yaml.safe_load(found.fix.text) == {"data": {"init_args": {"num_workers": 4}}}
    (found,) = findings(HEALTHY | FACTS["slow loader"] | {"workers": 8})
    assert not found.fix.can_be_tried


def test_a_number_that_was_not_measured_is_zero():
    assert Facts()["anything"] == 0
    assert Facts().of_step("anything") == 0


def test_a_time_of_a_checkpoint_that_was_not_measured_is_left_out():
    (found,) = findings(Facts(checkpoint_share=0.22))
    assert found.sentence == "Checkpoints take 22 % of the time"


def test_what_the_host_does_while_the_gpu_idles_explains_it():
    seen = HEALTHY | GPU | {"idle": 0.39, "shares": {"logging": 0.16}, "host": {"logging": 0.3}}
    assert [each.name for each in findings(seen)] == ["excessive logging"]
    assert [each.name for each in findings(seen | {"idle": 0.0, "shares": {}})] == [], "the GPU is busy meanwhile"
    saving = HEALTHY | GPU | {"idle": 0.17, "shares": {"checkpoint": 0.15}, "checkpoint_share": 0.15}
    assert [each.name for each in findings(saving)] == ["checkpoint stalls"]
    hook = HEALTHY | GPU | {"idle": 0.2, "hooks": {"A.on_train_batch_end": 0.02}, "host": {"A.on_train_batch_end": 0.3}}
    assert [(each.name, each.lost) for each in findings(hook)] == [("slow callback", 0.2)]


def test_a_batch_is_not_small_because_it_was_slow_when_it_was_timed_again():
    slow = {"rate_half": 4 / 0.074, "rate_same": 8 / 0.125, "rate_twice": 16 / 0.19}
    assert [each.name for each in findings(HEALTHY | slow)] == ["tiny batch"]
    assert findings(HEALTHY | slow | {"backward_s": 0.095}) == []
