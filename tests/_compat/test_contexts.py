import logging
from threading import Thread

import pytest
from torch.compiler import config

from lightning_ups._compat.contexts import SharedSettings, ThreadStack, only_from, without

NAME = "cache_key_tag"


def test_contexts_close_in_any_order_and_threads_have_their_own():
    stack, seen = ThreadStack(), []
    one, other = [], []  # equal, and not the same
    first, second = stack.holding(one), stack.holding(other)
    first.__enter__(), second.__enter__()
    thread = Thread(target=lambda: seen.append(stack.innermost))
    thread.start()
    thread.join()
    assert seen == [None]
    first.__exit__(None, None, None)
    assert stack.innermost is other
    second.__exit__(None, None, None)
    assert stack.values == []


def test_settings_hold_until_the_last_context_closes():
    settings, before = SharedSettings(config, NAME), getattr(config, NAME)
    first, second = settings.set("a"), settings.set("a")
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert (getattr(config, NAME), settings.values) == ("a", ("a",))
    second.__exit__(None, None, None)
    assert (getattr(config, NAME), settings.values) == (before, None)


def test_a_thread_sets_what_it_reads():
    settings, before, seen = SharedSettings(config, NAME), getattr(config, NAME), []

    def run():
        with settings.set("a"):
            seen.append(getattr(config, NAME))

    with settings.set("a"):
        thread = Thread(target=run)
        thread.start()
        thread.join()
        seen.append(getattr(config, NAME))
    assert seen == ["a", "a"]
    assert getattr(config, NAME) == before


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
