"""What torch and Lightning compute for messages that nobody reads here, left out: a tenth of the tests' time.

None of it changes what is compiled, computed or collected. Each is looked for, since versions differ.
"""

import gc
import logging
import sys
import traceback
from functools import cache
from importlib.metadata import entry_points
from types import SimpleNamespace

STACKS = ("torch._subclasses.fake_tensor", "torch.cuda", "torch.mtia", "torch.xpu")


@cache
def leave_out():
    """Leave it out of what this process has imported, and of processes that are forked from it."""
    _replace("torch._dynamo.guards", "profile_guard_manager", lambda *_: 0.0)  # how long guards take, with cold caches
    _replace("torch._dynamo.symbolic_convert", "get_funcname", lambda *_: None)  # reads each file that is traced
    # Records of each compilation, which pytest keeps, since it listens to loggers that keep to themselves.
    records = logging.getLogger("torch.__trace")
    records.handlers.clear()
    records.propagate = True
    _leave_out_printed_graphs()
    # Where a mode was made, and where a seed was set, with the line of source of each frame.
    silent = SimpleNamespace(**vars(traceback) | {"extract_stack": lambda *_: [], "format_stack": lambda *_: []})
    for module in STACKS:
        _replace(module, "traceback", silent)
    # For each Trainer, the metadata of all that is installed.
    _replace("lightning.fabric.utilities.registry", "entry_points", cache(entry_points))
    _remember_what_is_frozen()


def _replace(module, name, by):
    if hasattr(place := sys.modules.get(module), name):
        setattr(place, name, by)


def _leave_out_printed_graphs():
    from torch.fx import GraphModule

    printed = GraphModule.print_readable

    def print_readable(self, print_output=True, *args, **options):
        return printed(self, print_output, *args, **options) if print_output else ""

    GraphModule.print_readable = print_readable


def _remember_what_is_frozen():
    """Count it once: that goes through a million objects, which only tests have frozen."""
    count, counted = gc.get_freeze_count, []

    def get_freeze_count():
        if not counted:
            counted.append(count())
        return counted[0]

    def forgetting(change):
        def changed():
            counted.clear()
            change()

        return changed

    gc.get_freeze_count = get_freeze_count
    gc.freeze, gc.unfreeze = forgetting(gc.freeze), forgetting(gc.unfreeze)
