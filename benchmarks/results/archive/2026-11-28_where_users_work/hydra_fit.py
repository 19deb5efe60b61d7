import hydra
from blocks import Blocks, Varying


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config):
    callbacks = [hydra.utils.instantiate(each) for each in config.callbacks.values()]
    trainer = hydra.utils.instantiate(config.trainer, callbacks=callbacks)
    trainer.fit(Blocks(), Varying())
    print("steps:", trainer.global_step)


main()
