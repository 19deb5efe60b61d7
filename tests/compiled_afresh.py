"""Compile with inductor anew and without vectors, and leave nothing of it to the tests after."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch._inductor import config, cpu_vec_isa  # noqa: TID251


@contextmanager
def compiled_afresh(**settings):
    """Open `settings`, no cache of graphs, and none of a processor's vectors, for each of which the compiler is tried.

    Not by inductor's own setting: what it finds by that it keeps, and without vectors no later test of the process
    could build what a cache of graphs holds with them.
    """
    torch.compiler.reset()
    with patch.object(cpu_vec_isa, "valid_vec_isa_list", list), config.patch({"fx_graph_cache": False, **settings}):
        yield
