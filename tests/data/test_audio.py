"""Recordings: files, folders, vocabularies, buckets and synthetic speech."""

import json
import re
import wave

from batch_checks import assert_resumed, assert_same, joined, take
import numpy as np
import pytest
from scipy.io import wavfile

from mod_jax.data import audio, audio_files, formants
from mod_jax.data.audio import AudioDataConfig
from mod_jax.data.characters import Characters
from mod_jax.errors import UserError

RATE = 8000


def tone(seconds=0.5, hertz=440.0, rate=RATE):
  return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)


def frames(samples):
  return (samples - 400) // 320 + 1


@pytest.mark.parametrize('width', [1, 2, 3, 4])
def test_wav_of_every_width_and_two_channels(width, tmp_path):
  samples_TC = np.stack([tone(), np.zeros(len(tone()))], axis=1)
  whole = np.round(samples_TC * (2 ** (8 * width - 1) - 1)).astype('<i8')
  whole += 128 if width == 1 else 0
  data = whole[..., None].view(np.uint8)[..., :width].tobytes()
  with wave.open(str(tmp_path / 'a.wav'), 'wb') as file:
    file.setnchannels(2)
    file.setsampwidth(width)
    file.setframerate(RATE)
    file.writeframes(data)
  samples_T, rate = audio_files.read(tmp_path / 'a.wav')
  assert rate == RATE
  np.testing.assert_allclose(
    samples_T, tone() / 2, atol=1 / 2 ** (8 * width - 2)
  )


def test_resampling_keeps_the_tone():
  resampled = audio_files.resample(np.float32(tone()), RATE, 16_000)
  expected = tone(rate=16_000)
  np.testing.assert_allclose(resampled[500:-500], expected[500:-500], atol=0.01)


def test_refused_files(tmp_path):
  audio_files.write(tmp_path / 'a.wav', tone(), RATE)
  headless = (tmp_path / 'a.wav').read_bytes().replace(b'data', b'dada')
  for content in (b'no audio at all', headless):
    (tmp_path / 'a.wav').write_bytes(content)
    with pytest.raises(UserError, match=r'a\.wav (is no WAV|cannot be read)'):
      audio_files.read(tmp_path / 'a.wav')
  audio_files.write(tmp_path / 'b.wav', np.zeros(0), RATE)
  with pytest.raises(UserError, match=r'b\.wav holds no samples'):
    audio_files.read(tmp_path / 'b.wav')
  wavfile.write(tmp_path / 'b.wav', RATE, np.float32([0, np.nan]))
  with pytest.raises(UserError, match=r'b\.wav holds samples that are no num'):
    audio_files.read(tmp_path / 'b.wav')
  audio_files.write(tmp_path / 'c.wav', tone(), RATE)
  with pytest.raises(UserError, match='has 8000 samples per second.*16000'):
    audio_files.read(tmp_path / 'c.wav', 16_000)
  with pytest.raises(UserError, match=r'd\.wav'):
    audio_files.read(tmp_path / 'd.wav')


def manifest(folder):
  lines = [{'audio': f'{i}.wav', 'text': f'word {"ab"[i % 2]}'} for i in (0, 1)]
  text = '\n'.join(map(json.dumps, lines))
  for part in ('train', 'eval'):
    (folder / f'{part}.jsonl').write_text(text)
  return folder


def table(folder):
  (folder / 'clips').mkdir()
  text = 'client\tpath\tsentence\nx\t0.wav\tword a\nx\t1.wav\tword b\n'
  (folder / 'train.tsv').write_text(text)
  (folder / 'dev.tsv').write_text(text)
  return folder / 'clips'


def librispeech(folder):
  for part in ('train-clean', 'dev-clean'):
    (folder / part / '1' / '2').mkdir(parents=True)
    text = '0 WORD A\n1 WORD B\n'
    (folder / part / '1' / '2' / '1-2.trans.txt').write_text(text)
  return folder / 'train-clean' / '1' / '2', folder / 'dev-clean' / '1' / '2'


@pytest.mark.parametrize('layout', [manifest, table, librispeech])
def test_folders(layout, tmp_path):
  folders = layout(tmp_path)
  for folder in folders if isinstance(folders, tuple) else (folders,):
    for i in range(2):
      audio_files.write(folder / f'{i}.wav', tone(0.5 + i), RATE)
  config = AudioDataConfig(source='folder', path=str(tmp_path), rate=RATE)
  vocabulary = audio.make_vocabulary(config)
  assert vocabulary.symbols == ('<pad>', '|', *'abdorw')
  for split in ('train', 'eval'):
    recordings = audio.Recordings(config, split, vocabulary)
    assert recordings.texts == ['word a', 'word b']
    np.testing.assert_array_equal(recordings.bucket_N, [0, 0])


def test_transcripts_without_a_character_teach_nothing(tmp_path):
  clips = table(tmp_path)
  for i in range(2):
    audio_files.write(clips / f'{i}.wav', tone(), RATE)
  (tmp_path / 'train.tsv').write_text('path\tsentence\n0.wav\t\n1.wav\t…\n')
  config = AudioDataConfig(source='folder', path=str(tmp_path), rate=RATE)
  vocabulary = audio.make_vocabulary(config)
  with pytest.raises(UserError, match='of 2 recordings .*no transcript'):
    audio.Recordings(config, 'train', vocabulary)


def test_changed_words_are_noticed(tmp_path):
  config = AudioDataConfig(source='folder', path=str(tmp_path), rate=RATE)
  prints = []
  for i in range(40):
    audio_files.write(tmp_path / f'{i}.wav', tone(), RATE)
  for word in ('ab', 'ba'):
    texts = [word, *['ab'] * 39]
    lines = [{'audio': f'{i}.wav', 'text': x} for i, x in enumerate(texts)]
    for part in ('train', 'eval'):
      (tmp_path / f'{part}.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    recordings = audio.Recordings(config, 'train', Characters.of_texts(['ab']))
    prints.append(recordings.fingerprint())
  assert prints[0] != prints[1]


def test_lists_as_others_save_them(tmp_path):
  file = tmp_path / 'train.jsonl'
  # A mark of the byte order, and what JSON allows in a line.
  row = {'audio': '0.wav', 'text': 'a\u2028b'}
  file.write_text(json.dumps(row, ensure_ascii=False), 'utf-8-sig')
  (listed,) = audio_files._of_manifest(file)
  assert listed.text == row['text']
  # A row that ends before its sentence has none.
  file.write_text('path\tsentence\n0.wav\n', 'utf-8-sig')
  (listed,) = audio_files._of_table(file)
  assert (listed.name, listed.text) == ('0.wav', '')
  file.write_text(json.dumps(row))
  with pytest.raises(UserError, match='one recording, so that none can be'):
    audio_files.recordings(tmp_path, 'train')
  file.write_bytes('path\tsentence\n0.wav\tä\n'.encode('latin-1'))
  for read in (audio_files._of_manifest, audio_files._of_table):
    with pytest.raises(UserError, match=r'train\.jsonl is not UTF-8'):
      list(read(file))


def test_bad_rows_are_left_out_and_the_others_unharmed(tmp_path, caplog):
  rows = {
    'good.wav': ('abba', tone()),
    'long.wav': ('abba', tone(3)),
    'other.wav': ('ab7', tone()),
    'broken.wav': ('abba', None),
    'empty.wav': ('abba', tone()[:0]),
    'fast.wav': ('abba', tone()),
    'none.wav': ('abba', tone()),
  }
  for name, (_, samples_T) in rows.items():
    if samples_T is None:
      (tmp_path / name).write_bytes(b'RIFF')
    else:
      audio_files.write(tmp_path / name, samples_T, RATE)
  (tmp_path / 'none.wav').unlink()
  lines = [{'audio': name, 'text': text} for name, (text, _) in rows.items()]
  lines[-2]['sampling_rate'] = 16_000
  for part in ('train', 'eval'):
    (tmp_path / f'{part}.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  config = AudioDataConfig(
    source='folder', path=str(tmp_path), rate=RATE, buckets=(1.0,)
  )
  vocabulary = Characters.of_texts(['ab'])
  recordings = audio.Recordings(config, 'train', vocabulary)
  assert recordings.texts == ['abba']
  for name, why in {
    'long.wav': r'3\.00 seconds are longer than the last of data\.buckets',
    'other.wav': "'7' is not in the vocabulary",
    'broken.wav': r'.*broken\.wav (is no WAV|cannot be read)',
    'empty.wav': '.*holds no samples',
    'fast.wav': '.*has 8000 samples per second, and its manifest says 16000',
    'none.wav': r'.*none\.wav',
  }.items():
    found = re.findall(f'left out of train: {name}: {why}', caplog.text)
    assert len(found) == 1, name
  (batch,) = audio.eval_batches(recordings, frames, batch_size=2)
  np.testing.assert_array_equal(batch['weight'], [1, 0])
  assert batch['valid'].sum() == frames(len(tone()))
  assert np.isfinite(batch['wave']).all()


def test_vocabulary_of_a_published_model(tmp_path):
  symbols = ['<pad>', '<s>', '</s>', '<unk>', '|', *"EOTL'"]
  file = tmp_path / 'vocab.json'
  file.write_text(json.dumps({x: i for i, x in enumerate(symbols)}))
  vocabulary = Characters.read(file)
  text = vocabulary.spelled('  to | let, let’s!')
  assert text == "TO LET LET'S"
  labels = vocabulary.encode(text)
  assert vocabulary.decode(labels) == "TO LET LET'"  # There is no S.
  assert labels[-1] == 3
  assert vocabulary.blank == 0
  # A model may have more labels than the vocabulary.
  assert vocabulary.decode([labels[0], len(symbols)]) == 'T'
  at_end = Characters((*'ab|', '[UNK]', '[PAD]'))
  assert at_end.blank == 4
  # Recognisers of phonemes have symbols of several letters.
  assert (
    Characters(('<pad>', 'aɪ', 't', '|')).decode([2, 1, 3, 0, 1]) == 'taɪ aɪ'
  )
  beside = tmp_path / 'tokenizer_config.json'
  beside.write_text('{"do_lower_case": true}')
  lower = Characters.read(file)
  assert lower.blank == 0
  assert lower.encode(lower.spelled('to | Let, let’s!')) == labels
  assert lower.decode(labels) == "to let let'"
  file.write_text('{"a": 0, "<space>": 1, "_": 2}')
  beside.write_text('{"word_delimiter_token": "<space>"}')
  assert Characters.read(file).decode([0, 1, 0]) == 'a a'
  (tmp_path / 'config.json').write_text('{"pad_token_id": 2}')
  with pytest.raises(UserError, match="no '<pad>'.* the blank is 2"):
    Characters.read(file)
  file.write_text('{"a": 1}')
  with pytest.raises(UserError, match='is no vocabulary'):
    Characters.read(file)


SMALL = AudioDataConfig(
  rate=RATE, num_train=40, num_eval=5, buckets=(1.0, 1.5, 3.0)
)


def open_words(split):
  vocabulary = audio.make_vocabulary(SMALL)
  return audio.Recordings(SMALL, split, vocabulary)


def batches(seed=0, **kwargs):
  kwargs = {'batch_size': 4, 'shard_index': 0, 'shard_count': 1, **kwargs}
  recordings = open_words('train')
  return audio.train_iterator(recordings, frames, seed=seed, **kwargs)


def test_words_are_new_sequences_of_known_words():
  train, held_out = open_words('train'), open_words('eval')
  assert not set(train.texts) & set(held_out.texts)
  words = {word for text in held_out.texts for word in text.split()}
  assert words <= set(formants.WORDS)


def test_batches_resume_are_sharded_and_are_of_few_shapes():
  iterator = batches()
  first = take(iterator, 10)  # An epoch.
  shapes = {batch['wave'].shape for batch in first}
  assert 1 < len(shapes) <= 3
  labels = sorted(map(tuple, np.concatenate([x['labels'] for x in first])))
  assert len(labels) == 40
  assert_resumed(batches, 10, 1)
  halves = (
    batches(batch_size=2, shard_index=i, shard_count=2) for i in range(2)
  )
  assert_same(joined([take(half, 1) for half in halves]), first[:1])
  assert not np.array_equal(next(batches(seed=1))['wave'], first[0]['wave'])


def test_every_recording_is_trained_on():
  # An epoch is one batch, and leaves 19 of 40 out.
  some = take(batches(batch_size=21), 20)
  assert len({row[:500].tobytes() for x in some for row in x['wave']}) == 40


def test_masked_spans_lie_in_real_frames():
  batch = next(batches())
  assert not np.any(batch['masked'] & ~batch['valid'])
  assert np.all(batch['masked'].sum(axis=1) >= SMALL.mask_span)
  np.testing.assert_allclose(batch['wave'].sum(axis=1), 0, atol=0.1)


def test_every_held_out_recording_counts_once():
  recordings = open_words('eval')
  kwargs = {'batch_size': 1, 'shard_count': 2}
  weights = [
    batch['weight']
    for i in range(2)
    for batch in audio.eval_batches(recordings, frames, shard_index=i, **kwargs)
  ]
  assert len(weights) == 6
  assert np.sum(weights) == 5
