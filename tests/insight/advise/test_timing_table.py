import json

import pytest
import torch

from lightning_ups._compat.environment import versions
from lightning_ups.insight.advise.linear_shapes import Product
from lightning_ups.insight.advise.timing_table import BFLOAT16, Table, Times, cache_path, obtain_table, where

SMALL, LARGE = Product(64, 32, 32), Product(8192, 4096, 4096)
CPU = torch.device("cpu")


def timer(calls):
    def time(product, recipe):
        calls.append((product, recipe))
        return Times(forward_ms=1.0, dgrad_ms=2.0, wgrad_ms=3.0 if recipe == BFLOAT16 else 1.0)

    return time


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_each_product_is_timed_once_and_kept_in_a_file_for_this_device_and_these_versions():
    calls = []
    first = obtain_table([SMALL, LARGE], ["tensorwise"], device=CPU, timer=timer(calls))
    assert calls == [(p, name) for p in (SMALL, LARGE) for name in (BFLOAT16, "tensorwise")]
    again = obtain_table([LARGE], ["tensorwise"], device=CPU)  # no timer is needed
    assert again.times == first.times
    assert again.times[LARGE][BFLOAT16].total_ms == 6.0
    obtain_table([LARGE], ["rowwise"], device=CPU, timer=timer(calls))
    assert calls[4:] == [(LARGE, "rowwise")]
    name = cache_path(where(CPU)).name
    assert name.startswith("cpu_")
    assert versions()["torch"] in name


def test_products_that_are_computed_as_one_are_kept_too(tmp_path):
    path = tmp_path / "table.json"
    fused = Product(64, 32, 96, norm="RMSNorm", split=(64, 16, 16))
    network = Product(64, 32, 128, norm="LayerNorm", activation="swiglu")
    table = Table({"device": "cpu"})
    table.fill([SMALL, fused, network], ["te-current"], timer([]))
    table.write(path)
    assert Table.read(path).times == table.times


def test_times_in_doubt_are_used_and_not_kept():
    def noisy(product, recipe):
        doubt = "runs differed" if product == SMALL and recipe != BFLOAT16 else ""
        return Times(forward_ms=1.0, dgrad_ms=2.0, wgrad_ms=0.0, doubt=doubt)

    found = obtain_table([SMALL, LARGE], ["tensorwise"], device=CPU, timer=noisy)
    assert found.times[SMALL]["tensorwise"].total_ms == 3.0
    calls = []
    obtain_table([SMALL, LARGE], ["tensorwise"], device=CPU, timer=timer(calls))
    assert calls == [(SMALL, "tensorwise")]


def test_two_tables_are_one_that_has_the_times_of_both():
    tables = [Table({"device": name}) for name in ("before", "after")]
    tables[0].fill([SMALL], ["tensorwise"], timer([]))
    tables[1].fill([SMALL, LARGE], ["rowwise"], timer([]))
    joined = tables[0].joined(tables[1])
    assert joined.place == {"device": "after"}
    assert {p: sorted(by) for p, by in joined.times.items()} == {
        SMALL: [BFLOAT16, "rowwise", "tensorwise"], LARGE: [BFLOAT16, "rowwise"]
    }  # fmt: skip


def test_a_device_without_timer_is_an_error():
    with pytest.raises(RuntimeError, match=r"timed on this device: cpu.*`advise`"):
        obtain_table([SMALL], ["tensorwise"], device=CPU)


def test_a_table_of_another_device_may_be_given(tmp_path):
    path = tmp_path / "h200.json"
    table = Table({"device": "NVIDIA H200"})
    table.fill([LARGE], ["tensorwise"], timer([]))
    table.write(path)
    assert obtain_table([LARGE], ["tensorwise"], device=CPU, path=path).place == {"device": "NVIDIA H200"}
    with pytest.raises(ValueError, match=r"NVIDIA H200.* 64 x 32 x 32 by bfloat16 .* 1 others"):
        obtain_table([SMALL], ["tensorwise"], device=CPU, path=path, timer=timer([]))


def written(times):
    return json.dumps(
        {"format": "lightning_ups float8 table 1", "place": {}, "products": [{"shape": [64, 32, 32], "times": times}]}
    )


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '{"format": "other"}',
        json.dumps([1]),
        b"PK\x03\x04\xd9\xff",  # such as a checkpoint
        written([1]),
        written({BFLOAT16: {"forward_ms": "1 ms", "dgrad_ms": 1, "wgrad_ms": 1}}),
        written({BFLOAT16: {"forward_ms": 10**400, "dgrad_ms": 1, "wgrad_ms": 1}}),
        "[" * 100_000,
    ],
)
def test_a_file_that_is_not_a_table_is_an_error(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"table.json is not a table of float8 times.*give another path"):
        Table.read(path)


def test_a_missing_file_is_an_error(tmp_path):
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(FileNotFoundError, match=rf"table of float8 times at {path} cannot be read"):
            obtain_table([SMALL], ["tensorwise"], device=CPU, path=path)
