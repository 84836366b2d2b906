"""Recognition of synthetic words: training, conversion, and use."""

import dataclasses
import json
import pathlib
import shutil

import command_line
import jax
import numpy as np
import pytest
import tiny

import mod_jax
from mod_jax import config as config_lib
from mod_jax.data import audio, audio_files, formants
from mod_jax.data.audio import AudioDataConfig
from mod_jax.data.characters import Characters
from mod_jax.errors import UserError
from mod_jax.layers import stack as stack_lib
from mod_jax.layers.mode import Mode
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.tasks import make_task, phases
from mod_jax.tasks.speech import Speech
from mod_jax.train import evaluation

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
WORDS = config_lib.load(ROOT / 'configs/speech/words.py')
GOLDEN = ROOT / 'tests/golden/wav2vec2'


@pytest.fixture(scope='module')
def dense(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('speech') / 'dense'
  result = phases.train(WORDS.get_config('tiny'), workdir)
  return workdir, result.metrics


def test_a_run_measures_error_rates_and_keeps_its_vocabulary(dense):
  workdir, metrics = dense
  assert {'loss', 'wer', 'cer', 'infeasible'} <= metrics.keys()
  assert 0 < metrics['wer'] < 3
  assert (workdir / 'vocab.json').is_file()


def test_a_run_transcribes_recordings(dense, tmp_path):
  run = mod_jax.load(dense[0])
  samples_T = formants.speak(np.random.default_rng(0), 'bana dogu')
  audio_files.write(tmp_path / 'a.wav', samples_T, formants.RATE)
  (transcript,) = run.predict([str(tmp_path / 'a.wav')])
  mod_jax.export(run, tmp_path / 'export')
  again = mod_jax.load(tmp_path / 'export')
  assert again.predict(tmp_path / 'a.wav') == [transcript]
  # The same letters, but those of this folder.
  vocabulary = (tmp_path / 'export/vocab.json').read_text().replace('a', 'x')
  (tmp_path / 'export/vocab.json').write_text(vocabulary)
  (other,) = mod_jax.load(tmp_path / 'export').predict(tmp_path / 'a.wav')
  assert other.text == transcript.text.replace('a', 'x')
  with pytest.raises(UserError, match='no learners'):
    run.draw(tmp_path / 'a.wav')
  assert transcript.text == ' '.join(word for word, _ in transcript.words)
  seconds = [second for _, second in transcript.words]
  assert seconds == sorted(seconds)
  audio_files.write(tmp_path / 'b.wav', samples_T[:20], formants.RATE)
  with pytest.raises(UserError, match='fewer than the'):
    run.predict([str(tmp_path / 'b.wav')])
  with pytest.raises(UserError, match='top: this model takes no settings'):
    run.predict([str(tmp_path / 'a.wav')], top=3)


def test_unknown_characters_part_no_words():
  speech = Speech(WORDS.get_config('tiny'))
  speech.vocabulary = Characters(('<pad>', '|', '<unk>', 'a', 'b'))
  best_L = np.array([3, 2, 0, 4, 1, 4, 9])  # 9 is past the vocabulary.
  text, words = speech.heard(best_L)
  assert text == speech.vocabulary.decode(best_L) == 'ab b'
  assert words == [('ab', 0), ('b', 5)]
  # A recogniser that hears none of them makes mistakes.
  rows = {'best': [[3, 1, 4]], 'labels': [[3, 2, 1, 4, 0]], 'count': [4]}
  rows = {name: np.array(x) for name, x in rows.items()}
  assert speech.of_rows(rows) == {'wer': 1 / 2, 'cer': 1 / 4}


def test_a_run_is_evaluated_on_other_recordings(dense, tmp_path, monkeypatch):
  run = mod_jax.load(dense[0])
  rng = np.random.default_rng(0)
  lines = []
  for name, text in (('a', 'bana dogu'), ('b', 'dogu')):
    samples_T = formants.speak(rng, text)
    audio_files.write(tmp_path / f'{name}.wav', samples_T, formants.RATE)
    lines.append(json.dumps({'audio': f'{name}.wav', 'text': text}))
  for split in ('train', 'eval'):
    (tmp_path / f'{split}.jsonl').write_text('\n'.join(lines))
  data = AudioDataConfig(source='folder', path=str(tmp_path))
  # A vocabulary of these recordings would have other labels.
  monkeypatch.setattr(audio, 'make_vocabulary', None)
  found = run.evaluate(data)
  assert found['wer'] > 0
  # The model's rate is taken, not the one that the data are said to have.
  slow = dataclasses.replace(data, rate=formants.RATE)
  assert run.evaluate(slow) == found


def test_the_command_line_transcribes_recordings(dense, tmp_path):
  samples_T = formants.speak(np.random.default_rng(0), 'bana dogu')
  audio_files.write(tmp_path / 'a.wav', samples_T, formants.RATE)
  args = ('eval.py', f'--workdir={dense[0]}', '--noevaluate')
  args += (f'--predict={tmp_path}/*.wav',)
  (transcript,) = mod_jax.load(dense[0]).predict(tmp_path / 'a.wav')
  assert command_line.run(*args).out == f'{tmp_path}/a.wav  {transcript.text}\n'
  ended = command_line.run(*args, '--predictions=out.csv')
  command_line.assert_refused(
    ended, '--predictions=out.csv holds classes of pictures'
  )


def test_routed_it_keeps_the_vocabulary_beside_its_weights(dense, tmp_path):
  run = mod_jax.load(dense[0])
  mod_jax.export(run, tmp_path / 'export')
  file = tmp_path / 'export/vocab.json'
  file.write_text(file.read_text().replace('"a"', '"x"'))
  exported = mod_jax.load(tmp_path / 'export')
  with pytest.raises(UserError, match='take one of amod, mod, acm'):
    mod_jax.route(exported, 'tome', r=2)
  routed = mod_jax.route(exported, 'mod')
  found, expected = (
    x.task.modality.vocabulary.to_json() for x in (routed, exported)
  )
  assert found == expected != run.task.modality.vocabulary.to_json()


def test_beams_are_compared_with_greedy_decoding(dense):
  run = mod_jax.load(dense[0])
  study = run.task.studies()['decoding']
  found = study(run.variables['params'], {}, None)
  assert found.metrics['greedy']['wer'] == pytest.approx(dense[1]['wer'])
  assert found.metrics['greedy']['cer'] == pytest.approx(dense[1]['cer'])
  assert found.metrics.keys() == {'greedy', 'beam of 4', 'beam of 16'}
  assert '6 held-out recordings' in found.text
  assert 'silence' not in run.task.studies()


def test_routed_learners_in_batches_of_any_length(monkeypatch):
  changes = {
    'model.routing': VisionRoutingConfig(),
    'objective.phase': 'end_to_end',
  }
  config = config_lib.replace(WORDS.get_config('acm_tiny'), changes)
  params = tiny.random_params(config.model)
  loads = []
  for rows in (2, 6):  # The first of which are of a shorter bucket, or not.
    task = make_task(
      config_lib.replace(config, {'evaluation.batch_size': rows})
    )
    monkeypatch.setattr(task, 'eval_modes', lambda **_: {'': Mode()})
    mesh = tiny.one_device()
    loads.append(evaluation.held_out(task, params, {}, mesh)['load'])
  assert loads[0] == pytest.approx(loads[1], rel=1e-4)
  study = task.studies()['silence'](params, {}, None)
  assert study.metrics['silence']['frames'] > 0


def test_a_conversion_counts_real_frames_only(dense, tmp_path):
  config = WORDS.get_config('acm_tiny')
  config = config_lib.replace(config, {'init': str(dense[0])})
  workdir = tmp_path / 'acm'
  metrics = phases.train(config, workdir).metrics
  assert {'load', 'wer', 'gmacs', 'k4/wer'} <= metrics.keys()
  task = make_task(mod_jax.load(workdir).experiment, workdir)
  variables = mod_jax.load(workdir).variables
  batch = next(iter(task.modality.eval_batches(batch_size=8, num_batches=1)))
  assert not batch['valid'].all()
  # Whatever the padding, the loads are those of the real frames.
  longer = dict(batch)
  samples = config.model.samples(batch['valid'].shape[1] + 8)
  room = samples - batch['wave'].shape[1]
  longer['wave'] = np.pad(batch['wave'], ((0, 0), (0, max(0, room))))
  frames = config.model.frames(longer['wave'].shape[1])
  more = frames - batch['valid'].shape[1]
  longer['valid'] = np.pad(batch['valid'], ((0, 0), (0, more)))

  @jax.jit
  def load(batch):
    key = jax.random.key(0)
    output = task.apply(variables['params'], {}, batch, key, Mode())
    choices = stack_lib.collect(output.aux, 'adaptive')
    return task.load_per_row(choices)

  assert more > 0
  np.testing.assert_allclose(load(batch), load(longer), atol=1e-5)
  assert 'load' in task.pictures(variables['params'], {})
  samples_T = formants.speak(np.random.default_rng(0), 'bana dogu')
  audio_files.write(tmp_path / 'a.wav', samples_T, formants.RATE)
  above, below = mod_jax.load(workdir).draw(tmp_path / 'a.wav').axes
  # As long as the recording is the load over it.
  seconds = len(samples_T) / formants.RATE
  assert above.get_xlim() == below.get_xlim() == pytest.approx((0, seconds))
  # The mean over silence and speech is that of all frames.
  found = task.studies()['silence'](variables['params'], {}, None).metrics
  assert found.keys() == {'silence', 'speech'}
  assert found['silence']['frames'] > 0

  def spent(output, batch):
    choices = stack_lib.collect(output.aux, 'adaptive')
    return task.share_per_token(choices).sum(where=batch['valid'])

  frames = learners = 0
  for batch, share in task.over_held_out(spent, variables['params'], {}, 0):
    frames += batch['valid'].sum()
    learners += share * config.model.adaptive.num_learners
  parts = found.values()
  assert sum(x['frames'] for x in parts) == frames
  assert sum(x['frames'] * x['learners'] for x in parts) == pytest.approx(
    learners, rel=1e-4
  )


def test_a_folder_of_hugging_face_is_read_with_its_vocabulary(tmp_path):
  folder = shutil.copytree(GOLDEN / 'layer', tmp_path / 'model')
  characters = ['<pad>', '|', *'abdegilkr']
  symbols = {x: i for i, x in enumerate(characters)}
  (folder / 'vocab.json').write_text(json.dumps(symbols))
  audio_files.write(tmp_path / 'a.wav', np.sin(np.arange(4000)), 8000)
  (transcript,) = mod_jax.load(folder).predict([tmp_path / 'a.wav'])
  assert set(transcript.text) <= set(' abdegilkr')
