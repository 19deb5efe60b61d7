"""The machine that the tests run on, looked at once: it takes seconds."""

from functools import cache

from lightning_ups.commands.machine.packages import Machine, look


@cache
def here() -> Machine:
    return look()
