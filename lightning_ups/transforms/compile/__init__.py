"""Compiling modules, and choosing between eager code, compiled code and CUDA graphs."""

from lightning_ups.transforms.compile.advice import advice_for_one_graph, advice_if_uncompiled
from lightning_ups.transforms.compile.cache import CacheFile
from lightning_ups.transforms.compile.cache_folder import prune, user_folder
from lightning_ups.transforms.compile.compiler import (
    Compiled,
    Compiler,
    OnFailure,
    compiled,
    compiled_by_model,
    is_compiled,
    refuse_compiled,
)
from lightning_ups.transforms.compile.contest import Contest, HostClock
from lightning_ups.transforms.compile.cuda_graphs import OwnGradients, begin_step
from lightning_ups.transforms.compile.frame import Mode, hearing, prepared
from lightning_ups.transforms.compile.loss_calls import large_cross_entropies
from lightning_ups.transforms.compile.mode import Choice, Clock
from lightning_ups.transforms.compile.replay import Replay
from lightning_ups.transforms.compile.step_source import repeated_backward, uses_only_loss
from lightning_ups.transforms.compile.trial import State
from lightning_ups.transforms.compile.whole_step import Step

__all__ = [
    "CacheFile",
    "Choice",
    "Clock",
    "Compiled",
    "Compiler",
    "Contest",
    "HostClock",
    "Mode",
    "OnFailure",
    "OwnGradients",
    "Replay",
    "State",
    "Step",
    "advice_for_one_graph",
    "advice_if_uncompiled",
    "begin_step",
    "compiled",
    "compiled_by_model",
    "hearing",
    "is_compiled",
    "large_cross_entropies",
    "prepared",
    "prune",
    "refuse_compiled",
    "repeated_backward",
    "user_folder",
    "uses_only_loss",
]
