import pytest

from lightning_ups.transforms.compile.advice import advice_for_one_graph


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_advice_to_name_blocks_is_replaced_and_the_cause_kept(kind):
    cause = KeyError("why")
    with pytest.raises(kind) as error, advice_for_one_graph("ThisStrategy"):
        raise kind("It broke at a.b. It is so. Name other blocks: Compile(blocks=[...]).") from cause
    text = str(error.value)
    assert text.startswith("It broke at a.b. It is so. ThisStrategy makes one graph of each outermost submodule")
    assert text.endswith("use FSDP2Strategy, under which blocks are compiled one by one.")
    assert error.value.__cause__ is cause


@pytest.mark.parametrize("raised", [RuntimeError("nothing of blocks"), KeyError("Compile(blocks=")])
def test_other_errors_pass(raised):
    with pytest.raises(type(raised)) as error, advice_for_one_graph("ThisStrategy"):
        raise raised
    assert error.value is raised
