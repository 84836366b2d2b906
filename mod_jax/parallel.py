"""The device mesh, and the table of logical axis names to mesh axes.

Modules name the axes of their arrays; only this file maps the names to mesh
axes. Meshes have automatic axes and are entered by `jax.set_mesh`: the older
`with mesh:` would silently drop the constraints.
"""

import dataclasses
import math
from typing import Annotated

from flax import linen as nn
import jax
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from mod_jax import config as config_lib
from mod_jax.errors import UserError

MESH_AXES = ('data', 'fsdp', 'expert', 'tensor')

# Logical name -> mesh axes. Names that are not listed are errors.
RULES = {
  # Activations.
  'batch': ('data', 'fsdp', 'expert'),
  # Rows of arrays with an axis of experts, which the mesh axis `expert` splits.
  'expert_batch': ('data', 'fsdp'),
  'length': (),
  'act_embed': (),
  'act_heads': ('tensor',),
  'act_mlp': ('tensor',),
  'act_vocab': ('tensor',),
  # Parameters.
  'embed': ('fsdp',),
  'experts': ('expert',),
  'heads': ('tensor',),
  'head_dim': (),
  'mlp': ('tensor',),
  'vocab': ('tensor',),
  'layers': (),
  # Norms, routers and predictors are small, so every device keeps a copy, and
  # routing needs no communication.
  'replicated': (),
}

# Logical axes over rows. At initialisation there is one row, which cannot be
# split.
_BATCHES = ('batch', 'expert_batch')

_Devices = Annotated[int, config_lib.Range(ge=-1, le=2**20)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """Number of devices along each mesh axis; one may be -1: all that remain."""

  # Replicas of the parameters, each with a part of the batch.
  data: _Devices = -1
  # Splits parameters, which are gathered for use; also splits the batch.
  fsdp: _Devices = 1
  expert: _Devices = 1  # Splits experts; also splits the batch.
  tensor: _Devices = 1  # Splits heads, hidden units and vocabulary.

  def __post_init__(self):
    config_lib.validate(self)
    sizes = self._sizes
    if 0 in sizes or sizes.count(-1) > 1:
      raise UserError(
        f'mesh={dict(zip(MESH_AXES, sizes, strict=True))}: expected positive'
        ' sizes, at most one of them -1 for the remaining devices.'
      )

  @property
  def _sizes(self) -> tuple[int, ...]:
    return tuple(getattr(self, axis) for axis in MESH_AXES)

  def sizes(self, num_devices: int) -> tuple[int, ...]:
    """Returns the sizes of MESH_AXES for `num_devices`, or raises UserError."""
    sizes = list(self._sizes)
    product = math.prod(n for n in sizes if n > 0)
    if -1 in sizes and num_devices % product == 0:
      sizes[sizes.index(-1)] = num_devices // product
    if math.prod(sizes) != num_devices:
      raise UserError(
        f'mesh={dict(zip(MESH_AXES, sizes, strict=True))} does not fit'
        f' {num_devices} device(s): the product of the sizes must be'
        f' {num_devices}; set config.mesh accordingly.'
      )
    return tuple(sizes)


def make_mesh(config: MeshConfig, devices=None) -> jax.sharding.Mesh:
  """Returns a mesh with the axes MESH_AXES over the devices.

  Devices may belong to several slices, which the slower data centre network
  connects. Then the axis `data` spans the slices, so that only the sum of
  gradients crosses that network. Raises UserError if the config does not fit
  the devices, their slices or their hosts.
  """
  devices = jax.devices() if devices is None else list(devices)
  axis_types = (jax.sharding.AxisType.Auto,) * len(MESH_AXES)
  data, *others = config.sizes(len(devices))
  slices = len({getattr(d, 'slice_index', 0) for d in devices})
  if slices == 1:
    grid = mesh_utils.create_device_mesh(
      (data, *others),
      devices,
      # Allow for example an axis of 8 devices in a cube of 4 x 4 x 4 chips.
      allow_split_physical_axes=True,
    )
  elif data % slices:
    raise UserError(
      f'mesh.data={data} does not divide over the {slices} slices that the'
      f' {len(devices)} devices are of: make it a multiple of {slices}, by less'
      ' fsdp, expert or tensor.'
    )
  else:
    grid = mesh_utils.create_hybrid_device_mesh(
      (data // slices, *others),
      (slices, *(1 for _ in others)),
      devices,
      allow_split_physical_axes=True,
    )
  mesh = jax.sharding.Mesh(grid, MESH_AXES, axis_types=axis_types)
  parts = set(_rows_of_hosts(mesh).values())
  sizes = {len(part) for part in parts}
  if len(sizes) > 1 or len(set().union(*parts)) != sum(map(len, parts)):
    raise UserError(
      f'mesh={dict(mesh.shape)} gives hosts some rows of a batch in common and'
      ' others not, so they cannot divide the reading: let mesh.tensor divide'
      ' the devices of a host, or be a multiple of them.'
    )
  return mesh


def fit_mesh(config: MeshConfig, num_devices: int, rows: int) -> MeshConfig:
  """Adapts the mesh of a config to a number of devices.

  If `data` is -1, `tensor` is doubled until the other axes divide the rows, and
  `fsdp` is reduced to a divisor of the remaining devices. `rows` is the size of
  a batch, or of a microbatch if there are several. The result may be invalid:
  `make_mesh`, `check_batch` and `shardings` check it.
  """
  if config.data != -1 or min(config._sizes[1:]) < 1:
    return config
  tensor = config.tensor
  while rows * tensor % num_devices and 2 * tensor <= num_devices:
    tensor *= 2
  if rows * tensor % num_devices:
    tensor = config.tensor
  fsdp = math.gcd(config.fsdp, num_devices // (tensor * config.expert))
  return dataclasses.replace(config, fsdp=fsdp, tensor=tensor)


def spec(names: tuple[str | None, ...]) -> PartitionSpec:
  """Returns the spec of an array with these logical axes; None is not split."""
  axes = []
  for name in names:
    if name is not None and name not in RULES:
      raise ValueError(f'Logical axis {name!r} is not in parallel.RULES.')
    axes.append(RULES[name] if name is not None else ())
  used = [axis for group in axes for axis in group]
  if len(used) != len(set(used)):
    raise ValueError(f'Logical axes {names} put one mesh axis on two axes.')
  return PartitionSpec(
    *(g if len(g) > 1 else (g[0] if g else None) for g in axes)
  )


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """Returns `x`, sharded by its logical axes `names` if there is a mesh."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, spec(names))


def per_device(function, inputs, outputs):
  """Returns a function that runs on each device's part of its arrays.

  This is for kernels, which XLA cannot partition: it would gather all arrays.
  Without a mesh, or on one device, the result is `function` itself. If the
  batch does not divide over the devices, as at initialisation, each device
  processes the whole batch. If another axis does not divide, `function` takes
  the global arrays and is left to the compiler; `shardings` refuses parameters
  with such axes.

  Args:
    function: takes arrays, or None for absent ones; returns a tuple. Its sums
      over a sharded axis are partial: use `sum_over` or `mean_over`.
    inputs: for each argument, the logical names of its axes.
    outputs: for each result, the logical names of its axes.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return function

  def run(*args):
    is_present = [x is not None for x in args]
    sizes = [
      (name, size)
      for x, names in zip(args, inputs, strict=True)
      if x is not None
      for name, size in zip(names, x.shape, strict=True)
    ]

    def divides(name, size):
      devices = [mesh.shape[axis] for axis in RULES.get(name, ())]
      return size % math.prod(devices) == 0

    split = all(divides(*of) for of in sizes if of[0] in _BATCHES)
    if not all(divides(*of) for of in sizes if of[0] not in _BATCHES):
      return function(*args)

    def part(names):
      return spec(
        tuple(n if split or n not in _BATCHES else None for n in names)
      )

    def call(*arrays):
      arrays = iter(arrays)
      return function(
        *(next(arrays) if present else None for present in is_present)
      )

    return jax.shard_map(
      call,
      in_specs=tuple(
        part(names)
        for names, x in zip(inputs, args, strict=True)
        if x is not None
      ),
      out_specs=tuple(map(part, outputs)),
      # Kernels do not declare the axes over which their results vary.
      check_vma=False,
    )(*(x for x in args if x is not None))

  return run


def mean_over(x: jax.Array, name: str) -> jax.Array:
  """Returns the mean over the devices that split the logical axis `name`.

  It is for functions of `per_device`; elsewhere it returns `x`.
  """
  return _over(jax.lax.pmean, x, name)


def sum_over(x: jax.Array, name: str) -> jax.Array:
  """Returns the sum over the devices that split an axis; see `mean_over`."""
  return _over(jax.lax.psum, x, name)


def max_over(x: jax.Array, name: str) -> jax.Array:
  """Returns the maximum over devices that split an axis; see `mean_over`."""
  return _over(jax.lax.pmax, x, name)


def index_of(name: str) -> jax.Array:
  """Returns the index of this device's part of an axis; 0 if it is whole."""
  return _over(lambda x, axes: x + jax.lax.axis_index(axes), 0, name)


def _over(reduce, x, name):
  if not jax.sharding.get_abstract_mesh().manual_axes:
    return x  # Not in `per_device`: arrays are global.
  return reduce(x, RULES[name])


def shardings(boxed, mesh: jax.sharding.Mesh):
  """Returns a tree with a NamedSharding in place of each array.

  `boxed` is what `jax.eval_shape(model.init, …)` returns: the boxes of
  `nn.with_logical_partitioning` name the axes. Leaves without a box are
  replicated. Raises UserError if devices do not divide an axis.
  """

  def one(path, leaf):
    if not isinstance(leaf, nn.LogicallyPartitioned):
      return NamedSharding(mesh, PartitionSpec())
    names = leaf.names
    for size, name in zip(leaf.value.shape, names, strict=True):
      parts = math.prod(mesh.shape[axis] for axis in RULES.get(name, ()))
      if size % parts:
        raise UserError(
          f'Axis {name!r} of parameter {jax.tree_util.keystr(path)} has size'
          f' {size}, which {parts} devices along {RULES[name]} do not divide:'
          ' change the mesh or the model.'
        )
    return NamedSharding(mesh, spec(names))

  return jax.tree_util.tree_map_with_path(
    one, boxed, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned)
  )


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding of a batch: rows over all mesh axes but tensor."""
  return NamedSharding(mesh, spec(('batch',)))


def abstract_batch(shapes, mesh: jax.sharding.Mesh):
  """Returns the shapes of a batch with the sharding of `put_batch`."""
  sharding = batch_sharding(mesh)
  return jax.tree.map(lambda x: x.update(sharding=sharding), shapes)


def check_batch(batch_size: int, mesh: jax.sharding.Mesh, what: str) -> None:
  """Raises UserError `what=…` if a batch does not divide over the mesh."""
  parts = math.prod(mesh.shape[axis] for axis in RULES['batch'])
  if batch_size % parts:
    raise UserError(
      f'{what}={batch_size} does not divide by the {parts} devices along the'
      f" mesh's data, fsdp and expert axes: use a multiple of {parts}, or a"
      ' larger mesh.tensor.'
    )


def place(x, sharding: NamedSharding, dtype=None) -> jax.Array:
  """Shards an array of which every host has a complete copy.

  Each host only places the parts of its own devices. An array that already has
  the sharding is returned as it is.
  """
  if isinstance(x, jax.Array) and x.sharding == sharding:
    return x
  x = np.asarray(x, dtype)
  return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def first_says(answer: bool) -> bool:
  """Returns the first host's answer on all hosts; all must call this."""
  if jax.process_count() == 1:
    return answer
  return bool(multihost_utils.broadcast_one_to_all(np.array(answer)))


def whole(x) -> jax.Array | np.ndarray:
  """Returns, on each host, the complete array; all hosts must call this."""
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    return multihost_utils.process_allgather(x, tiled=True)
  # A teacher's array may be a `convert.arrays.Lazy`, which `asarray` reads.
  return x if isinstance(x, jax.Array) else np.asarray(x)


def row_shard(mesh: jax.sharding.Mesh) -> tuple[int, int]:
  """Returns the index of this host's part of batches, and the number of parts.

  There are as many parts as hosts, unless `tensor` spans hosts: such hosts need
  the same rows, so they read the same part.
  """
  by_host = _rows_of_hosts(mesh)
  parts = sorted(set(by_host.values()))
  return parts.index(by_host[jax.process_index()]), len(parts)


def _rows_of_hosts(mesh):
  """Returns, by host, the indices of its devices' parts of a batch."""
  by_host = {}
  # Rows are split along all axes but `tensor`, the last one.
  for part, devices in enumerate(
    mesh.devices.reshape(-1, mesh.devices.shape[-1])
  ):
    for device in devices:
      by_host.setdefault(device.process_index, set()).add(part)
  return {host: tuple(sorted(parts)) for host, parts in by_host.items()}


def put_batch(batch, mesh: jax.sharding.Mesh):
  """Returns the global batch; each host passes its part, by `row_shard`."""
  sharding = batch_sharding(mesh)
  return jax.tree.map(
    lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)),
    batch,
  )
