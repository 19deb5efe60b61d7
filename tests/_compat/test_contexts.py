import logging
from threading import Event, Thread

import pytest
from torch.compiler import config

from lightning_ups._compat.contexts import ThreadStack, only_from, setting, values_set, without

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


def test_the_newest_open_context_decides_and_all_is_put_back():
    before, entry = getattr(config, NAME), config._config[NAME]
    first, second = setting(config, NAME, "a", everywhere=True), setting(config, NAME, "b", everywhere=True)
    first.__enter__(), second.__enter__()
    assert (getattr(config, NAME), entry.default, values_set(config, NAME)) == ("b", "b", ["a", "b"])
    first.__exit__(None, None, None)
    assert (getattr(config, NAME), entry.default, values_set(config, NAME)) == ("b", "b", ["b"])
    second.__exit__(None, None, None)
    assert (getattr(config, NAME), entry.default, values_set(config, NAME)) == (before, before, [])


@pytest.mark.parametrize("everywhere", [False, True])
def test_threads_end_in_any_order(everywhere):
    before, begun, ended, seen = getattr(config, NAME), Event(), Event(), []

    def run():
        with setting(config, NAME, "b", everywhere=everywhere):
            begun.set()
            ended.wait(60)
            seen.append(getattr(config, NAME))

    thread = Thread(target=run)
    with setting(config, NAME, "a", everywhere=everywhere):
        thread.start()
        begun.wait(60)
    ended.set()
    thread.join()
    assert seen == ["b"]
    assert getattr(config, NAME) == before == config._config[NAME].default


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
