"""What lies at a path, by its files alone."""

import contextlib
import json
import pathlib
import shutil

import pytest

from mod_jax import config as config_lib
from mod_jax import paths
from mod_jax.data import tokenizers
from mod_jax.errors import UserError
from mod_jax.models.detr import DETRConfig
from mod_jax.models.lm import LMConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.models.vlm import VLMConfig
from mod_jax.models.wav2vec2 import Wav2Vec2Config
from mod_jax.pretrained.source import Source
from mod_jax.runs import workdir as workdir_lib
from mod_jax.tasks.experiment import ExperimentConfig

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'


def test_each_kind_is_recognised(tmp_path):
  run = ExperimentConfig()
  workdir_lib.claim(tmp_path / 'run', run)
  model = json.loads(config_lib.to_json(run))['model']
  (tmp_path / 'export').mkdir()
  (tmp_path / 'export' / 'mod_jax.json').write_text(
    json.dumps(
      {
        'model': {'type': 'LMConfig'} | model,
        'experiment': json.loads(config_lib.to_json(run)),
        'tokenizer': 'bytes',
      }
    )
  )
  for path, kind, config in (
    (tmp_path / 'run', 'run', LMConfig),
    (tmp_path / 'export', 'export', LMConfig),
    (GOLDEN / 'lm' / 'llama', 'language', LMConfig),
    (GOLDEN / 'wav2vec2' / 'group', 'speech', Wav2Vec2Config),
    (GOLDEN / 'detr', 'detector', DETRConfig),
    (GOLDEN / 'vlm' / 'llava', 'vlm', VLMConfig),
    (GOLDEN / 'vlm' / 'clip', 'vision', ViTConfig),
    (GOLDEN / 'vit_timm.safetensors', 'vision', ViTConfig),
    (GOLDEN / 'vit_lvvit.pth.tar', 'vision', ViTConfig),
  ):
    fields = {'num_heads': 3} if path.name.startswith('vit') else {}
    source = Source.open(path, **fields)
    assert source.kind == kind
    assert type(source.config) is config
    assert source.ours == (kind in ('run', 'export'))
    assert source.foreign == (kind in ('language', 'speech', 'vlm'))


def test_a_recogniser_says_its_rate(tmp_path):
  folder = shutil.copytree(GOLDEN / 'wav2vec2' / 'group', tmp_path / 'model')
  file = folder / 'preprocessor_config.json'
  for rate in (8000, 'x'):
    file.write_text(json.dumps({'sampling_rate': rate}))
    expected = pytest.raises(UserError, match="beside .*rate='x'")
    with contextlib.nullcontext() if rate == 8000 else expected:
      assert Source.open(folder).experiment.data.rate == 8000
  file.write_text(json.dumps({'do_normalize': False}))
  with pytest.raises(UserError, match='do_normalize=False: expected true'):
    _ = Source.open(folder).experiment
  # As transformers 5 writes it.
  file.unlink()
  told = {'feature_extractor': {'sampling_rate': 8000}}
  (folder / 'processor_config.json').write_text(json.dumps(told))
  assert Source.open(folder).experiment.data.rate == 8000


@pytest.mark.parametrize(
  ('name', 'ends'),
  # transformers takes those of the config where the other file is missing.
  [('generation_config', [2, 3]), ('generation_config', [1]), ('config', [3])],
)
def test_settings_of_generation_are_followed_or_told(
  name, ends, tmp_path, caplog
):
  folder = shutil.copytree(GOLDEN / 'lm_eval' / 'model', tmp_path / 'model')
  told = {'num_beams': 1, 'temperature': 0.7, 'eos_token_id': ends}
  told |= {'repetition_penalty': 1.1, 'suppress_tokens': None}
  file = folder / f'{name}.json'
  file.write_text(json.dumps(paths.read_object(file) | told))
  _ = Source.open(folder).experiment
  assert 'not followed: repetition_penalty=1.1.' in caplog.text
  # Copies keep them, as of exports.
  tokenizers.copy('huggingface', str(folder), str(tmp_path / 'copy'))
  for there in (folder, tmp_path / 'copy'):
    found = tokenizers.make('huggingface', str(there)).end_ids
    assert set(found) == {1, *ends}


VISION = {
  'config.json': {
    **{'num_attention_heads': 3, 'layer_norm_eps': 1e-6, 'id2label': {}},
    **{'hidden_act': 'gelu', 'architecture': 'vit_tiny_', 'label_names': []},
    **{'model_args': {}, 'pretrained_cfg': {}, 'model_type': 'vit'},
    **{'crop_pct': 0.9, 'crop_mode': 'center', 'input_size': [3, 32, 32]},
    **{'mean': [0.5] * 3, 'std': [0.5] * 3, 'interpolation': 'bicubic'},
  },
  'preprocessor_config.json': {
    **{'image_processor_type': 'ViT', 'do_resize': True, 'size': 32},
    **{'resample': 2, 'do_center_crop': True, 'crop_size': 32},
    **{'do_rescale': True, 'rescale_factor': 0.1, 'do_normalize': True},
    **{'image_mean': [0.5] * 3, 'image_std': [0.5] * 3, 'do_pad': False},
  },
}


@pytest.mark.parametrize('file', VISION)
@pytest.mark.parametrize(
  'value',
  [None, 'x', [2], {}, 0, -1, 1e300, 1e-300, True, [[]], {'height': {}}],
)
def test_no_value_of_a_foreign_file_is_more_than_refused(file, value, tmp_path):
  weights = tmp_path / 'model.safetensors'
  shutil.copy(GOLDEN / 'vit_timm.safetensors', weights)
  for key in VISION[file]:
    changed = VISION[file] | {key: value}
    (tmp_path / file).write_text(json.dumps(changed))
    with contextlib.suppress(UserError):
      source = Source.open(tmp_path, num_heads=3)
      _ = source.config, source.classes, source.preprocess
