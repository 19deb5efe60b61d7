import logging

import pytest

from lightning_ups._compat.torch.log_levels import only_from, without


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


def test_one_message_is_left_out_for_a_while(caplog):
    logger = logging.getLogger("somebody.else")
    with without("advice about", "somebody.else"):
        logger.warning("some %s this", "advice about")
        logger.warning("another")
    logger.warning("advice about that")
    assert [record.getMessage() for record in caplog.records] == ["another", "advice about that"]
