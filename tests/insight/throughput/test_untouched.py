import pytest

from lightning_ups.insight.throughput.untouched import NotCopiedError, Untouched, Watch


@pytest.mark.parametrize(
    "use",
    [next, iter, len, bool, int, float, list, lambda x: x(), lambda x: x.name, lambda x: x[0], lambda x: x + 1],
    ids=range(11),
)
def test_whoever_uses_it_hears_why(use):
    with pytest.raises(NotCopiedError, match=r"self\.x, a generator"):
        use(Untouched(Watch(), "self.x, a generator"))


def test_it_may_be_held_and_compared():
    held = Untouched(Watch(), "")
    assert held is not None
    assert held in [held]
    assert not hasattr(held, "__torch_function__")


@pytest.mark.parametrize("then", [lambda: None, lambda: 1 / 0], ids=["goes on", "fails"])
def test_a_step_that_hides_the_error_does_not_hide_what_it_did(then):
    watch = Watch()
    held = Untouched(watch, "self.x")

    def step():
        try:
            held.name = 1
        except RuntimeError:
            then()

    with pytest.raises(NotCopiedError, match=r"self\.x"), watch.on():
        step()
    held.close()  # all is over


def test_another_error_stays_what_it_is():
    with pytest.raises(ZeroDivisionError), Watch().on():
        1 / 0  # noqa: B018
