"""Trains a model, or continues a run: flags, then one library call."""

from absl import flags
from ml_collections import config_flags

from mod_jax import cli
from mod_jax import flops
from mod_jax.errors import UserError
from mod_jax.train import loop
from mod_jax.train.experiment import ExperimentConfig

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'File that builds the experiment, FILE.py[:variant].'
)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.')
_FLOPS = flags.DEFINE_bool(
  'flops', False, "Print the model's FLOPs instead of training."
)


def main(_):
  config = cli.load_config(_CONFIG.value, ExperimentConfig)
  if _FLOPS.value:
    print(flops.report(config.model, config.data.length))
    return
  if not _WORKDIR.value:
    raise UserError('--workdir is missing: give the directory of the run.')
  cli.start_distributed()
  loop.train(config, _WORKDIR.value)


if __name__ == '__main__':
  cli.run(main)
