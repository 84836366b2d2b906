"""Batches, files and summaries that `images` and `detection` share."""

import abc
import json
import types

import numpy as np

from mod_jax import flops
from mod_jax.pretrained import source as source_lib
from mod_jax.tasks.modality import Modality, table

_NAMED = 10  # Number of classes to list when training starts.


class Vision(Modality):
  """Images of named classes.

  Attributes:
    reader: the module of `data` that reads the images: it has `open_split`,
      `train_iterator` and `eval_batches`.
  """

  unit = 'images'
  row = 'images'
  reader: types.ModuleType

  @property
  @abc.abstractmethod
  def classes(self) -> tuple[str, ...]:
    """Class names by number, read on first use; '' for unused numbers."""

  def files(self):
    # The training images may be missing where the model is used later.
    return {source_lib.CLASSES: json.dumps(self.classes, indent=1)}

  def split(self, name):
    return self.reader.open_split(self.config.data, name)

  def endless(self, **kwargs):
    return self.reader.train_iterator(self.config.data, **kwargs)

  def eval_batches(self, **kwargs):
    return self.reader.eval_batches(self.config.data, **kwargs)

  def examples(self, count: int) -> dict[str, np.ndarray]:
    """Returns a batch of `count` held-out images, or all, spread evenly."""
    batch = next(iter(self.eval_batches(batch_size=count, num_batches=1)))
    real_B = batch['weight'] > 0
    return {name: value[real_B] for name, value in batch.items()}

  def data_summary(self):
    classes = [name for name in self.classes if name]
    shown = ', '.join(classes[:_NAMED]) + ', …' * (len(classes) > _NAMED)
    return f'{super().data_summary()}, {len(classes)} classes: {shown}'

  @property
  def tokens_per_step(self):
    return self.config.train.batch_size

  def token_weights(self, batch):
    return batch['weight'][:, None]

  def summary(self, task, metrics):
    model = self.config.model
    costs = [flops.published_macs(model), flops.forward(model)]
    cells = [f'{cost / 1e9:.4f}' for cost in costs]
    rows = [('model', '', *cells, f'{flops.num_params(model):,}')]
    if 'never/loss' in metrics:
      rows.append(('never', 'never/'))
    columns = [c for c in self.columns if c in metrics]
    more = ('GMACs', 'GFLOPs', 'parameters')
    lines = table(metrics, columns, rows, more=more, first=8, width=12)
    lines.append(
      'GMACs: what published tables call GFLOPs; a multiply-add counts once,'
      ' and norms count too.'
    )
    if 'never/loss' in metrics:
      lines.append('never: routed blocks left out, the trivial baseline.')
    return '\n'.join(lines)
