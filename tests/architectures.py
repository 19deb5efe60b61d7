"""Module trees of image models from timm, rebuilt without timm: the same classes, names and shapes, but no forward.

``architectures.json`` holds them. Regenerate it, in an environment that has timm:

    python -m tests.architectures
"""

import json
from functools import cache
from pathlib import Path

import torch
from torch import nn

FILE = Path(__file__).with_name("architectures.json")


def record(models):
    """Return ``models`` by name as JSON: a list of distinct nodes, which refer to their children by number."""
    nodes = {}
    roots = {name: _number_of(model, nodes) for name, model in models.items()}
    return {"nodes": [json.loads(node) for node in nodes], "models": roots}


def _number_of(module, nodes):
    kind = type(module)
    of_torch = next(base for base in kind.__mro__ if base.__module__.startswith("torch."))
    shapes = [[name, *p.shape] for name, p in module._parameters.items() if p is not None]
    children = [[name, _number_of(child, nodes)] for name, child in module.named_children()]
    own = "" if kind is of_torch else kind.__name__
    node = json.dumps([own, of_torch.__name__, kind.forward is not nn.Module.forward, shapes, children])
    return nodes.setdefault(node, len(nodes))


@cache
def recorded():
    """Return what the file holds."""
    return json.loads(FILE.read_text())


def rebuild(name):
    """Return the tree of the model ``name``, with parameters on the meta device."""
    return _rebuilt(recorded()["nodes"], recorded()["models"][name])


def _rebuilt(nodes, number):
    name, of_torch, is_called, shapes, children = nodes[number]
    kind = _class(name, of_torch, is_called)
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for parameter, *shape in shapes:
        module.register_parameter(parameter, nn.Parameter(torch.empty(shape, device="meta")))
    for child, inner in children:
        module.add_module(child, _rebuilt(nodes, inner))
    return module


@cache
def _class(name, of_torch, is_called):
    base = getattr(nn, of_torch, None) or getattr(nn.modules.linear, of_torch)
    if not name:
        return base
    forward = {"forward": lambda self, x: x} if is_called and base.forward is nn.Module.forward else {}
    return type(name, (base,), {"__module__": "timm.models", **forward})


if __name__ == "__main__":
    import timm  # pyright: ignore[reportMissingImports]

    from tests.test_architectures import TIMM

    with torch.device("meta"):
        recording = record({name: timm.create_model(name) for name in TIMM})
    FILE.write_text(json.dumps({"timm": timm.__version__, **recording}, separators=(",", ":")) + "\n")
