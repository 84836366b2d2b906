"""Array operations with hardware backends. Knows nothing of `mod_jax`.

Each operation has a folder: the public function validates and dispatches, a
reference in plain JAX is the truth, and other files hold its backends.
"""

from mod_jax_kernels.acm_mlp import acm_mlp
from mod_jax_kernels.attention import attention
from mod_jax_kernels.route_scores import route_scores

__all__ = ('acm_mlp', 'attention', 'route_scores')
