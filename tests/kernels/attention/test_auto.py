import logging

import pytest
import torch

from lightning_ups.kernels.attention import attention, auto, decisions, support
from lightning_ups.kernels.attention.auto import Row, Table, choose, decide, predict, tables
from lightning_ups.kernels.attention.kind import Kind
from lightning_ups.kernels.attention.support import BACKENDS

CPU = Kind("cpu", torch.float32, 32, 8, 128, 128, causal=True)
GPU = CPU._replace(device="cuda", dtype=torch.bfloat16)


def row(seq, times, *, dim=128, kv_heads=8, batch=None, causal=True, forward=None):
    return Row(dim, 32, kv_heads, seq, batch or 32768 // seq, causal, forward or times, times)


CROSSING = Table(
    "Test GPU",
    (9, 0),
    {},
    "2026-11-21",
    (
        row(1024, {"cudnn": 1.0, "fa4": 2.0}),
        row(4096, {"cudnn": 1.0, "fa4": 1.2}),
        row(16384, {"cudnn": 1.2, "fa4": 1.0}, forward={"cudnn": 1.0, "fa4": 3.0}),
    ),
)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Test GPU")
    monkeypatch.setattr(support, "missing_package", lambda _: None)
    monkeypatch.setattr(support, "_torch_refuses", lambda *_: None)
    auto._table.cache_clear()
    auto._choice.cache_clear()
    monkeypatch.setattr(auto, "tables", lambda: (CROSSING,))
    yield monkeypatch
    auto._table.cache_clear()
    auto._choice.cache_clear()


def best(kind, seq, batch=None, table=CROSSING):
    behind = predict(table, kind, seq=seq, work=(batch or 32768 / seq) * seq * kind.heads)
    return min(behind, key=behind.get)


@pytest.mark.parametrize(
    ("seq", "wanted"), [(512, "cudnn"), (1536, "cudnn"), (4096, "cudnn"), (14000, "fa4"), (65536, "fa4")]
)
def test_between_and_beyond_the_measured_lengths(seq, wanted):
    assert best(GPU, seq) == wanted


def test_the_prediction_at_a_measured_shape_is_its_measurement():
    for measured in CROSSING.rows:
        behind = predict(CROSSING, GPU, seq=measured.seq, work=32768 * 32)
        times = measured.training
        assert behind["fa4"] - behind["cudnn"] == pytest.approx(
            float(torch.tensor(times["fa4"] / times["cudnn"]).log()), abs=0.02
        )


def test_forward_alone_has_times_of_its_own():
    assert best(GPU._replace(trains=False), 16384) == "cudnn"


def test_the_nearest_width_decides():
    rows = (row(4096, {"cudnn": 1.0, "fa4": 2.0}, dim=64), row(4096, {"cudnn": 2.0, "fa4": 1.0}, dim=128))
    table = CROSSING._replace(rows=rows)
    assert best(GPU._replace(head_dim=72), 4096, table=table) == "cudnn"
    assert best(GPU._replace(head_dim=120), 4096, table=table) == "fa4"
    assert best(GPU._replace(head_dim=64), 6144, table=table) == "cudnn"


def test_the_nearest_grouping_decides():
    rows = (row(4096, {"cudnn": 2.0, "fa4": 1.0}, kv_heads=32), row(4096, {"cudnn": 1.0, "fa4": 2.0}, kv_heads=8))
    table = CROSSING._replace(rows=rows)
    assert best(GPU._replace(kv_heads=32), 4096, table=table) == "fa4"
    assert best(GPU._replace(kv_heads=4), 4096, table=table) == "cudnn"


def test_full_attention_has_times_of_its_own():
    rows = (row(4096, {"cudnn": 2.0, "fa4": 1.0}), row(16384, {"cudnn": 1.0, "fa4": 2.0}, causal=False))
    table = CROSSING._replace(rows=rows)
    assert best(GPU, 12288, table=table) == "fa4"
    assert best(GPU._replace(causal=False), 6144, table=table) == "cudnn"


def test_a_backend_that_failed_nearby_has_no_say_from_afar():
    table = CROSSING._replace(rows=(row(4096, {"cudnn": 1.0}, dim=256), row(4096, {"cudnn": 2.0, "fa4": 1.0}, dim=64)))
    assert set(predict(table, GPU._replace(head_dim=256), seq=4096, work=2**20)) == {"cudnn"}


def test_only_backends_that_can_are_chosen(hopper):
    assert decide(GPU, seq=1024, work=2**20).backend == "cudnn"
    assert decide(GPU._replace(window=True), seq=1024, work=2**20).backend == "fa4"
    choice = decide(GPU._replace(softcap=True, head_dim=512, value_dim=512), seq=1024, work=2**20)
    assert choice.backend == "flex"
    assert "rule" in choice.why


def test_hardware_that_was_not_measured_follows_the_rule(hopper):
    hopper.setattr(auto, "tables", lambda: ())
    auto._table.cache_clear()
    assert decide(GPU, seq=1024, work=2**20).backend == "cudnn"
    assert decide(GPU._replace(window=True), seq=1024, work=2**20).backend == "fa4"
    hopper.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    auto._table.cache_clear()
    assert decide(GPU, seq=1024, work=2**20).backend == "flash"
    assert decide(CPU, seq=1024, work=2**20).backend == "flash"
    assert decide(CPU._replace(softcap=True), seq=1024, work=2**20).backend == "reference"


def test_kin_of_a_measured_device_uses_its_table(hopper):
    hopper.setattr(torch.cuda, "get_device_name", lambda *_: "Another of 9.0")
    assert decide(GPU, seq=16384, work=2**20).why == "fastest in the table of Test GPU, 2026-11-21"


def test_where_nothing_can_the_reasons_are_listed():
    with pytest.raises(ValueError, match=r"fa4: .*CUDA devices only.*Change what is asked"):
        decide(CPU._replace(dropout=True, softcap=True), seq=8, work=8)


def test_said_once_and_kept_for_the_manifest(caplog):
    auto._choice.cache_clear()
    before = len(decisions())
    with caplog.at_level(logging.INFO, logger=auto.__name__):
        for seq in (5, 6, 7):
            tensor = torch.zeros(1, seq, 3, 40)
            attention(tensor, tensor, tensor)
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "first of the rule for hardware not measured that can do it."
    ]
    assert [decision["backend"] for decision in decisions()[before:]] == ["flash"]


def test_lengths_within_a_cell_share_a_compiled_function(hopper):
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=count, fullgraph=True, dynamic=True)
    def function(x):
        name = choose(GPU, batch=x.shape[0], seq=x.shape[1])
        return x + 1 if name == "cudnn" else x - 1

    found = [float(function(torch.zeros(2, seq))[0, 0]) for seq in (1000, 1001, 1010, 14000, 14010)]
    assert found == [1, 1, 1, -1, -1]
    assert len(graphs) == 2


def test_tables_in_the_package_are_sound():
    for table in tables():
        assert len(table.date) == 10
        assert {"torch"} <= set(table.versions)
        for measured in table.rows:
            assert set(measured.training) | set(measured.forward) <= set(BACKENDS)
            assert all(time > 0 for time in measured.training.values())
