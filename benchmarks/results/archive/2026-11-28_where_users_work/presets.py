"""Fit, validate, test and predict under each preset, with batches of several shapes."""

from lightning_ups.cli import main

for preset in ("cpu", "a100", "h100", "memory", "h200-fp8"):
    for command in ("fit", "validate", "test", "predict"):
        try:
            main([command, "--config=presets.yaml", f"--preset={preset}"])
            outcome = "done"
        except Exception as error:  # noqa: BLE001
            outcome = f"{type(error).__name__}: {error}"
        print(f"RESULT {preset} {command}: {outcome}", flush=True)
