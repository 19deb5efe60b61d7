"""Write notebooks from lists of cells."""

import nbformat as nbf

ONE = """import lightning as L
import torch
from lightning_ups.callbacks import TrainingReport
from net import Data, Net

report = TrainingReport()
trainer = L.Trainer(strategy="fsdp2", accelerator="cpu", devices=%s, max_epochs=2, callbacks=[report])
trainer.fit(Net(), Data())"""
SHOW = """from IPython.display import HTML
HTML(filename=report.path)"""
IMPORT = "import lightning_ups\n"
for name, devices, last in (("one", 1, SHOW), ("two", 2, None)):
    cells = [IMPORT + ONE % devices] + ([last] if last else [])
    book = nbf.v4.new_notebook(cells=[nbf.v4.new_code_cell(cell) for cell in cells])
    nbf.write(book, f"{name}.ipynb")
