"""Questions about pictures as a task: training, evaluation, use."""

import dataclasses
import pathlib
import types

import numpy as np
import pytest
import tiny
import tokenizers as hf

import mod_jax
from mod_jax import config as config_lib
from mod_jax import trees
from mod_jax.data import conversations
from mod_jax.errors import UserError
from mod_jax.layers.lora import LoRAConfig
from mod_jax.layers.token_info import KINDS
from mod_jax.models.vlm import place_images
from mod_jax.studies import language as studies
from mod_jax.tasks import make_task, phases

ROOT = pathlib.Path(__file__).parents[2]
SCENES = config_lib.load(ROOT / 'configs/vlm/scenes.py')
TASK = make_task(SCENES.get_config('pmod_tiny')).modality


def batch():
  return next(iter(TASK.eval_batches(batch_size=3, num_batches=1)))


def test_the_loss_is_on_answers_alone():
  rows = batch()
  source = conversations.open_split(TASK.config.data, 'eval')
  index = np.arange(3) * len(source) // 3
  for i, row in enumerate(index):
    turns = source.load(int(row)).turns
    weighed = rows['weights'][i] > 0
    answer = TASK.tokenizer.decode(rows['targets'][i][weighed])
    assert answer == f' {turns[0][1]}\n'
    # It is predicted from the tokens before it.
    places = np.flatnonzero(weighed)
    np.testing.assert_array_equal(
      rows['targets'][i, places], rows['tokens'][i, places + 1]
    )
    kinds = [KINDS[k] for k in rows['kind'][i][rows['valid'][i]]]
    assert kinds.count('image') == TASK.config.model.num_patches
    assert kinds.count('question') == len(turns[0][0]) - len('<image>')
    assert kinds.count('answer') == len(answer)
  shapes = TASK.batch_shapes()
  for name, shape in shapes.items():
    assert rows[name].shape[1:] == shape.shape[1:], name
    assert rows[name].dtype == shape.dtype, name


@pytest.mark.parametrize('adds_space', ['always', 'first', 'never'])
@pytest.mark.parametrize('begin', ['<s>', '</s>', None])
def test_tokens_are_those_of_the_whole_prompt(tmp_path, begin, adds_space):
  """Also if the tokenizer puts a space before each text, or before the first.

  Llama 2's tokenizers do the one or the other, by their age.
  """
  special = ['<s>', '</s>', '<image>']
  text = 'Be kind. USER: <image>\nIs it? ASSISTANT: A dog.'
  text += '</s>USER: And? ASSISTANT: A cat.</s>'
  vocab = [*special, *sorted({*text}), '▁', '▁▁', '▁A']
  merges = [('▁', '▁'), ('▁', 'A')]
  tokenizer = hf.Tokenizer(
    hf.models.BPE({x: i for i, x in enumerate(vocab)}, merges)
  )
  tokenizer.add_special_tokens(special)
  tokenizer.normalizer = hf.normalizers.Sequence(
    [hf.normalizers.Prepend('▁')] * (adds_space == 'always')
    + [hf.normalizers.Replace(' ', '▁')]
  )
  if adds_space == 'first':
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Metaspace(
      prepend_scheme='first', split=False
    )
  tokenizer.decoder = hf.decoders.Replace('▁', ' ')
  if begin is not None:
    tokenizer.post_processor = hf.processors.TemplateProcessing(
      f'{begin} $A', special_tokens=[(begin, special.index(begin))]
    )
  tokenizer.save(str(tmp_path / 'tokenizer.json'))
  config = config_lib.replace(TASK.config, {'model.image_token': 2})
  modality = make_task(config).modality
  modality.use_tokenizer('huggingface', str(tmp_path))
  said = conversations.Conversation(
    (), (('<image>\nIs it?', 'A dog.'), ('And?', 'A cat.'))
  )
  tokens, kinds = modality.encode([('text', 'Be kind. '), *said.pieces()])
  assert tokens == tokenizer.encode(text).ids
  of_answers = [
    t for t, k in zip(tokens, kinds, strict=True) if KINDS[k] == 'answer'
  ]
  assert modality.tokenizer.decode(of_answers) == ' A dog. A cat.'


def test_adapters_of_the_language_model_are_new(tmp_path):
  tiny.export_dense(TASK.config, tmp_path)
  lora = {'model.language.lora': LoRAConfig(rank=2)}
  config = config_lib.replace(SCENES.get_config('pmod_tiny'), lora)
  variables = tiny.variables(config.model)
  params, _ = make_task(config).start(
    variables.pop('params'), variables, str(tmp_path)
  )
  assert any('_lora/' in name for name in trees.flatten(params))


def test_long_conversations_are_cut_with_their_pictures():
  source = conversations.open_split(TASK.config.data, 'eval')
  one = source.load(0)
  late = one._replace(turns=(('x' * 99, 'y'), one.turns[0]))
  row = TASK._row(late)
  assert row['valid'].sum() == TASK.config.data.length
  assert not row['images'].any()
  assert TASK._row(one)['images'].any()


def test_samples_ask_the_first_question_with_its_own_pictures(monkeypatch):
  one = conversations.open_split(TASK.config.data, 'eval').load(0)
  two = one._replace(pictures=one.pictures * 2, turns=one.turns * 2)

  class Source(list):
    def load(self, index):
      return self[index]

  data = config_lib.replace(TASK.config, {'data.pictures': 2})
  modality = make_task(data).modality
  asked = []

  def answers(params, model_state, pictures, questions, **kwargs):
    asked.extend(zip(pictures, questions, strict=True))
    return ['A digit.']

  monkeypatch.setattr(modality, 'answers', answers)
  monkeypatch.setattr(conversations, 'open_split', lambda *_: Source([two]))
  (line,) = modality.texts(None, {}, {})
  assert line.endswith(f'A digit. (it is {one.turns[0][1]})')
  ((pictures, question),) = asked
  assert len(pictures) == question.count(conversations.IMAGE) == 1
  none = config_lib.replace(TASK.config, {'evaluation.sample_tokens': 0})
  assert list(make_task(none).modality.texts(None, {}, {})) == []


def test_a_digit_may_be_more_than_one_token(monkeypatch):
  source = conversations.open_split(TASK.config.data, 'eval')
  usual = TASK._eval_row(source, 0)['shown']
  encode = TASK.tokenizer.encode
  wordy = types.SimpleNamespace(encode=lambda text: [7, *encode(text)])
  row = TASK._row(source.load(0))
  monkeypatch.setattr(TASK, 'tokenizer', wordy)
  shown = TASK._digits_shown(row, source.load(0))
  np.testing.assert_array_equal(shown, usual)


def test_right_answers_are_counted_by_question():
  rows = batch()
  config = TASK.config.model
  (args, kwargs), variables = (
    TASK.inputs(rows, train=False),
    tiny.variables(config),
  )
  output = tiny.apply(config, variables, *args, **kwargs)
  assert output.logits_BLV is None
  of_all = {k: x for k, x in kwargs.items() if 'kind' in k or 'valid' in k}
  logits_BLV = tiny.apply(config, variables, *args, **of_all).logits_BLV
  likeliest_BL = logits_BLV.argmax(axis=-1)
  np.testing.assert_array_equal(
    output.right_BL, likeliest_BL == rows['targets']
  )
  # A wrong last token of the first answer, and nonsense beside answers.
  right_BL = rows['weights'] > 0
  right_BL[0, np.flatnonzero(right_BL[0])[-1]] = False
  found = TASK.eval_sums(output.replace(right_BL=right_BL), rows, None)
  assert tuple(map(float, found['accuracy'])) == (2, 3)
  by_topic = [found[f'accuracy/{name}'] for name in TASK.config.data.topics]
  assert sum(float(right) for right, _ in by_topic) == 2
  assert sum(float(count) for _, count in by_topic) == 3
  chosen, among = map(float, found['routed'])
  # Two routed blocks: on half of 16 tokens, and on .15 of them.
  assert (chosen, among) == (3 * (8 + 2), 3 * 2 * 16)


def test_image_tokens_name_the_digits_that_they_show():
  task = make_task(SCENES.get_config('captions_tiny')).modality
  source = conversations.open_split(task.config.data, 'train')
  conversation = source.load(3)
  row, plain = task._train_row(source, 3, None), task._row(conversation)
  grid, seen = task.config.model.grid, set()
  start = int(np.flatnonzero(row['kind'] == KINDS.index('image'))[0])
  for i in range(grid**2):
    y, x = (np.array(divmod(i, grid)) + 0.5) / grid
    shown = [
      digit
      for (u, v, width, height), digit in conversation.objects
      if abs(u - x) < width / 2 and abs(v - y) < height / 2
    ]
    seen |= set(shown)
    assert row['weights'][start + i] == bool(shown)
    if shown:
      assert chr(row['targets'][start + i]) == shown[-1]
  assert seen
  assert seen <= set(conversation.turns[0][1])
  after = slice(start + grid**2, None)
  for name in ('targets', 'weights'):
    np.testing.assert_array_equal(row[name][after], plain[name][after])
  assert not plain['weights'][: start + grid**2].any()


def test_ranks_are_of_what_enters_a_block(monkeypatch):
  queries, config = [], SCENES.get_config('gamma_tiny')
  monkeypatch.setattr(
    studies, 'mean_rank', lambda q, *_: queries.append(q) or 0.0
  )
  monkeypatch.setattr(studies, '_SAMPLES', 1)
  variables = tiny.variables(config.model)
  params = variables.pop('params')
  for model in (config.model, config.model.dense_twin()):
    task = make_task(dataclasses.replace(config, model=model))
    task.studies()['arank'](params, variables, None)
  _, routed, _, _, dense, _ = queries
  assert len(routed) < len(dense)
  # The end of the answer, which always enters.
  np.testing.assert_allclose(routed[-1], dense[-1], rtol=1e-4)


def test_ranks_are_of_the_language_model_with_its_pictures():
  task = make_task(SCENES.get_config('pmod_tiny'))
  variables = tiny.variables(TASK.config.model)
  params = variables.pop('params')
  study = task.studies()['arank'](params, variables, None)
  found = study.metrics
  # A picture of 16 tokens, of which routed blocks take 8 and 2.
  text = np.array(found['tokens']) - [16, 8, 2]
  np.testing.assert_allclose(text, text[0])
  assert 30 < text[0] < 50
  # Room for a picture that no row has takes no place of the text.
  roomy = config_lib.replace(task.config, {'data.pictures': 2})
  again = make_task(roomy).studies()['arank'](params, variables, None)
  assert again.metrics['tokens'] == found['tokens']
  assert (np.array(found['share']) <= 1).all()
  # Of digits and of the background together it is the capacity.
  found = task.studies()['image_tokens'](params, variables, None).metrics
  digits = found.pop('digits')
  assert 0 < digits < 1
  for share, capacity in zip(found.values(), (8, 2), strict=True):
    mean = digits * share['digits'] + (1 - digits) * share['background']
    assert mean == pytest.approx(capacity / 16)
  assert 'model.language.routing.layers=' in study.text


def test_places_without_a_picture_have_no_part_in_the_ratio():
  config = config_lib.replace(
    SCENES.get_config('tower_dynamic_tiny'), {'data.pictures': 2}
  )
  keep_STN = np.zeros((1, 4, 16), np.float32)  # Of two rows with two places.
  keep_STN[0, 0, :12] = 1
  output = types.SimpleNamespace(loss=(1.0, 1.0), keep_STN=keep_STN)
  kind_BL = np.full((2, 20), KINDS.index('question'))
  kind_BL[0, :8] = KINDS.index('image')  # One picture of eight patches.
  batch = {'kind': kind_BL, 'valid': np.ones_like(kind_BL, bool)}
  pairs, metric_sums = make_task(config).modality.losses(output, batch)
  assert metric_sums['ratio'] == (0.25**2, 1)
  assert pairs == [(1, 1), (2 * 0.25**2, 1)]


@pytest.mark.slow
def test_generated_answers_are_those_of_the_forward_pass():
  config = TASK.config.model
  variables = tiny.variables(config)
  images = tiny.images(2, size=32)
  questions = ['Is there a seven?', 'What is it?']
  pictures = [[images[0]], [images[1]]]
  state = {name: x for name, x in variables.items() if name != 'params'}
  found = TASK.answers(
    variables['params'], state, pictures, questions, max_new_tokens=3
  )
  for i, question in enumerate(questions):
    pieces = conversations.prompt(f'<image>\n{question}')
    tokens, kinds = TASK.encode(pieces)
    for _ in range(3):
      placed = place_images(config, [tokens], [pictures[i]], [kinds], text=50)
      args, kwargs = placed.inputs
      logits_LV = tiny.apply(config, variables, *args, **kwargs).logits_BLV[0]
      new = int(logits_LV[placed.valid_BL.sum() - 1].argmax())
      if new == TASK.end:
        break
      tokens.append(new)
      kinds.append(KINDS.index('answer'))
    added = tokens[len(TASK.encode(pieces)[0]) :]
    assert found[i] == TASK.tokenizer.decode(added).strip()


@pytest.fixture(scope='module')
def trained(tmp_path_factory, on_one_device):
  workdir = tmp_path_factory.mktemp('vlm') / 'run'
  with on_one_device():
    return workdir, phases.train(SCENES.get_config('gamma_tiny'), workdir)


@pytest.mark.slow
def test_a_run_trains_answers_and_is_exported(trained, tmp_path):
  workdir, result = trained
  assert {'loss', 'accuracy', 'routed'} <= result.metrics.keys()
  assert np.isfinite(result.metrics['loss'])
  assert result.metrics['routed'] == pytest.approx(0.5, abs=0.05)
  assert (workdir / 'pictures' / 'image_tokens.png').is_file()
  run = mod_jax.load(workdir)
  picture = conversations.open_split(run.experiment.data, 'eval').load(0)
  asked = (picture.pictures[0], 'What is the sum?')
  (answer,) = run.predict(asked, max_new_tokens=4)
  assert isinstance(answer, str)
  # A row of the picture, and of the tokens that the routed block processes.
  (axes,) = run.draw([asked]).axes
  assert len(axes.images) == 1 + run.config.num_routed
  mod_jax.export(run, tmp_path)
  again = mod_jax.load(tmp_path)
  assert again.config == run.config
  assert again.predict([asked], max_new_tokens=4) == [answer]
  with pytest.raises(UserError, match='no question about a picture'):
    run.predict(['What is the sum?'])
  with pytest.raises(UserError, match='top: this model takes max_new_tokens'):
    run.predict(asked, top=3)


def test_what_does_not_fit_is_refused():
  for changes, words in (
    ({'model.image_token': 65}, "image_token=65 is 'A' in the tokenizer"),
    ({'model.language.vocab_size': 100, 'model.image_token': 99}, 'vocab_size'),
  ):
    config = config_lib.replace(SCENES.get_config('tiny'), changes)
    with pytest.raises(UserError, match=words):
      make_task(config).modality.check()
