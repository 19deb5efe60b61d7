"""Modules, settings and precisions drawn from a seed, trained beside float32 and looked at from every side.

What is drawn is a plain dictionary, so that a failing one can be printed, and made smaller part by part.
"""

import logging
import random
import warnings
from contextlib import ExitStack

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from lightning_ups._compat.torch.log_levels import only_from
from lightning_ups.precision import BF16Precision, BF16WeightsPrecision, Float8Precision, TEPrecision
from tests import fake_te, foreign
from tests.strategies import any_module
from tests.strategies.any_module import PLACES, ROWS, WIDTH, Drawn, Unfreeze, batches

# Parts: those of `any_module`, and some that float8 takes.


class WideBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Wide(nn.Module):
    """Blocks that float8 takes, between ends that it does not."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.layers = nn.ModuleList(WideBlock() for _ in range(2))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WideEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.embed, self.head = nn.Linear(WIDTH // 2, 16), nn.Linear(16, WIDTH // 2)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x.view(-1, 2, WIDTH // 2)))).flatten(1)


class WideTied(Wide):
    """Blocks that share a weight, and a method that reads it outside its layer's forward."""

    def __init__(self):
        super().__init__()
        self.layers[1].up.weight = self.layers[0].up.weight

    def forward(self, x):
        return super().forward(x) + 0.1 * nn.functional.linear(self.embed(x), self.layers[0].up.weight)[:, :WIDTH]


class OddBuffers(nn.Module):
    """Complex and integer buffers, and a float one that is only read."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("phase", torch.randn(WIDTH, dtype=torch.complex64))
        self.register_buffer("order", torch.randperm(WIDTH))
        self.register_buffer("scale", torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x):
        x = self.linear(x)[:, self.order]
        turned = (torch.fft.fft(x.float()) * self.phase).real
        return x + 0.1 * (turned * self.scale).to(x.dtype)


WIDE = {"wide": Wide, "wide encoder": WideEncoder, "wide tied": WideTied}
_NOT_RESUMED = ("dropped", "experts")  # a checkpoint does not say where they are
PARTS = {k: v for k, v in any_module.PARTS.items() if k not in _NOT_RESUMED} | WIDE | {"odd buffers": OddBuffers}
NETS = {"llama": foreign.llama, "llama tied": foreign.llama_tied, "bert": foreign.bert, "clip": foreign.clip}
OPTIMIZERS = any_module.OPTIMIZERS


class Any(Drawn):
    """What was drawn, with a network of transformers' in place of parts if ``net`` says so."""

    kinds = PARTS

    def __init__(self, drawn):
        LightningModule.__init__(self)
        self.drawn, self.losses, self.validated, self.calls, self.fail_at = drawn, [], [], 0, None
        self.settings, self._traits, self.sample = drawn["settings"], [], None
        self.automatic_optimization = not self.settings["manual"]
        self.seen = []
        if self.settings["late"]:
            self.built = False
        else:
            self.build()

    def configure_model(self):
        if self.settings["late"] and not self.built:
            self.build()

    def build(self):
        self.built = True
        torch.manual_seed(0)
        self._compose()

    def _add_parts(self):
        if (net := self.drawn["net"]) is None:
            super()._add_parts()
            return
        self.net, self.sample = NETS[net]()[0].net, NETS[net]()[1]
        for module in self.net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.net.train()

    def _part(self, i):
        return self.net if self.drawn["net"] is not None else super()._part(i)

    def _build_uncertain(self, *_):
        self.log_variances = nn.Parameter(torch.zeros(2))

    def run(self, x, step):
        if self.drawn["net"] is None:
            return super().run(x, step)
        return self.head(x)

    def loss(self, x, step):
        loss = super().loss(x, step)
        if self.drawn["net"] is not None:
            loss = loss + self._loss_of_net(x)
        if any(name == "uncertain" for name, *_ in self._traits):
            second = self.head(x.float()).square().mean()
            weights = torch.exp(-self.log_variances)
            loss = weights[0] * loss + weights[1] * second + self.log_variances.sum()
        return loss

    def _loss_of_net(self, x):
        ids = (x.float() * 7).long() % 30
        if "pixel_values" not in self.sample:
            return self.net(input_ids=ids, labels=ids).loss
        pixels = x.repeat(1, 24).view(-1, 3, 8, 8)
        return self.net(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels).loss

    def training_step(self, batch, index):
        self.seen.append({p.dtype for p in self.parameters()})
        if self.calls == self.fail_at:
            raise InterruptedError("stop here")
        return super().training_step(batch, index)

    def predict_step(self, batch, index):
        return self.loss(batch, 0)

    def on_train_batch_end(self, *_):
        if self.drawn["net"] is None or any(name == "average" for name, *_ in self._traits):
            super().on_train_batch_end(*_)

    def configure_optimizers(self):
        if self.settings["optimizer"] != "torchao":
            return super().configure_optimizers()
        from torchao.optim import AdamW8bit

        return AdamW8bit(
            [p for p in self.parameters() if p.requires_grad], lr=0.01, eps=1e-3, bf16_stochastic_round=True
        )


# Drawing

CHECKS = ("resume", "validate", "to plain", "from plain", "twice", "around", "fail")


def draw(seed):
    """Return what is drawn from ``seed``."""
    rng = random.Random(f"precision {seed}")
    base = any_module.draw(rng.randrange(10**6))
    kind = rng.choice(("bf16",) * 5 + ("float8",) * 3 + ("te",) * 2 + ("bf16 weights",))
    options = {"weights": rng.choice(("masters", "masters", "autocast"))}
    if kind == "float8":
        recipes = ("tensorwise", "tensorwise", "rowwise", "rowwise_with_gw_hp")
        options |= {"recipe": rng.choice(recipes), "head": rng.choice((False, True)), "emulate": True}
    if kind == "te":
        options |= {"recipe": rng.choice(("delayed", "current", None)), "head": rng.choice((False, False, True))}
    if kind == "bf16 weights":
        options = {}
    net = rng.choice((None,) * 3 + tuple(NETS))
    places = [*PLACES]
    parts = [[rng.choice([*PARTS]), rng.choice(places)] for _ in range(rng.randint(1, 3))]
    if kind in ("float8", "te"):
        parts[0] = [rng.choice([*WIDE]), rng.choice(("plain", "list", "nested", "twice", "by method", "recomputed"))]
    traits = base["traits"]
    if rng.random() < 0.25:
        traits = [*traits, ["uncertain", 0, 0]]
    if net is not None:
        parts, traits = (
            [["bare", "plain"]],
            [t for t in traits if t[0] in ("half_frozen", "root", "lonely", "marked", "uncertain", "penalty")],
        )
    settings = {k: v for k, v in base["settings"].items() if k not in ("resume", "async", "precision", "validate")}
    settings["late"] = rng.random() < 0.15
    settings["late"] = settings["late"] and not settings["unfreeze"]  # what Lightning freezes is there by then
    settings["averaging"] = rng.random() < 0.08
    if settings["unfreeze"] and net is not None:
        settings["unfreeze"] = False
    if kind == "bf16 weights":
        settings |= {"optimizer": "torchao", "manual": None, "optimizers": 1, "manual clip": None, "groups": False}
        settings |= {"unfreeze": False, "averaging": False}
    by_chance = kind == "bf16 weights"  # and every look at the generator is another step
    checks = rng.sample(("to plain", "from plain", "twice") if by_chance else CHECKS, 3)
    ranks = rng.choice((1, 1, 2))
    if kind == "te":
        settings, ranks = {**settings, "uneven": False}, 1  # its products need rows that are multiples of 8
    return {
        "net": net, "parts": parts, "traits": traits, "settings": settings, "precision": [kind, options],
        "ranks": ranks, "checks": checks,
    }  # fmt: skip


PLAIN = {k: v for k, v in any_module.PLAIN.items() if k not in ("resume", "async", "precision", "validate")} | {
    "late": False,
    "averaging": False,
}


def plainly(*parts, net=None, traits=(), precision=("bf16", {}), ranks=1, checks=CHECKS, **settings):
    """Return what might have been drawn: these parts, and settings as nobody chose them, but for these."""
    settings = {name.replace("_", " "): value for name, value in settings.items()}
    assert settings.keys() <= PLAIN.keys()
    return {
        "net": net, "parts": [[*part] for part in parts], "traits": [[*trait] for trait in traits],
        "settings": {**PLAIN, **settings}, "precision": [*precision], "ranks": ranks, "checks": [*checks],
    }  # fmt: skip


KINDS = {"bf16": BF16Precision, "float8": Float8Precision, "te": TEPrecision, "bf16 weights": BF16WeightsPrecision}


# Training


def trainer(drawn, path, precision, *, name="run", epochs=2, **more):
    settings = drawn["settings"]
    callbacks = [Unfreeze()] if settings["unfreeze"] else []
    callbacks.append(ModelCheckpoint(path / name, filename="{epoch}", save_top_k=-1))
    if settings["averaging"]:
        callbacks.append(WeightAveraging())
    return Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
        strategy="auto" if drawn["ranks"] == 1 else "ddp_find_unused_parameters_true",
        devices=drawn["ranks"],
        callbacks=callbacks,
        accumulate_grad_batches=settings["accumulate"],
        gradient_clip_val=settings["clip"],
        gradient_clip_algorithm=settings["clip by"] if settings["clip"] else None,
        use_distributed_sampler=False,
        num_sanity_val_steps=1,
        **({"precision": precision} if isinstance(precision, str) else {"plugins": [precision]}),
        **more,
    )


class Looked:
    """A module after a fit, and what was seen of it."""

    def __init__(self, model, run, before):
        self.model, self.run, self.before = model, run, before
        self.losses = torch.stack(model.losses).tolist() if model.losses else []
        self.weights = {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}
        self.buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
        self.state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in model.state_dict().items()}


def fit(drawn, path, precision, *, name="run", ckpt=None, model=None, validate=False, epochs=2, before=None, **more):
    """Train what was drawn and look at it."""
    seed_everything(3, verbose=False)
    model = Any(drawn) if model is None else model
    torch.manual_seed(100)
    found = hooks_of(model)
    run = trainer(drawn, path, precision, name=name, epochs=epochs, **more)
    loader = batches(drawn["settings"], alone=drawn["ranks"] == 1)
    if before is not None:
        before(run, model, DataLoader([*loader], batch_size=None))
        model.validated.clear()
        torch.manual_seed(100)
    run.fit(model, loader, loader if validate else None, ckpt_path=ckpt, weights_only=False)
    return Looked(model, run, found)


def hooks_of(model):
    """Return how many hooks hang on each module, and whether its forward is its own, as DDP leaves the outermost."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")
    return {
        name: (type(m).__qualname__, bool(name) and "forward" in vars(m), *(len(getattr(m, table)) for table in tables))
        for name, m in model.named_modules()
    }


def made(drawn):
    kind, options = drawn["precision"]
    return KINDS[kind](**options)


def fresh(drawn):
    """Return what was drawn, built and not trained."""
    model = Any(drawn)
    model.configure_model()
    return model


def twin_of(drawn, model):
    """Return another module with the weights of ``model``, in their types, and what is frozen of them."""
    twin = fresh(drawn)
    twin.load_state_dict({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in model.state_dict().items()})
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        p.requires_grad_(q.requires_grad)
        if p.dtype != q.dtype:
            p.data = q.data.clone()
    return twin


# Comparing


def compare(drawn, path):
    """Train what was drawn in float32 and in the drawn precision; return what is wrong, or an empty string."""
    warnings.simplefilter("ignore")
    with only_from(logging.ERROR, "lightning.pytorch"), ExitStack() as stack:
        if drawn["precision"][0] == "te":
            stack.enter_context(fake_te.installed())
        if drawn["precision"][0] == "bf16 weights":
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # torchao compiles its steps, for long
        try:
            return _compare(drawn, path)
        except (RuntimeError, ValueError, TypeError) as error:
            return _refusal(drawn, path, error)


def _refusal(drawn, path, error):
    """Return a refusal in words, if its cure works; raise ``error`` if it is none."""
    told = " ".join([str(error), *getattr(error, "__notes__", [])])
    if not any(words in told for words in REFUSED):
        try:
            fit(drawn, path, "bf16-mixed", name="stock")
        except Exception as stock:  # noqa: BLE001
            return f"not by Lightning's bf16-mixed: {stock}"
        raise error
    if (cured := _cured(drawn, told)) is None:
        return f"refused: {told[:300]}"
    found = compare(cured, path / "cured")
    if found.startswith("refused, and cured"):  # of what is wrong in two ways, each has its cure
        return found
    return f"refused, {found or 'and cured'}: {told[:300]}"


def _cured(drawn, told):
    """Return what is drawn, with that in it which the refusal says to do."""
    kind, options = drawn["precision"]
    if "weights='autocast'" in told and options.get("weights") == "masters":
        return {**drawn, "precision": [kind, {**options, "weights": "autocast"}]}
    if "Use recipe='current'" in told and options.get("recipe") == "delayed":
        return {**drawn, "precision": [kind, {**options, "recipe": "current"}]}
    if "or use BF16Precision" in told and kind == "bf16 weights":
        settings = {**drawn["settings"], "optimizer": "adamw"}  # torchao's rounds into low precision, which is refused
        return {**drawn, "settings": settings, "precision": ["bf16", {"weights": "masters"}]}
    if "The model calls torch.utils.checkpoint" in told:
        return {**drawn, "parts": [[part, "list" if "recomputed" in at else at] for part, at in drawn["parts"]]}
    return None


REFUSED = (
    "Set weights='autocast' in the precision",
    "Use weights='autocast' in the precision",
    "Take the autocast out",
    "No linear layer of",
    "Cast them, as in x.to(self.weight.dtype)",
    "Use recipe='current', which keeps none",
    "The model calls torch.utils.checkpoint, which knows nothing of it",
)


def _compare(drawn, path):
    try:
        right = fit(drawn, path, "32-true", name="right")
    except Exception as error:  # noqa: BLE001  (float32 does not train it, so we need not)
        return f"not in float32: {type(error).__name__}: {error}"
    ours = fit(drawn, path, made(drawn), name="ours")
    start = {n: p.detach().clone() for n, p in fresh(drawn).named_parameters(remove_duplicate=False)}
    found = agreed(lambda: outside(drawn, path, ours, right, start) or after(drawn, ours, right) or saved(drawn, path))
    for check in drawn["checks"]:
        if not found:
            found = agreed_of(check, _run(check, drawn, path, ours, right, start))
    return found


def _run(check, drawn, path, ours, right, start):
    try:
        return RUNS[check](drawn, path, ours, right, start)
    except (RuntimeError, ValueError, TypeError):
        if check not in ("resume", "to plain", "from plain") or _resumes(drawn, path):
            raise
        return ""


def _resumes(drawn, path):
    """Return whether float32 goes on from its own checkpoint: LBFGS does not, over parameters of several types."""
    try:
        fit(drawn, path, "32-true", name="right again", ckpt=path / "right" / "epoch=0.ckpt")
    except (RuntimeError, ValueError, TypeError):
        return False
    return True


def agreed_of(check, found):
    return agreed(lambda: f"{check}: {found}" if found else "")


def agreed(find):
    """Return what the first rank that found something found."""
    found = find()
    if dist.is_initialized() and dist.get_world_size() > 1:
        all_found = [None] * dist.get_world_size()
        dist.all_gather_object(all_found, found)
        return next((words for words in all_found if words), "")
    return found


def _goes_its_own_way(drawn):
    """Return whether the optimizer makes much of rounding: Rprop of signs, LBFGS of differences between gradients."""
    optimizer, judged = drawn["settings"]["optimizer"], drawn["precision"][0] == "bf16" and drawn["ranks"] == 1
    return optimizer == "rprop" or (optimizer == "lbfgs" and not judged)  # judged by how stock bfloat16 fares


def outside(drawn, path, ours, right, start):
    """Return how far ``ours`` is from float32, if that is farther than low precision explains."""
    if _goes_its_own_way(drawn):
        return "" if _is_near(ours.losses[0], right.losses[0], factor=1.0) else f"begins with {ours.losses[0]}"
    loose = 1.0 if drawn["precision"][0] == "bf16" else 2.0
    if not (words := _outside(ours, right, start, factor=loose)):
        return ""
    if drawn["ranks"] > 1:
        return _outside(ours, right, start, factor=4.0)  # another run would have to be made by all ranks
    try:
        stock = fit(drawn, path, "bf16-mixed", name="stock")
    except Exception:  # noqa: BLE001
        return _outside(ours, right, start, factor=4.0)
    if _outside(stock, right, start, factor=0.5) and not _outside(ours, right, start, factor=4):
        return ""
    return "" if words.startswith("losses") and _is_chaotic(drawn, path, right, factor=loose) else words


ROUNDING = {"bf16": 2**-8, "bf16 weights": 2**-8, "float8": 2**-4, "te": 2**-4}


def _is_chaotic(drawn, path, right, *, factor):
    """Return whether float32 itself comes to other losses from weights that differ by as much as they are rounded."""
    model = fresh(drawn)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + ROUNDING[drawn["precision"][0]] * (2 * torch.rand(p.shape, generator=generator) - 1))
    shaken = fit(drawn, path, "32-true", name="shaken", model=model)
    pairs = zip(shaken.losses, right.losses, strict=True)
    return any(not _is_near(mine, theirs, factor=factor) for mine, theirs in pairs)


def _outside(ours, right, start, *, factor):
    if len(ours.losses) != len(right.losses):
        return f"{len(ours.losses)} losses for {len(right.losses)}"
    for mine, theirs in zip(ours.losses, right.losses, strict=True):
        if not _is_near(mine, theirs, factor=factor):
            return f"losses: {ours.losses} for {right.losses}"
    for name, theirs in right.weights.items():
        mine = ours.weights[name]
        if mine.shape != theirs.shape:
            return f"{name} is {tuple(mine.shape)} for {tuple(theirs.shape)}"
        if mine.numel() == 0:
            continue
        moved, apart = (theirs - start[name]).norm(), (mine.to(theirs.dtype) - theirs).norm()
        if apart > factor * (0.5 * moved + 0.02 * theirs.norm() + 1e-2):
            return f"{name}: by {apart:.3g}, of {moved:.3g} that it moves"
        mine_moved = (mine.to(theirs.dtype) - start[name]).norm()
        if (moved > 1e-2 and mine_moved == 0) or (moved == 0 and mine_moved > 0.01 * theirs.norm()):
            return f"{name} moves by {mine_moved:.3g} for {moved:.3g}"
    for name, theirs in right.buffers.items():
        mine = ours.buffers[name]
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return f"buffer {name} is {mine.dtype} {tuple(mine.shape)} for {theirs.dtype} {tuple(theirs.shape)}"
        if not torch.allclose(mine, theirs, rtol=0.2 * factor, atol=0.1 * factor):
            return f"buffer {name} by {(mine - theirs).abs().max():.3g}"
    rates = [[[g["lr"] for g in o.param_groups] for o in one.run.optimizers] for one in (ours, right)]
    return f"learning rates {rates[0]} for {rates[1]}" if rates[0] != rates[1] else ""


def _is_near(mine, theirs, *, factor):
    return abs(mine - theirs) <= factor * (0.1 * abs(theirs) + 0.05) or theirs != theirs


def after(drawn, ours, right):
    """Return what a fit has left on the module, or lost from it."""
    model, low = ours.model, drawn["precision"][0] == "bf16 weights"
    plain = fresh(drawn)
    for (name, p), (other, q) in zip(
        model.named_parameters(remove_duplicate=False), plain.named_parameters(remove_duplicate=False), strict=True
    ):
        if name != other or p.shape != q.shape or (p.dtype != q.dtype and not low):
            return f"after: {name} {p.dtype} {tuple(p.shape)} for {other} {q.dtype} {tuple(q.shape)}"
        if p.stride() != q.stride():
            return f"after: {name} lies in memory as {p.stride()} for {q.stride()}"
        stays = right.model.get_parameter(name).requires_grad  # Lightning's toggling may end with less than it began
        if p.requires_grad != stays and not drawn["settings"]["unfreeze"]:
            return f"after: {name} is trained: {p.requires_grad} for {stays}"
        if "__deepcopy__" in vars(p):
            return f"after: {name} still copies as another"
    if hooks_of(model) != hooks_of(plain):
        left = [n for n, v in hooks_of(plain).items() if hooks_of(model).get(n) != v]
        return f"after: hooks or classes of {left}"
    if not drawn["settings"]["late"] and ours.before != hooks_of(model):
        return "after: hooks other than before"
    parameters = {*model.parameters()}
    for optimizer in ours.run.optimizers:
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        if not mine <= parameters:
            return "after: an optimizer steps what the module does not have"
        if not {k for k in optimizer.state if isinstance(k, torch.Tensor)} <= mine | {None}:
            return "after: an optimizer has state for what it does not step"
    if list(ours.state) != list(plain.state_dict()):
        return f"after: state {list(ours.state)} for {list(plain.state_dict())}"
    return _plainly_usable(drawn, ours, plain, low=low)


def _plainly_usable(drawn, ours, plain, *, low):
    """Return what keeps plain torch from going on with the module."""
    if low:
        return ""
    plain.load_state_dict(ours.state)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
    parted = drawn["settings"]["late"] or any(kind == "extra state" for kind, _ in drawn["parts"])
    values, model = [], ours.model
    for one in (model, plain):
        one.eval()
        values.append(one.loss(x, 0))
    if not torch.equal(*(v.detach() for v in values)) and not parted:
        return f"after: a plain forward gives {values[0].item()} for {values[1].item()}"
    grads = []
    for one, value in zip((model, plain), values, strict=True):
        one.zero_grad()
        value.backward()
        grads.append([None if p.grad is None else p.grad.to_dense() for p in one.parameters() if p.requires_grad])
        one.train()
    if drawn["settings"]["unfreeze"]:
        return ""
    same = all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(*grads, strict=True))
    return "" if same or parted else "after: plain gradients are others"


def saved(drawn, path):
    """Return how a checkpoint differs in form from that of float32."""
    mine, theirs = (
        torch.load(path / name / "epoch=1.ckpt", weights_only=False, map_location="cpu") for name in ("ours", "right")
    )
    low = drawn["precision"][0] == "bf16 weights"
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        if found := _other_form(mine[key], theirs[key], key, low=low):
            return f"saved: {found}"
    return ""


def _other_form(mine, theirs, at, *, low):
    if isinstance(theirs, torch.Tensor):
        if mine.shape != theirs.shape or (mine.dtype != theirs.dtype and not low):
            return f"{at}: {mine.dtype} {tuple(mine.shape)} for {theirs.dtype} {tuple(theirs.shape)}"
        return ""
    if isinstance(theirs, dict):
        if list(mine) != list(theirs):
            return f"{at}: {list(mine)} for {list(theirs)}"
        pairs = [(mine[key], value, f"{at}.{key}") for key, value in theirs.items()]
    elif isinstance(theirs, (list, tuple)):
        if len(mine) != len(theirs):
            return f"{at}: {len(mine)} for {len(theirs)}"
        pairs = [(a, b, f"{at}.{i}") for i, (a, b) in enumerate(zip(mine, theirs, strict=True))]
    else:
        return ""
    return next((found for a, b, name in pairs if (found := _other_form(a, b, name, low=low))), "")


def other_bits(mine, theirs, *, losses=True):
    """Return the first thing that is not bitwise the same."""
    mine_losses, their_losses = torch.tensor(mine.losses), torch.tensor(theirs.losses)
    if losses and not torch.equal(mine_losses.nan_to_num(7.0), their_losses.nan_to_num(7.0)):
        return f"losses {mine.losses} for {theirs.losses}"
    for kind in ("weights", "buffers"):
        for name, value in getattr(theirs, kind).items():
            if not torch.equal(getattr(mine, kind)[name], value) and not value.isnan().any():
                return f"{name} by {(getattr(mine, kind)[name] - value).abs().max():.3g}"
    for one, other in zip(mine.run.optimizers, theirs.run.optimizers, strict=True):
        for (i, a), (j, b) in zip(one.state_dict()["state"].items(), other.state_dict()["state"].items(), strict=True):
            for key, value in b.items():
                if isinstance(value, torch.Tensor) and not torch.equal(a[key], value) and not value.isnan().any():
                    return f"state {key} of {i} and {j}"
    return ""


# What is drawn to be checked by further runs


def check_resume(drawn, path, ours, right, start):
    again = fit(drawn, path, made(drawn), name="again", ckpt=path / "ours" / "epoch=0.ckpt")
    half = len(ours.losses) // 2
    if [*ours.losses[half:]] != again.losses and not any(x != x for x in again.losses):
        return f"losses {again.losses} for {ours.losses[half:]}"
    found = other_bits(again, ours, losses=False)
    return "" if found and drawn["ranks"] == 1 and not _resumes_to_the_bit(drawn, path, right) else found


def _resumes_to_the_bit(drawn, path, right):
    """Return whether float32 does: torch gives NAdam's product of momenta another type where parameters are double."""
    again = fit(drawn, path, "32-true", name="right to the bit", ckpt=path / "right" / "epoch=0.ckpt")
    return not other_bits(again, right, losses=False)


def _is_written_by_evaluation(drawn):
    """Return whether evaluation changes weights, which is torch's own way with an embedding that has ``max_norm``."""
    return any(getattr(module, "max_norm", None) is not None for module in fresh(drawn).modules())


def check_validate(drawn, path, ours, right, start):
    if _is_written_by_evaluation(drawn):
        return ""
    again = fit(drawn, path, made(drawn), name="validated", validate=True)
    return other_bits(again, ours)


def check_to_plain(drawn, path, ours, right, start):
    again = fit(drawn, path, "32-true", name="plain", ckpt=path / "ours" / "epoch=0.ckpt")
    return _second_half(drawn, again, right, start)


def check_from_plain(drawn, path, ours, right, start):
    again = fit(drawn, path, made(drawn), name="from", ckpt=path / "right" / "epoch=0.ckpt")
    return _second_half(drawn, again, right, start)


def _second_half(drawn, again, right, start):
    if _goes_its_own_way(drawn) or drawn["settings"]["optimizer"] == "lbfgs":
        return ""
    kept = right.losses
    right.losses = kept[len(kept) // 2 :]
    try:
        return _outside(again, right, start, factor=4.0)
    finally:
        right.losses = kept


def check_twice(drawn, path, ours, right, start):
    """A second fit of a module is the first of one with its weights."""
    first = fit(drawn, path, made(drawn), name="first", epochs=1)
    twin = twin_of(drawn, first.model)
    twin.calls = first.model.calls
    first.model.losses.clear()
    second = fit(drawn, path, made(drawn), name="second", model=first.model, epochs=1)
    other = fit(drawn, path, made(drawn), name="other", model=twin, epochs=1)
    return "" if drawn["precision"][0] == "bf16 weights" else other_bits(second, other)


def check_around(drawn, path, ours, right, start):
    """Evaluation by the same Trainer before a fit changes nothing; nor does one after it."""

    def before(run, model, loader):
        held = {n: p.detach().clone() for n, p in model.state_dict().items() if isinstance(p, torch.Tensor)}
        run.validate(model, loader, verbose=False)
        run.predict(model, loader, return_predictions=drawn["ranks"] == 1 or None)
        for n, p in model.state_dict().items():
            if n in held:
                assert p.dtype == held[n].dtype, n
                assert torch.equal(p, held[n]), n

    if _is_written_by_evaluation(drawn):
        return ""
    again = fit(drawn, path, made(drawn), name="around", before=None if drawn["settings"]["late"] else before)
    if found := other_bits(again, ours):
        return found
    # Lightning takes no list of indices to predict.
    loader = DataLoader([*batches(drawn["settings"], alone=drawn["ranks"] == 1)], batch_size=None)
    hung = hooks_of(again.model)
    again.model.eval()
    plain = torch.stack([again.model.loss(x, 0).detach().float() for x in loader])
    again.model.train()
    mine = trainer(drawn, path, made(drawn), name="later")
    predicted = torch.stack([*map(torch.Tensor.float, mine.predict(again.model, loader))])
    if hooks_of(again.model) != hung:
        return "hooks after a prediction"
    if not torch.allclose(plain, predicted, rtol=0.2, atol=0.1, equal_nan=True):
        return f"predictions {predicted.tolist()} for {plain.tolist()}"
    after_all = {n: p.detach() for n, p in again.model.named_parameters(remove_duplicate=False)}
    for name, value in again.weights.items():
        if after_all[name].dtype != value.dtype or (
            not torch.equal(after_all[name], value) and not value.isnan().any()
        ):
            return f"a prediction changes {name}"
    return ""


def check_fail(drawn, path, ours, right, start):
    """An exception in the midst leaves a module that can be trained, and has its types."""
    model = Any(drawn)
    model.fail_at = 3
    try:
        fit(drawn, path, made(drawn), name="failed", model=model)
    except InterruptedError:
        pass
    else:
        return "did not stop"
    model.fail_at, model.calls = None, 0
    plain, low = fresh(drawn), drawn["precision"][0] == "bf16 weights"
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if p.dtype != q.dtype and not low:
            return f"{name} is {p.dtype}"
    if hooks_of(model) != hooks_of(plain):
        return "hooks"
    model.losses.clear()
    twin = twin_of(drawn, model)
    fit_again = fit(drawn, path, made(drawn), name="failed again", model=model)
    other = fit(drawn, path, made(drawn), name="failed twin", model=twin)
    return "" if drawn["settings"]["unfreeze"] or low else other_bits(fit_again, other)


RUNS = {
    "resume": check_resume,
    "validate": check_validate,
    "to plain": check_to_plain,
    "from plain": check_from_plain,
    "twice": check_twice,
    "around": check_around,
    "fail": check_fail,
}
