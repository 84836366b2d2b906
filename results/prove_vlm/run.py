"""Compiles LLaVA-7B's second stage for slices of TPUs, and tells what it takes.

    JAX_PLATFORMS=cpu python results/prove_vlm/run.py

The dense model and p-MoD of `configs/vlm/llava.py`, fully rematerialised, on 16
chips of v5p and of v5e, whose smaller memory also needs weights split over
hidden units and heads (`mesh.tensor`). An interrupted call goes on where it
stopped. Tables are written beside this script, one for each kind of chip.
"""

import pathlib
import shutil

from absl import app, flags

from mod_jax import config as config_lib
from mod_jax.prove import prove

_HERE = pathlib.Path(__file__).resolve().parent
_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/prove_vlm', 'Keeps what is compiled.'
)
_RUNS = flags.DEFINE_list('runs', ['dense', 'pmod'], 'Which models.')
_SLICES = {
  'v5p:2x2x4': {},
  'v5e:4x4': {'mesh.fsdp': 4, 'mesh.tensor': 4},
}
_TOPOLOGIES = flags.DEFINE_list('topologies', list(_SLICES), 'Slices.')


def main(_):
  llava = config_lib.load(_HERE.parents[1] / 'configs' / 'vlm' / 'llava.py')
  variants = {'dense': '', 'pmod': 'pmod'}
  for topology in _TOPOLOGIES.value:
    # Of 128 conversations, 16 at a time.
    changes = {'train.grad_accum_steps': 8, **_SLICES[topology]}
    runs = [
      (name, config_lib.replace(llava.get_config(variants[name]), changes))
      for name in _RUNS.value
    ]
    kind = topology.partition(':')[0]
    workdir = pathlib.Path(_WORKDIR.value, kind)
    prove.run(runs, [topology], workdir)
    shutil.copy(workdir / 'prove.csv', _HERE / f'{kind}.csv')


if __name__ == '__main__':
  app.run(main)
