from threading import Thread

import pytest
from torch.compiler import config

from lightning_ups._compat.torch.settings import SharedSettings

NAME = "cache_key_tag"


def test_settings_hold_until_the_last_context_closes():
    settings, before = SharedSettings(config, NAME), getattr(config, NAME)
    first, second = settings.set("a"), settings.set("a")
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert (getattr(config, NAME), settings.values) == ("a", ("a",))
    second.__exit__(None, None, None)
    assert (getattr(config, NAME), settings.values) == (before, None)


def test_other_values_are_a_mistake_of_the_caller():
    settings = SharedSettings(config, NAME)
    with settings.set("a"), pytest.raises(AssertionError):
        settings.set("b").__enter__()
    assert settings.values is None


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
