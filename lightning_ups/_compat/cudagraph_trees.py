"""Inductor's recordings of CUDA graphs, which torch keeps as trees and does not count."""

import sys
from typing import Any

import torch

__all__ = ["recordings"]


def recordings(device: torch.device) -> int:
    """Return how many CUDA graphs inductor has recorded for ``device`` and keeps."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")  # imported by the first recording
    if trees is None or device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    manager = trees.get_manager(index, create_if_none_exists=False)
    return 0 if manager is None or manager.roots is None else _count(manager.roots)


def _count(by_function: dict[Any, list[Any]]) -> int:
    nodes = [node for recorded in by_function.values() for node in recorded]
    return len(nodes) + sum(_count(node.children) for node in nodes)
