"""Synthetic speech by formants, drawn from a seed: offline and endless.

Each letter is a phone: a buzz of the voice, or noise, through two or three
resonances (Klatt 1980 in its simplest form). Speakers differ in pitch and in
the length of the vocal tract, utterances in tempo, loudness and pauses.
"""

import numpy as np

RATE = 8000  # Samples per second.
LETTERS = 'aeioubdgklmnrst'
# Resonances in Hz, and how much of the source is voice; the rest is noise.
_PHONES = {
  'a': ((750, 1250, 2500), 1.0),
  'e': ((480, 1900, 2600), 1.0),
  'i': ((280, 2300, 3100), 1.0),
  'o': ((480, 850, 2500), 1.0),
  'u': ((300, 700, 2200), 1.0),
  'b': ((200, 900, 1500), 0.8),
  'd': ((250, 1700, 3200), 0.7),
  'g': ((220, 1300, 1900), 0.6),
  'k': ((900, 1800, 2000), 0.0),
  'l': ((380, 1050, 3300), 1.0),
  'm': ((250, 1100, 2100), 1.0),
  'n': ((260, 1500, 2900), 1.0),
  'r': ((420, 1350, 1650), 1.0),
  's': ((2900, 3400, 3700), 0.0),
  't': ((1500, 2700, 3600), 0.0),
}
_VOWELS = 'aeiou'
_BANDWIDTH = 90.0  # Hz.
# Fixed words of two or three syllables, so that spelling can be learnt, too.
WORDS = (
  *('bana', 'dogu', 'gilo', 'kare', 'lumi', 'mate', 'noki', 'rusa', 'sito'),
  *('tabe', 'adru', 'elko', 'imas', 'ogti', 'unle', 'basto', 'delmi', 'gurna'),
  *('kolte', 'lasri', 'mondu', 'nerka', 'ritso', 'salgu', 'tumbi', 'arado'),
  *('erilu', 'isoma', 'odeka', 'utagi'),
)


def sentence(rng: np.random.Generator, words: int) -> str:
  """Returns `words` random words, separated by spaces."""
  return ' '.join(rng.choice(WORDS, words))


def speak(rng: np.random.Generator, text: str) -> np.ndarray:
  """Returns a recording, float32 [T], of a text by a random speaker."""
  pitch, tract = rng.uniform(90, 220), rng.uniform(0.9, 1.1)
  tempo, loudness = rng.uniform(0.8, 1.2), rng.uniform(0.1, 0.3)
  parts = [_silence(rng, rng.uniform(0.05, 0.3))]
  for character in text:
    if character == ' ':
      parts.append(_silence(rng, rng.uniform(0.08, 0.25)))
    else:
      seconds = 0.11 if character in _VOWELS else 0.08
      seconds *= tempo * rng.uniform(0.9, 1.1)
      parts.append(loudness * _phone(rng, character, seconds, pitch, tract))
  parts.append(_silence(rng, rng.uniform(0.05, 0.3)))
  samples_T = np.concatenate(parts)
  return np.float32(samples_T + 0.002 * rng.standard_normal(len(samples_T)))


def _silence(rng, seconds):
  return 0.001 * rng.standard_normal(round(seconds * RATE))


def _phone(rng, letter, seconds, pitch, tract):
  """Returns the samples of a phone, of mean square 1 before its edges fade."""
  # Imported here, since it takes long and is rarely used.
  from scipy import signal

  count = round(seconds * RATE)
  formants, voiced = _PHONES[letter]
  phase_T = np.cumsum(np.full(count, pitch * rng.uniform(0.95, 1.05) / RATE))
  # A pulse wherever the voice's phase passes a whole number.
  pulse_T = np.diff(np.floor(phase_T), prepend=0.0) * np.sqrt(RATE / pitch)
  source_T = voiced * pulse_T
  source_T += (1 - 0.9 * voiced) * rng.standard_normal(count)
  samples_T = np.zeros(count)
  for i, formant in enumerate(formants):
    frequency = min(formant / tract, 0.48 * RATE)
    radius = np.exp(-np.pi * _BANDWIDTH / RATE)
    poles = (1, -2 * radius * np.cos(2 * np.pi * frequency / RATE), radius**2)
    samples_T += signal.lfilter([1 - radius], poles, source_T) / (1 + i)
  samples_T /= np.sqrt(np.mean(samples_T**2)) + 1e-9
  edge = min(round(0.012 * RATE), count // 2)
  ramp_E = np.linspace(0, 1, edge)
  samples_T[:edge] *= ramp_E
  samples_T[count - edge :] *= ramp_E[::-1]
  return samples_T
