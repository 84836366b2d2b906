"""Writes the golden file of preprocessing: what transformers makes of pictures.

`pictures.npz` holds two pictures of random pixels, `wide` and `tall`, and of
each case of `CASES` the preprocessor_config.json as text, `<case>/config`, and
what the library's image processor (by Pillow) makes of both pictures,
`<case>/wide` and `<case>/tall` [8, 8, 3]. Run it again only to add a case, in
the environment of `make_vit.py`:

  golden/bin/python tools/golden/make_pictures.py
"""

import json
import pathlib
import sys
import tempfile
import types

import numpy as np

# It registers shapes for compiled operators that are not there.
_META = 'torchvision._meta_registrations'
sys.modules[_META] = types.ModuleType(_META)

import transformers  # noqa: E402

HERE = pathlib.Path(__file__).parents[2] / 'tests' / 'golden'
SIZE = 8
SQUARE = {'height': SIZE, 'width': SIZE}
LARGER = {'height': 11, 'width': 11}
VIT = {'image_processor_type': 'ViTImageProcessor'}
DEIT = {'image_processor_type': 'DeiTImageProcessor'}
CASES = {
  # As google/vit-base-patch16-224 and facebook/deit-base-patch16-224 have it.
  'old_vit': {
    **{'do_normalize': True, 'do_resize': True, 'size': SIZE},
    **{'image_mean': [0.5, 0.5, 0.5], 'image_std': [0.5, 0.5, 0.5]},
  },
  'old_deit': {
    **{'feature_extractor_type': 'DeiTFeatureExtractor', 'size': 10},
    **{'do_center_crop': True, 'crop_size': SIZE, 'resample': 3},
    **{'image_mean': [0.485, 0.456, 0.406], 'image_std': [0.2, 0.3, 0.4]},
  },
  'fast': {'image_processor_type': 'ViTImageProcessorFast', 'size': SQUARE},
  'deit_silent': DEIT | {'size': LARGER, 'crop_size': SQUARE},
  'shortest_edge': DEIT | {'size': {'shortest_edge': 11}, 'crop_size': SQUARE},
  'crop_beyond': DEIT | {'size': {'shortest_edge': 5}, 'crop_size': SQUARE},
  'no_resize': DEIT | {'do_resize': False, 'crop_size': SQUARE},
  'lanczos': VIT | {'size': SQUARE, 'resample': 1},
  'nearest': VIT | {'size': SQUARE, 'resample': 0},
  'no_normalize': VIT | {'size': SQUARE, 'do_normalize': False},
  'no_rescale': VIT | {'size': SQUARE, 'do_rescale': False},
  'rescale_factor': VIT | {'size': SQUARE, 'rescale_factor': 1 / 127.5},
  'raw': VIT | {'size': SQUARE, 'do_rescale': False, 'do_normalize': False},
}


def main():
  rng = np.random.default_rng(0)
  pictures = {
    'wide': rng.integers(0, 256, (13, 30, 3), np.uint8),
    'tall': rng.integers(0, 256, (21, 7, 3), np.uint8),
  }
  arrays = dict(pictures)
  for name, config in CASES.items():
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder)
      (path / 'config.json').write_text(json.dumps({'model_type': 'vit'}))
      (path / 'preprocessor_config.json').write_text(json.dumps(config))
      processor = transformers.AutoImageProcessor.from_pretrained(
        folder, backend='pil'
      )
    assert type(processor).__name__.endswith('Pil')
    arrays[f'{name}/config'] = np.array(json.dumps(config))
    for picture, pixels in pictures.items():
      (values,) = processor(pixels, return_tensors='np')['pixel_values']
      arrays[f'{name}/{picture}'] = values.transpose(1, 2, 0).astype('f')
  np.savez_compressed(HERE / 'pictures.npz', **arrays)


if __name__ == '__main__':
  main()
