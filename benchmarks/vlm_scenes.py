"""Questions about scenes: dense, and fewer image tokens by several ways.

    python benchmarks/vlm_scenes.py --workdir=runs/vlm_scenes

For each seed a dense model first learns to name all digits of a scene. From
its weights, each model of `configs/vlm/scenes.py` is trained to answer
questions, for as many steps; FastV is also tried on the dense model as it is.
All are asked 2,000 questions about held-out scenes, whose digits no training
scene shows. Every run is a line of `vlm_scenes.jsonl` beside this file; see
`study.py`.
"""

from absl import app, flags
import jax
import machine
from study import Study
import study_tables

from mod_jax import config as config_lib
from mod_jax import flops, viz
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import evaluation

_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'Of each variant.')
_STUDY = Study(__file__, 'runs/vlm_scenes')

FIRST, UNTRAINED = 'captions', 'FastV, not trained with'
VARIANTS = {
  FIRST: 'captions',
  'dense': '',
  'p-MoD': 'pmod',
  'γ-MoD': 'gamma',
  '2 × 2 pooling': 'pooled',
  'FastV': 'fastv',
  'random tokens': 'random',
  'every n-th token': 'stride',
  'A-MoD in the tower': 'tower_amod',
  'EViT in the tower': 'tower_evit',
}


def make_config(variant: str, seed: int) -> ExperimentConfig:
  scenes = machine.configs('vlm/scenes.py')
  changes = {'seed': seed, 'log.tensorboard': False}
  if variant != VARIANTS[FIRST]:
    first = _STUDY.workdir(f'{FIRST}/{seed}')
    changes['init'] = str(first.absolute())
  if _STUDY.tiny:
    variant = f'{variant}_tiny'.lstrip('_')
  return config_lib.replace(scenes.get_config(variant), changes)


def tell(config: ExperimentConfig, metrics: dict) -> dict:
  """Returns the result of a run."""
  length = make_task(config).modality.length[0]
  names = ('loss', 'accuracy', 'routed')
  names += tuple(f'accuracy/{topic}' for topic in config.data.topics)
  rows = config.train.batch_size * config.train.num_steps
  return {
    **{name: metrics[name] for name in names if name in metrics},
    'forward_flops': flops.forward(config.model, length),
    'train_flops': flops.train(config.model, length) * rows,
    'image_tokens': config.model.num_patches,
    'params': flops.num_params(config.model),
    'steps': config.train.num_steps,
    'batch': config.train.batch_size,
  }


def try_fastv(seed: int) -> None:
  """Records FastV on a dense model that was trained without."""
  name = f'{UNTRAINED}/{seed}'
  found = _STUDY.results()
  if name in found or f'dense/{seed}' not in found:
    return
  dense, config = (make_config(x, seed) for x in ('', 'fastv'))
  workdir = _STUDY.workdir(f'dense/{seed}')
  dense = config_lib.replace(dense, {'name': f'dense/{seed}'})
  trained = evaluation.load(make_task(dense), workdir)
  with jax.set_mesh(trained.mesh):
    metrics = evaluation.held_out(
      *(make_task(config), trained.params, trained.model_state, trained.mesh),
      batches=config.evaluation.final_batches,
    )
  result = tell(config, metrics)
  _STUDY.record(name, result | {'train_flops': 0, 'steps': 0})


def draw(found: dict[str, dict]):
  """Returns a picture of accuracy over compute."""
  points = []
  for name, of_seed in study_tables.by_model(found).items():
    runs = list(of_seed.values())
    if name != FIRST:
      accuracy = machine.spread([run['accuracy'] for run in runs])
      cost = runs[0]['forward_flops'] / 1e6
      points.append(machine.point(name, '', cost, accuracy))
  return viz.accuracy_flops(
    points,
    title='Questions about scenes: right answers over compute',
    xlabel='MFLOPs (multiply-add = 2) of a forward pass over one question',
  )


def main(_):
  seeds = [int(seed) for seed in _SEEDS.value]
  planned = {  # A seed after the other, so that the first are comparable.
    f'{name}/{seed}': make_config(variant, seed)
    for seed in seeds
    for name, variant in VARIANTS.items()
  }
  _STUDY.train(planned, tell)
  if not _STUDY.only_table:
    for seed in seeds:
      try_fastv(seed)
  found = _STUDY.results()
  print(study_tables.pictures_asked(found))
  viz.save(draw(found), _STUDY.path('.png'))


if __name__ == '__main__':
  app.run(main)
