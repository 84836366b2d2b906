"""Slices of TPUs to compile for; this takes libtpu, but no TPU.

A slice is named as in Google Cloud, `v5e:4x4` or `v5p:4x4x4`.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import importlib.util
import math
import os
import re

import jax

from mod_jax import config as config_lib
from mod_jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """Specification of a kind of TPU; its FLOP/s are in `peaks`."""

  memory: int  # Bytes of HBM.
  link: float  # Bytes/s from a chip to a neighbour, in each direction.
  # An axis of the slice whose size is a multiple of this is a ring, and any
  # other one a line.
  ring: int
  slices: tuple[str, ...]  # Those on offer, from the smallest to the largest.
  # Further options with which libtpu shows one device per chip.
  options: tuple[tuple[str, str], ...] = ()


_PLANES = ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
_CUBES = ('4x4x4', '4x4x8', '4x8x8', '8x8x8', '8x8x16', '8x16x16', '16x16x16')
# Memory and slices: https://docs.cloud.google.com/tpu/docs/v5e (also /v5p, /v6e
# and /v4), read in 2026. The bandwidth of v5e, v5p and v6e is from the same
# pages: 400, 1200 and 800 GB/s for all ports of a chip (4 in 2D, 6 in 3D), both
# directions together. That v4 has six links of 50 GB/s in each direction:
# Jouppi et al. 2023, arXiv 2304.01433. Which axes are rings: Austin et al.
# 2025, How to scale your model, chapter 2
# (https://jax-ml.github.io/scaling-book/tpus).
CHIPS = {
  'v4': Chip(
    memory=32 * 2**30,
    link=50e9,
    ring=4,
    slices=('2x2x1', '2x2x2', '2x2x4', '2x4x4', *_CUBES),
    options=(('chip_config_name', 'megacore'),),
  ),
  'v5e': Chip(memory=16 * 2**30, link=50e9, ring=16, slices=_PLANES),
  'v5p': Chip(
    memory=95 * 2**30,
    link=100e9,
    ring=4,
    slices=('2x2x1', '2x2x2', '2x4x4', *_CUBES, '16x16x24'),
  ),
  'v6e': Chip(memory=32 * 2**30, link=100e9, ring=16, slices=_PLANES),
}


@dataclasses.dataclass(frozen=True)
class Slice:
  """Chips of one kind in a grid."""

  kind: str
  sizes: tuple[int, ...]

  @property
  def name(self) -> str:
    return f'{self.kind}:{"x".join(map(str, self.sizes))}'

  @property
  def chip(self) -> Chip:
    return CHIPS[self.kind]

  @property
  def num_chips(self) -> int:
    return math.prod(self.sizes)

  def check_compiler(self) -> None:
    """Raises UserError where libtpu is not installed."""
    if importlib.util.find_spec('libtpu') is None:
      raise UserError(
        f'{self.name} can only be compiled for with libtpu, the TPU compiler,'
        ' which is not installed: pip install libtpu.'
      )

  def devices(self) -> list[jax.Device]:
    """Returns the slice's chips as devices to compile for."""
    self.check_compiler()
    # Set here and not globally: they only matter to libtpu.
    os.environ['TPU_SKIP_MDS_QUERY'] = '1'
    os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'
    from jax.experimental import topologies

    options = dict(self.chip.options)
    if self.num_chips == 1:  # Hosts of larger slices have four chips.
      options['chips_per_host_bounds'] = (1, 1, 1)
    try:
      topology = topologies.get_topology_desc(
        platform='tpu', topology_name=self.name, **options
      )
    except jax.errors.JaxRuntimeError as error:
      raise _unknown(self.name) from error
    return list(topology.devices)

  def bandwidth(self, coordinates: Sequence[Sequence[int]]) -> float:
    """Returns the bytes/s that each chip of a group sends around their ring.

    The group, given as coordinates in the grid, uses the links along the axes
    that it spans: both directions of an axis that is a ring and that it spans
    completely, one direction of the others. Contention with other groups is
    ignored.
    """
    spans = [len(set(axis)) for axis in zip(*coordinates, strict=True)]
    links = sum(
      2 if span == size and size % self.chip.ring == 0 else 1
      for span, size in zip(spans, self.sizes, strict=False)
      if span > 1
    )
    return max(1, links) * self.chip.link


def parse(topology: str) -> list[Slice]:
  """Returns the slice such as `v5e:4x4`, or all of `v5e` from the smallest."""
  match = re.fullmatch(r'(\w+)(?::(\d+(?:x\d+)*))?', topology)
  if not match or match[1] not in CHIPS:
    raise _unknown(topology)
  kind, grid = match.groups()
  on_offer = [_slice(kind, name) for name in CHIPS[kind].slices]
  if grid is None:
    return on_offer
  requested, largest = _slice(kind, grid), on_offer[-1]
  same_axes = len(requested.sizes) == len(largest.sizes)
  if not same_axes or not 0 < requested.num_chips <= largest.num_chips:
    raise _unknown(topology)
  return [requested]


def _slice(kind: str, grid: str) -> Slice:
  return Slice(kind, tuple(map(int, grid.split('x'))))


def _unknown(topology: str) -> UserError:
  kind = topology.partition(':')[0]
  names, shape = list(CHIPS), ', with a shape as in v5e:4x4 or v5p:4x4x4'
  if kind in CHIPS:
    names, shape = [f'{kind}:{name}' for name in CHIPS[kind].slices], ''
  return UserError(
    f'topology {topology!r} is unknown: expected one of {", ".join(names)}'
    f'{shape}.{config_lib.nearest(topology, names)}'
  )


@contextlib.contextmanager
def compiler(*, quick: bool):
  """Compiles for devices that are not present, quickly or as a run would.

  The quick way lowers libtpu's optimisation level, to a third of the compile
  time or less. The program does the same work, but weights may be gathered
  long before they are used, so that more of them are held at once. The
  persistent compilation cache is off, since it cannot load programs for absent
  devices.
  """
  settings = {'jax_persistent_cache_min_compile_time_secs': float('inf')}
  if quick:
    settings['jax_optimization_level'] = 'O1'
  before = {name: jax.config.values[name] for name in settings}
  try:
    for name, value in settings.items():
      jax.config.update(name, value)
    yield
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
