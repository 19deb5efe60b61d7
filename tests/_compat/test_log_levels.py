import logging

import pytest

from lightning_ups._compat.log_levels import only_from


def test_less_is_left_out_for_a_while():
    logger = logging.getLogger("somebody.below")
    before = logger.getEffectiveLevel()
    with only_from(logging.ERROR, "somebody"):
        assert not logger.isEnabledFor(logging.WARNING)
        assert logger.isEnabledFor(logging.ERROR)
    assert logger.getEffectiveLevel() == before


def test_the_level_comes_back_after_an_error():
    logger = logging.getLogger("somebody")
    logger.setLevel(logging.INFO)
    with pytest.raises(KeyError), only_from(logging.ERROR, "somebody"):
        raise KeyError
    assert logger.level == logging.INFO
