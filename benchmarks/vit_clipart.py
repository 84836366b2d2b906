"""Methods that skip work, on real pictures: accuracy and cost.

    python benchmarks/vit_clipart.py --data=clipart/usr/share/openclipart/png

The pictures are those of `clipart.py`, which says how to get them. The models
are those of `vit_scenes.py`, which see crops of 64 pixels; all are trained for
twice as many steps. What there is is said in `vit_methods.py`. Every run is a
line of `vit_clipart.jsonl` beside this file; see `study.py`.
"""

import dataclasses
import functools

from absl import app, flags
import clipart
import machine
from study import Study
import vit_methods

from mod_jax import config as config_lib
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.tasks.experiment import ExperimentConfig

_STUDY = Study(__file__, 'runs/vit_clipart')
_SEEDS = flags.DEFINE_list('seeds', [*'01234'], 'A dense run for each.')


@functools.cache
def variant(name: str) -> ExperimentConfig:
  """Returns a variant of `configs/vit/scenes.py` on these pictures."""
  scenes = vit_methods.of_scenes(name, _STUDY.tiny)
  pictures = _STUDY.workdir('pictures').absolute()
  data = dataclasses.replace(
    machine.configs('vit/folder.py').get_config('dense').data,
    path=str(pictures),
    image_size=scenes.data.image_size,
  )
  pruned = isinstance(scenes.model, DynamicViTConfig)
  model = 'model.backbone' if pruned else 'model'
  changes = {
    'data': data,
    f'{model}.num_classes': len([*(pictures / 'train').iterdir()]),
  }
  if not _STUDY.tiny:
    changes['train.num_steps'] = 2 * scenes.train.num_steps
  return config_lib.replace(scenes, changes)


def main(_):
  if not _STUDY.only_table:
    clipart.prepare(_STUDY.workdir('pictures'))
  vit_methods.Methods(
    _STUDY, variant, 'Open Clip Art, by methods that skip work'
  ).run(_SEEDS.value)


if __name__ == '__main__':
  app.run(main)
