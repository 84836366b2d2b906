"""Puts arrays on one device, for rows that are too few for a mesh."""

import contextlib

import jax

from mod_jax import parallel


@contextlib.contextmanager
def one_device(*trees):
  """Leaves the mesh, and yields the trees on this host's first device."""
  trees = jax.tree.map(parallel.whole, trees)
  mesh = parallel.make_mesh(parallel.MeshConfig(), jax.local_devices()[:1])
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  with jax.set_mesh(mesh):
    yield jax.device_put(trees, everywhere)
