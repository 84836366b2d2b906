"""Bad input is answered by a sentence with the offender and the way out."""

import jax
import jax.numpy as jnp
import pytest

from mod_jax.errors import UserError
from mod_jax.layers.attention import AttentionConfig
from mod_jax.layers.block import BlockConfig
from mod_jax.layers.experts import ExpertMLP, ExpertMLPConfig, ExpertsConfig
from mod_jax.layers.mlp import MLPConfig
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.layers.routed import Layer, LayerConfig
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.layers.scores import Attention, Learned, Stride
from mod_jax.layers.token_info import TokenInfo

MLP = MLPConfig(width=8, hidden=4)
BLOCK = BlockConfig(
  attention=AttentionConfig(width=8, num_heads=4, num_kv_heads=2, head_dim=2),
  mlp=MLP,
)
INFO = TokenInfo(jnp.zeros((1, 4), jnp.int32))


def run(module, mode=None):
  """Runs a module with features and parameters of the right shapes."""
  x_BLD = jnp.zeros((1, 4, 8))
  variables = jax.eval_shape(module.init, jax.random.key(0), x_BLD, INFO)
  variables = {'params': variables['params']}
  if mode is not None:
    module = module.clone(mode=mode)
  jax.eval_shape(module.apply, variables, x_BLD, INFO)


def routed(**fields):
  return Layer(
    LayerConfig(block=BLOCK, routing=MoDConfig(**fields), capacity=1)
  )


def experts(**fields):
  config = ExpertsConfig(num_experts=2, **fields)
  return ExpertMLP(ExpertMLPConfig(mlp=MLP, experts=config))


class OfRow(Stride):
  """A score that a user got wrong: one of a row, and not of each token."""

  def run(self, module, x_BLD, info, capacity, attention_BL):
    return x_BLD[:, :1, 0]


SHIFTED = {'capacity_schedule': 'shifted_cosine'}
BY_THRESHOLD = Mode(routing=RoutingMode(rule='threshold'))
UNROUTED = MoDConfig(**SHIFTED, layers=(0, 1))


# A call, and what stands in the sentence. Single numbers and choices of all
# configs are in test_configs.py.
TABLE = [
  # Routing of language models.
  (lambda: MoDConfig(offset=2), 'offset=2', 'period=2'),
  (lambda: MoDConfig(gate='none'), "gate='none'", 'gradient'),
  (lambda: MoDConfig(router_width=4, score='stride'), 'router_width=4'),
  (
    lambda: MoDConfig(shared_router=True, score=Learned()),
    'shared_router=True',
  ),
  (lambda: MoDConfig(combine='weigh_bypass'), 'weigh_bypass', "gate='sigmoid'"),
  (lambda: MoDConfig(**SHIFTED, capacity_decay=0.5), 'capacity_decay=0.5'),
  (lambda: MoDConfig(score=Attention()), 'Attention(', 'from later ones'),
  (lambda: MoDConfig(balance_loss=0.1), 'balance_loss=0.1', "rule='router'"),
  (lambda: MoDConfig(per_sequence=True, balance_loss=0.1), 'router_loss=0.01'),
  (lambda: MoDConfig(train_rule='router', router_loss=0.0), 'balance_loss'),
  (lambda: MoDConfig(layers=(1, 3, 1)).capacities(5), '(1, 3, 1)', 'different'),
  (lambda: MoDConfig(kinds=()), 'kinds=()', 'expected None'),
  (lambda: UNROUTED.capacities(5), 'num_layers=5', 'leave dense'),
  (
    lambda: run(routed(threshold_decay=0.9), BY_THRESHOLD),
    *("rule='threshold'", "'moving' collection"),
  ),
  (
    lambda: run(routed(score=OfRow(), router_loss=0.0)),
    *('OfRow.run(…).shape=(1, 1)', '[batch, length] = (1, 4)'),
  ),
  # Experts.
  (lambda: experts(per_token=3), 'per_token=3, num_experts=2'),
  (lambda: experts(compute_share=0.5), 'compute_share=0.5, num_nulls=0'),
  (
    lambda: experts(per_token=2, num_nulls=1, compute_share=0.25),
    *('per_token=2, num_nulls=1', 'num_nulls of at least 2'),
  ),
  (lambda: experts(choice='expert', per_token=2), 'per_token=2', "'expert'"),
  (lambda: experts(threshold_decay=0.9), 'threshold_decay=0.9', "'token'"),
  (
    lambda: run(experts(choice='expert'), BY_THRESHOLD),
    'threshold_decay above 0',
  ),
]


@pytest.mark.parametrize(
  ('call', 'named'),
  [(x[0], x[1:]) for x in TABLE],
  ids=[', '.join(x[1:]) for x in TABLE],
)
def test_is_refused(call, named):
  with pytest.raises(UserError) as caught:
    call()
  assert all(text in str(caught.value) for text in named), caught.value
