"""Pictures of what a model did: matplotlib figures from plain arrays.

Nothing here knows a model: whoever draws passes arrays, strings and records.
All figures are made without pyplot, so they share no state with a notebook or
with another thread; `save` writes them. A module is imported when one of its
functions is first asked for, since matplotlib takes long to import.
"""

import importlib

# In which module each public name is.
_MODULES = {
  'compute_extremes': 'adaptive',
  'compute_histogram': 'adaptive',
  'error_by_learners': 'adaptive',
  'loss_effects': 'adaptive',
  'compared_curves': 'curves',
  'expert_curves': 'curves',
  'loss_curves': 'curves',
  'engagement': 'engagement',
  'NOT_THERE': 'experts',
  'NO_EXPERT': 'experts',
  'expert_load': 'experts',
  'expert_map': 'experts',
  'expert_patches': 'experts',
  'save': 'files',
  'display_piece': 'glyphs',
  'score_histogram': 'histograms',
  'attention_maps': 'images',
  'keep_probability': 'images',
  'load_map': 'images',
  'patch_maps': 'images',
  'token_stages': 'images',
  'isoflop': 'isoflop',
  'routing_map': 'maps',
  'attention_ranks': 'ranks',
  'corruption_curves': 'robustness',
  'accuracy_flops': 'scatter',
  'importance_scatter': 'scatter',
  'seed_dots': 'seeds',
  'RULES': 'style',
  'RuleStyle': 'style',
  'rule_style': 'style',
  'token_load': 'token_load',
}

__all__ = (
  'corruption_curves',
  'NOT_THERE',
  'NO_EXPERT',
  'RULES',
  'RuleStyle',
  'accuracy_flops',
  'attention_maps',
  'attention_ranks',
  'compared_curves',
  'compute_extremes',
  'compute_histogram',
  'display_piece',
  'engagement',
  'error_by_learners',
  'expert_curves',
  'expert_load',
  'expert_map',
  'expert_patches',
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


def __getattr__(name):
  if name not in _MODULES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module = importlib.import_module(f'{__name__}.{_MODULES[name]}')
  # Importing a module sets it as an attribute, and some are called as what they
  # hold: the public name must win.
  globals()[name] = getattr(module, name)
  return globals()[name]


def __dir__():
  return sorted([*globals(), *_MODULES])
