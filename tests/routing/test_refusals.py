"""Bad input is refused in a sentence that names it and the way out."""

import jax.numpy as jnp
import pytest

from mod_jax import errors, routing


@pytest.mark.parametrize(
  ('call', 'named'),
  [
    (lambda: routing.gate('relu', jnp.zeros(2)), "gate='relu'.*one_plus_tanh"),
    (lambda: routing.select_tokens(jnp.zeros((2, 7)), 0), 'k=0: .* 1 to 7'),
    (lambda: routing.select_tokens(jnp.zeros((2, 7)), 8), 'k=8: .* 1 to 7'),
    (
      lambda: routing.layer_capacities((0.5, 0.25), 3),
      'capacity=.*routed_layers=3',
    ),
  ],
)
def test_names_the_offender_and_the_limit(call, named):
  with pytest.raises(errors.UserError, match=named):
    call()
