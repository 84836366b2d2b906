"""Bad input is refused in a sentence that names it and the way out."""

import dataclasses
import functools

import numpy as np
import pytest
import tiny

from mod_jax.errors import UserError
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.sampling import Draft, generate, pad_prompts
from mod_jax.sampling import logits as logits_lib

MOD = dataclasses.replace(
  tiny.LM, vocab_size=20, routing=MoDConfig(threshold_decay=0.9)
)
UNTRAINED = dataclasses.replace(
  MOD, routing=MoDConfig(router_loss=0.0, predictor_width=4)
)


@functools.cache
def params():
  return {'params': tiny.variables(MOD)['params']}


def run(tokens=((1, 2), (3, 4)), config=MOD, **kwargs):
  variables = kwargs.pop('variables', None) or params()
  kwargs = {
    'max_new_tokens': 6,
    'temperature': 0,
    'mode': 'router',
  } | kwargs
  return generate(config.build(), variables, tokens, **kwargs)


EMPTY = np.array([[1, 1, 1], [0, 0, 0]], bool)


@pytest.mark.parametrize(
  ('kwargs', 'named'),
  [
    ({'tokens': np.zeros((1, 0), int)}, 'at least one in each row'),
    ({'tokens': np.array([1, 2])}, r'shape=\(2,\).*tokens\[None\]'),
    ({'tokens': np.array([[1.0, 2.0]])}, "dtype='float64': expected integers"),
    (
      {'tokens': np.ones((2, 3), int), 'valid_BP': EMPTY},
      'at least one token in every row',
    ),
    ({'valid_BP': np.ones((2, 3), bool)}, r'shape=\(2, 3\)'),
    ({'tokens': [[1, 20]]}, '1..20.*vocab_size=20'),
    ({'max_length': 7}, 'prompt=2, max_new_tokens=6, max_length=7'),
    ({'max_length': 2**31}, 'max_length=2147483648: .*000 at most'),
    ({'max_new_tokens': 2**31}, 'max_new_tokens=2147483648: .* 1 to 1,000'),
    ({'max_new_tokens': '6'}, "max_new_tokens='6': expected a whole number"),
    ({'end_token': 20}, 'end_token=20: .* from 0 to 19'),
    ({'variables': {'embedding': 0}}, "'embedding'.*'params'"),
    ({'mode': 'top_k'}, "rule='top_k' cannot generate"),
    ({'mode': 'fixed'}, "rule='fixed' cannot generate"),
    ({'mode': 'threshold'}, 'moving'),
    ({'mode': 'router', 'config': UNTRAINED}, 'router.*predictor'),
    ({'temperature': 1.0}, 'key=jax'),
    ({'draft': Draft(kind='early', layers=2)}, 'layers=2, num_layers=2'),
  ],
)
def test_generate(kwargs, named):
  with pytest.raises(UserError, match=named):
    run(**kwargs)


@pytest.mark.parametrize(
  ('call', 'named'),
  [
    (lambda: run(((1, 2), (3,))), 'pad_prompts'),
    (lambda: pad_prompts([[1], []]), 'a token in each'),
    (lambda: logits_lib.check(1.0, 2**31, 1.0, 0.0), 'top_k=2147483648'),
    (lambda: logits_lib.check(1.0, 0, 1.1, 0.0), 'top_p=1.1'),
  ],
)
def test_parts(call, named):
  with pytest.raises((UserError, ValueError), match=named):
    call()
