"""Token pruning with a teacher that drops nothing: DynamicViT."""

import jax
import jax.numpy as jnp

from mod_jax import losses, routing
from mod_jax.tasks.experiment import PruningObjective
from mod_jax.tasks.plain import Plain, joined


class Pruning(Plain):
  """Learns to drop image tokens, with the frozen backbone as teacher.

  The loss is that of Rao et al. 2021, section 3.4, Eq. 16 as published; the
  loss weights are in `experiment.PruningObjective`.
  """

  no_teacher = (
    'DynamicViT learns beside a teacher that drops nothing: give its workdir or'
    ' checkpoint as init (or objective.teacher), or set'
    ' objective.token_distillation=0 and objective.logit_distillation=0.'
  )

  def __init__(self, config, modality):
    super().__init__(config, modality)
    self.objective = config.objective or PruningObjective()
    if self.objective.needs_teacher:
      self.teacher_model = config.model.backbone.with_parts(lora=None)

  def losses(self, params, model_state, batch, rng, static_args, teacher=None):
    model, objective = self.config.model, self.objective
    output, model_state = self.forward(model, params, model_state, batch, rng)
    weighted = {
      'loss': (objective.classification, self.modality.loss(output, batch))
    }
    if model.learned:
      ratio = losses.ratio_loss(output.keep_SBN, model.targets)
      weighted['ratio'] = (objective.ratio, ratio)
    if teacher is not None:
      teacher_output = self.teacher_model.build().apply(
        teacher, batch['image'], rngs={'routing': rng}
      )
      weighted['logit_distillation'] = (
        objective.logit_distillation,
        losses.logit_distillation(output.logits_BV, teacher_output.logits_BV),
      )
      if model.score != 'structural':  # Pools patches; the teacher does not.
        weighted['token_distillation'] = (
          objective.token_distillation,
          self._token_distillation(output, teacher_output),
        )
    pairs = [(w * total, count) for w, (total, count) in weighted.values()]
    metric_sums = {name: pair for name, (_, pair) in weighted.items()}
    for s, keep_BN in enumerate(output.keep_SBN):
      keep_BN = jax.lax.stop_gradient(keep_BN)
      metric_sums[f'kept_{s}'] = (keep_BN.sum(), jnp.float32(keep_BN.size))
    pairs, metric_sums = joined(
      (pairs, metric_sums), self.choice_losses(output, batch, model)
    )
    return pairs, (metric_sums, model_state)

  def _token_distillation(self, output, taught):
    prefix = self.config.model.backbone.num_prefix
    features_BKD = output.features_BLD[:, prefix:]
    teacher_BND = taught.features_BLD[:, prefix:]
    keep_BN = output.keep_SBN[-1]
    num_left = features_BKD.shape[1]
    if num_left < teacher_BND.shape[1]:  # Patches were dropped, not masked.
      selection = routing.select_decided(keep_BN > 0, num_left)
      teacher_BND = routing.gather_tokens(teacher_BND, selection.index_BK)
      keep_BN = jnp.ones(selection.index_BK.shape)
    return losses.token_distillation(features_BKD, teacher_BND, keep_BN)
