import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.strategies.test_parity import expected

ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_two_nodes_of_two_ranks_are_one_device(tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    script = ["-m", "tests.strategies.two_nodes", str(tmp_path)]
    nodes = [
        subprocess.Popen([*command, f"--node-rank={rank}", *script], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [node.communicate(timeout=150)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], errors[0][-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["losses"] == pytest.approx(
        expected("Scalar", tmp_path, {"gradient_clip_val": 0.1})["losses"], rel=1e-5
    )
    assert result["names"] == ["replicate", "shard", "tensor_parallel"]
    assert result["shape"] == [2, 2, 1]
