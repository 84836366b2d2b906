"""Pictures of what a model did: matplotlib figures from plain arrays.

The functions do not depend on models: callers pass arrays, strings and records.
All figures are made without pyplot, so they share no state with a notebook or
with another thread; `save` writes them. A module is imported when one of its
names in `_NAMES` is first used, since matplotlib takes long to import.

A run has the pictures that the methods `curves` and `pictures` of its task and
modality return (`tasks`); `studies` draw further ones.
"""

import importlib

_NAMES = {
  'bars': 'attention_ranks compute_histogram error_by_learners score_histogram',
  'confusion': 'confusion_matrix worst_pictures',
  'detection': 'boxes',
  'curves': 'compared_curves corruption_curves expert_curves loss_curves',
  'experts': 'NOT_THERE NO_EXPERT expert_load expert_map expert_patches',
  'files': 'save',
  'glyphs': 'display_piece',
  'images': 'attention_maps compute_extremes keep_probability load_map'
  ' merged_patches patch_maps token_stages',
  'maps': 'routing_map token_load',
  'scatter': 'accuracy_flops engagement importance_scatter isoflop seed_dots',
  'speech': 'load_over_time',
  'style': 'RULES RuleStyle rule_style',
}
_MODULES = {
  name: module for module, names in _NAMES.items() for name in names.split()
}
__all__ = sorted(_MODULES)


def __getattr__(name):
  if name not in _MODULES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module = importlib.import_module(f'{__name__}.{_MODULES[name]}')
  # Keep the value, so that Python does not call this function for it again.
  globals()[name] = getattr(module, name)
  return globals()[name]


def __dir__():
  return sorted({*globals(), *_MODULES})
