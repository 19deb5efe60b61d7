"""A double of Transformer Engine 2.20.2 that runs on the CPU: the same names, signatures, layouts and state.

It computes what the real modules compute, in plain torch; inside `autocast` it rounds what enters a product to float8
by the recipe's scale, forward only. `install` puts it where `transformer_engine` would be; `test_te.py`
compares its signatures with those of the release, and with the installed package where there is one.
"""

import contextlib
import types
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.parameter import Parameter


class Format(Enum):
    E4M3 = 448.0
    HYBRID = 448.5  # forward e4m3, backward e5m2; another value, so that it is no alias


class Recipe:
    def delayed(self):
        return isinstance(self, DelayedScaling)


@dataclass
class DelayedScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: object = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclass
class Float8CurrentScaling(Recipe):
    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclass
class Float8BlockScaling(Recipe):
    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self):
        assert not self.fp8_dpa, "FP8 attention is not supported for Float8BlockScaling."


@dataclass
class MXFP8BlockScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False


class FP8GlobalState:
    def __init__(self):
        self.fp8_enabled, self.fp8_recipe, self.fp8_distributed_group = False, None, None
        self.autocast_depth = 0
        self.metas = []  # of modules with delayed scaling, whose maxima are reduced
        self.reductions = []  # the groups
        self.recomputing = None  # None, or whether it is the second forward
        self.entered = []


class FP8GlobalStateManager:
    quantization_state = FP8GlobalState()

    @classmethod
    def is_fp8_enabled(cls):
        return cls.quantization_state.fp8_enabled

    @classmethod
    def reset(cls):
        cls.quantization_state = FP8GlobalState()


def _state():
    return FP8GlobalStateManager.quantization_state


class autocast:  # noqa: N801
    def __init__(self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False):
        self._args = enabled, recipe, amax_reduction_group
        self._before = None

    def __enter__(self):
        state = _state()
        assert self._before is None
        self._before = state.fp8_enabled, state.fp8_recipe, state.fp8_distributed_group
        state.fp8_enabled, state.fp8_recipe, state.fp8_distributed_group = self._args
        state.autocast_depth += 1
        state.entered.append(self._args)
        return self

    def __exit__(self, *_):
        state = _state()
        state.fp8_enabled, state.fp8_recipe, state.fp8_distributed_group = self._before
        self._before = None
        state.autocast_depth -= 1
        if self._args[0] and state.autocast_depth == 0 and torch.is_grad_enabled():
            _reduce_and_update(state)


def _reduce_and_update(state):
    for meta in state.metas:
        recipe, forward = meta["recipe"], meta["scaling_fwd"]
        if recipe.reduce_amax and dist.is_initialized():
            state.reductions.append(meta["fp8_group"])
            dist.all_reduce(forward.amax_history[0], op=dist.ReduceOp.MAX, group=meta["fp8_group"])
        history = forward.amax_history
        amax = history.max(0).values if recipe.amax_compute_algo == "max" else history[0]
        scale = 448.0 / amax / 2**recipe.margin
        forward.scale.copy_(torch.where(amax > 0, scale, forward.scale))
        history.copy_(history.roll(-1, 0))
        history[0].zero_()


class _Scaling:
    def __init__(self, recipe, count):
        self.scale = torch.ones(count)
        self.amax_history = torch.zeros(recipe.amax_history_len, count)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, scale):
        scaled = (value.float() * scale).clamp(-448.0, 448.0)
        return (scaled.to(torch.float8_e4m3fn).float() / scale).to(value.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class TransformerEngineBaseModule(nn.Module):
    def __init__(self, name=None):
        super().__init__()
        self.name, self.fp8, self.fp8_initialized, self.fp8_meta_tensors_initialized = name, False, False, False
        self.fp8_meta = {"fp8_checkpoint": False, "fp8_group": None}
        self.activation_dtype = None
        self.param_init_meta = {}
        self.ran = []  # for tests: whether each call was in float8
        self._stash = []

    def fast_setattr(self, name, value):
        self.__dict__[name] = value

    @property
    def is_fsdp2(self):
        return self.__dict__.get("_is_fsdp2", False)

    def register_parameter(self, name, param, **kwargs):
        super().register_parameter(name, param)

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass

    def init_fp8_meta_tensors(self, recipe):
        count = self.fp8_meta["num_gemms"]
        if recipe.delayed() and not self.fp8_meta_tensors_initialized:
            self.fp8_meta |= {"scaling_fwd": _Scaling(recipe, count * 3), "scaling_bwd": _Scaling(recipe, count * 2)}
            self.fp8_meta_tensors_initialized = True

    def prepare_forward(self, inp, num_gemms=1):
        state = _state()
        self.fp8 = state.fp8_enabled
        self.ran.append(self.fp8)
        if torch.is_autocast_enabled("cpu"):
            self.activation_dtype = torch.get_autocast_dtype("cpu")
        else:
            self.activation_dtype = inp.dtype
            for name, param in self.named_parameters():
                if param.dtype != inp.dtype:
                    raise TypeError(f"Found input dtype: {inp.dtype} and {name!r} dtype: {param.dtype}")
        if self.fp8:
            self.fp8_meta |= {"num_gemms": num_gemms, "recipe": state.fp8_recipe}
            if state.recomputing is not True:
                self.fp8_meta["fp8_group"] = state.fp8_distributed_group
            self.init_fp8_meta_tensors(state.fp8_recipe)
            self._prepare_delayed(state)
        return inp.to(self.activation_dtype).contiguous()

    def _prepare_delayed(self, state):
        if "scaling_fwd" not in self.fp8_meta:
            return
        forward = self.fp8_meta["scaling_fwd"]
        if state.recomputing is True:
            self._now, kept = forward.scale.clone(), self._stash.pop(0)
            forward.scale.copy_(kept)
            return
        if not any(self.fp8_meta is meta for meta in state.metas):
            state.metas.append(self.fp8_meta)
        if state.recomputing is False:
            self._stash.append(forward.scale.clone())

    def end_forward(self):
        if self.fp8 and "scaling_fwd" in self.fp8_meta and _state().recomputing is True:
            self.fp8_meta["scaling_fwd"].scale.copy_(self._now)

    def _quantized(self, value, slot):
        if not self.fp8:
            return value.to(self.activation_dtype)
        for size, multiple in ((value.numel() // value.shape[-1], 8), (value.shape[-1], 16)):
            assert size % multiple == 0, f"FP8 execution requires multiples, but got {[*value.shape]}"
        amax = value.detach().abs().amax().float()
        if "scaling_fwd" in self.fp8_meta:
            forward = self.fp8_meta["scaling_fwd"]
            if _state().recomputing is not True:
                forward.amax_history[0, slot] = amax
            scale = forward.scale[slot].clone()
        else:
            scale = 448.0 / amax.clamp(min=1e-12)
        return _Round.apply(value, scale).to(self.activation_dtype)

    def _product(self, value, weight, bias, gemm):
        bias = None if bias is None else bias.to(self.activation_dtype)
        return F.linear(self._quantized(value, 3 * gemm), self._quantized(weight, 3 * gemm + 1), bias)


def _empty(*shape, device, dtype):
    return Parameter(torch.empty(*shape, device=device, dtype=dtype or torch.get_default_dtype()))


class Linear(TransformerEngineBaseModule):
    def __init__(
        self, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None,
        tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False,
        params_dtype=None, parallel_mode=None, parameters_split=None, device="cuda", ub_overlap_ag=False,
        ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, ub_name=None,
        delay_wgrad_compute=False, symmetric_ar_type=None, save_original_input=False, name=None,
    ):  # fmt: skip
        super().__init__(name)
        self.use_bias = bias
        self.register_parameter("weight", _empty(out_features, in_features, device=device, dtype=params_dtype))
        if bias:
            self.register_parameter("bias", _empty(out_features, device=device, dtype=params_dtype))
        else:
            self.bias = torch.Tensor().to(dtype=params_dtype, device=device)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        inp = self.prepare_forward(inp)
        try:
            return self._product(inp, self.weight, self.bias if self.use_bias else None, 0)
        finally:
            self.end_forward()


def _normalized(inp, weight, bias, *, eps, kind, zero_centered):
    x, gamma = inp.float(), weight.float() + (1.0 if zero_centered else 0.0)
    if kind == "RMSNorm":
        normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    else:
        x = x - x.mean(-1, keepdim=True)
        normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    out = normal * gamma
    return (out if bias is None else out + bias.float()).to(inp.dtype)


class LayerNormLinear(TransformerEngineBaseModule):
    def __init__(
        self, in_features, out_features, eps=1e-5, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True, normalization="LayerNorm",
        return_bias=False, params_dtype=None, parallel_mode=None, return_layernorm_output=False,
        return_layernorm_output_gathered=False, parameters_split=None, zero_centered_gamma=False, device="cuda",
        ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_wgrad=False, ub_bulk_dgrad=False,
        ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None, name=None,
    ):  # fmt: skip
        super().__init__(name)
        assert normalization in ("LayerNorm", "RMSNorm")
        self.eps, self.normalization, self.zero_centered_gamma, self.use_bias = (
            eps, normalization, zero_centered_gamma, bias,
        )  # fmt: skip
        self.register_parameter("layer_norm_weight", _empty(in_features, device=device, dtype=params_dtype))
        if normalization != "RMSNorm":
            self.register_parameter("layer_norm_bias", _empty(in_features, device=device, dtype=params_dtype))
        else:
            self.layer_norm_bias = None
        self.register_parameter("weight", _empty(out_features, in_features, device=device, dtype=params_dtype))
        if bias:
            self.register_parameter("bias", _empty(out_features, device=device, dtype=params_dtype))
        else:
            self.bias = torch.Tensor().to(dtype=params_dtype, device=device)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        inp = self.prepare_forward(inp)
        try:
            normal = _normalized(
                inp, self.layer_norm_weight, self.layer_norm_bias, eps=self.eps, kind=self.normalization,
                zero_centered=self.zero_centered_gamma,
            )  # fmt: skip
            return self._product(normal, self.weight, self.bias if self.use_bias else None, 0)
        finally:
            self.end_forward()


_ACTIVATIONS = {"gelu": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "silu": F.silu}
_GATED = {"swiglu": F.silu, "geglu": lambda x: F.gelu(x, approximate="tanh"), "reglu": F.relu, "glu": torch.sigmoid}


class LayerNormMLP(TransformerEngineBaseModule):
    def __init__(
        self, hidden_size, ffn_hidden_size, eps=1e-5, sequence_parallel=False, return_bias=False,
        get_rng_state_tracker=None, tp_group=None, tp_size=1, init_method=None, bias=True, normalization="LayerNorm",
        activation="gelu", activation_params=None, output_layer_init_method=None, fuse_wgrad_accumulation=False,
        params_dtype=None, return_layernorm_output=False, return_layernorm_output_gathered=False, seq_length=None,
        micro_batch_size=None, set_parallel_mode=False, zero_centered_gamma=False, device="cuda", ub_overlap_ag=False,
        name=None, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False,
        delay_wgrad_compute=False, symmetric_ar_type=None, checkpoint=False,
    ):  # fmt: skip
        super().__init__(name)
        assert normalization in ("LayerNorm", "RMSNorm")
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.use_bias, self.activation = bias, activation
        rows = ffn_hidden_size * (2 if activation in _GATED else 1)
        new = {
            "layer_norm_weight": (hidden_size,), "layer_norm_bias": (hidden_size,),
            "fc1_weight": (rows, hidden_size), "fc1_bias": (rows,),
            "fc2_weight": (hidden_size, ffn_hidden_size), "fc2_bias": (hidden_size,),
        }  # fmt: skip
        for key, shape in new.items():
            if key == "layer_norm_bias" and normalization == "RMSNorm":
                self.layer_norm_bias = None
            elif key.startswith("fc") and key.endswith("bias") and not bias:
                setattr(self, key, torch.Tensor().to(dtype=params_dtype, device=device))
            else:
                self.register_parameter(key, _empty(*shape, device=device, dtype=params_dtype))

    def forward(self, inp, is_first_microbatch=None):
        inp = self.prepare_forward(inp, num_gemms=2)
        try:
            normal = _normalized(
                inp, self.layer_norm_weight, self.layer_norm_bias, eps=self.eps, kind=self.normalization,
                zero_centered=self.zero_centered_gamma,
            )  # fmt: skip
            hidden = self._product(normal, self.fc1_weight, self.fc1_bias if self.use_bias else None, 0)
            if self.activation in _GATED:  # the first half is activated
                a, b = hidden.chunk(2, dim=-1)
                hidden = _GATED[self.activation](a) * b
            else:
                hidden = _ACTIVATIONS[self.activation](hidden)
            return self._product(hidden, self.fc2_weight, self.fc2_bias if self.use_bias else None, 1)
        finally:
            self.end_forward()


class _NormOp(nn.Module):
    kind = ""

    def __init__(
        self, normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None, zero_centered_gamma=False,
        hidden_size=None, **kwargs,
    ):  # fmt: skip
        super().__init__()
        unknown = kwargs.keys() - {"device", "dtype", "sm_margin"}
        assert not unknown, unknown
        self.eps, self.zero_centered_gamma, self.ran = eps, zero_centered_gamma, []
        options = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        self.weight = _empty(*normalized_shape, **options)
        if self.kind == "LayerNorm":
            self.bias = _empty(*normalized_shape, **options)

    def forward(self, input):
        self.ran.append(_state().fp8_enabled)
        on = torch.is_autocast_enabled("cpu")
        x = input.to(torch.get_autocast_dtype("cpu") if on else self.weight.dtype)
        out = _normalized(
            x, self.weight, getattr(self, "bias", None), eps=self.eps, kind=self.kind,
            zero_centered=self.zero_centered_gamma,
        )  # fmt: skip
        if out.grad_fn is not None:
            # As the real one, whose backward reads the attribute: it must be there, and whole. Of the node, and not of
            # the tensor: where that is what a block returns, its hooks are FSDP2's, which gather, and come before.
            shape = x.shape[-self.weight.dim() :]
            out.grad_fn.register_prehook(lambda _: self._is_whole(shape))
        return out

    def _is_whole(self, shape):
        assert self.weight.size() == shape
        assert not isinstance(self.weight, DTensor)
        assert self.weight.untyped_storage().nbytes() > 0

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)


class RMSNorm(_NormOp):
    kind = "RMSNorm"


class LayerNorm(_NormOp):
    kind = "LayerNorm"


@contextlib.contextmanager
def _recomputing(second):
    state = _state()
    before, state.recomputing = state.recomputing, second
    try:
        yield
    finally:
        state.recomputing = before


def checkpoint(function, *args, **kwargs):
    """As the real one without reentrance: indices are saved in the first forward, tensors taken from a second."""
    assert kwargs.pop("use_reentrant", True) is False
    kwargs.pop("determinism_check", None), kwargs.pop("debug", None)
    context_fn = kwargs.pop("context_fn", lambda: (contextlib.nullcontext(), contextlib.nullcontext()))
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    user_forward, user_recompute = context_fn()
    state = _state()
    enabled, recipe = state.fp8_enabled, state.fp8_recipe
    kept, count, rng = [], [0], torch.get_rng_state()
    dtype, casts = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")

    def pack(tensor):
        count[0] += 1
        return count[0] - 1

    def unpack(index):
        if not kept:
            now = torch.get_rng_state()
            torch.set_rng_state(rng)
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda t: kept.append(t.detach()) or t.detach(), lambda t: t
            )
            torch_autocast = torch.autocast("cpu", dtype=dtype, enabled=casts, cache_enabled=False)
            its_own = autocast(enabled, recipe=recipe)
            with hooks, torch.enable_grad(), _recomputing(True), user_recompute, torch_autocast, its_own:
                function(*args, **kwargs)
            torch.set_rng_state(now)
        value, kept[index] = kept[index], None
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), _recomputing(False), user_forward:
        return function(*args, **kwargs)


def _available(return_reason=False):
    return (True, "") if return_reason else True


def _needs_blackwell(return_reason=False):
    reason = "Device compute capability 10.0 or higher required for MXFP8 execution."
    return (False, reason) if return_reason else False


NAMES = {
    "transformer_engine.pytorch": {
        "Linear": Linear, "LayerNormLinear": LayerNormLinear, "LayerNormMLP": LayerNormMLP, "RMSNorm": RMSNorm,
        "LayerNorm": LayerNorm, "autocast": autocast,
        "checkpoint": checkpoint, "is_fp8_available": _available, "is_fp8_block_scaling_available": _available,
        "is_mxfp8_available": _needs_blackwell,
    },
    "transformer_engine.pytorch.quantization": {"FP8GlobalStateManager": FP8GlobalStateManager},
    "transformer_engine.common.recipe": {
        "Format": Format, "DelayedScaling": DelayedScaling, "Float8CurrentScaling": Float8CurrentScaling,
        "Float8BlockScaling": Float8BlockScaling, "MXFP8BlockScaling": MXFP8BlockScaling,
    },
}  # fmt: skip


@contextlib.contextmanager
def installed(*, everywhere=True):
    """Put the double where Transformer Engine would be; ``everywhere``: on the CPU instead of on GPUs."""
    from lightning_ups._compat.optional import te

    def required(name):
        module = types.ModuleType(name)
        vars(module).update(NAMES[name])
        return module

    modules = {name: required(name) for name in NAMES}
    before = te._required, te.DEVICE
    te._required = lambda name: modules[name]
    te.DEVICE = "cpu" if everywhere else "cuda"
    FP8GlobalStateManager.reset()
    try:
        yield modules["transformer_engine.pytorch"]
    finally:
        te._required, te.DEVICE = before
        FP8GlobalStateManager.reset()
