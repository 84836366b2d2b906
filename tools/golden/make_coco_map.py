"""Writes the golden file of mean average precision: what pycocotools computes.

Random boxes, found and there, in `map_expected.npz`, with the average
precisions `ap` [classes, thresholds]; and boxes of crowds, with the precisions
`ap_with_crowds` if they are there, too. The environment is that of
`make_vit.py` with pycocotools:

  golden/bin/pip install pycocotools==2.0.11
  golden/bin/python tools/golden/make_coco_map.py
"""

import pathlib

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

HERE = pathlib.Path(__file__).parents[2] / 'tests' / 'golden'
PICTURES, CLASSES = 12, 4  # Of the last class nothing is there.


def main():
  generator = np.random.default_rng(0)
  arrays = {name: [] for name in ('there', 'found')}
  for i in range(PICTURES):
    count = int(generator.integers(0, 7)) if i else 0
    label = generator.integers(0, CLASSES - 1, count)
    size = generator.uniform(10, 90, (count, 2))
    corner = generator.uniform(0, 200, (count, 2))
    there = np.column_stack([np.full(count, i), label, corner, size])
    # Several tries at most boxes, some wrong, some of a tied score.
    tries = np.repeat(there, 3, axis=0)
    tries = tries[generator.random(len(tries)) < 0.8]
    tries[:, 2:] += generator.normal(0, 6, tries[:, 2:].shape)
    tries[:, 4:] = np.maximum(tries[:, 4:], 3)
    wrong = generator.random(len(tries)) < 0.15
    tries[wrong, 1] = generator.integers(0, CLASSES, wrong.sum())
    score = np.round(generator.random(len(tries)), 1)
    arrays['there'].append(there)
    arrays['found'].append(np.column_stack([tries, score]))
  # Over a hundred boxes of a class in a picture.
  many = np.repeat(arrays['found'][3][:1], 130, axis=0)
  many[:, 2:6] += generator.normal(0, 2, (130, 4))
  many[:, 6] = generator.random(130)
  arrays['found'].append(many)
  arrays = {k: np.concatenate(x) for k, x in arrays.items()}
  # Crowds around some of the boxes that were found.
  inside = arrays['found'][::9]
  crowds = inside[:, :6].copy()
  crowds[:, 2:4] -= 20
  crowds[:, 4:] += 30
  ap = {
    'ap': precisions(**arrays, crowds=crowds[:0]),
    'ap_with_crowds': precisions(**arrays, crowds=crowds),
  }
  np.savez_compressed(HERE / 'map_expected.npz', **arrays, crowds=crowds, **ap)
  print(ap)


def precisions(there, found, crowds):
  """Returns pycocotools' average precisions [classes, thresholds]."""
  coco = COCO()
  rows = np.concatenate([there, crowds])
  coco.dataset = {
    'images': [{'id': i, 'width': 300, 'height': 300} for i in range(PICTURES)],
    'categories': [{'id': v, 'name': str(v)} for v in range(CLASSES)],
    'annotations': [
      {
        **{'id': n + 1, 'image_id': int(row[0]), 'category_id': int(row[1])},
        **{'bbox': row[2:].tolist(), 'area': row[4] * row[5]},
        'iscrowd': int(n >= len(there)),
      }
      for n, row in enumerate(rows)
    ],
  }
  coco.createIndex()
  guesses = coco.loadRes(np.column_stack([found[:, [0, 2, 3, 4, 5, 6, 1]]]))
  evaluation = COCOeval(coco, guesses, 'bbox')
  evaluation.params.imgIds = list(range(PICTURES))
  evaluation.evaluate()
  evaluation.accumulate()
  precision_JRV = evaluation.eval['precision'][:, :, :, 0, -1]
  ap_VJ = precision_JRV.mean(axis=1).T
  return np.where(ap_VJ < 0, np.nan, ap_VJ)


if __name__ == '__main__':
  main()
