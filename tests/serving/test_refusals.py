"""Bad input is refused in a sentence that names it and the way out."""

import dataclasses

import pytest
import tiny

from mod_jax.errors import UserError
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.pretrained.load import Run
from mod_jax.serving.engine import Engine

MOD = dataclasses.replace(
  tiny.LM, vocab_size=30, routing=MoDConfig(capacity=0.5)
)


def make(config=MOD, **kwargs):
  run = Run(config=config, variables=tiny.variables(config))
  return Engine(run, **{'slots': 1, 'max_length': 40, **kwargs})


@pytest.mark.parametrize(
  ('prompt', 'settings', 'named'),
  [
    ([], {}, 'no token'),
    ([1] * 30, {'max_new_tokens': 11}, '30 tokens and 11 new.*max_length=40'),
    ([30], {}, '30..30.*vocab_size=30'),
    ([1], {'max_new_tokens': 2.5}, 'max_new_tokens=2.5'),
    ([1], {'temperature': -1.0}, 'temperature=-1.0'),
    ([1], {'top_k': 2.5}, 'top_k=2.5: expected a whole number'),
    ([1], {'top_p': 0.0}, 'top_p=0.0'),
    ([1], {'seed': 1.5}, 'seed=1.5: expected a whole number'),
    ([1], {'stop': ['']}, 'none of them empty'),
    ([1], {'presence_penalty': float('nan')}, 'presence_penalty=nan'),
    ([1], {'logit_bias': {30: 1}}, 'logit_bias={30: 1}: expected tokens'),
    ([1], {'logit_bias': {1: 101}}, 'numbers from -100 to 100'),
    ([1], {'logit_bias': {'1': 1}}, "logit_bias={'1': 1}: expected tokens"),
    ([1], {'logit_bias': {1.5: 1}}, 'logit_bias={1.5: 1}: expected tokens'),
    ([1], {'num_likeliest': 21}, 'num_likeliest=21: expected .* 0 to 20'),
    ([1], {'num_likeliest': 1.5}, 'num_likeliest=1.5: expected a whole'),
    ([1], {'schema': {}}, 'no tokenizer: give no schema'),
    ('text', {}, 'no tokenizer'),
  ],
)
def test_requests(prompt, settings, named):
  engine = make()
  with pytest.raises(UserError, match=named):
    engine.submit(prompt, **settings)
  assert engine.idle


UNTRAINED = dataclasses.replace(MOD, routing=MoDConfig(router_loss=0.0))


@pytest.mark.parametrize(
  ('kwargs', 'named'),
  [
    ({'mode': 'predictor'}, "rule='predictor' cannot generate"),
    ({'slots': 0}, 'slots=0'),
    ({'config': UNTRAINED}, 'no causal rule'),
  ],
)
def test_engines(kwargs, named):
  with pytest.raises(UserError, match=named):
    make(**kwargs)
