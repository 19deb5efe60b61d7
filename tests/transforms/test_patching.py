import pytest

from lightning_ups.transforms.patching import instead_of


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("own", [True, False])
def test_a_method_is_given_back_whoever_goes_first(first, own):
    class Owner:
        def name(self):
            return "class's"

    owner = Owner()
    if own:
        owner.name = mine = lambda: "its own"
    both = [instead_of(owner, "name", lambda number=number: number) for number in (0, 1)]
    for each in both:
        each.__enter__()
    assert owner.name() == 1
    both[first].__exit__(None, None, None)
    assert owner.name() == 1 - first
    both[1 - first].__exit__(None, None, None)
    assert vars(owner) == ({"name": mine} if own else {})
