"""Trains a routed language model with its dense original as teacher."""

from mod_jax import losses
from mod_jax.tasks.plain import Plain


class Distilled(Plain):
  """Plain training plus the divergence from a dense model's predictions.

  Settings are in `experiment.ConversionObjective`.
  """

  no_teacher = (
    'a conversion learns from a dense model: give its run or directory as init'
    ' (or objective.teacher), or set objective to None.'
  )

  @property
  def teacher_model(self):
    return self.config.model.dense_twin()

  def forward(self, model, params, model_state, batch, rng, **mode):
    batch = _without_targets(batch)
    return super().forward(model, params, model_state, batch, rng, **mode)

  def taught(self, output, batch, teacher):
    args, kwargs = self.modality.inputs(_without_targets(batch), train=True)
    teacher_output = self.teacher_model.build().apply(teacher, *args, **kwargs)
    total, count = losses.logit_distillation(
      output.logits_BLV, teacher_output.logits_BLV, batch['weights']
    )
    scaled = self.config.objective.distillation * total, count
    return [scaled], {'distillation': (total, count)}


def _without_targets(batch):
  """Returns the batch without targets; then models return logits, no loss."""
  return {name: x for name, x in batch.items() if name != 'targets'}
