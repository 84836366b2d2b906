"""Arguments of the kernels' operations, at the sizes of real models or tiny.

* `arrays`: of an operation, drawn from a seed.
* `call`: the operation as a function of these arrays alone.
* `INPUTS`: how many of the arrays, the first, have gradients.
"""

import functools

import jax
import jax.numpy as jnp

import mod_jax_kernels

INPUTS = {
  'route_scores': 3,
  'acm_mlp': 4,
  'token_select': 0,
  'grouped_dot': 2,
  'attention': 3,
}


def arrays(
  op: str, dtype: str, *, tiny: bool = False, length: int = 197
) -> tuple[jax.Array, ...]:
  """Returns the arrays: a ViT-B's on 128 images, or a language model's.

  `length` is that of the rows of `route_scores`.
  """
  key = jax.random.key(0)

  def normal(i, *shape, fan_in=1):
    x = jax.random.normal(jax.random.fold_in(key, i), shape) * fan_in**-0.5
    return x.astype(dtype)

  if op == 'token_select':
    return (normal(0, *((2, 32) if tiny else (128, 2048))).astype('float32'),)
  if op == 'attention':
    shape = (1, 128, 2, 64) if tiny else (8, 2048, 8, 128)
    return tuple(normal(i, *shape) for i in range(3))
  if op == 'route_scores':
    shape = (128 * 197 // length, length, 12, 64)
    shape = (2, 21, 2, 32) if tiny else shape
    return tuple(normal(i, *shape) for i in range(3))
  if op == 'grouped_dot':
    rows, width, groups = (20, 16, 3) if tiny else (2**15, 768, 8)
    # Some rows are of no group.
    ends = jnp.sort(jax.random.randint(key, (groups,), 0, rows))
    return (
      normal(0, rows, width),
      normal(1, groups, width, 4 * width, fan_in=width),
      jnp.diff(ends, prepend=0),
    )
  tokens, width, learners = (20, 16, 4) if tiny else (128 * 197, 768, 4)
  return (
    normal(0, tokens, width),
    normal(1, learners, width, width, fan_in=width),
    normal(2, learners, width),
    normal(3, learners, width, width, fan_in=width),
    jax.random.randint(key, (tokens,), 0, learners + 1),
  )


def call(op: str, implementation: str | None = None):
  """Returns the operation by one of its backends, a function of arrays."""
  if op == 'token_select':
    return lambda score_BL: mod_jax_kernels.token_select(
      score_BL, score_BL.shape[-1] // 8, implementation
    )
  options = {'causal': True} if op == 'attention' else {}
  return functools.partial(
    getattr(mod_jax_kernels, op), implementation=implementation, **options
  )


def with_gradients(op: str, implementation: str | None = None):
  """Returns results and gradients of the sum of the results' squares."""
  function, inputs = call(op, implementation), INPUTS[op]

  def run(*args):
    def loss(*inputs):
      results = jax.tree.leaves(function(*inputs, *args[len(inputs) :]))
      squares = [(x.astype(jnp.float32) ** 2).sum() for x in results]
      return sum(squares), results

    if not inputs:
      return loss()[1], ()
    grads, results = jax.grad(loss, tuple(range(inputs)), has_aux=True)(
      *args[:inputs]
    )
    return results, grads

  return run
