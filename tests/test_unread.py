"""What is left out for the tests' sake changes nothing but their time."""

import gc
import logging
import traceback

import torch

from tests import unread


def test_what_is_frozen_is_counted_anew_after_each_change():
    gc.unfreeze()
    before = gc.get_freeze_count()
    gc.freeze()
    assert gc.get_freeze_count() > before + 100_000
    assert gc.get_freeze_count() == gc.get_freeze_count()


def test_code_is_compiled_as_before_and_no_record_is_made_of_it():
    seen = []

    def backend(graph, inputs):
        seen.append(len([*graph.graph.nodes]))
        return graph.forward

    x = torch.randn(4)
    torch.testing.assert_close(torch.compile(lambda x: x.sin() + 1, backend=backend)(x), x.sin() + 1)
    assert seen == [4]
    assert logging.getLogger("torch.__trace").handlers == []


def test_graphs_are_printed_where_somebody_reads_them(capsys):
    graph = torch.fx.symbolic_trace(torch.nn.ReLU())
    assert graph.print_readable(print_output=False) == ""
    graph.print_readable()
    assert "relu" in capsys.readouterr().out


def test_stacks_of_others_are_as_ever():
    unread.leave_out()
    assert traceback.extract_stack()[-1].name == "test_stacks_of_others_are_as_ever"
    assert torch.cuda.traceback.format_stack() == []
