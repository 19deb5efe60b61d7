"""What each process of the test of two nodes runs, under torchrun."""

import json
import os
import sys
from pathlib import Path

from tests.strategies.cases import train


def main(folder):
    from lightning_ups.strategies import FSDP2Strategy

    strategy = FSDP2Strategy(replicate_size=int(os.environ["GROUP_WORLD_SIZE"]))
    options = {"num_nodes": 2, "data_ranks": 4, "gradient_clip_val": 0.1}
    _, lightning, result = train("Scalar", folder, strategy=strategy, ranks=2, **options)
    mesh = strategy.device_mesh
    if lightning.is_global_zero:
        facts = {"losses": result["losses"], "names": mesh.mesh_dim_names, "shape": mesh.shape}
        (Path(folder) / "result.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
