"""Maps names, shapes and layouts of other libraries' arrays to ours."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import dataclasses
import functools
import math
import re
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mod_jax import trees
from mod_jax.convert import files
from mod_jax.errors import UserError
from mod_jax.models import protocol

# Maps our names of a module's arrays to PyTorch's.
_SUFFIXES = {
  'kernel': 'weight',
  'scale': 'weight',
  'bias': 'bias',
  'mean': 'running_mean',
  'var': 'running_var',
}
# The order in which other libraries concatenate these maps.
_QUERY_KEY_VALUE = ('query', 'key', 'value')


@dataclasses.dataclass(frozen=True)
class Entry:
  """Maps one array of another library to our parameters.

  Attributes:
    theirs: the array's name in the other library.
    ours: names of the same parameters in mod_jax. There are several if the
      other library concatenates them along its array's first axis.
    shape: shape of each of our parameters.
    channels: number of input channels of the patch embedding.
  """

  theirs: str
  ours: tuple[str, ...]
  shape: tuple[int, ...]
  channels: int = 3

  def to_theirs(self, *arrays):
    """Converts our arrays, in the order of `ours`, to the other library's."""
    converted = [self._to_theirs(array) for array in arrays]
    return converted[0] if len(converted) == 1 else np.concatenate(converted)

  def _to_theirs(self, x):
    name = self.ours[0]
    if name in ('embedding', 'queries'):
      return x
    # Except in CLIP, these arrays have a leading axis of images, of length 1.
    if name == 'position':
      return x if self.theirs.endswith('weight') else x[None]
    if name.endswith('_token'):
      return x if self.theirs.endswith('embedding') else x[None, None]
    if not name.endswith('kernel'):
      return x.reshape(-1)
    if re.match('(position_)?conv', name):  # [taps, inputs, outputs]
      return x.transpose(2, 1, 0)
    if name == 'patch/kernel':
      side = math.isqrt(len(x) // self.channels)
      x = x.reshape(side, side, self.channels, -1)
    if x.ndim == 4:
      return x.transpose(3, 2, 0, 1)
    if name.endswith('/out/kernel'):  # [H, C, D]
      return x.reshape(-1, x.shape[-1]).T
    return x.reshape(len(x), -1).T

  def to_ours(self, x):
    """Converts the other library's array to a list of ours."""
    parts = np.split(x, len(self.ours))
    if self.ours[0].endswith('kernel'):
      # Kernels of 2-D convolutions, of 1-D convolutions, and of linear maps.
      axes = {4: (2, 3, 1, 0), 3: (2, 1, 0), 2: (1, 0)}[x.ndim]
      parts = [part.transpose(axes) for part in parts]
    return [part.reshape(self.shape) for part in parts]

  @property
  def their_shape(self) -> tuple[int, ...]:
    """Shape of the other library's array."""
    abstract = jax.ShapeDtypeStruct(self.shape, jnp.float32)
    first, *rest = jax.eval_shape(self._to_theirs, abstract).shape
    return (first * len(self.ours), *rest)


def entries(
  ours: Mapping[str, tuple[int, ...]],
  table: Mapping[str, str],
  label: str,
  channels: int = 3,
) -> tuple[Entry, ...]:
  """Returns one `Entry` for each array of the other library.

  Args:
    ours: shapes of our parameters by name.
    table: maps our names of modules, and of arrays outside any module, to the
      other library's names, with `{}` for the number of the block. PyTorch's
      name of the array, such as `weight`, is appended to a module's name. A
      module `qkv` is one that the other library has for query, key and value
      together.
    label: name of the other library, for messages.
    channels: as for `Entry`.

  Raises:
    UserError: a parameter's name is not in the table.
  """
  by_theirs = {}
  for name in ours:
    module, _, leaf = name.removeprefix('batch_stats/').rpartition('/')
    number = ''
    if match := re.match(
      r'(?:(?:encoder|decoder)/)?(?:block|prediction|conv|conv_norm)_(\d+)/',
      module + '/',
    ):
      number = match[1]
      module = module.replace(number, '{}', 1)
    fused = re.sub('/(query|key|value)$', '/qkv', module)
    theirs = table.get(module or leaf, table.get(fused))
    if theirs is None:
      raise UserError(
        f'{name}: {label} has no such parameter, so its weights do not fit this'
        ' model; use another naming, or change the config.'
      )
    theirs = theirs.format(number) + (_SUFFIXES[leaf] if module else '')
    by_theirs.setdefault(theirs, []).append(name)
  for names in by_theirs.values():
    if len(names) > 1:
      names.sort(key=lambda x: _QUERY_KEY_VALUE.index(x.split('/')[-2]))
  return tuple(
    Entry(theirs, tuple(names), ours[names[0]], channels)
    for theirs, names in by_theirs.items()
  )


def flatten(variables: Mapping[str, Any]) -> dict[str, Any]:
  """Returns variables by name; batch statistics are named `batch_stats/…`."""
  variables = nn.unbox(dict(variables))
  statistics = variables.get('batch_stats') or {}
  return trees.flatten({**variables['params'], 'batch_stats': statistics})


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Returns variables by collection; the inverse of `flatten`."""
  params = trees.unflatten(flat)
  statistics = params.pop('batch_stats', None)
  variables = {'params': params, 'batch_stats': statistics}
  return {name: x for name, x in variables.items() if x is not None}


@functools.lru_cache(maxsize=8)
def shapes_of(config) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of a model's variables, named as by `flatten`."""
  flat = flatten(protocol.shapes(config))
  return {name: leaf.shape for name, leaf in flat.items()}


def complete(
  source: Mapping[str, Any], config, key: jax.Array | None = None
) -> dict[str, dict[str, Any]]:
  """Returns all of a model's variables by collection.

  `source` has variables by name, as from `flatten`. Variables that are missing
  there are initialised with `key`; None means `jax.random.key(0)`.
  """
  new = set(shapes_of(config)) - set(source)

  @jax.jit  # Lets XLA remove the initialisation of all other variables.
  def fresh(new_key):
    flat = flatten(config.build().init(new_key, config.example()))
    return {name: flat[name] for name in new}

  variables = {name: jnp.asarray(array) for name, array in source.items()}
  if new:
    variables |= fresh(jax.random.key(0) if key is None else key)
  return unflatten(variables)


def read(
  table: Iterable[Entry],
  stored: Mapping[str, Any],
  left_out: Collection[str] = (),
  **kwargs,
) -> dict[str, files.Lazy]:
  """Returns our parameters, each converted from `stored` when it is used.

  Args:
    table: the entries to read.
    stored: the other library's arrays by name, which may be `Lazy`.
    left_out: the other library's names of arrays that are neither compared nor
      returned.
    **kwargs: `dropped` and `describe` of `trees.compare`.

  Raises:
    UserError: the names or shapes in `stored` do not fit the table.
  """
  trees.compare(
    {entry.theirs: entry.their_shape for entry in table},
    {name: x.shape for name, x in stored.items() if name not in left_out},
    new=tuple(map(re.escape, left_out)),
    **kwargs,
  )

  def convert(entry, i):
    return entry.to_ours(np.asarray(stored[entry.theirs], np.float32))[i]

  return {
    name: files.Lazy(entry.shape, functools.partial(convert, entry, i))
    for entry in table
    if entry.theirs not in left_out
    for i, name in enumerate(entry.ours)
  }


def arrays(
  table: Iterable[Entry],
  ours: Mapping[str, Any],
  types: Mapping[str, str],
  dropped: Sequence[str] = (),
) -> list[tuple[str, int, Callable[[], np.ndarray]]]:
  """Returns (name, size in bytes, function that returns the array) of arrays.

  The other library's arrays are converted from our parameters when the function
  is called. `files.write_sharded` takes such a list.

  Args:
    table: the entries to write.
    ours: our parameters by name.
    types: type of each array, a key of `files.DTYPES`, by the other library's
      name of the array; float32 for arrays without an entry.
    dropped: regular expressions, matched whole, of our names of parameters that
      are left out.

  Raises:
    UserError: the names or shapes of `ours` do not fit the table.
  """
  trees.compare(
    {name: entry.shape for entry in table for name in entry.ours},
    {name: x.shape for name, x in ours.items()},
    dropped=dropped,
    describe='params',
  )
  made = []
  for entry in table:
    dtype = np.dtype(files.DTYPES[types.get(entry.theirs, 'F32')])

    def convert(entry=entry, dtype=dtype):
      parts = [np.asarray(ours[name], np.float32) for name in entry.ours]
      return np.asarray(entry.to_theirs(*parts), dtype)

    size = len(entry.ours) * math.prod(entry.shape) * dtype.itemsize
    made.append((entry.theirs, size, convert))
  return made
