"""Pictures of what a model did: matplotlib figures from plain arrays.

Nothing here knows a model: whoever draws passes arrays, strings and records.
All figures are made without pyplot, so they share no state with a notebook or
with another thread; `save` writes them.
"""

from mod_jax.viz.adaptive import compute_extremes
from mod_jax.viz.adaptive import compute_histogram
from mod_jax.viz.adaptive import error_by_learners
from mod_jax.viz.adaptive import loss_effects
from mod_jax.viz.curves import compared_curves
from mod_jax.viz.curves import loss_curves
from mod_jax.viz.engagement import engagement
from mod_jax.viz.files import save
from mod_jax.viz.glyphs import display_piece
from mod_jax.viz.histograms import score_histogram
from mod_jax.viz.images import attention_maps
from mod_jax.viz.images import keep_probability
from mod_jax.viz.images import load_map
from mod_jax.viz.images import patch_maps
from mod_jax.viz.images import token_stages
from mod_jax.viz.isoflop import isoflop
from mod_jax.viz.maps import routing_map
from mod_jax.viz.robustness import corruption_curves
from mod_jax.viz.scatter import accuracy_flops
from mod_jax.viz.scatter import importance_scatter
from mod_jax.viz.seeds import seed_dots
from mod_jax.viz.style import RULES
from mod_jax.viz.style import RuleStyle
from mod_jax.viz.style import rule_style
from mod_jax.viz.token_load import token_load

__all__ = (
  'corruption_curves',
  'RULES',
  'RuleStyle',
  'accuracy_flops',
  'attention_maps',
  'compared_curves',
  'compute_extremes',
  'compute_histogram',
  'display_piece',
  'engagement',
  'error_by_learners',
  'importance_scatter',
  'isoflop',
  'keep_probability',
  'load_map',
  'loss_curves',
  'loss_effects',
  'patch_maps',
  'routing_map',
  'rule_style',
  'save',
  'score_histogram',
  'seed_dots',
  'token_load',
  'token_stages',
)
