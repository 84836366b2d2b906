"""Class weights and balanced sampling on real pictures of unequal classes.

    apt-get download openclipart-png && dpkg -x openclipart-png_*.deb clipart
    python benchmarks/openclipart.py --data=clipart/usr/share/openclipart/png

The pictures are those of `clipart.py`. `configs/vit/folder.py` is trained on
them from scratch, with patches of 16 pixels: as it is, with class weights, and
with balanced sampling, each with three seeds. Every run is a line of
`openclipart.jsonl` beside this file; see `study.py`. The table shows the seeds
that all variants have.
"""

import pathlib

from absl import app, flags
import clipart
import machine
from study import Study
import study_tables

from mod_jax import config as config_lib
from mod_jax.tasks.experiment import ExperimentConfig

_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'Of each variant.')
_EPOCHS = flags.DEFINE_float('epochs', 10, 'Passes over the pictures.')
_STUDY = Study(__file__, 'runs/openclipart')

VARIANTS = {
  'plain': {},
  'class weights': {'data.class_weights': 'balanced'},
  'balanced sampling': {'data.sampling': 'balanced'},
}


def make_config(pictures: pathlib.Path, changes, seed: int) -> ExperimentConfig:
  """Returns a run of the folder's config."""
  folder = machine.configs('vit/folder.py')
  config = config_lib.replace(
    folder.get_config('dense'), {'data.path': str(pictures)}
  )
  # A quarter of the patches: nine runs take about an hour on two cores.
  length = {'train.num_epochs': _EPOCHS.value, 'model.patch_size': 16}
  if _STUDY.tiny:
    length = {
      **{'model.num_layers': 1, 'model.width': 16, 'model.num_heads': 2},
      **{'train.num_steps': 4, 'evaluation.batches': 1},
      'evaluation.final_batches': 2,
    }
  return config_lib.replace(
    folder.complete(config),
    {'seed': seed, 'log.tensorboard': False, **length, **changes},
  )


def tell(config: ExperimentConfig, metrics: dict) -> dict:
  """Returns the result of a run."""
  names = ('accuracy', 'mean_recall', 'loss')
  return {
    **{name: metrics[name] for name in names},
    'epochs': config.train.num_epochs,
    'batch': config.train.batch_size,
  }


def main(_):
  if not _STUDY.only_table:
    pictures = _STUDY.workdir('pictures')
    clipart.prepare(pictures)
    planned = {
      f'{name}/{seed}': make_config(pictures.absolute(), changes, int(seed))
      for name, changes in VARIANTS.items()
      for seed in _SEEDS.value
    }
    _STUDY.train(planned, tell)
  print(study_tables.imbalance(_STUDY.results()))


if __name__ == '__main__':
  app.run(main)
