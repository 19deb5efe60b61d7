"""State in modules: what outlives a run, or is seen by all runs of a process, is listed here, with the reason."""

import ast
from pathlib import Path

import lightning_ups

ROOT = Path(lightning_ups.__file__).parent

# A result that is found once; a run cannot tell whether it or an earlier one found it.
CACHES = {
    "kernels/attention/routing.py:_AS_TORCH": "calls for which torch chooses the same kernel",
    "transforms/recompute/kept.py:CALLED_TRACED": "operators of code that Dynamo traced, which equal blocks share",
    "transforms/recompute/kept.py:TRACED": "code that Dynamo traced, which equal blocks and later fits share",
    "transforms/recompute/kept.py:TRACED_IDLE": "the same, where nothing needed a gradient",
    "transforms/sharding/mesh.py:_MESHES": "process groups, which each mesh of the same sizes shares",
    "_compat/lightning/sigterm.py:_GROUPS": "process groups, one for each world",
}
# What the process itself has once: an attribute of another package, an environment variable, a counter.
OF_THE_PROCESS = {
    "_compat/lightning/checkpoints.py:_UNTIL_THE_END": "a patch that comes before any hook of a run",
    "_compat/contexts.py:_HELD": "settings of torch, each thread's or the process's as torch has them",
    "_compat/contexts.py:_LOCK": "of these settings",
    "_compat/patches.py:_LOCK": "of the register of patches",
    "_compat/patches.py:_PLACES": "the register of patches: attributes of other packages, and who replaces them",
    "_compat/torch/compile/cudagraph_trees.py:_LAST_MARK": "torch counts steps for the process",
    "_compat/torch/fsdp/process_groups.py:_INHERITED": "of a process that was forked: groups of its parent",
    "_compat/torch/tensors/ops.py:_COSTLY": "operators that packages of kernels register",
    "_compat/torch/tensors/tensor_files.py:_PATCHING": "a lock around a setting of torch",
    "commands/tokenize.py:_work": "the work of a process that was started for it",
    "insight/advise/timer.py:_NUMBER": "names of code",
    "insight/memory/cuda.py:_STACKS": "functions of torch that a dry run replaces",
    "insight/verify/recording.py:_OPEN": "an operator in a compiled graph can only be given names",
    "kernels/attention/auto.py:_DECIDED": "what was chosen in the process, for a report at its end",
    "kernels/attention/sdpa.py:_TURN": "a lock around switches of torch",
    "kernels/attention/routing.py:_ALLOWED": "torch's switches when its function was replaced",
    "kernels/attention/routing.py:_CALLED": "whether a replaced function of torch was called",
    "transforms/compile/replay.py:_KEPT": "memory of runs that have ended, for as long as somebody uses it",
    "transforms/float8/recipes.py:RECIPES": "a table, filled where recipes are defined",
    "transforms/fsdp/collective_order.py:_numbers": "keys in the store of the process group",
    "transforms/compile/frame.py:_NUMBERS": "names of code",
}
# Entries of an object that one run owns; they go with it, or when the run ends.
BY_OWNER = {
    "order/applier.py:_RUNS": "a run, by its strategy: the only way from a Trainer of Lightning to it",
    "_compat/lightning/steps.py:_heard": "an optimizer",
    "transforms/recompute/wrapping.py:_OPENED": "a block: equal blocks share their forward, and so cannot hold it",
    "transforms/te/forward.py:COMPUTED_WITHIN": "a module: equal modules share their class, and so cannot hold it",
    "transforms/te/forward.py:_COMPUTED": "a module, likewise",
}
# Contexts that are open in the present thread.
BY_THREAD = {
    "_compat/torch/fsdp/shard_data.py:_READS": "operators of a DTensor know no run",
    "kernels/attention/auto.py:_RECORDS": "calls of attention know no run",
    "transforms/compile/frame.py:_CALLERS": "a backend is called by Dynamo, which knows no run",
    "transforms/compile/frame.py:_HEARING": "a graph that blocks of several runs share",
    "transforms/compile/loss_calls.py:_OPEN": "calls of a function of torch know no run",
    "transforms/compile/frame.py:_PREPARING": "read where a frame is made, and part of what it is found by",
}
LISTED = CACHES | OF_THE_PROCESS | BY_OWNER | BY_THREAD

_CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
_STATEFUL = ("Counter(", "ContextVar(", "ExitStack(", "Lock(", "RLock(", "ThreadStack", "count(")
_STATEFUL += (
    "local(",
    "defaultdict(",
    "WeakKeyDictionary",
    "WeakSet",
    "WeakValueDictionary",
    "WeakTensorKeyDictionary",
)


def state_of(tree):
    """Return the names that ``tree``, a module, binds to what its functions change, or may change."""
    bound = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and getattr(node, "value", None) is not None:
                bound[target.id] = ast.unparse(node.value).removeprefix("threading.").removeprefix("weakref.")
    names = {name for name, value in bound.items() if value.startswith(_STATEFUL) or value in ("{}", "[]", "set()")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            names.update(node.names)
        changed = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            changed = node.func.value
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node.value
        if isinstance(changed, ast.Name) and changed.id in bound and not _is_local(changed.id, tree):
            names.add(changed.id)
    return names


def _is_local(name, tree):
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda))
    return any(
        argument.arg == name
        for function in functions
        for argument in ast.walk(function.args)
        if isinstance(argument, ast.arg)
    )


def found():
    paths = sorted(ROOT.rglob("*.py"))
    return {f"{path.relative_to(ROOT)}:{name}" for path in paths for name in state_of(ast.parse(path.read_text()))}


def test_state_of_a_run_is_in_no_module():
    assert found() - LISTED.keys() == set(), "hold it in order/run_state.py or in an object of the run's"


def test_what_is_listed_is_there():
    assert LISTED.keys() - found() == set()


def test_state_in_a_module_is_found():
    source = """
SEEN, STACK, FIXED = set(), [], {1: 2}
TABLE = {name: 1 for name in "ab"}
RUNS: dict = {}
_mark = 0

def f(key):
    global _mark
    TABLE[key] = FIXED[1]
    RUNS.setdefault(key, 1)
"""
    assert state_of(ast.parse(source)) == {"TABLE", "RUNS", "_mark"}
