"""Methods that skip work, on scenes of digits among clutter: accuracy and cost.

    python benchmarks/vit_scenes.py --workdir=runs/vit_scenes

The models name the largest digit of a scene (`configs/vit/scenes.py:quick`).
Which there are is said in `vit_methods.py`. Every run is a line of
`vit_scenes.jsonl` beside this file; see `study.py`.
"""

import functools

from absl import app, flags
from study import Study
import vit_methods

_STUDY = Study(__file__, 'runs/vit_scenes')
_SEEDS = flags.DEFINE_list('seeds', [*'01234'], 'A dense run for each.')


def main(_):
  vit_methods.Methods(
    _STUDY,
    functools.partial(vit_methods.of_scenes, tiny=_STUDY.tiny),
    'Scenes: the largest digit, by methods that skip work',
  ).run(_SEEDS.value)


if __name__ == '__main__':
  app.run(main)
