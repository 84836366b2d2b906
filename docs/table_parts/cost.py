"""What it costs, counted."""

from machine import markdown

from mod_jax import flops
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.routing_config import MoDConfig, VisionRoutingConfig
from mod_jax.models import vit
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.lm import LMConfig
from table_parts.common import table


@table
def flops_lm():
  """FLOPs of routed language models over their dense twins'."""
  rows = []
  for width, layers, length, vocab in (
    (256, 8, 512, 256),
    (1024, 24, 2048, 32_000),
  ):
    config = LMConfig(
      width=width,
      num_layers=layers,
      num_heads=width // 64,
      vocab_size=vocab,
      mlp='gelu',
      routing=MoDConfig(capacity=0.125),
    )
    count = flops.forward(config, length)
    dense = flops.forward(config.dense_twin(), length)
    rows.append(
      [
        *(str(width), str(layers), f'{length:,}', f'{vocab:,}'),
        *(f'{count / 1e9:.2f}', f'{dense / 1e9:.2f}', f'{count / dense:.3f}'),
      ]
    )
  header = ['width', 'layers', 'tokens', 'vocabulary']
  header += ['MoD, GFLOPs', 'dense, GFLOPs', 'ratio']
  return markdown(header, rows)


@table
def macs_amod():
  """GMACs of vision transformers, dense and with A-MoD."""
  names = {
    'deit_tiny': 'DeiT-Ti',
    'deit_small': 'DeiT-S',
    'vit_base': 'ViT-B',
    'vit_large': 'ViT-L',
  }

  def giga(name, **changes):
    return f'{flops.published_macs(vit.BACKBONES[name](**changes)) / 1e9:.4f}'

  rows = []
  for name, text in names.items():
    routed = [
      {'num_classes': 196, 'routing': VisionRoutingConfig(capacity=capacity)}
      for capacity in (0.5, 0.125)
    ]
    rows.append([text, giga(name), *(giga(name, **r) for r in routed)])
  return markdown(['GMACs', 'dense', 'A-MoD 50%', 'A-MoD 12.5%'], rows)


@table
def macs_dynamic():
  """GMACs of DynamicViT on DeiT-S, by how much is kept."""
  keeps = (0.9, 0.8, 0.7, 0.6, 0.5)
  configs = [DynamicViTConfig(backbone=vit.deit_small(), keep=k) for k in keeps]
  row = [f'{flops.published_macs(config) / 1e9:.3f}' for config in configs]
  header = ['kept at each stage', *map(str, keeps)]
  return markdown(header, [['DeiT-S, GMACs', *row]])


@table
def acm_cost():
  """What an adaptive ViT-B costs at most."""
  config = vit.vit_base(adaptive=AdaptiveConfig())
  dense = flops.forward(config.dense_twin())
  gates = sum(parts.get('gate', 0) for _, parts in config.flops_table())
  return (
    f'With all four learners of each module, an ACMized ViT-B costs'
    f' {flops.forward(config) / dense:.3f} times the dense one, and its gates'
    f' are {gates / dense:.3f} of that.'
  )
