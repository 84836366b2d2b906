"""Trains a model, several, or continues: flags, then one library call."""

from absl import flags
import jax

from mod_jax import cli
from mod_jax.errors import UserError
from mod_jax.sweeps import grid
from mod_jax.sweeps import prove
from mod_jax.tasks import make_task
from mod_jax.tasks import phases
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import stop

_CONFIG = flags.DEFINE_string(
  'config',
  None,
  'File that builds the experiment, FILE.py[:variant]; --config.FIELD=VALUE'
  ' changes a field of it.',
)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.')
_SWEEP = flags.DEFINE_multi_string(
  'sweep',
  [],
  'Field and values, as in seed=0,1,2; given several times, all combinations'
  ' are trained one after another.',
)
_ALLOW_CHANGED_DATA = flags.DEFINE_bool(
  'allow_changed_data',
  False,
  'Continue even where the data are not those that the run began with.',
)
_FLOPS = flags.DEFINE_bool(
  'flops', False, "Print the model's FLOPs instead of training."
)
_COMPILE_FOR = flags.DEFINE_string(
  'compile_for',
  None,
  'Slice of TPUs, such as v5p:4x4x4, that need not be here: compile the step'
  ' for it and print what it takes, instead of training. A kind of chip alone,'
  ' v5e, stands for the smallest slice that the run fits on.',
)


def main(_):
  config = cli.load_config(_CONFIG.value, ExperimentConfig)
  if _FLOPS.value:
    print(make_task(config).flops_report())
    return
  if _COMPILE_FOR.value:
    print(prove.report(config, _COMPILE_FOR.value))
    return
  if not _WORKDIR.value:
    raise UserError('--workdir is missing: give the directory of the run.')
  axes = grid.parse(config, _SWEEP.value)
  cli.start_distributed()
  kwargs = {'allow_changed_data': _ALLOW_CHANGED_DATA.value}
  with stop.listening():
    if axes:
      points = grid.run(config, axes, _WORKDIR.value, **kwargs)
      if jax.process_index() == 0:
        print(grid.table(points))
    else:
      phases.train(config, _WORKDIR.value, **kwargs)


if __name__ == '__main__':
  cli.run(main)
