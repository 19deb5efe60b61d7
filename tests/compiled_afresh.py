"""Compile with inductor anew and without vectors, and leave nothing of it to the tests after."""

from contextlib import contextmanager

import torch
from torch._inductor import config  # noqa: TID251
from torch._inductor.cpu_vec_isa import valid_vec_isa_list  # noqa: TID251


@contextmanager
def compiled_afresh(**settings):
    """Open `settings`, no cache of graphs, and none of a processor's vectors, for each of which the compiler is tried.

    What inductor finds of vectors it keeps for the process: with none, it cannot build what a cache holds with them.
    """
    torch.compiler.reset()
    valid_vec_isa_list.cache_clear()
    try:
        with config.patch({"fx_graph_cache": False, "cpp.vec_isa_ok": False, **settings}):
            yield
    finally:
        valid_vec_isa_list.cache_clear()
