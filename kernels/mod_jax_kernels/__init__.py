"""Array operations with hardware backends. Knows nothing of `mod_jax`.

Each operation has a folder: the public function validates and dispatches, a
reference in plain JAX is the truth, and other files hold its backends.
"""

from mod_jax_kernels.acm_mlp import acm_mlp
from mod_jax_kernels.attention import attention
from mod_jax_kernels.route_scores import route_scores
from mod_jax_kernels.token_move import gather_tokens
from mod_jax_kernels.token_move import scatter_add_tokens
from mod_jax_kernels.token_select import token_select

__all__ = (
  'acm_mlp',
  'attention',
  'gather_tokens',
  'route_scores',
  'scatter_add_tokens',
  'token_select',
)
