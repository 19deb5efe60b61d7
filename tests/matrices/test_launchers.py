"""Ways to start a run x strategies: it trains two steps on two devices, or is refused with what to write instead."""

import re
import subprocess
import sys

import pytest
import yaml

from tests.command import run as config
from tests.strategies.test_notebooks import ROOT, run_cells
from tests.strategies.test_two_nodes import free_port
from tests.toys import outside_a_group

STRATEGIES = ("auto", "fsdp2", "simple_fsdp")
SCRIPT = """
import sys
import lightning_ups
from lightning.pytorch import Trainer
from lightning_ups.callbacks import Compile
from tests.cli_toys import Data, Telling, Toy

def train(strategy, devices=2):
    parts = [Telling(strategy), *([Compile(backend="aot_eager")] if strategy == "simple_fsdp" else ())]
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    try:
        trainer = Trainer(
            accelerator="cpu", strategy=strategy, devices=devices, max_steps=2, callbacks=parts, **options
        )
        trainer.fit(Toy(), Data(16))
    except ValueError as error:
        print(f"REFUSED {strategy} {devices} {error!r}\\n", end="", flush=True)

for each in sys.argv[1:]:
    name, _, devices = each.partition("=")
    train(name, int(devices or 2))
"""
ALL = [*STRATEGIES, "fsdp2=1", "simple_fsdp=1"]  # in one process, which is to start with as many as two devices


def printed(folder, *commands):
    """Return what programs print that run at the same time, each a command and its environment."""
    env = outside_a_group() | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    options = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    programs = [subprocess.Popen([sys.executable, *words], env=env | more, **options) for words, more in commands]
    try:
        told = [program.communicate(timeout=250) for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [0] * len(programs), told
    return "".join(out for out, _ in told)


def script(folder, strategies):
    return printed(folder, (["train.py", *reversed(strategies)], {}))  # the first fit starts the second process


def cli(folder, strategies):
    def command(strategy):
        telling = {"class_path": "tests.cli_toys.Telling", "init_args": {"of": strategy}}
        compiling = {"class_path": "Compile", "init_args": {"backend": "aot_eager"}}
        parts = [telling, compiling] if strategy == "simple_fsdp" else [telling]
        trainer = {"strategy": strategy, "devices": 2, "max_steps": 2, "callbacks": parts, "logger": False}
        tree = config(data={"class_path": "tests.cli_toys.Data", "init_args": {"size": 16}}, trainer=trainer)
        (folder / f"{strategy}.yaml").write_text(yaml.safe_dump(tree))
        return ["-m", "lightning_ups", "fit", "--config", f"{strategy}.yaml"], {}

    return printed(folder, *map(command, strategies))


def notebook(folder, strategies):
    return run_cells(folder, SCRIPT, *(f"train('{name}', {devices})" for name in strategies for devices in (2, 1)))


def torchrun(folder, strategies):
    words = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "train.py"]
    return printed(folder, ([*words, *ALL], {}))


def slurm(folder, strategies):
    def task(rank):
        given = {"NTASKS": 2, "NTASKS_PER_NODE": 2, "NNODES": 1, "JOB_ID": 7, "JOB_NAME": "train"}
        given |= {"PROCID": rank, "LOCALID": rank, "NODEID": 0, "JOB_NODELIST": "localhost"}
        return ["train.py", *ALL], {f"SLURM_{name}": str(value) for name, value in given.items()} | {
            "MASTER_PORT": port
        }

    port = str(free_port())
    return printed(folder, task(0), task(1))


@pytest.mark.parametrize(
    ("launcher", "strategies"),
    [
        (script, STRATEGIES),
        (notebook, STRATEGIES),
        (torchrun, STRATEGIES),
        (slurm, STRATEGIES),
        (cli, ["fsdp2"]),
        pytest.param(cli, ["auto", "simple_fsdp"], marks=pytest.mark.slow),
    ],
)
def test_two_devices_train_or_are_refused(launcher, strategies, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    out = launcher(tmp_path, strategies)
    for strategy in strategies:
        trained = sorted(re.findall(rf"^TRAINED {strategy} .*", out, re.M))
        refused = dict(re.findall(rf"^REFUSED {strategy} (\d) (.*)", out, re.M))
        if launcher is notebook and strategy != "auto":
            assert all(line in refused["2"] for line in ("%%writefile train.py", f"!{sys.executable} train.py"))
            del refused["2"]
            assert trained == [f"TRAINED {strategy} step 2 rank 0 of 1"]
        else:
            assert trained[-2:] == [f"TRAINED {strategy} step 2 rank {rank} of 2" for rank in range(2)], out
        if launcher in (torchrun, slurm) and strategy != "auto":
            assert "devices and num_nodes whose product is 2" in refused.pop("1")
        assert not refused
