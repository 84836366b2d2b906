"""Compiles LLaVA-7B's second stage for slices of TPUs, and tells what it takes.

    JAX_PLATFORMS=cpu python results/prove_vlm/run.py

The dense model and p-MoD of `configs/vlm/llava.py`, fully rematerialised, on
slices of v5e and of v5p, one conversation a chip at a time. An interrupted call
goes on where it stopped. The table is written to `prove.csv` beside this
script.
"""

import pathlib
import shutil

from absl import app, flags

from mod_jax import config as config_lib
from mod_jax.prove import prove

_ONE_ROW = {'train.grad_accum_steps': 8}  # Of 128 conversations on 16 chips.
_HERE = pathlib.Path(__file__).resolve().parent
_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/prove_vlm', 'Keeps what is compiled.'
)
_RUNS = flags.DEFINE_list('runs', ['pmod', 'dense'], 'Which.')
_TOPOLOGIES = flags.DEFINE_list(
  'topologies', ['v5e:4x4', 'v5p:2x2x4'], 'Slices.'
)


def main(_):
  llava = config_lib.load(_HERE.parents[1] / 'configs' / 'vlm' / 'llava.py')
  variants = {'pmod': 'pmod', 'dense': ''}
  runs = [
    (name, config_lib.replace(llava.get_config(variants[name]), _ONE_ROW))
    for name in _RUNS.value
  ]
  workdir = pathlib.Path(_WORKDIR.value)
  prove.run(runs, _TOPOLOGIES.value, workdir)
  shutil.copy(workdir / 'prove.csv', _HERE / 'prove.csv')


if __name__ == '__main__':
  app.run(main)
