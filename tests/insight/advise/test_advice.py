from dataclasses import replace

import pytest
import torch.distributed as dist

from lightning_ups.insight.advise.advice import Advice, best_recipe, decide_on_rank0
from lightning_ups.insight.advise.linear_shapes import Layer, Product
from lightning_ups.insight.advise.timing_table import BFLOAT16, Table, Times

WIDE, NARROW = Product(1024, 4096, 4096), Product(1024, 64, 64)
LAYERS = [Layer("layers.0.up", {WIDE: 1}), Layer("layers.1.up", {WIDE: 1}), Layer("layers.0.gate", {NARROW: 2})]


def times(total):
    return Times(forward_ms=total / 4, dgrad_ms=total / 4, wgrad_ms=total / 2)


def advice(*, wide=(10.0, 5.0), narrow=(1.0, 1.5), recipe="tensorwise", **options):
    by_shape = {WIDE: wide, NARROW: narrow}
    table = Table({}, {p: {BFLOAT16: times(b), recipe: times(f)} for p, (b, f) in by_shape.items()})
    return Advice(recipe=recipe, layers=LAYERS, table=table, **options)


def test_only_what_wins_is_converted_and_the_rest_says_why():
    found = advice()
    assert [layer.name for layer in found.winners] == ["layers.0.up", "layers.1.up"]
    assert found.losers == {"layers.0.gate": "is not faster: 2 ms in bfloat16, 3 ms in float8"}


def test_the_gain_of_a_step_follows_from_the_share_of_its_time():
    found = advice(step_ms=40.0)
    assert found.products_ms == 22.0
    assert found.gain(found.winners) == pytest.approx(40 / 30 - 1)
    assert found.gain(found.layers) == pytest.approx(40 / 31 - 1)
    assert "convert 2 of 3 layers by tensorwise: +33.3% steps a second; with all of them +29.0%" in found.verdict()
    assert advice().gain(LAYERS) is None


def test_gradients_that_are_not_computed_take_no_time():
    frozen = [replace(layer, wgrad=False) for layer in LAYERS]
    found = replace(advice(step_ms=40.0), layers=frozen)
    assert found.products_ms == 11.0
    assert found.gain(found.layers) == pytest.approx(40 / 35.5 - 1)
    assert replace(found, layers=[replace(layer, dgrad=False) for layer in frozen]).products_ms == 5.5


def test_microbatches_count():
    found = advice(step_ms=80.0, microbatches=2)
    assert found.gain(found.winners) == pytest.approx(80 / 60 - 1)


def test_slower_layers_stay_in_bfloat16():
    found = advice(wide=(10.0, 10.5), step_ms=40.0)
    assert not found.winners
    assert len(found.losers) == 3
    assert found.verdict() == "leave bfloat16: all layers by tensorwise would mean -4.8% steps a second"
    untimed = replace(found, step_ms=None).verdict()
    assert untimed == "leave bfloat16: all layers by tensorwise would mean +9.1% of the time of these products"


def test_differences_within_the_noise_do_not_count():
    assert not advice(wide=(10.0, 9.8)).winners


def test_layers_that_save_too_little_stay_in_bfloat16():
    found = advice(wide=(1.0, 0.9), step_ms=1000.0)
    assert not found.winners
    assert "saves too little with the rest" in found.losers["layers.0.up"]
    assert advice(wide=(1.0, 0.9), step_ms=15.0).winners


def test_the_recipe_that_saves_most():
    slow, fast = advice(wide=(10.0, 8.0), recipe="rowwise"), advice(wide=(10.0, 5.0))
    assert best_recipe([slow, fast]) is fast


def test_rows_have_the_parts_and_the_ratio():
    rows = [*advice().rows(["tensorwise"])]
    assert [row["in"] for row in rows] == ["layers.0.gate", "layers.*.up"]
    assert rows[1]["a step"] == "2"
    assert rows[1][BFLOAT16] == "2.500 + 2.500 + 5.000 ms"
    assert rows[1]["tensorwise"] == "1.250 + 1.250 + 2.500 ms, x2.00"


def test_times_that_were_taken_on_a_busy_device_are_in_doubt():
    found = advice()
    assert "busy" not in found.verdict()
    narrow = found.table.times[NARROW]
    narrow["tensorwise"] = replace(narrow["tensorwise"], doubt="runs of the same product differed by 31%")
    narrow["rowwise"] = replace(narrow["tensorwise"], doubt="of another recipe")
    said = (
        "the device was busy: of 1 of 2 products, runs of the same product differed by 31%; time again when it is idle"
    )
    assert found.verdict().endswith(f" ({said})")
    assert replace(found, step_ms=1e6).verdict().startswith("leave bfloat16")
    assert "the device was busy" in replace(found, step_ms=1e6).verdict()
    rows = {row["rows x in x out"]: row["tensorwise"] for row in found.rows(["tensorwise"])}
    assert [text.endswith("(in doubt)") for text in (rows[str(NARROW)], rows[str(WIDE)])] == [True, False]


def test_without_ranks_the_result_is_returned():
    assert decide_on_rank0(lambda: {"layer": "is slower"}, by="Advice") == {"layer": "is slower"}
    with pytest.raises(KeyError, match="broken"):
        decide_on_rank0(lambda: {}["broken"], by="Advice")


def decide(fail):
    """Return the result of each rank, or its error."""
    mine = dist.get_rank()

    def find():
        assert mine == 0, "only rank 0 measures"
        if fail:
            raise KeyError("broken")
        return {"found by": str(mine)}

    try:
        told = decide_on_rank0(find, by="Advice")
    except (KeyError, RuntimeError) as error:
        told = f"{type(error).__name__}: {error}"
    both = [None, None]
    dist.all_gather_object(both, told)
    return both


def test_all_ranks_do_as_rank_0_found(ranks):
    assert ranks(decide, False) == [{"found by": "0"}] * 2


def test_a_failure_on_rank_0_raises_on_all_ranks(ranks):
    first, other = ranks(decide, True)
    assert first == "KeyError: 'broken'"
    assert other.startswith("RuntimeError: Advice failed on rank 0")
