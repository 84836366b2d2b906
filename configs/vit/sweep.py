"""Short fine-tuning runs to find a learning rate, by `train.py --sweep`.

    python train.py --config=configs/vit/sweep.py --workdir=runs/sweep \\
      --config.init=deit_small_patch16_224.safetensors \\
      --sweep=optimizer.learning_rate=3e-6,1e-5,3e-5,1e-4

The variants are those of `configs/vit/imagenet.py`, with ten epochs.
"""

from mod_jax import config as config_lib
from mod_jax.tasks.experiment import ExperimentConfig

imagenet = config_lib.sibling(__file__, 'imagenet')
EPOCHS = 10


def shortened(experiment: ExperimentConfig) -> ExperimentConfig:
  """Returns a run with a tenth of the epochs, evaluated at the end only."""
  steps = imagenet.num_steps(EPOCHS, experiment.train.batch_size)
  return config_lib.replace(
    experiment,
    {
      'name': f'{experiment.name}_sweep',
      'train.num_steps': steps,
      'evaluation.every': 0,
    },
  )


VARIANTS = {
  name: lambda make=make: shortened(make())
  for name, make in imagenet.FULL.items()
}
VARIANTS['tiny'] = lambda: imagenet.digits.tiny(VARIANTS['']())

get_config = config_lib.config_getter(VARIANTS)
