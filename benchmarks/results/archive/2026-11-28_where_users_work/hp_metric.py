from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

for path in Path("logs").rglob("events*"):
    events = EventAccumulator(str(path)).Reload()
    print(
        "hp_metric:",
        [point.value for name in events.Tags()["scalars"] if name == "hp_metric" for point in events.Scalars(name)],
    )
