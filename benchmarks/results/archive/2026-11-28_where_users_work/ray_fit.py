import os

import lightning as L
import ray
import ray.train.lightning as ray_lightning
from blocks import Blocks, Varying
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from lightning_ups.callbacks import ActivationCheckpoint, Compile, RunManifest
from lightning_ups.precision import BF16Precision


def train():
    trainer = L.Trainer(
        accelerator="cpu",
        devices="auto",
        max_epochs=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=ray_lightning.RayDDPStrategy(),
        plugins=[ray_lightning.RayLightningEnvironment(), BF16Precision()],
        callbacks=[
            Compile(backend="aot_eager"),
            ActivationCheckpoint(save="matmuls"),
            RunManifest(),
            ray_lightning.RayTrainReportCallback(),
        ],
        enable_checkpointing=False,
    )
    trainer = ray_lightning.prepare_trainer(trainer)
    trainer.fit(Blocks(), Varying())


if __name__ == "__main__":
    ray.init(num_cpus=3, include_dashboard=False)
    result = TorchTrainer(
        train, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=os.path.abspath("ray"))
    ).fit()
    print("metrics:", result.metrics)
