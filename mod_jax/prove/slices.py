"""TPUs and GPUs to compile for, which need not be present.

A slice of TPUs is named as in Google Cloud, `v5e:4x4` or `v5p:4x4x4`; compiling
for it needs libtpu. The GPUs of a host are named by their number, `h100:8`, and
need JAX's plugin for NVIDIA GPUs.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import importlib.metadata
import math
import os
import re

import jax

from mod_jax import config as config_lib
from mod_jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """Specification of a kind of chip; its FLOP/s are in `peaks`."""

  memory: int  # Bytes that a program can have.
  link: float  # Bytes/s from a chip to a neighbour, in each direction.
  slices: tuple[str, ...]  # Available sizes, from the smallest to the largest.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu(Chip):
  """A kind of TPU, whose chips are the points of a grid."""

  platform = 'tpu'
  compilers = ('libtpu',)  # Python packages; one of them is needed.
  package = 'libtpu'  # What to install to have one of `compilers`.

  # An axis of the slice is a ring if its size is a multiple of this, and
  # otherwise a line.
  ring: int
  # Further options with which libtpu shows one device per chip.
  options: tuple[tuple[str, str], ...] = ()

  def topology(self, found: 'Slice') -> dict[str, object]:
    """Returns arguments of `get_topology_desc`; sets environment variables."""
    # Set here and not globally: only libtpu reads these variables.
    os.environ['TPU_SKIP_MDS_QUERY'] = '1'
    os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'
    options = dict(self.options)
    if found.num_chips == 1:  # Hosts of larger slices have four chips.
      options['chips_per_host_bounds'] = (1, 1, 1)
    return {'topology_name': found.name, **options}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu(Chip):
  """A kind of NVIDIA GPU; a slice consists of GPUs of one host."""

  platform = 'cuda'
  compilers = ('jax-cuda13-pjrt', 'jax-cuda12-pjrt')
  package = 'mod_jax[gpu]'

  name: str  # JAX's `device_kind`.
  memory_bandwidth: int  # Bytes/s.
  capacity: int  # Bytes of the memory.

  def topology(self, found: 'Slice') -> dict[str, object]:
    """Returns the arguments of `get_topology_desc` that describe the GPUs."""
    return {
      'topology': f'1x1x{found.num_chips}',
      'target_config': _HOPPER.format(
        name=self.name,
        bandwidth=self.memory_bandwidth,
        memory=self.capacity,
      ),
    }


# What XLA would otherwise query from a GPU of this generation. Sources:
# NVIDIA's H100 data sheet, and the technical specifications of compute
# capability 9.0 in the CUDA C++ programming guide.
_HOPPER = """
  platform_name: "CUDA"
  device_description_str: "{name}"
  runtime_version {{ major: 13 }}
  dnn_version_info {{ major: 9 minor: 10 }}
  gpu_device_info {{
    cuda_compute_capability {{
      major: 9
      feature_extension: ACCELERATED_FEATURES
    }}
    core_count: 132
    fpus_per_core: 128
    clock_rate_ghz: 1.98
    device_memory_size: {memory}
    memory_bandwidth: {bandwidth}
    l2_cache_size: 52428800
    threads_per_warp: 32
    threads_per_block_limit: 1024
    threads_per_core_limit: 2048
    registers_per_block_limit: 65536
    registers_per_core_limit: 65536
    shared_memory_per_block: 49152
    shared_memory_per_block_optin: 232448
    shared_memory_per_core: 233472
    block_dim_limit_x: 2147483647
    block_dim_limit_y: 65535
    block_dim_limit_z: 65535
  }}
"""


def _hopper(name: str, capacity: int, bandwidth: int) -> Gpu:
  """Returns a kind of GPU, of which NVLink joins up to 8 in a host at 450 GB/s.

  A program can have 75% of the GPU's memory, unless JAX's setting
  XLA_PYTHON_CLIENT_MEM_FRACTION is changed.
  """
  return Gpu(
    name=name,
    capacity=capacity,
    memory_bandwidth=bandwidth,
    memory=capacity * 3 // 4,
    link=450e9,
    slices=('1', '2', '4', '8'),
  )


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
  'v4': Tpu(
    memory=32 * 2**30,
    link=50e9,
    ring=4,
    slices=('2x2x1', '2x2x2', '2x2x4', '2x4x4', *_CUBES),
    options=(('chip_config_name', 'megacore'),),
  ),
  'v5e': Tpu(memory=16 * 2**30, link=50e9, ring=16, slices=_PLANES),
  'v5p': Tpu(
    memory=95 * 2**30,
    link=100e9,
    ring=4,
    slices=('2x2x1', '2x2x2', '2x4x4', *_CUBES, '16x16x24'),
  ),
  'v6e': Tpu(memory=32 * 2**30, link=100e9, ring=16, slices=_PLANES),
  # Memory as the driver reports it; bandwidths are from NVIDIA's data sheets.
  'h100': _hopper('NVIDIA H100 80GB HBM3', 84_929_347_584, 3_350_000_000_000),
  'h200': _hopper('NVIDIA H200', 150_013_214_720, 4_800_000_000_000),
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

  def compiler(self) -> str:
    """Returns the compiler's name and version, or raises UserError if none."""
    for name in self.chip.compilers:
      with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f'{name} {importlib.metadata.version(name)}'
    raise UserError(
      f'{self.name} can only be compiled for with {self.chip.package}, which is'
      f' not installed: pip install {self.chip.package!r}.'
    )

  def devices(self) -> list[jax.Device]:
    """Returns the slice's chips as JAX devices that can be compiled for."""
    self.compiler()
    from jax.experimental import topologies

    try:
      topology = topologies.get_topology_desc(
        platform=self.chip.platform, **self.chip.topology(self)
      )
    except jax.errors.JaxRuntimeError as error:
      raise _unknown(self.name) from error
    except NotImplementedError as error:
      raise UserError(
        f'{self.name} can only be compiled for where JAX accepts its plugin'
        ' for GPUs, and it has no GPU here: set JAX_PLATFORMS=cpu.'
      ) from error
    return list(topology.devices)

  def bandwidth(self, group: Sequence[jax.Device]) -> float:
    """Returns the bytes/s that each chip of a group sends around their ring.

    TPUs use the links along the axes of the grid that the group spans: both
    directions of an axis that is a ring and that the group spans completely,
    one direction of other axes. Contention with other groups is ignored. GPUs
    are connected by switches, so each has the full rate of its link.
    """
    if isinstance(self.chip, Gpu):
      return self.chip.link
    coordinates = [device.coords for device in group]
    spans = [len(set(axis)) for axis in zip(*coordinates, strict=True)]
    links = sum(
      2 if span == size and size % self.chip.ring == 0 else 1
      for span, size in zip(spans, self.sizes, strict=False)
      if span > 1
    )
    return max(1, links) * self.chip.link


def parse(topology: str) -> list[Slice]:
  """Returns a list of the slice that has a name, such as `v5e:4x4`.

  For the name of a kind of chip, `v5e`, the list has all slices of that kind,
  the smallest first. Raises UserError for an unknown name.
  """
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
  """Context manager: sets JAX's options to compile for absent devices.

  If `quick`, libtpu's optimisation level is lower, which takes a third of the
  compile time or less. The program does the same work, but may gather weights
  long before they are used, so more of the weights are in memory at once. The
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
