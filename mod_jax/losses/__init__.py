"""Losses and metrics: functions of arrays. Most return (total, weight) pairs.

A pair is a sum, and the number or the total weight of its terms. The pairs of
microbatches and hosts are added; then each total is divided by its weight. The
modules:

* `acm`: adaptive computation modules;
* `classification`: confusion, precision and recall of a classifier, in NumPy;
* `ctc`: CTC, and error rates of transcripts;
* `detection`: DETR's matching and set losses;
* `experts`: mixtures of experts;
* `language`: next-token cross-entropy, also fused with the head;
* `mean_precision`: mean average precision of boxes, in NumPy;
* `routing`: routers, predictors, and causal rules that approximate top-k;
* `sums`: addition of pairs;
* `vision`: image classification, distillation and token pruning.
"""

from mod_jax.losses import acm, ctc, experts
from mod_jax.losses.language import head_loss, next_token_loss
from mod_jax.losses.routing import choice_agreement, choice_bce, path_balance
from mod_jax.losses.vision import (
  classification_loss,
  logit_distillation,
  multi_label_loss,
  ratio_loss,
  token_distillation,
  top_k_accuracy,
)

__all__ = (
  'acm',
  'choice_agreement',
  'choice_bce',
  'classification_loss',
  'ctc',
  'experts',
  'head_loss',
  'logit_distillation',
  'multi_label_loss',
  'next_token_loss',
  'path_balance',
  'ratio_loss',
  'token_distillation',
  'top_k_accuracy',
)
