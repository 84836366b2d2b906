"""Trains a model, or several, or continues a run.

  python train.py --config=configs/lm/mod.py --workdir=runs/mod
  python train.py --config=configs/vit/digits.py:amod --workdir=runs/amod \\
    --config.model.routing.capacity=0.25 --sweep=seed=0,1,2

Where the package is installed, `mod-jax-train` is the same command; config
files that are not found here are taken from the installed package.

--config=FILE.py:VARIANT is a file that builds an experiment, and the name of
  one of its variants; without a name, the file's default.
--config.FIELD=VALUE changes a field of it, as in --config.train.num_steps=100.
--config=FILE.py --describe lists the variants of a file, and all fields with
  their values, types and meanings.
--distributed joins the other hosts of a run. Start the same command on each of
  them; on TPU pods and under Slurm the hosts find each other, elsewhere set
  JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.

The same command continues a run that was interrupted.
"""

import functools

from absl import flags
import jax

from mod_jax import cli, config_docs
from mod_jax.errors import UserError
from mod_jax.prove import prove
from mod_jax.runs import stop
from mod_jax.sweeps import grid
from mod_jax.tasks import make_task, phases
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import profile as profile_lib

# Flags that a sweep does not support.
_OF_SINGLE_RUNS = (
  *('describe', 'flops', 'compile_for', 'profile', 'allow_changed_config'),
)


def define_flags() -> None:
  flags.DEFINE_string(
    'config',
    None,
    'File that builds the experiment, FILE.py[:variant]; --config.FIELD=VALUE'
    ' changes a field of it.',
  )
  flags.DEFINE_string('workdir', None, 'Directory of the run.')
  flags.DEFINE_multi_string(
    'sweep',
    [],
    'Field and values, as in seed=0,1,2; of several fields, all combinations'
    ' are trained one after another',
  )
  flags.DEFINE_bool(
    'allow_changed_data',
    False,
    'Continue even where the data are not those that the run began with.',
  )
  flags.DEFINE_bool(
    'allow_changed_config',
    False,
    'Continue with other steps, learning rates or capacities than those that'
    ' the run began with: so a run is lengthened.',
  )
  flags.DEFINE_string(
    'profile',
    None,
    'Steps to trace, FROM:TO, for TensorBoard and https://ui.perfetto.dev.',
  )
  flags.DEFINE_bool(
    'describe',
    False,
    "List the config's variants and fields instead of training.",
  )
  flags.DEFINE_bool(
    'flops', False, "Print the model's FLOPs instead of training."
  )
  flags.DEFINE_string(
    'compile_for',
    None,
    'Slice of TPUs or number of GPUs, such as v5p:4x4x4 or h100:8, that need'
    ' not be here: compile the step for it and print what it takes, instead of'
    ' training. A kind of chip alone, v5e, stands for the smallest slice that'
    ' the run fits on. What is found is kept in WORKDIR/prove if there is a'
    ' --workdir.',
  )


def main(_) -> None:
  """Trains, or prints a description of the run, as the flags say."""
  args = flags.FLAGS
  for name in _OF_SINGLE_RUNS:
    if args.sweep and args[name].value:
      raise UserError(
        f'--{name} and --sweep: the first is for a single run, so leave one'
        ' out.'
      )
  build = functools.partial(cli.load_config, args.config, ExperimentConfig)
  config = build(complete=not args.describe)
  if args.describe:
    print(config_docs.page(cli.config_file(args.config), config))
    return
  if args.flops:
    print(make_task(config).flops_report())
    return
  if args.compile_for:
    cache = args.workdir and f'{args.workdir}/prove'
    print(prove.report(config, args.compile_for, cache))
    return
  if not args.workdir:
    raise UserError('--workdir is missing: give the directory of the run.')
  axes = grid.parse(config, args.sweep)
  profile = None
  if args.profile is not None:
    profile = profile_lib.parse(args.profile)
  cli.start_backend()
  kwargs = {'allow_changed_data': args.allow_changed_data}
  with stop.listening():
    if axes:
      points = grid.run(
        *(config, axes, args.workdir),
        build=lambda changes: build(changes=changes),
        **kwargs,
      )
      if jax.process_index() == 0:
        print(grid.table(points))
    else:
      kwargs['allow_changed_config'] = args.allow_changed_config
      phases.train(config, args.workdir, profile=profile, **kwargs)


def run() -> None:
  """Entry point of the console command."""
  define_flags()
  cli.run(main)
