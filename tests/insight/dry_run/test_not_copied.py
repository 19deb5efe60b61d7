import pytest

from lightning_ups.insight.dry_run.not_copied import NotCopied, NotCopiedError, Uses


@pytest.mark.parametrize(
    "use",
    [next, iter, len, bool, int, float, list, lambda x: x(), lambda x: x.name, lambda x: x[0], lambda x: x + 1],
    ids=range(11),
)
def test_every_use_in_a_step_names_the_object(use):
    uses = Uses()
    with pytest.raises(NotCopiedError, match=r"self\.x, a generator"), uses.watched():
        use(NotCopied(uses, "self.x, a generator"))


def test_a_placeholder_may_be_held_and_compared():
    uses = Uses()
    held = NotCopied(uses, "")
    with uses.watched():
        assert held is not None
        assert held in [held]
        assert not hasattr(held, "__torch_function__")
    assert iter(held) is held.close() is held


@pytest.mark.parametrize("then", [lambda: None, lambda: 1 / 0], ids=["goes on", "fails"])
def test_a_step_cannot_hide_the_error(then):
    uses = Uses()

    def step():
        try:
            NotCopied(uses, "self.x").name = 1
        except RuntimeError:
            then()

    with pytest.raises(NotCopiedError, match=r"self\.x"), uses.watched():
        step()


def test_another_error_is_not_replaced():
    with pytest.raises(ZeroDivisionError), Uses().watched():
        1 / 0  # noqa: B018
