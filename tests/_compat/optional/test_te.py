import inspect
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lightning_ups._compat.optional import te
from lightning_ups.transforms.te import RECIPES
from tests import fake_te, te_source

KNOWN = json.loads((Path(__file__).parents[2] / "te_signatures.json").read_text())  # of release 2.20.2
DOUBLES = fake_te.NAMES["transformer_engine.pytorch"]


def source():
    """Return the folder of the release's Python source, where there is one, or None."""
    if given := os.environ.get("TRANSFORMER_ENGINE_SOURCE"):
        return Path(given)
    spec = find_spec("transformer_engine")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


needs_source = pytest.mark.skipif(source() is None, reason="no Transformer Engine, nor TRANSFORMER_ENGINE_SOURCE")


def parameters(function):
    kinds = {inspect.Parameter.VAR_KEYWORD: "**"}
    return [kinds.get(p.kind, "") + p.name for p in inspect.signature(function).parameters.values() if p.name != "self"]


@pytest.mark.parametrize("name", te_source.CLASSES)
def test_the_double_has_the_signatures_of_the_release(name):
    for method in ("__init__", "forward"):
        if (expected := KNOWN[name].get(method)) is None:
            continue
        assert parameters(getattr(DOUBLES[name], method)) == expected


@pytest.mark.parametrize("name", te_source.RECIPES)
def test_the_doubles_recipes_have_fields_of_the_release(name):
    fields = [*fake_te.NAMES["transformer_engine.common.recipe"][name].__dataclass_fields__]
    assert fields == [field for field in KNOWN[name]["fields"] if not field.startswith("fp8_gemm")]


@pytest.mark.parametrize("name", ["LayerNormLinear", "LayerNormMLP"])
def test_the_doubles_parameters_are_those_of_the_release(name):
    kind = DOUBLES[name]
    module = kind(32, 64, normalization="LayerNorm", device="meta", params_dtype=torch.float32)
    registered = {name for name, _ in module.named_parameters()}
    assert set(KNOWN[name]["parameters"]) <= registered
    assert registered - set(KNOWN[name]["parameters"]) <= {"weight", "bias"}  # whose names it computes


@needs_source
def test_what_is_known_of_the_release_is_what_its_source_says():
    assert te_source.signatures(source()) == KNOWN
    assert te_source.missing(source()) == []


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(te, "REQUIREMENT", "transformer-engine>=1000")  # here there may be one
    te._required.cache_clear()
    with pytest.raises(
        ModuleNotFoundError, match=r"TEPrecision needs transformer-engine.*pip install 'transformer-engine\[pytorch\]>="
    ):
        te.engine()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Put a Transformer Engine of our own where Python looks for one; it is written by calling this."""

    def write(text):
        folder = tmp_path / "transformer_engine"
        (folder / "pytorch").mkdir(parents=True)
        (folder / "__init__.py").write_text(text)
        (folder / "pytorch" / "__init__.py").write_text("")

    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(te, "has", lambda _: True)
    monkeypatch.setattr("lightning_ups._compat.optional.packages.RequirementCache", lambda _: True)
    _forget()
    yield write
    _forget()
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def _forget():
    te._required.cache_clear()
    te._check_cudnn.cache_clear()


def test_what_was_found_is_not_looked_up_at_each_forward(package, monkeypatch):
    package("")
    asked = []
    monkeypatch.setattr(
        "lightning_ups._compat.optional.packages.RequirementCache", lambda text: asked.append(text) or text
    )
    first, again = te.engine(), te.engine()
    assert first is again is sys.modules["transformer_engine.pytorch"]
    assert asked == [te.REQUIREMENT]


def test_libraries_that_cannot_be_loaded_say_how_to_install(package):
    package("raise FileNotFoundError('Could not find shared object file for Transformer Engine torch lib.')")
    with pytest.raises(ImportError, match=r"could not load its libraries: Could not.*lib\. .*--no-build-isolation"):
        te.engine()


def test_what_is_wrong_inside_of_it_is_told(package):
    package("import no_such_module")
    with pytest.raises(ImportError, match=r"could not load transformer_engine\.pytorch: No module named 'no_such"):
        te.engine()


def test_nobody_is_told_of_jax(package, recwarn):
    jax = "Detected a Jax installation but could not find the shared object file"
    package(f"import warnings; warnings.warn('{jax}', RuntimeWarning); warnings.warn('the clock', RuntimeWarning)")
    te.engine()
    assert [str(warning.message) for warning in recwarn] == ["the clock"]


def test_torchs_cudnn_is_loaded_first_and_found_while_it_is_imported(package, monkeypatch, tmp_path):
    package("import os; found = os.environ['CUDNN_HOME']")
    monkeypatch.setenv("CUDNN_HOME", "/another")
    monkeypatch.setattr("lightning_ups._compat.optional.cudnn._loaded", lambda: [tmp_path / "libcudnn.so.9"])
    te.engine()
    assert sys.modules["transformer_engine"].found == str(tmp_path)
    assert os.environ["CUDNN_HOME"] == "/another"


def test_another_cudnn_is_told_of_before_anything_computes_with_it(package, monkeypatch):
    package("")
    monkeypatch.setattr(te, "cudnn_conflict", lambda: "torch was compiled against cuDNN 9.19.0, and 9.14.0 is loaded")
    for _ in range(2):  # whoever goes on after the first time is told again
        with pytest.raises(ImportError, match=r"9\.14\.0 is loaded\. .*CUDNN_HOME.*LD_LIBRARY_PATH.*start a new"):
            te.engine()
    monkeypatch.setattr(te, "cudnn_conflict", lambda: None)
    assert te.engine() is sys.modules["transformer_engine.pytorch"]


def recipe(name, **options):
    return RECIPES[name].make(**({"amax_history": 16, "reduce_amax": True} | options))


def test_scales_come_and_go():
    with fake_te.installed() as engine:
        old, new = (engine.Linear(16, 16, params_dtype=torch.float32, device="cpu") for _ in range(2))
        torch.nn.init.normal_(old.weight)
        torch.nn.init.zeros_(old.bias)
        assert te.scales(old) == {}
        with te.autocast(recipe("delayed"), group=None):
            old(torch.randn(8, 16))
        kept = te.scales(old)
        assert kept.keys() == {
            f"scaling_{side}.{what}" for side in ("fwd", "bwd") for what in ("scale", "amax_history")
        }
        assert kept["scaling_fwd.scale"][0] != 1
        te.set_scales(new, kept, recipe=recipe("delayed"), num_products=1)
        assert all(torch.equal(te.scales(new)[name], value) for name, value in kept.items())
        shorter = engine.Linear(16, 16, params_dtype=torch.float32, device="cpu")
        te.set_scales(shorter, kept, recipe=recipe("delayed", amax_history=4), num_products=1)
        assert torch.equal(te.scales(shorter)["scaling_fwd.amax_history"], kept["scaling_fwd.amax_history"][:4])


def test_scales_begin_so_that_no_gradient_is_lost_and_what_there_is_stays():
    with fake_te.installed() as engine:
        module = engine.Linear(16, 16, params_dtype=torch.float32, device="cpu")
        torch.nn.init.normal_(module.weight, std=1e-3)
        torch.nn.init.zeros_(module.bias)
        te.begin_scales(module, recipe=recipe("delayed"), num_products=1)
        assert te.scales(module)["scaling_fwd.scale"].tolist() == [1.0, 64.0, 1.0]
        assert te.scales(module)["scaling_bwd.scale"].tolist() == [65536.0, 65536.0]
        value = torch.randn(8, 16)
        with te.autocast(recipe("delayed"), group=None):
            found = module(value)
        wanted = torch.nn.functional.linear(value, module.weight)
        assert (found - wanted).norm() < 0.05 * wanted.norm()  # with a scale of 1, half of the weights would be zero
        seen = te.scales(module)
        te.begin_scales(module, recipe=recipe("delayed"), num_products=1)
        assert all(torch.equal(seen[name], value) for name, value in te.scales(module).items())


def test_a_module_is_told_of_fsdp2_and_a_norm_need_not_be():
    with fake_te.installed() as engine:
        linear, norm = engine.Linear(16, 16, device="meta"), engine.RMSNorm((16,), device="meta")
        assert not linear.is_fsdp2
        te.mark_fsdp2(linear)
        te.mark_fsdp2(norm)
        assert linear.is_fsdp2
        assert "_is_fsdp2" not in vars(norm)


def test_a_recomputed_forward_reduces_no_maxima_again():
    """The context that Transformer Engine opens for it would, at its end."""
    with fake_te.installed() as engine:
        asked = recipe("delayed")
        linear = engine.Linear(16, 16, params_dtype=torch.float32, device="cpu")
        torch.nn.init.normal_(linear.weight)
        histories = []
        for run in (te.checkpoint_by(asked), engine.checkpoint):
            value = torch.randn(8, 16, requires_grad=True)
            with te.autocast(asked, group=None):
                out = run(linear, value, use_reentrant=False)
            histories.append(te.scales(linear)["scaling_fwd.amax_history"])
            out.sum().backward()
            histories.append(te.scales(linear)["scaling_fwd.amax_history"])
        ours, theirs = histories[:2], histories[2:]
        assert torch.equal(*ours)
        assert not torch.equal(*theirs)


def test_the_second_context_of_the_user_is_kept():
    entered = []

    class Context:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            entered.append(self.name)

        def __exit__(self, *_):
            pass

    with fake_te.installed() as engine:
        linear = engine.Linear(16, 16, params_dtype=torch.float32, device="cpu")
        value = torch.randn(8, 16, requires_grad=True)
        out = te.checkpoint_by(recipe("current"))(
            linear, value, use_reentrant=False, context_fn=lambda: (Context("first"), Context("second"))
        )
        assert entered == ["first"]
        out.sum().backward()
        assert entered == ["first", "second"]


def test_what_runs_out_of_sight_is_seen_by_no_mode():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(function.__name__)
            return function(*args, **(kwargs or {}))

    one = torch.ones(2)
    with Seen() as seen:
        one.neg()
        with te.out_of_sight():
            one.abs()
        one.exp()
    assert seen.names == ["neg.default", "exp.default"]
    with te.out_of_sight():
        assert torch.equal(one.abs(), one)


def test_modules_of_the_package_are_found_by_their_module():
    class Theirs(torch.nn.Linear):
        __module__ = "transformer_engine.pytorch.module.linear"

    assert te.holds_engine_modules(torch.nn.Sequential(Theirs(2, 2), torch.nn.Linear(2, 2))) == ["0"]


@pytest.fixture(scope="module")
def release():
    """Return what the release's own Python does on the CPU, its kernels stood in for."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.te_on_cpu", str(source())]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


needs_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, benchmarks/te.py shows it")


@needs_source
@needs_a_cpu
@pytest.mark.slow
class TestTheReleasesOwnPython:
    def test_logits_and_gradients_are_torchs(self, release):
        assert len(release["conversions"]) == 9
        for name, (logits, gradient) in release["conversions"].items():
            assert logits < 1e-5, name
            assert gradient < 1e-4, name

    def test_each_recipe_trains_near_bfloat16(self, release):
        found = release["training"]
        assert found["None"] == pytest.approx(found["bf16"], rel=1e-2)
        for recipe in ("delayed", "current", "block"):
            assert found[recipe] == pytest.approx(found["bf16"], rel=5e-2)

    @pytest.mark.parametrize("save", ["nothing", "matmuls"])
    @pytest.mark.parametrize("recipe", [None, "delayed", "current", "block"])
    def test_recomputed_blocks_train_bit_for_bit_as_without(self, release, recipe, save):
        assert release["training"][f"{recipe} recomputed, {save}"]

    def test_delayed_scaling_goes_on_with_its_scales(self, release):
        found = release["training"]
        assert (found["scales"], found["goes on"], found["goes on without"]) == (6, True, False)
        assert found["buffers left"] == 0
