"""A transformer block in numpy, for the tests of the real one."""

import jax
import jax.numpy as jnp
import numpy as np

from mod_jax.layers import block as block_lib
from mod_jax.layers.attention import AttentionConfig
from mod_jax.layers.mlp import MLPConfig
from mod_jax.layers.token_info import TokenInfo

THETA = 100.0


# A tiny block: 4 query heads that share 2 key heads.
BLOCK = block_lib.BlockConfig(
  attention=AttentionConfig(
    width=8, num_heads=4, num_kv_heads=2, head_dim=4, rope_theta=THETA
  ),
  mlp=MLPConfig(width=8, hidden=6),
)


def info(batch, length):
  """Returns what a block is told of rows without padding."""
  return TokenInfo(jnp.broadcast_to(jnp.arange(length), (batch, length)))


def update(params, config, x_BLD, position_BL, kept_BL, segment_BL=None):
  """Returns a block's update of every token: slow, plain, in float64.

  All tokens are processed, and a mask hides the keys that are not `kept_BL`.
  """
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  x_BLD, position_BL = np.asarray(x_BLD, np.float64), np.asarray(position_BL)
  length = x_BLD.shape[1]

  def norm(x_BLD, name):
    mean = (x_BLD**2).mean(axis=-1, keepdims=True)
    return x_BLD / np.sqrt(mean + config.norm_epsilon) * params[name]['scale']

  def project(name):
    kernel = params['attention'][name]['kernel']
    return np.einsum('bld,dhc->blhc', norm(x_BLD, 'attention_norm'), kernel)

  def rotate(x_BLHC):
    half = x_BLHC.shape[-1] // 2
    angle = position_BL[..., None] * THETA ** (-np.arange(half) / half)
    turned = x_BLHC[..., :half] + 1j * x_BLHC[..., half:]
    turned = turned * np.exp(1j * angle)[:, :, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)

  q_BLHC, k_BLGC, v_BLGC = (
    rotate(project('query')),
    rotate(project('key')),
    project('value'),
  )
  share = config.attention.num_heads // config.attention.num_kv_heads
  k_BLHC, v_BLHC = (np.repeat(x, share, axis=2) for x in (k_BLGC, v_BLGC))
  score = np.einsum('bqhc,bshc->bhqs', q_BLHC, k_BLHC)
  score /= np.sqrt(config.attention.head_dim)
  seen = np.tri(length, dtype=bool) & np.asarray(kept_BL)[:, None, :]
  if segment_BL is not None:
    seen = seen & (segment_BL[:, :, None] == segment_BL[:, None, :])
  weight = np.where(seen[:, None], np.exp(score - score.max()), 0)
  weight /= weight.sum(axis=-1, keepdims=True) + 1e-300
  attended = np.einsum(
    'bhqs,bshc,hcd->bqd', weight, v_BLHC, params['attention']['out']['kernel']
  )
  h = norm(x_BLD + attended, 'mlp_norm')
  mlp = params['mlp']
  gate = h @ mlp['gate']['kernel']
  hidden = gate / (1 + np.exp(-gate)) * (h @ mlp['up']['kernel'])
  return attended + hidden @ mlp['down']['kernel']
