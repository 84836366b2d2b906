"""Studies of an adaptive model: robustness to corrupted images."""

import jax
import numpy as np

from mod_jax import viz
from mod_jax.data import corruptions, resize
from mod_jax.data import images as images_lib
from mod_jax.layers import stack as stack_lib
from mod_jax.models import acm
from mod_jax.train.task import Study

_IMAGES = 512
_SEVERITIES = range(6)  # 0 is the clean image.


def robustness(task, params, model_state) -> Study:
  """Measures accuracy and load (`load_per_row`) under corruptions.

  The original model, not adaptive yet, is measured for comparison. Both models
  classify up to 512 held-out images, clean and with each corruption of
  `data.corruptions` in five severities.
  """
  model = task.config.model
  batch = task.modality.examples(_IMAGES)
  shown_BHWC = images_lib.denormalize(task.config.data, batch['image'])
  # Reads the teacher's arrays, which may be `convert.arrays.Lazy`.
  teacher = jax.tree.map(np.asarray, task.converted())
  key = jax.random.key(task.config.seed)

  @jax.jit
  def guess(params, model_state, teacher, images_BHWC):
    variables, rngs = {'params': params, **model_state}, {'routing': key}
    output = model.build().apply(variables, images_BHWC, rngs=rngs)
    teacher_output = (
      acm.without(model).build().apply(teacher, images_BHWC, rngs=rngs)
    )
    load_B = task.load_per_row(stack_lib.collect(output.aux, 'adaptive'))
    both = output, teacher_output
    return *(x.logits_BV.argmax(axis=-1) for x in both), load_B

  data = task.config.data
  lines = [
    f'{"corruption":<12}{"severity":>9}{"adaptive":>10}{"dense":>8}{"load":>8}'
  ]
  metrics, curves = {}, {}
  for kind in corruptions.CORRUPTIONS:
    curves[kind] = {'adaptive': [], 'dense': [], 'load': []}
    for severity in _SEVERITIES:
      corrupted_BHWC = corruptions.corrupt(
        shown_BHWC, kind, severity, seed=task.config.seed
      )
      images_BHWC = resize.normalize(corrupted_BHWC, data.mean, data.std)
      adaptive_B, dense_B, load_B = jax.device_get(
        guess(params, model_state, teacher, images_BHWC)
      )
      measured = {
        'adaptive': float(np.mean(adaptive_B == batch['label'])),
        'dense': float(np.mean(dense_B == batch['label'])),
        'load': float(load_B.mean()),
      }
      metrics[f'{kind}/{severity}'] = measured
      for name, value in measured.items():
        curves[kind][name].append(value)
      lines.append(
        f'{kind:<12}{severity:>9}{measured["adaptive"]:>10.4f}'
        f'{measured["dense"]:>8.4f}{measured["load"]:>8.4f}'
      )
  lines.append(
    f'{len(batch["label"])} held-out images; severity 0 is none. Dense: the'
    ' model that was converted.'
  )
  figure = viz.corruption_curves(curves, budget=task.objective.budget)
  return Study(
    text='\n'.join(lines), metrics=metrics, figures={'curves': figure}
  )
