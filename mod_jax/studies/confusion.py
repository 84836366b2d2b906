"""What a classifier confuses: precision and recall by class, worst pictures."""

from collections.abc import Sequence
import os
from typing import Any

import jax
import numpy as np

from mod_jax import tables, viz
from mod_jax.data import images as images_lib
from mod_jax.losses import classification
from mod_jax.train.task import Study

_WORST = 24  # Number of the worst pictures that are drawn.
_LISTED = 200  # Number of the worst pictures that `worst.csv` lists.
_CLASSES = 40  # Maximum classes in the printed table; `classes.csv` has all.
_MISTAKEN = 3  # Number of most frequent wrong predictions to list for a class.


def confusion(task, params, model_state) -> Study:
  """Counts the predicted classes of each true class, on all held-out images.

  The worst pictures are the wrongly classified ones with the largest losses.
  With several labels per image, each label has its own precision, recall and
  average precision, and there is no confusion matrix.
  """
  data, modality = task.config.data, task.modality
  pictures = images_lib.open_split(data, 'eval')
  labels, logits, worst, start = [], [], [], 0
  for batch, (logits_BV, loss_B) in task.over_held_out(
    lambda output, batch: (output.logits_BV, _losses(modality, output, batch)),
    *(params, model_state, 0),
  ):
    real_B = batch['weight'] > 0
    labels.append(batch['label'][real_B])
    logits.append(logits_BV[real_B])
    for b in np.flatnonzero(real_B):
      said = modality.caption(batch['label'][b], logits_BV[b])
      if ' → ' in said:
        picture = images_lib.denormalize(data, batch['image'][b])
        name = pictures.name(start + b)
        worst.append((float(loss_B[b]), name, said, picture))
    start += len(real_B)
    # Only some are kept, since all images may not fit into memory.
    worst.sort(key=lambda wrong: -wrong[0])
    del worst[_LISTED:]
  label_N, logits_NV = np.concatenate(labels), np.concatenate(logits)
  by_class = _one_true if not modality.multi_label else _many_true
  text, metrics, rows, files, figures = by_class(
    modality.classes, label_N, logits_NV
  )
  listed = [(name, said, round(loss, 4)) for loss, name, said, _ in worst]
  text += ['', 'The worst, by their loss in nats:']
  text += [f'  {loss:8.3f}  {name}: {said}' for name, said, loss in listed[:10]]
  if worst:
    figures['worst'] = viz.worst_pictures(
      [picture for *_, picture in worst[:_WORST]],
      [said for _, _, said, _ in worst[:_WORST]],
      [
        f'{loss:.2f} nats\n{os.path.basename(name)}'
        for loss, name, *_ in worst[:_WORST]
      ],
      title='The worst pictures',
      subtitle='Held-out pictures that were taken for something else, by their'
      ' loss, the largest first.',
    )
  files |= {
    'classes.csv': tables.csv_of(rows),
    'worst.csv': tables.csv_text([('file', 'said', 'loss'), *listed]),
  }
  metrics['classes'] = {row['class']: row for row in rows}
  return Study(
    text='\n'.join(text), metrics=metrics, files=files, figures=figures
  )


def _losses(modality, output, batch) -> jax.Array:
  """Returns loss_B, the loss of each image."""
  return jax.vmap(modality.held_out_loss)(output.logits_BV, batch['label'])


def _one_true(classes, label_N, logits_NV):
  """Returns lines, metrics, rows by class, files and figures, for one label."""
  matrix_VV = classification.confusion(
    label_N, logits_NV.argmax(axis=-1), len(classes)
  )
  precision_V, recall_V = classification.precision_recall(matrix_VV)
  rows = [
    {
      'class': name,
      'images': int(matrix_VV[v].sum()),
      'predicted': int(matrix_VV[:, v].sum()),
      'precision': float(precision_V[v]),
      'recall': float(recall_V[v]),
      'taken for': _mistaken(matrix_VV, classes, v),
    }
    for v, name in enumerate(classes)
  ]
  metrics = {
    'accuracy': float(np.trace(matrix_VV) / matrix_VV.sum()),
    'mean_recall': float(np.nanmean(recall_V)),
  }
  text = [
    f'{len(label_N):,} held-out images: accuracy {metrics["accuracy"]:.4f},'
    f' mean recall {metrics["mean_recall"]:.4f}',
    *_table(rows, 'recall'),
  ]
  matrix = tables.csv_text(
    [
      ('true', *classes),
      *((c, *row) for c, row in zip(classes, matrix_VV.tolist(), strict=True)),
    ]
  )
  figures = {'matrix': viz.confusion_matrix(matrix_VV, classes)}
  return text, metrics, rows, {'matrix.csv': matrix}, figures


def _many_true(classes, label_NV, logits_NV):
  """Returns the same as `_one_true`, for images that may have several labels.

  There are no files and no figures: these two dictionaries are empty.
  """
  ap_V = classification.average_precision(label_NV, logits_NV)
  true_NV, guess_NV = label_NV > 0, logits_NV > 0
  rows = []
  for v, name in enumerate(classes):
    (tn, fp), (fn, tp) = classification.confusion(
      true_NV[:, v], guess_NV[:, v], 2
    ).tolist()
    rows.append(
      {
        'class': name,
        'images': tp + fn,
        'predicted': tp + fp,
        'precision': tp / (tp + fp) if tp + fp else np.nan,
        'recall': tp / (tp + fn) if tp + fn else np.nan,
        'average precision': float(ap_V[v]),
      }
    )
  metrics = {
    'mAP': float(np.nanmean(ap_V)),
    'mean_recall': float(np.nanmean([row['recall'] for row in rows])),
  }
  text = [
    f'{len(label_NV):,} held-out images: mAP {metrics["mAP"]:.4f}; precision'
    ' and recall where a label is likelier true than not',
    *_table(rows, 'average precision'),
  ]
  return text, metrics, rows, {}, {}


def _mistaken(matrix_VV, classes, v: int) -> str:
  """Returns the most frequent wrong predictions for class `v`, with counts."""
  count_V = matrix_VV[v].copy()
  count_V[v] = 0
  order = np.argsort(-count_V, kind='stable')[:_MISTAKEN]
  return ', '.join(f'{classes[i]} {count_V[i]}' for i in order if count_V[i])


def _table(rows: Sequence[dict[str, Any]], worst_by: str) -> list[str]:
  """Returns a table's lines; of many classes only the worst by `worst_by`."""
  shown, note = rows, []
  if len(rows) > _CLASSES:
    order = sorted(rows, key=lambda row: np.nan_to_num(row[worst_by], nan=2))
    shown = order[:_CLASSES]
    note = [f'The {_CLASSES} worst of {len(rows)} classes, by {worst_by}.']
  wide = max(len(row['class']) for row in shown)
  titles = list(rows[0])[1:]

  def cell(title, value):
    if isinstance(value, str):  # The last column, aligned at the left.
      return f'   {value}'
    text = f'{value:.4f}' if isinstance(value, float) else f'{value:,}'
    return text.rjust(len(title) + 2)

  head = [
    f'   {t}' if isinstance(rows[0][t], str) else f'  {t}' for t in titles
  ]
  lines = ['class'.ljust(max(wide, 5)) + ''.join(head)]
  for row in shown:
    cells = ''.join(cell(title, row[title]) for title in titles)
    lines.append(row['class'].ljust(max(wide, 5)) + cells)
  return lines + note
