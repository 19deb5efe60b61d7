"""What the source of Transformer Engine says of its signatures, read without importing it."""

import ast
from pathlib import Path

CLASSES = {
    "Linear": ("pytorch/module/linear.py", ("__init__", "forward")),
    "LayerNormLinear": ("pytorch/module/layernorm_linear.py", ("__init__", "forward")),
    "LayerNormMLP": ("pytorch/module/layernorm_mlp.py", ("__init__", "forward")),
    "RMSNorm": ("pytorch/module/rmsnorm.py", ("__init__",)),
    "LayerNorm": ("pytorch/module/layernorm.py", ("__init__",)),
    "autocast": ("pytorch/quantization.py", ("__init__",)),
}
RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling")
# Private, or of the class's inside: what lightning_ups/_compat/optional/te.py relies on, by file.
USED = {
    "pytorch/module/base.py": (
        "self.__dict__[name] = value",
        'if not hasattr(self, "_is_fsdp2"):',
        "def init_fp8_meta_tensors(self, recipe: Recipe) -> None:",
        'self.fp8_meta["num_gemms"]',
        "self.adjust_amax_history_length(recipe.amax_history_len, fwd=fwd)",
    ),
    "pytorch/quantization.py": (
        "def is_fp8_enabled(cls) -> bool:",
        "def reset(cls) -> None:",
        "if enabled and qstate.autocast_depth == 0 and not _graph and torch.is_grad_enabled():",
        "self.scale = torch.ones(num_quantizers, dtype=torch.float32, device=device)",
        "self.amax_history = torch.zeros(",
    ),
    "pytorch/distributed.py": (
        'kwargs.pop("use_reentrant", True)',
        'context_fn = kwargs.pop("context_fn", noop_context_fn)',
        "user_forward_ctx, user_recompute_ctx = context_fn()",
        "te_recompute_ctx\n        ), user_recompute_ctx, torch_gpu_amp_forward_ctx",
    ),
    "pytorch/ops/basic/swiglu.py": ("the first half of the input tensor, while PyTorch applies it to",),
    "pytorch/utils.py": ("if math.prod(tensor.shape[:-1]) % 8 != 0 or tensor.shape[-1] % 16 != 0:",),
}


def signatures(root):
    """Return the parameters of every method that the double imitates, in order, and the fields of recipes."""
    found, root = {}, Path(root)
    for name, (file, methods) in CLASSES.items():
        body = _class(ast.parse((root / file).read_text()), name)
        found[name] = {method: _parameters(_function(body, method)) for method in methods}
    recipes = ast.parse((root / "common/recipe/__init__.py").read_text())
    for name in RECIPES:
        fields = [node.target.id for node in _class(recipes, name).body if isinstance(node, ast.AnnAssign)]
        found[name] = {"fields": fields}
    mlp = (root / CLASSES["LayerNormMLP"][0]).read_text()
    found["LayerNormMLP"]["parameters"] = _registered(mlp)
    found["LayerNormLinear"]["parameters"] = _registered((root / CLASSES["LayerNormLinear"][0]).read_text())
    return found


def missing(root):
    """Return what `_compat/optional/te.py` relies on and the source does not say any more."""
    return [
        (file, text) for file, texts in USED.items() for text in texts if text not in (Path(root) / file).read_text()
    ]


def _class(tree, name):
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _function(body, name):
    return next(node for node in body.body if isinstance(node, ast.FunctionDef) and node.name == name)


def _parameters(function):
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args) if arg.arg != "self"]
    return [*names, *([f"**{args.kwarg.arg}"] if args.kwarg else [])]


def _registered(text):
    """Return the names that are registered literally."""
    calls = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call))
    names = (
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "register_parameter"
        and call.args
        and isinstance(call.args[0], ast.Constant)
    )
    return sorted(dict.fromkeys(names))
