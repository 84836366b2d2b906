"""Compiles the paper's models for slices of TPUs, and tells what they take.

    JAX_PLATFORMS=cpu python results/prove_paper/run.py
    JAX_PLATFORMS=cpu python results/prove_paper/run.py --remedies

Every size, dense and MoD, on 16 and 256 chips of v5e and on 64 of v5p: 24
compilations of one to several minutes on one core. An interrupted call goes on
where it stopped. The table is written to `prove.csv` beside this script.

With `--remedies`, what settings alone can do where the network is the bound:
the largest model on 256 chips with other meshes and rematerialisation, in
`remedies.csv`.
"""

import pathlib
import shutil

from absl import app
from absl import flags

from mod_jax import config as config_lib
from mod_jax.sweeps import prove

_HERE = pathlib.Path(__file__).resolve().parent
_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/prove_paper', 'Keeps what is compiled.'
)
_REMEDIES = flags.DEFINE_bool('remedies', False, 'Other settings instead.')
_TOPOLOGIES = ('v5e:4x4', 'v5p:4x4x4', 'v5e:16x16')
# What is changed in the 3B model, by name.
_CHANGES = {
  'fsdp_8': {'mesh.fsdp': 8, 'mesh.tensor': 2},
  'fsdp_4': {'mesh.fsdp': 4, 'mesh.tensor': 2},
  'fsdp_2': {'mesh.fsdp': 2, 'mesh.tensor': 2},
  'no_remat': {'model.remat': 'none'},
}


def main(_):
  paper = config_lib.load(_HERE.parents[1] / 'configs' / 'lm' / 'paper.py')
  workdir = pathlib.Path(_WORKDIR.value)
  if _REMEDIES.value:
    runs = [
      (name, config_lib.replace(paper.get_config('3b'), changes))
      for name, changes in _CHANGES.items()
    ]
    name, topologies = 'remedies.csv', ['v5e:16x16']
  else:
    names = [name for size in paper.SIZES for name in (size, f'{size}_dense')]
    runs = [(name, paper.get_config(name)) for name in names]
    name, topologies = 'prove.csv', _TOPOLOGIES
  prove.run(runs, topologies, workdir)
  shutil.copy(workdir / 'prove.csv', _HERE / name)


if __name__ == '__main__':
  app.run(main)
