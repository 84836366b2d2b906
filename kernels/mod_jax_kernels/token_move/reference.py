"""Moves of tokens in plain JAX: the truth, and what CPUs and TPUs run."""

import jax
import jax.numpy as jnp

# Promises that let XLA use a plain loop, with no sort and no bounds check, and
# that keep the move local to a device under a batch sharding.
_PROMISES = {
  'unique_indices': True,
  'indices_are_sorted': True,
  'mode': 'promise_in_bounds',
}


def gather(x_BLD, index_BK):
  """Returns the rows at the indices."""
  return jax.vmap(lambda x, index: x.at[index].get(**_PROMISES))(
    x_BLD, index_BK
  )


def scatter(x_BLD, index_BK, update_BKD, gate_BK):
  """Returns x with the gated rows added at the indices."""
  if gate_BK is not None:
    gate_BK1 = gate_BK.astype(jnp.float32)[..., None]
    update_BKD = update_BKD.astype(jnp.float32) * gate_BK1
  return jax.vmap(lambda x, index, u: x.at[index].add(u, **_PROMISES))(
    x_BLD, index_BK, update_BKD.astype(x_BLD.dtype)
  )


def gather_gated(dy_BLD, index_BK, update_BKD, gate_BK):
  """Returns the gradients of `scatter` in the update and in the gate."""
  dy_BKD = gather(dy_BLD, index_BK).astype(jnp.float32)
  d_BKD = dy_BKD * gate_BK.astype(jnp.float32)[..., None]
  d_BK = jnp.sum(dy_BKD * update_BKD.astype(jnp.float32), axis=-1)
  return d_BKD.astype(update_BKD.dtype), d_BK.astype(gate_BK.dtype)
