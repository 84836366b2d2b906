"""Puts arrays on one device, for batches of too few rows for a mesh."""

import contextlib

import jax

from mod_jax import parallel


@contextlib.contextmanager
def one_device(*trees):
  """Context manager: sets a mesh of this host's first device for its body.

  Yields the tuple of trees on that device.
  """
  trees = jax.tree.map(parallel.whole, trees)
  mesh = parallel.make_mesh(parallel.MeshConfig(), jax.local_devices()[:1])
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  with jax.set_mesh(mesh):
    yield jax.device_put(trees, everywhere)
