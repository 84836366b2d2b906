"""Runs that train adapters and routers beside frozen weights of `init`."""

import dataclasses
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest
import tiny
import tokenizers

import mod_jax
from mod_jax import config as config_lib
from mod_jax import parallel, trees
from mod_jax.data.conversations import ConversationDataConfig
from mod_jax.data.detection import DetectionDataConfig
from mod_jax.data.scenes import SceneConfig
from mod_jax.errors import UserError
from mod_jax.layers.lora import PARAMETERS
from mod_jax.runs import checkpoints
from mod_jax.runs import workdir as workdir_lib
from mod_jax.tasks import load as load_trained
from mod_jax.tasks import make_task, phases
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import loop
from mod_jax.train import state as state_lib

pytestmark = [
  pytest.mark.slow,
  pytest.mark.usefixtures('no_report', 'one_device'),
]

ROOT = pathlib.Path(__file__).parents[2]
CONVERT = config_lib.load(ROOT / 'configs' / 'lm' / 'convert.py')
WORDS = config_lib.load(ROOT / 'configs' / 'speech' / 'words.py')
GOLDEN = ROOT / 'tests' / 'golden'
TINY = {
  'train.num_steps': 6,
  'train.batch_size': 4,
  'evaluation.every': 0,
  'evaluation.batches': 1,
  'evaluation.final_batches': 1,
  'evaluation.batch_size': 4,
  'evaluation.sample_tokens': 0,
  'log.tensorboard': False,
  'checkpoint.every': 3,
}


@pytest.fixture(scope='module')
def dense(tmp_path_factory):
  folder = tmp_path_factory.mktemp('dense')
  tiny.export_dense(
    config_lib.replace(CONVERT.get_config('lora'), tiny.SMALL), folder
  )
  return folder


def build(dense, **changes):
  config = config_lib.replace(
    CONVERT.get_config('lora'), tiny.SMALL | {'init': str(dense)}
  )
  config = CONVERT.complete(config)
  rate = {'optimizer.learning_rate': 1e-3}
  return config_lib.replace(config, TINY | rate | changes)


@dataclasses.dataclass
class Trained:
  config: object
  workdir: pathlib.Path
  result: loop.Result


@pytest.fixture(scope='module')
def whole(dense, tmp_path_factory, on_one_device, no_report):
  workdir = tmp_path_factory.mktemp('whole')
  config = build(dense)
  with on_one_device():
    result = phases.train(config, workdir)
  assert result.finished
  return Trained(config, workdir, result)


def test_only_what_is_trained_is_in_state_optimiser_and_checkpoint(
  whole, dense
):
  state = whole.result.state
  trained = trees.flatten(state.params)
  routers = {name for name in trained if 'router' in name}
  adapters = {name for name in trained if '_lora/' in name}
  assert routers
  assert all('block_1/' in name for name in routers)
  # Adapters of the deeper half: seven maps of two matrices in one block.
  assert len(adapters) == 7 * 2
  assert trained.keys() == routers | adapters
  assert not any('block_0' in name for name in trained)
  # Adam's two moments of these.
  moments = [x.size for x in jax.tree.leaves(state.opt_state) if x.ndim]
  assert sum(moments) == 2 * sum(x.size for x in trained.values())
  saved = checkpoints.restore_named(
    workdir_lib.checkpoints(whole.workdir), ('params', 'frozen', 'ema')
  )
  assert trees.flatten(saved.state['params']).keys() == trained.keys()
  assert not saved.state['frozen']
  # What is frozen is as it was at first.
  base = mod_jax.load(dense).variables['params']
  tiny.same(state.frozen, base)
  # The others have changed.
  assert all(
    np.any(np.asarray(x)) for name, x in trained.items() if '/up/' in name
  )
  tiny.same(state.eval_params, trees.join(state.params, base))


def test_stopped_and_continued_is_bit_identical(whole, tmp_path):
  assert not phases.train(whole.config, tmp_path, max_steps=2).finished
  rest = phases.train(whole.config, tmp_path)
  assert tiny.bits(rest.state) == tiny.bits(whole.result.state)
  assert rest.metrics == whole.result.metrics


def logits(run):
  tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 256)
  return np.asarray(run.apply(tokens).logits_BLV)


def test_the_run_loads_exports_and_is_evaluated(whole, dense, tmp_path):
  run = mod_jax.load(whole.workdir)
  assert run.base == str(dense)
  tiny.same(run.variables['params'], whole.result.state.eval_params)
  trained = load_trained(whole.workdir)
  tiny.same(trained.params, whole.result.state.eval_params)

  mod_jax.export(run, tmp_path / 'merged')
  merged = mod_jax.load(tmp_path / 'merged')
  assert merged.config == run.config.with_parts(lora=None)
  np.testing.assert_allclose(logits(merged), logits(run), rtol=1e-4, atol=1e-4)
  # Adapters that have learned nothing would merge, too.
  alone = dict(run.variables['params'])
  alone = {
    k: 0 * x if '_lora/up' in k else x for k, x in trees.flatten(alone).items()
  }
  alone = dataclasses.replace(
    run, variables={**run.variables, 'params': trees.unflatten(alone)}
  )
  assert np.abs(logits(alone) - logits(run)).max() > 1e-3


def test_its_adapters_are_written_for_peft(whole, dense, tmp_path):
  run = mod_jax.load(whole.workdir)
  hugging_face = tmp_path / 'base'
  mod_jax.export(mod_jax.load(dense), hugging_face, 'huggingface')
  with pytest.raises(UserError, match='PEFT cannot run routed blocks'):
    mod_jax.export(run, tmp_path / 'peft', 'peft')
  mod_jax.export(run, tmp_path / 'peft', 'peft', dense=True)
  assert (tmp_path / 'peft' / 'routers.safetensors').is_file()
  again = mod_jax.load(tmp_path / 'peft', base=str(hugging_face))
  without_routing = dataclasses.replace(
    run, config=run.config.with_parts(routing=None)
  )
  np.testing.assert_allclose(
    logits(again), logits(without_routing), rtol=1e-4, atol=1e-4
  )


def test_another_run_starts_from_it(whole, dense, tmp_path):
  """With the same adapters, or with these merged and new ones."""
  for rank, alpha, kept in (
    *((16, 32.0, True), (2, 32.0, False)),
    (16, 8.0, False),  # These would weigh a quarter.
  ):
    config = build(dense, **{'init': str(whole.workdir)})
    adapters = {'model.lora.rank': rank, 'model.lora.alpha': alpha}
    config = config_lib.replace(config, adapters)
    workdir = tmp_path / f'{rank} {alpha}'
    with loop.build(make_task(config), config, workdir) as run:
      variables = {'params': run.state.eval_params, **run.state.model_state}
    flat = trees.flatten(variables['params'])
    assert all(np.any(x) for k, x in flat.items() if '_lora/up' in k) == kept
    start = mod_jax.Run(config=config.model, variables=variables)
    np.testing.assert_allclose(
      logits(start), logits(mod_jax.load(whole.workdir)), rtol=1e-4, atol=1e-4
    )


def test_other_frozen_weights_are_refused(whole, dense, tmp_path):
  workdir, kept = tmp_path / 'run', tmp_path / 'kept'
  shutil.copytree(whole.workdir, workdir)
  shutil.rmtree(workdir_lib.checkpoints(workdir) / '6')
  shutil.copytree(dense, kept)
  try:
    tiny.export_dense(whole.config, dense, seed=1)
    for use in (
      lambda: phases.train(whole.config, workdir),
      lambda: load_trained(workdir),
      lambda: mod_jax.load(workdir),
    ):
      with pytest.raises(UserError, match='other weights than those.*step 3'):
        use()
    # As they were, but elsewhere.
    assert mod_jax.load(workdir, base=str(kept)).base == str(kept)
    shutil.rmtree(dense)
    with pytest.raises(UserError, match=f'{dense}'):
      mod_jax.load(workdir)
  finally:
    shutil.rmtree(dense, ignore_errors=True)
    shutil.copytree(kept, dense)


def test_bfloat16_takes_half_the_memory(whole, dense, tmp_path):
  config = build(dense, **{'train.frozen': 'bfloat16'})
  result = phases.train(config, tmp_path, max_steps=3)
  frozen = trees.flatten(result.state.frozen)
  kinds = {name: x.dtype.name for name, x in frozen.items()}
  assert kinds['block_0/mlp/up/kernel'] == kinds['embedding'] == 'bfloat16'
  assert kinds['norm/scale'] == 'float32'
  # What is loaded is what was trained beside.
  run = mod_jax.load(tmp_path)
  tiny.same(
    run.variables['params'],
    jax.tree.map(lambda x: x.astype(jnp.float32), result.state.eval_params),
  )
  resumed = phases.train(config, tmp_path, max_steps=1)
  tiny.same(resumed.state.frozen, result.state.frozen)
  a, b = result.state.frozen, whole.result.state.frozen
  assert tiny.bits(a) != tiny.bits(b)


def test_gradients_stop_at_the_split(whole):
  """The compiled step takes about what `flops` counts, not the whole."""
  config = config_lib.replace(
    whole.config, {'model.width': 64, 'train.capacity_warmup_steps': 0}
  )
  counts, ours = {}, {}
  for frozen in ('float32', None):
    changed = config_lib.replace(config, {'train.frozen': frozen})
    task = make_task(changed)
    mesh = parallel.make_mesh(parallel.MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
      optimizer, abstract = state_lib.of_run(task, mesh)
      step = loop.jit_step(
        abstract,
        task=task,
        optimizer=optimizer,
        static_args=0.0,
        config=changed.train,
      )
      batch = parallel.abstract_batch(task.modality.batch_shapes(), mesh)
      compiled = step.lower(abstract, batch, None).compile()
    counts[frozen] = compiled.cost_analysis()['flops']
    ours[frozen] = task.flops_per_step(0.0)
  assert ours['float32'] < 0.62 * ours[None]
  saved = counts[None] - counts['float32']
  # XLA counts the optimiser of the whole model, too.
  assert saved > 0.9 * (ours[None] - ours['float32'])


def of_pictures(tmp_path):
  """LLaVA with a frozen tower, and questions of a word about two pictures."""
  rows = [('image', 'question', 'answer')]
  for name in ('a.png', 'b.png'):
    Image.new('RGB', (6, 6)).save(tmp_path / name)
    rows += [(name, 'word1', 'word2')] * 8
  (tmp_path / 'asked.tsv').write_text('\n'.join(map('\t'.join, rows)))
  words = {f'word{i}': i for i in range(29)}
  model = tokenizers.models.WordLevel(words, unk_token='word0')
  tokenizers.Tokenizer(model).save(str(tmp_path / 'tokenizer.json'))
  data = ConversationDataConfig(
    source='table',
    path=str(tmp_path / 'asked.tsv'),
    eval_fraction=0.5,
    image_size=6,
    tokenizer='huggingface',
    tokenizer_path=str(tmp_path / 'tokenizer.json'),
    length=8,
  )
  return GOLDEN / 'vlm' / 'llava', '^tower/', data, {}


def of_objects(tmp_path):
  """A DETR with a frozen backbone, and a new head for the scenes' classes."""
  del tmp_path
  scenes = SceneConfig(scales=(1, 1.5), num_train=8, num_eval=4)
  data = DetectionDataConfig(image_size=(32, 32), most=4, scenes=scenes)
  changes = {'image_size': (32, 32), 'num_classes': 10}
  return GOLDEN / 'detr', '^backbone/', data, changes


def of_speech(tmp_path):
  """A Wav2Vec2 with frozen convolutions, and a new head for other letters."""
  del tmp_path
  data = dataclasses.replace(
    WORDS.DATA, buckets=(1.5,), words=1, num_train=8, num_eval=4
  )
  changes = {'vocab_size': WORDS.MODEL.vocab_size}
  return GOLDEN / 'wav2vec2' / 'layer', r'^conv_(norm_)?\d/', data, changes


@pytest.mark.parametrize('of', [of_pictures, of_objects, of_speech])
def test_a_part_of_any_published_model_stays(of, tmp_path):
  """It is found again where the run is loaded, exported, or started from."""
  folder, part, data, changes = of(tmp_path)
  published = mod_jax.load(folder)
  config = ExperimentConfig(
    model=config_lib.replace(published.config, changes),
    data=data,
    init=str(folder),
  )
  frozen = {
    'optimizer.rules': ((part, 0.0, 0), ('', 1.0, 0)),
    'optimizer.warmup_steps': 0,
    'train.frozen': 'float32',
  }
  config = config_lib.replace(config, TINY | frozen)
  result = phases.train(config, tmp_path / 'run', max_steps=1)
  of_part = {
    name: x
    for name, x in trees.flatten(published.variables['params']).items()
    if re.match(part, name)
  }
  tiny.same(result.state.frozen, of_part)
  run = mod_jax.load(tmp_path / 'run')
  tiny.same(run.variables['params'], result.state.eval_params)
  mod_jax.export(run, tmp_path / 'exported')
  next_one = dataclasses.replace(config, init=str(tmp_path / 'run'))
  variables = tiny.shapes(config.model)
  params, _ = make_task(next_one).start(
    variables.pop('params'), variables, next_one.init
  )
  tiny.same(params, result.state.eval_params)


def test_what_freezes_must_come_from_somewhere(dense, tmp_path):
  config = build(dense)
  with pytest.raises(UserError, match='init=None: frozen weights'):
    loop.train(
      make_task(config), dataclasses.replace(config, init=None), tmp_path
    )
  rules = ((PARAMETERS, 1.0, 0), ('.*', 0.0, 0))
  config = config_lib.replace(config, {'optimizer.rules': rules})
  with pytest.raises(UserError, match='has no block_1/router.*rules freeze'):
    loop.train(make_task(config), config, tmp_path)
  with pytest.raises(UserError, match='layer_decay=0.5'):
    config_lib.replace(config, {'optimizer.layer_decay': 0.5})
