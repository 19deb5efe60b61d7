import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


CASES = ["maxima", "both", "rows", "columns", "inductor"]
BY_ROWS = ["scaled_rows", "column_maxima", "scaled_columns", "inductor_rows"]


@pytest.mark.parametrize("case", [*CASES, *BY_ROWS])
def test_a_case_has_a_speed_for_each_shape(import_benchmark, monkeypatch, case):
    script = import_benchmark("float8_casts")
    monkeypatch.setattr(script, "SHAPES", ((32, 48), (16, 16)))
    found = script.CASES[case]()
    assert [*found["shapes"]] == ["32x48", "16x16"]
    for shape in found["shapes"].values():
        (least,) = (ways for ways in [shape["TB_s"].values()])
        assert shape["ms"] > 0
        assert [*least] == sorted(least, reverse=True)


def test_the_hosts_share_is_timed(import_benchmark):
    found = import_benchmark("float8_casts").CASES["host"]()
    assert min(found["maxima_us"], found["both_us"]) > 0


def test_products_are_timed_by_the_format_of_gradients(import_benchmark):
    script = import_benchmark("float8_casts")
    times = [*script.CASES["products"]()["shapes"].values()]
    assert len(times) == (9 if script.ON_GPU else 1)
    for each in times:
        assert min(time for what, time in each.items() if "off" not in what) > 0
        assert (each["fast sums off by"] > 0) == script.ON_GPU, "a CPU has none"
        assert each["e4m3 to e5m2"] == pytest.approx(each["e4m3"] / each["e5m2"], rel=2e-3)


def test_what_does_not_fit_is_left_out(import_benchmark, monkeypatch, capsys):
    script = import_benchmark("float8_casts")
    monkeypatch.setattr(script, "SHAPES", ((32, 48),))

    def too_large(values):
        raise RuntimeError("out of resource: shared memory")

    found = script.quickest("rows", {"large": too_large, "small": lambda values: values + 1})
    assert found["of"] == "small"
    assert "large: RuntimeError: out of resource" in capsys.readouterr().out


def test_a_shape_that_nothing_fits_leaves_the_others(import_benchmark, monkeypatch):
    script = import_benchmark("float8_casts")
    monkeypatch.setattr(script, "SHAPES", ((32, 48), (16, 16)))

    def only_small(values):
        if values.numel() > 16 * 16:
            raise torch.OutOfMemoryError("no room")
        return values + 1

    assert [*script.quickest("rows", {"way": only_small})["shapes"]] == ["16x16"]
    monkeypatch.setattr(script, "SHAPES", ((32, 48),))
    with pytest.raises(SystemExit, match="No way of rows ran"):
        script.quickest("rows", {"way": only_small})
