"""Compiles the paper's models for slices of TPUs, and tells what they take.

    JAX_PLATFORMS=cpu python benchmarks/prove_paper.py

Every size, dense and MoD, on 16 and 256 chips of v5e and on 64 of v5p: 24
compilations of one to several minutes on one core. An interrupted call goes on
where it stopped. The table is written to `results/prove_paper/prove.csv`.
"""

import pathlib
import shutil

from absl import app
from absl import flags

from mod_jax import config as config_lib
from mod_jax.sweeps import prove

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/prove_paper', 'Keeps what is compiled.'
)
_TOPOLOGIES = ('v5e:4x4', 'v5p:4x4x4', 'v5e:16x16')


def main(_):
  paper = config_lib.load(_ROOT / 'configs' / 'lm' / 'paper.py')
  names = [name for size in paper.SIZES for name in (size, f'{size}_dense')]
  runs = [(name, paper.get_config(name)) for name in names]
  prove.run(runs, _TOPOLOGIES, _WORKDIR.value)
  results = _ROOT / 'results' / 'prove_paper'
  results.mkdir(parents=True, exist_ok=True)
  shutil.copy(pathlib.Path(_WORKDIR.value) / 'prove.csv', results)


if __name__ == '__main__':
  app.run(main)
