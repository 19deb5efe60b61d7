import copy
import re
from dataclasses import replace
from types import MethodType

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_ups._compat.torch.fake_tensors import partitioning_backend
from lightning_ups.callbacks import Compile
from lightning_ups.callbacks.logs.progress import LeanProgressBar
from lightning_ups.data import RandomTokens
from lightning_ups.models.gpt import GPT, SIZES, Block, GPTConfig, GPTModule
from lightning_ups.order import applied
from lightning_ups.transforms.casting.cast import computing_in_float32
from lightning_ups.transforms.tensor_parallel import parallelize, plan_of
from tests.late_device import Reads
from tests.toys import trainer

TINY = replace(SIZES["tiny"], dim=32, num_layers=3, ffn_dim=64, vocab_size=50, max_seq_len=16)


def built(config=TINY, *, seed=0):
    torch.manual_seed(seed)
    return GPT(config)


def tokens(shape=(2, 16), *, vocab=50, seed=1):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def small(**options):
    """A GPTModule over TINY, which no size names."""
    module = GPTModule(**{"warmup_steps": 2, **options})
    module.config = replace(TINY, tie=module.config.tie, qk_norm=module.config.qk_norm)
    return module


def data():
    return RandomTokens(vocab_size=50, seq_len=16, batch_size=4)


def fit(module, tmp_path, **options):
    run = trainer(tmp_path, epochs=-1, **{"max_steps": 10, "limit_val_batches": 0, **options})
    run.fit(module, data())
    return run


# --- the sizes


@pytest.mark.parametrize(
    ("size", "count"),
    [  # 1B, 8B and 70B as torchtitan counts them
        ("150M", 152_783_616),
        ("1B", 1_498_482_688),
        ("8B", 8_030_261_248),
        ("10B", 9_775_157_248),
        ("70B", 70_553_706_496),
    ],
)
def test_sizes_have_the_weights_they_say(size, count):
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT(SIZES[size]).parameters()) == count


def test_flops_are_those_of_a_counted_step():
    config, length = replace(TINY, tie=False), 16
    model, batch = built(config), tokens()
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(batch, batch).backward()
    # The counter takes attention full, and knows that the first layer's input needs no gradient as well as we do: the
    # embedding does. So: what it counts, less half of attention's share.
    attention = 12 * config.num_layers * config.dim * length
    assert counter.get_total_flops() / batch.numel() == config.flops_per_token(length) + attention / 2


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"num_heads a multiple of num_kv_heads\.$"):
        replace(TINY, num_heads=4, num_kv_heads=3)


# --- what it computes


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"num_kv_heads": 4}, {"num_kv_heads": 1}])
def test_a_token_does_not_see_what_follows(options):
    model, batch = built(replace(TINY, **options)), tokens()
    changed = batch.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 50
    before, after = model(batch), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.isclose(before[:, 9:], after[:, 9:]).all(-1).any()


def test_loss_is_the_mean_cross_entropy_in_float32():
    model, batch = built().to(torch.bfloat16), tokens()
    loss = model(batch, batch)
    expected = -model(batch).float().log_softmax(-1).gather(-1, batch[..., None]).mean()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("tie", [False, True])
def test_the_chunked_loss_is_the_same_without_all_logits(tie):
    config, batch = replace(TINY, vocab_size=5000, tie=tie), tokens((32, 16), vocab=5000)
    losses, gradients, largest = [], [], []
    for loss in ("logits", "chunked"):
        model = built(replace(config, loss=loss))
        with Largest() as seen:
            value = model(batch, batch.roll(1))
            value.backward()
        losses.append(value)
        gradients.append([p.grad for p in model.parameters()])
        largest.append(seen.elements)
    torch.testing.assert_close(*losses)
    for whole, chunked in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-7)
    assert largest == [batch.numel() * 5000, 32 * 5000], "the logits; the gradient of the head's weight"


def test_the_chunked_loss_does_not_pass_over_a_converted_head():
    model = built(replace(TINY, loss="chunked"))
    model.head = nn.Sequential(model.head)
    with pytest.raises(ValueError, match=r"the head is a Sequential .*use loss='logits'"):
        model(tokens(), tokens())
    model(tokens())  # logits come from the head itself


def test_a_sequence_too_long_is_refused():
    with pytest.raises(ValueError, match=r"larger max_seq_len\.$"):
        built()(tokens((1, 17)))


def test_compiles_as_one_graph_with_equal_gradients():
    model, batch = built(replace(TINY, qk_norm=True)), tokens()
    whole = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    model(batch, batch).backward()
    whole(batch, batch).backward()
    for (name, eager), compiled in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(compiled.grad, eager.grad, msg=name)


def test_blocks_share_one_compilation():
    model, graphs = built(), []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    forward = torch.compile(Block.forward, backend=backend, fullgraph=True)
    for block in model.layers:
        block.forward = MethodType(forward, block)
    model(tokens())
    assert len(graphs) == 1


def small_built():
    module = small()
    module.configure_model()
    return module


# --- initialisation


@pytest.mark.parametrize("tie", [False, True])
def test_built_on_meta_and_replayed_is_built_in_place(tie):
    config = replace(TINY, tie=tie)
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    wanted = built(config)
    assert {n: t.tolist() for n, t in model.state_dict().items()} == {
        n: t.tolist() for n, t in wanted.state_dict().items()
    }
    assert torch.equal(model(tokens()), wanted(tokens()))  # the rotary table, which no state dict holds
    assert (model.head.weight is model.embedding.weight) == tie


def kept_for_backward(function, *inputs):
    """Return what a compiled ``function`` saves for its backward, as inductor would divide the two."""
    graphs = []

    def make(graph):
        graphs.append(graph)
        return lambda args: graph(*args)

    compiled = torch.compile(function, backend=partitioning_backend(make))
    compiled(*inputs).backward()
    (outputs,) = (node.args[0] for node in graphs[0].graph.nodes if node.op == "output")
    values = [node.meta["val"] for node in outputs[1:] if isinstance(node, torch.fx.Node)]
    return [value for value in values if isinstance(value, torch.Tensor)]


def test_the_compiled_loss_has_its_logits_in_no_other_type():
    logits = torch.randn(2, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    kept = kept_for_backward(built().criterion, logits, torch.randint(64, (2, 8)))
    large = [value.dtype for value in kept if value.numel() >= logits.numel()]
    assert large == [torch.bfloat16], "eager: two in float32"


def test_the_loss_is_compiled_beside_the_blocks(tmp_path):
    module, data = GPTModule(size="tiny", schedule="constant"), RandomTokens(vocab_size=256, seq_len=16, batch_size=2)
    compile_blocks = Compile(losses=True, backend="aot_eager")
    ran = trainer(tmp_path, max_steps=2, callbacks=[compile_blocks])
    reported = {}
    compile_blocks.on_train_end = lambda *_: reported.update(applied(ran.strategy).report.parts["Compile"])
    ran.fit(module, data)
    assert reported["blocks"] == [f"model.layers.{layer}" for layer in range(4)] + ["model.criterion"]
    assert reported["graphs"] == 4, "of the equal blocks one forward and one backward, of the loss too"


def test_every_weight_has_its_own_reset():
    # What a strategy relies on that gives memory to one module after another.
    model = built()
    bare = {n for n, m in model.named_modules() if [*m.parameters(recurse=False), *m.buffers(recurse=False)]}
    assert bare == {n for n, m in model.named_modules() if hasattr(m, "reset_parameters")}


def test_an_untrained_model_guesses():
    # The signal neither dies nor explodes over depth: the loss begins near that of guessing.
    config = GPTConfig(dim=64, num_layers=24, num_heads=4, num_kv_heads=2, ffn_dim=128, vocab_size=97, max_seq_len=32)
    batch = tokens((4, 32), vocab=97)
    assert built(config)(batch, tokens((4, 32), vocab=97, seed=2)).item() == pytest.approx(4.57, abs=0.6)


# --- the LightningModule


def test_learns(tmp_path):
    torch.manual_seed(0)
    module, losses = small(lr=1e-2), []
    module.on_train_batch_end = lambda outputs, *_: losses.append(outputs["loss"].item())
    four = RandomTokens(vocab_size=50, seq_len=16, batch_size=4, num_samples=4)
    trainer(tmp_path, epochs=60, limit_val_batches=0).fit(module, four)
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_any_integer_type_will_do(dtype):
    torch.manual_seed(0)
    module = small_built()
    assert module.loss(tokens((2, 17)).to(dtype)).item() == module.loss(tokens((2, 17))).item()


def test_a_step_never_waits_for_a_value():
    # A fake tensor has no value: whatever would wait for the GPU to read one raises.
    with FakeTensorMode():
        module = small_built()
        module.log = lambda *_, **__: None
        loss = module.training_step(torch.zeros(2, 17, dtype=torch.uint8), 0)
        loss.backward()
        with pytest.raises(DataDependentOutputException):
            loss.item()


def test_training_reads_no_value_at_every_step(tmp_path):
    with Reads() as counted:
        fit(small(), tmp_path, max_steps=20)
    assert counted.count <= 2


@pytest.mark.gpu
def test_a_step_under_the_trainer_never_waits(tmp_path):
    module, steps = small(), []

    def on_train_batch_start(batch, batch_idx):  # from here to the next: all that Lightning does in a step
        torch.cuda.set_sync_debug_mode("error" if 2 < batch_idx < 7 else "default")
        steps.append(batch_idx)

    module.on_train_batch_start = on_train_batch_start
    Trainer(
        max_epochs=-1,
        max_steps=8,
        accelerator="gpu",
        devices=1,
        limit_val_batches=0,
        logger=CSVLogger(tmp_path),
        callbacks=[LeanProgressBar()],
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    ).fit(module, data())
    assert steps == [*range(8)]


def test_matrices_decay_and_vectors_do_not(tmp_path):
    module = small(weight_decay=0.3, qk_norm=True, tie=True)
    fit(module, tmp_path)
    (optimizer,) = module.trainer.optimizers
    names = {id(p): name for name, p in module.named_parameters()}
    decay = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {name: 0.0 if "norm" in name else 0.3 for name in names.values()}
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}


def test_learning_rate_follows_the_schedule(tmp_path):
    module, seen = small(lr=1.0, warmup_steps=5, schedule="wsd", decay_fraction=0.5, final_fraction=0.0), []
    module.on_train_batch_start = lambda *_: seen.append(module.trainer.optimizers[0].param_groups[0]["lr"])
    fit(module, tmp_path)
    assert seen == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_an_endless_run_needs_a_constant_schedule(tmp_path):
    with pytest.raises(ValueError, match=r"schedule='constant'\.$"):
        fit(small(), tmp_path, max_steps=-1)
    module = small(schedule="constant")
    module.on_train_batch_end = lambda *_: setattr(module.trainer, "should_stop", True)
    assert fit(module, tmp_path, max_steps=-1).global_step == 1


def test_a_second_fit_goes_on(tmp_path):
    module = small(lr=1e-2)
    fit(module, tmp_path)
    after = module.model.head.weight.clone()
    module.on_fit_start = lambda: seen.append(torch.equal(module.model.head.weight, after))
    seen = []
    fit(module, tmp_path)
    assert seen == [True]
    assert not torch.equal(module.model.head.weight, after)


def test_a_checkpoint_makes_the_module_again(tmp_path):
    torch.manual_seed(0)
    module = GPTModule(size="tiny", max_seq_len=16, vocab_size=50, tie=True, warmup_steps=2)
    run = fit(module, tmp_path, max_steps=2)
    run.save_checkpoint(tmp_path / "c.ckpt")
    again = GPTModule.load_from_checkpoint(tmp_path / "c.ckpt", weights_only=True)
    assert again.config == module.config
    assert torch.equal(again(tokens()), module(tokens()))
    assert again.model.head.weight is again.model.embedding.weight


def test_arguments_change_the_size():
    config = GPTModule(size="150M", vocab_size=100, max_seq_len=64, qk_norm=True, tie=True, rope_theta=5e5).config
    assert config == replace(SIZES["150M"], vocab_size=100, max_seq_len=64, qk_norm=True, tie=True, rope_theta=5e5)


def test_a_vocabulary_larger_than_the_models_is_refused(tmp_path):
    data = RandomTokens(vocab_size=51, seq_len=16, batch_size=4)
    with pytest.raises(ValueError, match=r"vocabulary of 51 tokens.*Give GPTModule vocab_size=51\.$"):
        trainer(tmp_path, epochs=1).fit(small(), data)


def test_tokens_without_a_batch_are_refused():
    with pytest.raises(ValueError, match=r"tokens\.unsqueeze\(0\)"):
        built()(tokens()[0])


def test_the_chunked_loss_does_not_pass_over_a_replaced_forward():
    model = built(replace(TINY, loss="chunked"))
    with computing_in_float32([model.head], outputs=torch.float32):
        with pytest.raises(ValueError, match=r"computes in float32.*use loss='logits'"):
            model(tokens(), tokens())
        assert model(tokens()).shape == (2, 16, 50)
    assert model(tokens(), tokens()).isfinite()


def test_the_chunked_loss_compiles_as_one_graph():
    model = built(replace(TINY, loss="chunked"))
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(tokens(), tokens())
    torch.testing.assert_close(found, model(tokens(), tokens()))


def chunked_loss_of_a_split_head():
    model = built(replace(TINY, loss="chunked"))
    parallelize(model, plan=plan_of(model, "gpt"), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"split over devices.*use loss='logits'"):
        model(tokens(), tokens())


def test_the_chunked_loss_does_not_read_a_part_of_the_head(ranks):
    ranks(chunked_loss_of_a_split_head)


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("size", "2B", "Use one of ('tiny', '150M', '1B', '8B', '10B', '70B')."),
        ("loss", "chunk", "Use one of ('logits', 'chunked')."),
        ("schedule", "cosin", "Use one of ('cosine', 'wsd', 'constant')."),
    ],
)
def test_a_wrong_argument_is_an_error_when_the_module_is_made(name, value, fix):
    with pytest.raises(ValueError, match=f"{re.escape(f'({name}={value!r})')} .*{re.escape(fix)}$"):
        GPTModule(**{name: value})
