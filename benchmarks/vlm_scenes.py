"""Questions about scenes: dense, and fewer image tokens by several ways.

    python benchmarks/vlm_scenes.py --workdir=runs/vlm_scenes

For each seed a dense model first learns to name all digits of a scene. From
its weights, each model of `configs/vlm/scenes.py` is trained to answer
questions, with as many FLOPs as the dense one. FastV is also tried on the dense
model as it is, and a dense model of three blocks instead of four, which costs
about what p-MoD does, is trained in both phases. All are asked 2,000 questions
about held-out scenes, whose digits no training scene shows. Every run is a line
of `vlm_scenes.jsonl` beside this file; see `study.py`.

`--time` measures instead how long prompts of 16 rows take, in turn, and what
caches hold: `vlm_scenes.json`; see `vlm.py`.
"""

import contextlib

from absl import app, flags
import jax
import machine
from study import Study
import study_tables
import vlm

from mod_jax import config as config_lib
from mod_jax import flops, viz
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import evaluation
import results as results_lib

_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'Of each variant.')
_TIME = flags.DEFINE_bool('time', False, 'Only time prompts.')
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
  'DynamicViT in the tower': 'tower_dynamic',
  'EViT in the tower': 'tower_evit',
}
SHALLOW = ', 3 blocks'  # A dense twin with about the FLOPs of p-MoD.


def make_config(variant: str, seed: int, shallow: bool) -> ExperimentConfig:
  """Returns a run that takes the training FLOPs of the dense model."""
  scenes = machine.configs('vlm/scenes.py')
  changes = {'seed': seed, 'log.tensorboard': False}
  if variant != VARIANTS[FIRST]:
    first = _STUDY.workdir(f'{FIRST}{SHALLOW * shallow}/{seed}')
    changes['init'] = str(first.absolute())
  tiny = '_tiny' * _STUDY.tiny
  dense = scenes.get_config(tiny.lstrip('_'))
  config = scenes.get_config(f'{variant}{tiny}'.lstrip('_'))
  if shallow:
    changes['model.language.num_layers'] = dense.model.language.num_layers - 1
  config = config_lib.replace(config, changes)
  rows, length = dense.train.batch_size, length_of(dense)
  budget = rows * dense.train.num_steps * flops.train(dense.model, length)
  steps = flops.steps_within(budget, config.model, rows, length_of(config))
  return config_lib.replace(config, {'train.num_steps': steps})


def length_of(config: ExperimentConfig) -> int:
  """Returns the number of tokens of an example, image tokens included."""
  return make_task(config).modality.length[0]


def tell(config: ExperimentConfig, metrics: dict) -> dict:
  """Returns the result of a run."""
  length = length_of(config)
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
  dense, config = (make_config(x, seed, False) for x in ('', 'fastv'))
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


def time_prompts() -> None:
  """Times the models that have results, and records what their caches hold."""
  known = study_tables.by_model(_STUDY.results())
  models = {
    name: config
    for name, config in of_seed(0).items()
    if name in known and not name.startswith(FIRST)
  }
  text = models['dense'].data.length
  configs = {name: config.model for name, config in models.items()}
  with contextlib.ExitStack() as stack:
    found, _ = vlm.measure(configs, 16, text, 40, stack)
  trial = str(_STUDY.workdir('')) if _STUDY.tiny else None
  results_lib.save(__file__, {'text': text, **found}, trial)


def draw(found: dict[str, dict]):
  """Returns a picture of accuracy over compute."""
  points = []
  for name, of_seed in study_tables.by_model(found).items():
    runs = list(of_seed.values())
    if not name.startswith(FIRST):
      accuracy = machine.spread([run['accuracy'] for run in runs])
      cost = runs[0]['forward_flops'] / 1e6
      points.append(machine.point(name, name, cost, accuracy))
  return viz.accuracy_flops(
    points,
    title='Questions about scenes: right answers over compute',
    xlabel='MFLOPs (multiply-add = 2) of a forward pass over one question',
  )


def of_seed(seed: int) -> dict[str, ExperimentConfig]:
  """Returns all that is trained, by name, in this order."""
  return {
    f'{name}{SHALLOW * shallow}': make_config(variant, seed, shallow)
    for shallow in (False, True)
    for name, variant in VARIANTS.items()
    if not shallow or name in (FIRST, 'dense')
  }


def main(_):
  if _TIME.value:
    time_prompts()
    return
  seeds = [int(seed) for seed in _SEEDS.value]
  planned = {  # A seed after the other, so that the first are comparable.
    f'{name}/{seed}': config
    for seed in seeds
    for name, config in of_seed(seed).items()
  }
  _STUDY.train(planned, tell)
  if not _STUDY.only_table:
    for seed in seeds:
      try_fastv(seed)
  found = _STUDY.results()
  print(study_tables.pictures_asked(found))
  print(study_tables.kinds_asked(found))
  viz.save(draw(found), _STUDY.path('.png'))


if __name__ == '__main__':
  app.run(main)
