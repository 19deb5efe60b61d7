import importlib.machinery
import json
import sys
import types
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from lightning_ups.models.gpt import GPT, SIZES
from lightning_ups.models.hf_names import to_hf
from lightning_ups.strategies import Communication, fsdp2
from lightning_ups.transforms.compile.frame import structure


@pytest.fixture
def llama(import_benchmark, monkeypatch):
    llama = import_benchmark("llama")
    monkeypatch.setattr(llama, "unmet_gpus", lambda *_, **__: None)  # nothing here runs on one
    return llama


def result(side, speed):
    return {"side": side, "tok_s_gpu": speed, "mfu": 1.0, "peak_gib": 2.0, "norm_first": 3.0}


def test_the_table_compares_medians_with_the_goal(llama):
    runs = [result("ours", 110), result("torchtitan", 100), result("ours", 104), result("torchtitan", 100)]
    shown = llama.table("1B-4", [*runs, {"side": "stock", "error": "out of memory"}])
    assert "| ours | 107 | 5.6% |" in shown
    assert "| torchtitan | 100 | 0.0% | 1.0 % | 2.0 | 3.0 | 1.070x |  |  | its own metrics, at once |" in shown
    assert "1.070 of torchtitan; the goal of 1.07 is reached" in shown
    assert "missed" in llama.table("1B-4", [result("ours", 106), result("torchtitan", 100)])


def test_each_goal_of_a_row_has_its_verdict(llama):
    shown = llama.table("1B-4-float8", [result("ours", 155), *(result(side, 100) for side in ("torchtitan", "stock"))])
    assert "1.550 of torchtitan; the goal of 1.15 is reached" in shown
    assert "1.550 of stock; the goal of 1.55 is reached" in shown
    assert "of bare; the goal" not in shown, "it was not run"
    assert "0.980 of bare; the goal of 0.99 is missed" in llama.table("8B", [result("ours", 98), result("bare", 100)])


def test_what_has_a_goal_is_run(llama):
    for name, row in llama.rows().items():
        assert {side for side, _ in row.goals} <= {*row.sides}, name


def test_loops_by_hand_collect_garbage_as_ours_does(llama, monkeypatch):
    made = []
    monkeypatch.setattr(Paced, "batches", 0)
    monkeypatch.setattr(llama, "PacedCollection", lambda interval: made.append(interval) or Paced())
    monkeypatch.setattr(llama, "tell", lambda _: None)
    row, weight = llama.rows()["tiny"], torch.ones(1, requires_grad=True)
    llama.looped(
        row, lambda *_: weight.sum(), lambda: weight.grad, torch.optim.SGD([weight], lr=0.1), device=torch.device("cpu")
    )
    assert made == [llama.COLLECT_EVERY]
    assert Paced.batches == row.steps + 1


class Paced(nullcontext):
    batches = 0

    def __enter__(self):
        return self

    def after_batch(self):
        Paced.batches += 1


def test_the_table_has_what_the_means_say_beside_the_medians(llama):
    told = [result("ours", 110) | {"tok_s_mean": 99.0}, result("bare", 110) | {"tok_s_mean": 100.0}]
    shown = llama.table("150M-32", told)
    assert (
        "| ours | 110 | 0.0% | 1.0 % | 2.0 | 3.0 | 1.000x | 99 | 1.000x | logger and bar, when it is there |" in shown
    )
    assert "| bare | 110 | 0.0% | 1.0 % | 2.0 | 3.0 | 1.000x | 100 | 0.990x | printed ten steps later |" in shown
    assert "1.000 of bare; the goal of 0.99 is reached. By the means it is 0.990x." in shown
    # What was kept before a run told its mean: 30 steps of warm-up, then 32 x 1024 tokens in 100 and in 300 ms.
    old = result("bare", 110) | {"step_ms_all": [9.0] * 30 + [100.0, 300.0]}
    assert f"| {32 * 1024 / 0.2:.0f} |" in llama.table("150M-32", [old])
    titans = result("torchtitan", 100) | {"all": {"tok_s_gpu_mean": 98.0}}
    assert "| 98 |" in llama.table("1B-4", [titans])


def test_a_run_tells_its_mean(llama):
    marks = types.SimpleNamespace(milliseconds=lambda: [50.0] * 2 + [10.0, 10.0, 40.0])
    found = llama.figures(llama.rows()["tiny"], marks, {}, None)
    assert (found["step_ms"], found["step_ms_mean"]) == (10.0, 20.0)
    assert found["tok_s_gpu"] == pytest.approx(2 * found["tok_s_mean"])


def test_a_loop_by_hand_prints_each_loss_when_it_logs_the_next(llama, capsys):
    losses, value = llama.Losses(), torch.tensor(2.0, requires_grad=True)
    losses.log(1, value * 1)
    assert capsys.readouterr().out == ""
    losses.log(11, value * 2)
    assert capsys.readouterr().out == "step 1: loss 2.0000\n"
    assert {step: loss.item() for step, loss in losses.kept.items()} == {1: 2.0, 11: 4.0}
    assert not losses.kept[11].requires_grad


def test_the_table_says_of_each_side_how_it_reads_its_loss(llama):
    assert llama.READS.keys() == {*llama.SIDES, "torchtitan"}
    assert "| ours, copied within | 5 |" in llama.table("8B", [result("ours, copied within", 5.0)])


def test_first_norms_that_differ_are_told(llama):
    runs = [result("ours", 1), result("bare", 1) | {"norm_first": 3.01}, result("stock", 1) | {"norm_first": None}]
    assert "The first norms are 0.33% apart." in llama.table("1B-4", runs)
    assert "are 1.67% apart: the sides differ." in llama.table("1B-4", [*runs[:1], runs[1] | {"norm_first": 3.05}])


# As bench_titan.sh prints at its end, and what it keeps of torchtitan's own words.
TITAN = """
echo 'RESULT_JSON {"tok_s_gpu": 60000.0, "step_ms": 273.0, "peak_alloc_gib": 47.0, "losses": {"1": 12.2}}'
echo "[rank0] step:  1  loss: 12.2  grad_norm:  1.5000  memory" > "$OUT/titan.log"
echo "step: 10  loss: 12.1  grad_norm:  9.5000 of $BT_TIMEOUT s: $*" >> "$OUT/titan.log"
echo x > "$OUT/titan_results.jsonl"
"""


def test_torchtitan_is_run_by_its_runner(llama, tmp_path, monkeypatch, capsys):
    (tmp_path / "bench_titan.sh").write_text(TITAN)
    words = ["--row", "1B-4", "--sides", "torchtitan", "--output", str(tmp_path / "out"), "--titan", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["llama.py", *words, "--timeout", "50"])
    llama.main()
    first, second = map(json.loads, (tmp_path / "out" / "results.jsonl").read_text().splitlines())
    assert (first["side"], first["round"], second["round"]) == ("torchtitan", 1, 2)
    assert (first["tok_s_gpu"], first["norm_first"]) == (60000.0, 1.5)
    flags = "--ngpu 1 --flavor 1B --compile --seq-len 4096 --local-batch-size 4 --steps 40 --warmup 12 --log-freq 10"
    assert f"9.5000 of 30 s: {flags}" in (tmp_path / "out" / "log.txt").read_text()
    assert "| torchtitan | 60000 | 0.0% |" in (tmp_path / "out" / "table.md").read_text()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"env.txt", "results.jsonl", "log.txt", "table.md"}


def test_a_runner_that_is_not_there_is_said_before_anything_runs(llama, tmp_path, monkeypatch, capsys):
    words = ["--row", "1B-4", "--titan", str(tmp_path), "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["llama.py", *words])
    with pytest.raises(SystemExit, match="2"):
        llama.main()
    assert f"{tmp_path / 'bench_titan.sh'}, which does not exist: name the folder by --titan" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--row", "8B", "--sides", "ours"], "row 8B needs 4 GPUs, and this machine has 0"),
        (["--row", "1B-4-float8", "--sides", "ours"], "row 1B-4-float8 needs torchao, which cannot be loaded"),
        (["--row", "150M-4", "--sides", "torchtitan"], "there is no setting of torchtitan for row 150M-4"),
        (["--row", "1B-4-float8", "--sides", "bare, torch alone"], "is for one GPU and bfloat16"),
        (["--row", "1B-4", "--sides", "ours, copied within"], "side 'ours, copied within' is about what GPUs say"),
        (["--row", "tiny", "--output", "{}/bench_titan.sh"], "cannot be written (File exists): name another folder"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(llama, tmp_path, monkeypatch, capsys, words, said):
    (tmp_path / "bench_titan.sh").touch()
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("raise RuntimeError('another CUDA')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    if "8B" in words:
        monkeypatch.undo()
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(llama, "child", lambda *_: pytest.fail("it has begun"))
    words = [word.format(tmp_path) for word in words]
    monkeypatch.setattr(sys, "argv", ["llama.py", "--titan", str(tmp_path), "--output", str(tmp_path / "out"), *words])
    with pytest.raises(SystemExit, match="2"):
        llama.main()
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_earlier_calls_have_kept_is_in_the_table(llama, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(llama, "child", lambda name, side, timeout: (result(side, 100), "words of it"))
    out = tmp_path / "out"
    out.mkdir()
    old = [result("ours", 107) | {"row": "1B-4"}, result("ours", 9) | {"row": "1B-8"}]
    (out / "results.jsonl").write_text("\n".join([*map(json.dumps, old), '{"side": "ours", "tok_s']) + "\n")
    words = [
        "llama.py",
        "--row",
        "1B-4",
        "--sides",
        "torchtitan",
        "bare",
        "--output",
        str(out),
        "--titan",
        str(tmp_path),
    ]
    (tmp_path / "bench_titan.sh").write_text(TITAN)
    monkeypatch.setattr(sys, "argv", words)
    llama.main()
    shown = (out / "table.md").read_text()
    assert "| bare | 100 | 0.0% | 1.0 % | 2.0 | 3.0 | 1.070x |" in shown
    assert "These are runs of 2 calls" in shown
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [*words, "--rounds", "0"])
    llama.main()
    assert capsys.readouterr().out == shown


def test_a_side_that_is_interrupted_keeps_its_words(llama, tmp_path, monkeypatch, capsys):
    def child(name, side, timeout):
        if side == "bare":
            raise llama.Interrupted("step 1")
        return result(side, 100), ""

    monkeypatch.setattr(llama, "child", child)
    words = ["llama.py", "--row", "1B-4", "--sides", "ours", "bare", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(KeyboardInterrupt):
        llama.main()
    assert "===== bare, round 1\nstep 1\n" in (tmp_path / "log.txt").read_text()
    assert "| ours | 100 |" in capsys.readouterr().out.splitlines()[-1]


def test_a_side_that_failed_is_not_run_again(llama, tmp_path, monkeypatch, capsys):
    ran = []

    def child(name, side, timeout):
        ran.append(side)
        return ({"error": "no kernel"} if side == "ours" else result(side, 100)), ""

    monkeypatch.setattr(llama, "child", child)
    words = ["--row", "1B-4", "--sides", "ours", "bare", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["llama.py", *words])
    llama.main()
    assert ran == ["ours", "bare", "bare"]
    assert "ours, round 2: left out, it failed before" in capsys.readouterr().out


def test_what_is_interrupted_keeps_what_it_has(llama, tmp_path, monkeypatch):
    def run(name, sides, options):
        yield result("ours", 107)
        yield result("torchtitan", 100)
        raise KeyboardInterrupt

    monkeypatch.setattr(llama, "run", run)
    monkeypatch.setattr(
        sys, "argv", ["llama.py", "--row", "1B-4", "--sides", "ours", "--output", str(tmp_path / "out")]
    )
    with pytest.raises(KeyboardInterrupt):
        llama.main()
    assert "1.070 of torchtitan" in (tmp_path / "out" / "table.md").read_text()


def test_nothing_begins_that_the_budget_does_not_allow(llama, tmp_path, monkeypatch, capsys):
    (tmp_path / "bench_titan.sh").touch()
    words = ["--row", "8B", "--budget", "60", "--output", str(tmp_path / "out"), "--titan", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["llama.py", *words])
    llama.main()
    assert capsys.readouterr().out.count("left out, 60 s of the budget are left") == 8


def test_a_search_runs_torchtitan_by_each_of_its_settings(llama, tmp_path, monkeypatch, capsys):
    speed = TITAN.replace(
        '"tok_s_gpu": 60000.0', '"tok_s_gpu": \'$(case "$*" in *selective*never*) echo 700;; *) echo 600;; esac)\''
    )
    (tmp_path / "bench_titan.sh").write_text(speed)
    monkeypatch.setattr(llama, "unmet_gpus", lambda *_, **__: None)
    words = ["--row", "8B", "--search", "--rounds", "1", "--output", str(tmp_path / "out"), "--titan", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["llama.py", *words])
    monkeypatch.setattr(llama, "RUNNER", 1)
    llama.main()
    results = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [one["side"] for one in results] == [*llama.titans(llama.rows()["8B"])]
    assert len(results) == 9
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "--ac none --reshard never --ac selective --reshard always --local-batch-size 2" in log
    assert "The best of 9 of 9 settings: torchtitan, selective checkpointing, reshard never." in capsys.readouterr().out


def test_on_one_gpu_there_is_no_reshard_to_search(llama, monkeypatch, capsys):
    assert len(llama.titans(llama.rows()["1B-4"])) == 6
    assert not any("reshard" in words for words in llama.titans(llama.rows()["1B-4"]).values())
    shown = llama.table(
        "1B-4", [result("torchtitan", 99), result("torchtitan, none checkpointing, single-gpu amp", 100)]
    )
    assert "What stands for torchtitan in this row has 0.990 of its speed." in shown
    monkeypatch.setattr(sys, "argv", ["llama.py", "--row", "150M-4", "--search"])
    with pytest.raises(SystemExit):
        llama.main()
    assert "there is no setting of torchtitan for row 150M-4" in capsys.readouterr().err


def test_torchtitan_begins_only_with_the_time_that_its_runner_keeps_for_itself(llama, tmp_path, monkeypatch, capsys):
    (tmp_path / "bench_titan.sh").write_text(TITAN)
    monkeypatch.setattr(llama, "child", lambda name, side, timeout: (result(side, 100), ""))
    for budget, told in ("64", ["ours"]), ("90", ["ours", "torchtitan"]):
        out = tmp_path / budget
        words = ["--sides", "ours", "torchtitan", "--rounds", "1", "--output", str(out), "--titan", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["llama.py", "--row", "1B-4", "--budget", budget, *words])
        llama.main()
        assert [json.loads(line)["side"] for line in (out / "results.jsonl").read_text().splitlines()] == told
    assert capsys.readouterr().out.count("torchtitan, round 1: left out") == 1


def test_blocks_of_our_side_are_equal_to_compile(llama):
    module = llama.Work(llama.rows()["tiny"])
    module.configure_model()
    assert len(module.model.layers) > 1
    assert len({structure(block) for block in module.model.layers}) == 1
    spreads = [block.ffn.down.weight.std().item() for block in module.model.layers]
    assert spreads == sorted(spreads, reverse=True), "they are drawn as before"


@pytest.mark.parametrize(
    ("side", "options"),
    [
        ("ours", {}),
        ("ours, copied within", {}),
        ("ours, 8 multiprocessors", {"communication": Communication(multiprocessors=8)}),
    ],
)
def test_a_side_of_ours_says_what_communication_takes(llama, monkeypatch, side, options):
    told = []
    monkeypatch.setattr(llama, "FSDP2Strategy", lambda **options: told.append(options))
    monkeypatch.setattr(llama, "fitted", lambda *_, **__: told.append(fsdp2.copying_beside is nullcontext))
    llama.SIDES[side](llama.rows()["tiny-2"])
    assert told[0].items() >= options.items()
    assert {"communication"} & told[0].keys() == options.keys()
    assert told[1] is (side == "ours, copied within")


def test_weights_are_drawn_with_torchtitans_spreads(llama):
    model = llama.drawn_like_torchtitan(GPT(replace(SIZES["tiny"], vocab_size=2000)))
    spread = {name: parameter.std().item() for name, parameter in model.named_parameters() if parameter.ndim > 1}
    assert spread["embedding.weight"] == pytest.approx(1, rel=0.02)
    assert spread["head.weight"] == pytest.approx(0.98658 * 128**-0.5, rel=0.005)
    assert spread["layers.3.attention.qkv.weight"] == pytest.approx(0.02, rel=0.03)
    assert spread["layers.3.ffn.up.weight"] == pytest.approx(0.02 / 8**0.5, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("row", ["tiny", "tiny-2"])
def test_all_sides_do_the_same_work(run_benchmark, row, tmp_path):
    done = run_benchmark("llama", "--row", row, "--rounds", "1", "--output", "out")
    found = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    sides = ["ours", "bare", *(["bare, torch alone"] if row == "tiny" else []), "stock"]
    assert [one["side"] for one in found] == sides, done.stderr
    norms, losses = [one["norm_first"] for one in found], [one["losses"]["1"] for one in found]
    # With one process the weights are the same; shards are drawn in other orders than whole tensors.
    assert norms == pytest.approx([norms[0]] * len(sides), rel=1e-3 if row == "tiny" else 0.1)
    assert losses == pytest.approx([losses[0]] * len(sides), rel=1e-4 if row == "tiny" else 0.01)
    assert [one["attention"] for one in found] == [
        ["flash"] if side == "bare" else [] for side in sides
    ]  # flags leave a CPU to torch
    assert "of bare; the goal of 0.10 is" in done.stdout


CONFIG = replace(SIZES["tiny"], num_layers=2, rope_theta=500_000.0)


class PeersShape(nn.Module):
    """The peer's model in its own shape: separate projections, neighbouring channels turned as complex numbers."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def forward(self, tokens):
        weight, length = self.state, tokens.shape[1]
        frequencies = CONFIG.rope_theta ** -(torch.arange(0, CONFIG.head_dim, 2) / CONFIG.head_dim)
        angles = torch.outer(torch.arange(length), frequencies)
        turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]
        x = weight["tok_embeddings.weight"][tokens]
        for name in (f"layers.{layer}." for layer in range(CONFIG.num_layers)):
            normed = self.normed(x, name + "attention_norm.weight")
            q, k, v = (
                F.linear(normed, weight[f"{name}attention.w{which}.weight"]).unflatten(-1, (-1, CONFIG.head_dim))
                for which in "qkv"
            )
            q, k = (
                torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * turn).flatten(3) for t in (q, k)
            )
            k, v = (t.repeat_interleave(CONFIG.num_groups, dim=2) for t in (k, v))
            scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / CONFIG.head_dim**0.5
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
            heads = torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1), v).flatten(2)
            x = x + F.linear(heads, weight[name + "attention.wo.weight"])
            normed = self.normed(x, name + "ffn_norm.weight")
            gate, up = (F.linear(normed, weight[f"{name}feed_forward.{which}.weight"]) for which in ("w1", "w3"))
            x = x + F.linear(F.silu(gate) * up, weight[name + "feed_forward.w2.weight"])
        return F.linear(self.normed(x, "norm.weight"), weight["output.weight"])

    def normed(self, x, name):
        return x * (x.square().mean(-1, keepdim=True) + CONFIG.norm_eps).rsqrt() * self.state[name]


def assert_same_logits(make):
    torch.manual_seed(0)
    ours = GPT(CONFIG)
    theirs = make(torchtitan_names(to_hf(ours.state_dict(), CONFIG), head_dim=CONFIG.head_dim))
    tokens = torch.randint(CONFIG.vocab_size, (2, 64))
    torch.testing.assert_close(theirs(tokens), ours(tokens), rtol=1e-4, atol=1e-5)


def test_our_weights_in_the_peers_shape_give_our_logits():
    assert_same_logits(PeersShape)


def test_our_weights_in_the_peer_itself_give_our_logits(monkeypatch):
    pytest.importorskip("torchtitan")
    pytest.importorskip("triton")
    for name in ("datasets", "datasets.distributed"):  # which torchtitan imports, and its model does not need
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.Dataset = module.load_dataset = module.split_dataset_by_node = None
        monkeypatch.setitem(sys.modules, name, module)
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    def make(state):
        model = Transformer(
            TransformerModelArgs(
                dim=CONFIG.dim,
                n_layers=CONFIG.num_layers,
                n_heads=CONFIG.num_heads,
                n_kv_heads=CONFIG.num_kv_heads,
                vocab_size=CONFIG.vocab_size,
                rope_theta=CONFIG.rope_theta,
                max_seq_len=CONFIG.max_seq_len,
                multiple_of=CONFIG.ffn_dim,
                rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
            )
        )
        model.load_state_dict(state)
        return model

    assert_same_logits(make)


def torchtitan_names(state, *, head_dim):
    names = {
        "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attention.wo",
        "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
        "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
    }  # fmt: skip
    result = {}
    for name, weight in state.items():
        if "q_proj" in name or "k_proj" in name:
            halves = weight.unflatten(0, (-1, 2, head_dim // 2))
            weight = halves.transpose(1, 2).flatten(0, 2)
        for theirs, titans in names.items():
            name = name.replace(theirs, titans)
        result[name] = weight
    return result
