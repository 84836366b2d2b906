"""Compiles recipes for pictures, for a GPU and a slice of TPUs.

    PYTHONPATH=.venv/cuda JAX_PLATFORMS=cpu python results/prove_vision/run.py

The recipes of ImageNet and COCO, each beside its dense twin, at their batches:
on one H100, which takes what `make test-slow` installs in `.venv/cuda`, and on
eight chips of v5e, which takes libtpu. Each takes one to several minutes on one
core, COCO on a GPU twenty. An interrupted call goes on where it stopped. The
table is written to `prove.csv` beside this script.
"""

import pathlib
import shutil

from absl import app, flags

from mod_jax import config as config_lib
from mod_jax.prove import prove

_HERE = pathlib.Path(__file__).resolve().parent
_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/prove_vision', 'Keeps what is compiled.'
)
_TOPOLOGIES = flags.DEFINE_list('topologies', ['h100:1', 'v5e:2x4'], 'Where.')
# Config files, and the variants of each.
_RECIPES = {
  'vit/imagenet.py': ('deit_small', 'vit_base', 'vit_large'),
  'detection/coco.py': ('amod',),
}


def main(_):
  configs = _HERE.parents[1] / 'configs'
  runs = [
    (f'{path}:{name}', config_lib.load(configs / path).get_config(name))
    for path, names in _RECIPES.items()
    for name in names
  ]
  workdir = pathlib.Path(_WORKDIR.value)
  prove.run(runs, _TOPOLOGIES.value, workdir)
  shutil.copy(workdir / 'prove.csv', _HERE / 'prove.csv')


if __name__ == '__main__':
  app.run(main)
