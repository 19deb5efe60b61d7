"""Print figures of how easy it is to find one's way in the package: ``python tests/count_house.py [--root PATH]``."""

import argparse
import ast
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
MOST_ARGUMENTS, MOST_ENTERED = 12, 45
OTHERS = ("torch", "lightning", "pytorch_lightning", "torchao", "transformer_engine", "transformers", "triton")
FIT = """
import json, os, sys
from pathlib import Path
entered = set()
sys.setprofile(lambda frame, event, _: entered.add(frame.f_code.co_filename) if event == "call" else None)
import lightning_ups
sys.setprofile(None)
package = Path(lightning_ups.__file__).parent
import torch
from torch import nn
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from lightning_ups.callbacks import ActivationCheckpoint, Compile
from lightning_ups.precision import Float8Precision

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2)))

    def training_step(self, batch, _):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

trainer = Trainer(
    accelerator="cpu", devices=1, strategy="fsdp2", max_steps=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
    plugins=[Float8Precision(emulate=True)], callbacks=[Compile(), ActivationCheckpoint()],
)
module, loader = Module(), DataLoader(torch.randn(64, 32), batch_size=16)
entered.clear()
def note(frame, event, _):
    if event == "call" and frame.f_code.co_name != "<module>":  # imports are not part of the fit
        entered.add(frame.f_code.co_filename)
sys.setprofile(note)
trainer.fit(module, loader)
sys.setprofile(None)
ours = sorted(str(Path(name).relative_to(package)) for name in entered if name.startswith(str(package)))
Path(sys.argv[1]).write_text(json.dumps(ours))
"""


def sources(root):
    """Return the path, text and tree of each file of the package, by its path within the package."""
    package = root / "lightning_ups"
    texts = {path.relative_to(package): path.read_text() for path in sorted(package.rglob("*.py"))}
    return {path: (text, ast.parse(text)) for path, text in texts.items()}


def rooms(files):
    """Return the number of files and lines of each room."""
    counted = {}
    for path, (text, _) in files.items():
        room = path.parts[0] if len(path.parts) > 1 else "(top)"
        count, lines = counted.get(room, (0, 0))
        counted[room] = count + 1, lines + len(text.splitlines())
    return counted


def patches(files):
    """Return the number of rows of the register of patches, or None if there is no register."""
    _, tree = files.get(Path("_compat/patches.py"), (None, ast.Module([], [])))
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id in ("PURPOSES", "PATCHES") for target in targets):
            return sum(len(each.keys) for each in ast.walk(node.value) if isinstance(each, ast.Dict))
    return None


def private_names(files):
    """Return imports of private names of other packages outside of ``_compat``."""

    def is_private(name):
        return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))

    found = []
    for path, (_, tree) in files.items():
        for node in ast.walk(tree) if path.parts[0] != "_compat" else ():
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            else:
                continue
            found += [f"{path}: {name}" for name in names if name.split(".")[0] in OTHERS and is_private(name)]
    return found


def getattr_with_string(files):
    """Return how many calls of ``getattr`` and ``hasattr`` name their attribute by a string."""
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"getattr", "hasattr"}
        and isinstance(node.args[1], ast.Constant)
        for _, tree in files.values()
        for node in ast.walk(tree)
    )


def stateful_globals(files):
    """Return how many names of modules are bound to state, by the rule of ``test_module_state.py``."""
    spec = importlib.util.spec_from_file_location("module_state", HERE / "test_module_state.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return sum(len(module.state_of(tree)) for _, tree in files.values())


def constructors(files):
    """Return the number of arguments of each constructor of a public class, largest first."""
    counted = {
        f"{path}:{node.name}": len(each.args.args) - 1 + len(each.args.kwonlyargs)
        for path, (_, tree) in files.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.name == "__init__"
    }
    return dict(sorted(counted.items(), key=lambda item: -item[1]))


def entered_by_a_fit(root):
    """Return the files of the package whose functions a fit on one CPU enters."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "entered.json")
        subprocess.run(
            [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{FIT}", answer],
            check=True,
            capture_output=True,
            cwd=folder,
        )
        return json.loads(answer.read_text())


def walk_throughs(root):
    """Return how many files ``CONTRIBUTING.md`` says that each walk-through opens."""
    path = root / "CONTRIBUTING.md"
    sections = path.read_text().split("\n## ")[1:] if path.exists() else []
    opened = {section.splitlines()[0]: re.search(r"Open (\w+) files", section) for section in sections}
    return {title: match[1] for title, match in opened.items() if match}


def table(root, *, fit=True):
    """Return the rows of the table: what is counted, and its figure."""
    files = sources(root)
    counted = rooms(files)
    rows = [(f"{room}: files, lines", f"{count}, {lines}") for room, (count, lines) in sorted(counted.items())]
    rows.append(("package: files, lines", ", ".join(str(sum(part)) for part in zip(*counted.values(), strict=True))))
    rows.append(("patches in the register", "no register" if patches(files) is None else patches(files)))
    rows.append(("private names of other packages outside `_compat`", len(private_names(files))))
    rows.append(("`getattr` and `hasattr` with a string", getattr_with_string(files)))
    rows.append(("stateful globals of modules", stateful_globals(files)))
    sizes = constructors(files)
    over = [f"{name.split(':')[1]} {size}" for name, size in sizes.items() if size > MOST_ARGUMENTS]
    rows.append(("arguments of a public constructor, at most", max(sizes.values())))
    rows.append((f"public constructors with more than {MOST_ARGUMENTS} arguments", ", ".join(over) or "none"))
    if fit:
        rows.append((f"files entered by a fit (aim: {MOST_ENTERED})", len(entered_by_a_fit(root))))
    rows += [(f"files opened: {title}", number) for title, number in walk_throughs(root).items()]
    tests = [path.read_text() for path in (root / "tests").rglob("*.py")]
    return [*rows, ("tests: lines", sum(len(text.splitlines()) for text in tests))]


def main():
    """Print the table of one checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=HERE.parent, help="a checkout, possibly of an old commit")
    parser.add_argument("--no-fit", action="store_true", help="leave out the files that a fit enters")
    arguments = parser.parse_args()
    rows = table(arguments.root.resolve(), fit=not arguments.no_fit)
    lines = ["| figure | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
