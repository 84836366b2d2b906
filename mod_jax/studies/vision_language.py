"""A study of vision-language models: which image tokens their blocks choose."""

import jax.numpy as jnp
import numpy as np

from mod_jax.train.task import Study

_ASKED = 500  # Held-out questions.


def image_tokens(task, params, model_state) -> Study:
  """Measures which tokens of held-out scenes each routed block processes.

  A token shows a digit if the middle of its patch is in the digit's box.
  """
  model = task.config.model
  processed, digits = [], []

  def look(output, batch):
    return jnp.stack([routed.chosen_BL for routed in output.routing])

  batches = -(-_ASKED // task.config.evaluation.batch_size)
  for batch, chosen_RBL in task.over_held_out(
    look, params, model_state, batches
  ):
    shown_BL = batch['shown'] >= -1
    processed.append(chosen_RBL[:, shown_BL])
    digits.append(batch['shown'][shown_BL] >= 0)
  processed_RN, digit_N = np.concatenate(processed, 1), np.concatenate(digits)
  lines = [f'{"":<10}{"digits":>12}{"background":>12}']
  metrics = {'digits': digit_N.mean().item()}
  for layer, processed_N in zip(model.routed_blocks, processed_RN, strict=True):
    shares = {
      'digits': processed_N[digit_N].mean().item(),
      'background': processed_N[~digit_N].mean().item(),
    }
    cells = ''.join(f'{share:>12.1%}' for share in shares.values())
    lines.append(f'block {layer:<4}{cells}')
    metrics[f'block {layer}'] = shares
  lines.append(
    f'Of image tokens that show a digit ({metrics["digits"]:.1%} of all), or'
    ' none, those that the block processes.'
  )
  return Study(text='\n'.join(lines), metrics=metrics)
