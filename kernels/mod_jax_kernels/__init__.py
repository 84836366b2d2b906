"""Array operations with hardware backends, independent of `mod_jax`.

Each operation has a folder: a public function that validates and dispatches, a
reference in plain JAX that defines the results, and a file for each backend.
`OPS` maps names to operations, to which backends can be added.
"""

from mod_jax_kernels.acm_mlp import OP as _ACM_MLP
from mod_jax_kernels.acm_mlp import acm_mlp
from mod_jax_kernels.attention import OP as _ATTENTION
from mod_jax_kernels.attention import attention
from mod_jax_kernels.grouped_dot import OP as _GROUPED_DOT
from mod_jax_kernels.grouped_dot import grouped_dot
from mod_jax_kernels.route_scores import OP as _ROUTE_SCORES
from mod_jax_kernels.route_scores import route_scores
from mod_jax_kernels.token_select import OP as _TOKEN_SELECT
from mod_jax_kernels.token_select import token_select

OPS = {
  'acm_mlp': _ACM_MLP,
  'attention': _ATTENTION,
  'grouped_dot': _GROUPED_DOT,
  'route_scores': _ROUTE_SCORES,
  'token_select': _TOKEN_SELECT,
}

__all__ = (
  'OPS',
  'acm_mlp',
  'attention',
  'grouped_dot',
  'route_scores',
  'token_select',
)
