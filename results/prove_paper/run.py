"""Compiles the paper's models for slices of TPUs, and tells what they take.

    JAX_PLATFORMS=cpu python results/prove_paper/run.py
    JAX_PLATFORMS=cpu python results/prove_paper/run.py --remedies

Four sizes, dense and MoD, fully rematerialised, on 16 and 256 chips of v5e and
on 64 of v5p: 24 compilations of one to several minutes on one core. An
interrupted call goes on where it stopped. The table is written to `prove.csv`
beside this script; then it is checked that a routed step communicates as its
dense twin's.

With `--remedies`, what settings alone can do where the network is the bound:
the largest model on 256 chips with other meshes and rematerialisation, in
`remedies.csv`.
"""

import json
import math
import pathlib
import shutil

from absl import app, flags

from mod_jax import config as config_lib
from mod_jax.prove import prove

_HERE = pathlib.Path(__file__).resolve().parent
_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/prove_paper', 'Keeps what is compiled.'
)
_REMEDIES = flags.DEFINE_bool('remedies', False, 'Other settings instead.')
_SIZES = ('60m', '220m', '670m', '3b')
_TOPOLOGIES = ('v5e:4x4', 'v5p:4x4x4', 'v5e:16x16')
# What is changed in the 3B model, by name.
_CHANGES = {
  'fsdp_4': {'mesh.fsdp': 4, 'mesh.tensor': 2},
  'no_remat': {'model.remat': 'none'},
  'fsdp_8': {'mesh.fsdp': 8, 'mesh.tensor': 2},
}


def main(_):
  paper = config_lib.load(_HERE.parents[1] / 'configs' / 'lm' / 'paper.py')
  workdir = pathlib.Path(_WORKDIR.value)
  if _REMEDIES.value:
    runs = [
      (
        name,
        config_lib.replace(
          paper.get_config('3b'), {'model.remat': 'full'} | changes
        ),
      )
      for name, changes in _CHANGES.items()
    ]
    name, topologies = 'remedies.csv', ['v5e:16x16']
  else:
    names = [name for size in _SIZES for name in (size, f'{size}_dense')]
    # The same for all, so that dense and MoD can be compared.
    full = {'model.remat': 'full'}
    runs = [
      (name, config_lib.replace(paper.get_config(name), full)) for name in names
    ]
    name, topologies = 'prove.csv', _TOPOLOGIES
  rows = prove.run(runs, topologies, workdir)
  shutil.copy(workdir / 'prove.csv', _HERE / name)
  if not _REMEDIES.value:
    for routed, dense in zip(rows[::2], rows[1::2], strict=True):
      compare(routed, dense)


def compare(routed, dense) -> None:
  """Prints by kind how many more bytes a routed step sends than its twin's.

  Raises:
    ValueError: it sends more than its twin besides the sum of its routers'
      gradients; or less, unless heads and hidden units are split: then
      activations are summed, and a routed block has fewer.
  """
  sent = [json.loads(row['collectives']) for row in (routed, dense)]
  more = {
    kind: sent[0].get(kind, (0, 0))[1] - sent[1].get(kind, (0, 0))[1]
    for kind in sorted({*sent[0], *sent[1]})
  }
  shown = ', '.join(f'{kind} {b / 1e6:+.3f} MB' for kind, b in more.items())
  print(f'{routed["id"]} on {routed["topology"]}, MoD - dense: {shown}')
  summed = more.pop('all-reduce')
  routers = routed['parameters'] - dense['parameters']
  # In float32, and each chip sends less than two copies of a sum.
  low, high = -math.inf if routed['tensor'] > 1 else 0, 8 * routers
  if any(abs(b) > 100 for b in more.values()) or not low <= summed <= high:
    raise ValueError(
      f'{routed["id"]} sends {routed["sent"]} bytes, its twin {dense["sent"]}'
    )


if __name__ == '__main__':
  app.run(main)
