import sys

import pytest


@pytest.fixture
def step_profile(import_benchmark):
    return import_benchmark("step_profile")


def kernel(name, start, length):
    return {"cat": "kernel", "name": name, "ts": 1e3 * start, "dur": 1e3 * length}


TRACE = [
    kernel("nvjet_tst_128x256", 0, 10),
    kernel("ncclDevKernel_AllGather", 5, 10),  # half of it beside the product
    kernel("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 20, 4),
    kernel("adamw_step_kernel", 24, 2),
    {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1e9},
]


def test_kernels_are_sorted_and_what_is_hidden_is_not_exposed(step_profile):
    found = step_profile.split(step_profile.spans_by_part(TRACE), steps=2)
    assert found == {
        "products": 5,
        "communication": 5,
        "attention": 2,
        "optimizer and clip": 1,
        "exposed communication": 2.5,
        "idle": 2.5,
        "step": 13,
    }


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvjet_sm90_qrtst_128x160_algo2_TNT", "products"),
        ("void at::native::multi_tensor_apply_kernel<at::native::FusedAdam>", "optimizer and clip"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy", "copies"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "fused"),
        ("void at::native::vectorized_elementwise_kernel", "elementwise"),
        ("FlashAttentionForwardSm90", "attention"),
        ("something new", "other"),
    ],
)
def test_parts_by_name(step_profile, name, part):
    assert step_profile.part_of(name) == part


def test_rooflines_are_arithmetic(step_profile):
    least = step_profile.rooflines(step_profile.rows()["1B-4"])
    # 1.2358 billion weights in products, 16384 tokens; 28 bytes a weight, the norm included in 2 of them and 2 written
    assert least["products"] == pytest.approx(6 * 1.2358e9 * 16384 / 787e12 * 1e3, rel=1e-3)
    assert least["optimizer and clip"] == pytest.approx(1.498482688e9 * 30 / 4.25e12 * 1e3, rel=1e-3)
    shown = step_profile.table({"step": 100.0, "products": 160.0}, least)
    assert "| products | 160.0 | 160.0% | 154.4 |" in shown


def test_gpus_that_are_not_there_are_said_before_anything_runs(step_profile, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["step_profile.py", "--row", "8B", "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="2"):
        step_profile.main()
    assert "row 8B needs 4 GPUs, and this machine has 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_interrupted_keeps_its_words(step_profile, monkeypatch, tmp_path):
    def finished(*_, **__):
        raise step_profile.Interrupted("step 1")

    monkeypatch.setattr(step_profile, "unmet_gpus", lambda *_, **__: None)
    monkeypatch.setattr(step_profile, "finished", finished)
    monkeypatch.setattr(sys, "argv", ["step_profile.py", "--row", "1B-4", "--output", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        step_profile.main()
    assert "step 1" in (tmp_path / "log.txt").read_text()
    assert "torch " in (tmp_path / "env.txt").read_text()
