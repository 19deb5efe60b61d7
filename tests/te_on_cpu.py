"""The release's own Python on the CPU, with its compiled part stood in for: `python -m tests.te_on_cpu SOURCE`.

SOURCE is the folder that holds `transformer_engine`, as its wheel and its torch extension's source archive have it. All
of the release's Python runs: constructors, autograd functions, autocast, scales and their update, checkpointing. Only
kernels are torch's: products, norms, the activation, and rounding to float8. Prints what came out as one line of JSON.
"""
# ruff: noqa: TID251  (this file is about private names)

import enum
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import re
import sys
import tempfile
import textwrap
import types
import warnings
from pathlib import Path
from unittest.mock import MagicMock

import torch

# What looks for CUDA or triton when it is imported comes before they seem to be there.
import torch._dynamo
import torch._inductor.standalone_compile
from transformers import LlamaForCausalLM  # noqa: F401

import lightning_ups.precision  # noqa: F401
import tests.precision.test_te as trained
import tests.transforms.te.test_convert as converted
from lightning_ups._compat.optional import te as compat
from lightning_ups.callbacks import ActivationCheckpoint
from lightning_ups.precision import BF16Precision, TEPrecision
from lightning_ups.transforms.te.convert import convert_to_te

SOURCE = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ["TRANSFORMER_ENGINE_SOURCE"])
SOURCE = SOURCE.parent if SOURCE.name == "transformer_engine" else SOURCE
FORWARD = ("INPUT", "WEIGHT", "OUTPUT")  # what each product of a forward rounds, in the order of its scales
STUBBED = {"onnxscript", "onnx", "triton", "importlib_metadata", "nvdlfw_inspect", "cudnn", "einops"}


class Stub(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=f"{self.__name__}.{name}"))
        return vars(self)[name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        known = name.partition(".")[0] in STUBBED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        pass


def text_of(file):
    return (SOURCE / "transformer_engine" / file).read_text()


def enum_of(name, names):
    return enum.IntEnum(name, {member: index for index, member in enumerate(names)})


def pretend():
    """Let the release be imported without a GPU, its libraries or triton."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    sys.path.insert(0, str(SOURCE))
    sys.meta_path.append(Finder())
    tex = sys.modules["transformer_engine_torch"] = Stub("transformer_engine_torch")
    tex.DType = enum_of("DType", re.findall(r"(k\w+) = int\(tex\.DType", text_of("pytorch/constants.py")))
    backends = text_of("pytorch/cpp_extensions/fused_attn.py").partition("class FusedAttnBackend")[2]
    names = re.findall(r"^    (\w+) = ", backends.partition("\nassert")[0], re.MULTILINE)
    tex.NVTE_Fused_Attn_Backend = enum_of("NVTE_Fused_Attn_Backend", [f"NVTE_{name}" for name in names])
    tex.FP8FwdTensors = enum_of("FP8FwdTensors", [f"GEMM{i}_{of}" for i in (1, 2, 3) for of in FORWARD])
    tex.FP8BwdTensors = enum_of("FP8BwdTensors", [f"GRAD_{of}{i}" for i in (1, 2, 3) for of in ("OUTPUT", "INPUT")])
    triton = importlib.import_module("triton")
    triton.jit = lambda function=None, **_: function or (lambda f: f)
    triton.__version__ = "3.6.0"
    torch.version.cuda = "13.0"
    for name, value in {
        "is_available": True,
        "get_device_capability": (9, 0),
        "current_device": 0,
        "is_current_stream_capturing": False,
        "synchronize": None,
    }.items():
        setattr(torch.cuda, name, lambda *_, value=value: value)
    properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="stub")
    torch.cuda.get_device_properties = lambda *_: properties
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    importlib.import_module("transformer_engine.pytorch")
    return tex


def edited(owner, name, before, after):
    """Put a method in place that is the release's but for one expression."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert before in source, (name, before)
    found = {}
    exec(compile(source.replace(before, after), f"<{name}>", "exec"), function.__globals__, found)
    setattr(owner, name, found[name])


def module(name):
    return importlib.import_module(f"transformer_engine.pytorch.{name}")


def quantized_class():
    class Quantized(module("quantized_tensor").QuantizedTensorStorage):
        """A rounded tensor in the type it had before."""

        def __init__(self, value):
            self.value, self._quantizer = value, None

        def update_usage(self, *_, **__):
            pass

        def dequantize(self, *, dtype=None):
            return self.value if dtype is None else self.value.to(dtype)

        def prepare_for_saving(self):
            tensors, self.value = [self.value], None
            return tensors, self

        def restore_from_saved(self, tensors):
            self.value = tensors[0]
            return tensors[1:]

        def view(self, *shape):
            return Quantized(self.value.view(*shape))

        def clear(self):
            self.value = torch.Tensor()

        def __getattr__(self, name):
            if name not in ("size", "numel", "dim", "shape", "dtype", "device"):
                raise AttributeError(name)
            return getattr(self.value, name)

    return Quantized


def stand_in(tex):
    """Put torch in the place of the kernels."""
    quantized, delayed = quantized_class(), module("tensor.float8_tensor").Float8Quantizer
    largest = {int(tex.DType.kFloat8E4M3): (448.0, torch.float8_e4m3fn)}

    def plain(tensor):
        return tensor.value if isinstance(tensor, quantized) else tensor

    def quantize(tensor, quantizer, *_):
        top, kind = largest.get(int(quantizer.dtype), (57344.0, torch.float8_e5m2))
        amax = tensor.detach().abs().amax().float()
        if isinstance(quantizer, delayed):
            quantizer.amax.copy_(amax.reshape(quantizer.amax.shape))
            scale = quantizer.scale.clone()
        else:
            scale = top / amax.clamp(min=1e-12)
        rounded = (tensor.float() * scale).clamp(-top, top).to(kind).float() / scale
        return quantized(rounded.to(tensor.dtype))

    def gemm(a, b, out_dtype=None, layout="TN", bias=None, out=None, grad=False, **options):
        a, b = plain(a), plain(b)
        x, y = a.reshape(-1, a.shape[-1]).float(), b.reshape(-1, b.shape[-1]).float()
        result = {"TN": lambda: y @ x.T, "NN": lambda: y @ x, "NT": lambda: y.T @ x}[layout]()
        shape = result.shape if layout == "NT" else (*b.shape[:-1], result.shape[-1])
        of_bias = y.sum(0).to(out_dtype or a.dtype) if bias is not None and grad else None
        if bias is not None and not grad:
            result = result + bias.float()
        result = result.to(out_dtype or a.dtype).reshape(shape)
        return (result if out is None else out.copy_(result)), of_bias, None, options.get("extra_output")

    def normalize(x, _, weight, bias, eps, quantizer, __, kind, ___, zero_centered):
        x32, gamma, mean = x.float(), weight.float() + bool(zero_centered), None
        if kind != "RMSNorm":
            mean = x32.mean(-1)
            x32 = x32 - mean[:, None]
        rsigma = torch.rsqrt(x32.pow(2).mean(-1) + eps)
        out = (x32 * rsigma[:, None] * gamma + (0 if bias is None else bias.float())).to(x.dtype)
        return (out if quantizer is None else quantize(out, quantizer)), mean, rsigma

    @torch.enable_grad()
    def rmsnorm_bwd(dz, x, rsigma, weight, _, zero_centered):
        x32, w32 = (t.detach().float().requires_grad_() for t in (x, weight))
        square = x32.pow(2).mean(-1, keepdim=True)
        eps = rsigma.float()[:, None] ** -2 - square.detach()
        out = x32 * torch.rsqrt(square + eps) * (w32 + bool(zero_centered))
        dx, dw = torch.autograd.grad(out, (x32, w32), dz.float())
        return dx.to(x.dtype), dw.to(weight.dtype)

    def swiglu(x, quantizer=None, *_):
        a, b = plain(x).float().chunk(2, -1)
        out = (torch.nn.functional.silu(a) * b).to(x.dtype)
        return out if quantizer is None else quantize(out, quantizer)

    @torch.enable_grad()
    def dswiglu(dy, x, quantizer=None, *_):
        x32 = plain(x).detach().float().requires_grad_()
        a, b = x32.chunk(2, -1)
        (out,) = torch.autograd.grad(torch.nn.functional.silu(a) * b, x32, plain(dy).float())
        return out.to(x.dtype) if quantizer is None else quantize(out.to(x.dtype), quantizer)

    def update(amax, histories, scales, compute, dtype, margin):
        top = largest.get(int(dtype), (57344.0,))[0]
        for part, history, scale in zip(amax.split([h.shape[1] for h in histories]), histories, scales, strict=True):
            history[0].copy_(part)
            most = history.max(0).values if compute == "max" else history[0]
            scale.copy_(torch.where(most > 0, top / most.clamp(min=1e-30) / 2**margin, scale))
            history.copy_(torch.roll(history, -1, 0))
            history[0].zero_()

    products = [module(f"module.{name}") for name in ("linear", "layernorm_linear", "layernorm_mlp")]
    for place in products:
        place.general_gemm = gemm
    for place in products[1:]:
        place.apply_normalization = normalize
    norm = module("ops.basic.rmsnorm")
    norm.rmsnorm_bwd = tex.rmsnorm_bwd = rmsnorm_bwd
    norm.rmsnorm_fwd = lambda x, w, eps, _, q, __, ___, zero: normalize(
        x, None, w, None, eps, q, None, "RMSNorm", 0, zero
    )
    tex.swiglu, tex.dswiglu, tex.quantize = swiglu, dswiglu, quantize
    tex.bgrad_quantize = lambda g, q: (g.reshape(-1, g.shape[-1]).sum(0), quantize(g, q))
    tex.fused_amax_and_scale_update_after_reduction = update


def without_a_device():
    """Take out what insists on CUDA."""
    quantization, distributed = module("quantization"), module("distributed")
    edited(module("module.base").TransformerEngineBaseModule, "prepare_forward", "not inp.is_cuda", "False")
    for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"):
        edited(getattr(quantization, f"{name}RecipeState"), "__init__", 'torch.device("cuda")', 'torch.device("cpu")')
    quantization._FP8_SUPPORT = quantization._FP8_BLOCK_SCALING_SUPPORT = (True, "")
    distributed._get_cuda_rng_state = distributed._set_cuda_rng_state = lambda *_, **__: None
    module("utils")._empty_tensor = torch.Tensor
    compat._required, compat.DEVICE = importlib.import_module, "cpu"


# What is looked at


def apart(found, wanted):
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def conversions():
    """Logits and gradients, as torch's."""
    found = {}
    for name in ("GPT", "Llama", "Qwen2"):
        for options in ({"fuse": "none"}, {"fuse": "all"}, {"fuse": "all", "sharded": True}):
            model = converted.MODELS[name]()
            logits, gradients = converted.logits_and_gradients(model)
            done = convert_to_te(model, **options)
            done.lay_together()
            again, others = converted.logits_and_gradients(model)
            worst = max(((others[k] - g).norm() / g.norm()).item() for k, g in gradients.items())
            found[f"{name} {options}"] = [((again - logits).norm() / logits.norm()).item(), worst]
            done.undo()
    return found


def training(folder):
    """Losses of each recipe, recomputed and not, and of runs that go on."""
    found = {"bf16": trained.fit(folder, BF16Precision()).losses}
    for recipe in (None, "delayed", "current", "block"):
        found[str(recipe)] = losses = trained.fit(folder, TEPrecision(recipe=recipe)).losses
        for save in ("nothing", "matmuls"):
            callbacks = [ActivationCheckpoint(save=save)]
            again = trained.fit(folder, TEPrecision(recipe=recipe), callbacks=callbacks).losses
            found[f"{recipe} recomputed, {save}"] = again == losses
    path, whole = trained.halfway(folder, TEPrecision(recipe="delayed"))
    found["goes on"] = trained.fit(folder, TEPrecision(recipe="delayed"), ckpt_path=path).losses == whole[4:]
    state = torch.load(path, weights_only=True)
    found["scales"] = len(state.pop("TEPrecision")["scales"])
    torch.save(state, path)
    found["goes on without"] = trained.fit(folder, TEPrecision(recipe="delayed"), ckpt_path=path).losses == whole[4:]
    found["buffers left"] = len(module("quantization").FP8GlobalStateManager.quantization_state.global_amax_buffer)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    stand_in(pretend())
    without_a_device()
    with tempfile.TemporaryDirectory() as directory:
        result = {"conversions": conversions(), "training": training(Path(directory))}
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")
