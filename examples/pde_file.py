"""Write trajectories of two-dimensional turbulence in PDEBench's layout: a file for examples/pde_surrogate.yaml.

    python examples/pde_file.py flow.hdf5

The file has 72 trajectories of 25 frames on 32 x 32 points, about 7 MB.
"""

import math
import sys

from lightning_ups.data.fields import EQUATIONS, solve
from lightning_ups.data.fields.files import write_pdebench

EQUATION = "navier_stokes"

if __name__ == "__main__":
    (path,) = sys.argv[1:]
    # One viscosity for all: PDEBench's files do not contain parameters.
    films, _ = solve(EQUATION, count=72, frames=25, points=32, seed=0, ranges={"viscosity": (1e-2, 1e-2)})
    write_pdebench(path, {"vorticity": films[:, :, 0]}, interval=EQUATIONS[EQUATION].interval, length=2 * math.pi)
    print(f"{path}: {len(films)} trajectories")
