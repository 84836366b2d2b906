"""Detection on scenes from nothing: dense, and routed at 50%.

    python benchmarks/detection_scenes.py --workdir=runs/detection_scenes

Each variant of `configs/detection/scenes.py` is trained with several seeds, as
many steps as the dense one, and evaluated on all 1,000 held-out scenes, whose
digits no training scene shows. Every run is a line of `detection_scenes.jsonl`
beside this file; see `study.py`.
"""

from absl import app, flags
import machine
from study import Study
import study_tables

from mod_jax import config as config_lib
from mod_jax import flops
from mod_jax.tasks.experiment import ExperimentConfig

_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'Of each variant.')
_STUDY = Study(__file__, 'runs/detection_scenes')

VARIANTS = {'dense': '', 'A-MoD 50%': 'amod', 'MoD 50%': 'mod'}


def make_config(variant: str, seed: int) -> ExperimentConfig:
  scenes = machine.configs('detection/scenes.py')
  if _STUDY.tiny:
    variant = f'{variant}_tiny'.lstrip('_')
  changes = {'seed': seed, 'log.tensorboard': False}
  return config_lib.replace(scenes.get_config(variant), changes)


def tell(config: ExperimentConfig, metrics: dict) -> dict:
  """Returns the result of a run."""
  return {
    **{name: metrics[name] for name in ('mAP50', 'mAP', 'loss')},
    'forward_flops': flops.forward(config.model),
    'params': flops.num_params(config.model),
    'steps': config.train.num_steps,
    'batch': config.train.batch_size,
  }


def main(_):
  planned = {  # A seed after the other, so that the first are comparable.
    f'{name}/{seed}': make_config(variant, int(seed))
    for seed in _SEEDS.value
    for name, variant in VARIANTS.items()
  }
  _STUDY.train(planned, tell)
  print(study_tables.detection(_STUDY.results()))


if __name__ == '__main__':
  app.run(main)
