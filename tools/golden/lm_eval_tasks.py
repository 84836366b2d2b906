"""Offline tasks for lm-evaluation-harness, one of each kind of request."""

import json

DOCUMENTS = [
  {
    'text': 'The cat sat on the mat, and the dog lay under the table.',
    'question': 'Where did the cat sit? ',
    'choices': ['on the mat', 'under the table', 'nowhere'],
    'label': 0,
  },
  {
    'text': 'Snow fell all night. In the morning, the road was white.',
    'question': 'What colour was the road?',
    'choices': ['black', 'white'],
    'label': 1,
  },
  {
    # Longer than the model reads, so that windows and cuts are seen.
    'text': 'One, two, three, four, five, six, seven, eight, nine, ten. ' * 3,
    'question': 'One, two, three, four, five, six, seven, eight, nine, ' * 2,
    'choices': ['ten', 'eleven'],
    'label': 0,
  },
]


def tasks(path) -> list[dict]:
  """Returns the tasks over the documents, which are written to a file."""
  path.parent.mkdir(parents=True, exist_ok=True)
  lines = [json.dumps(document) + '\n' for document in DOCUMENTS]
  path.write_text(''.join(lines))
  shared = {
    'dataset_path': 'json',
    'dataset_kwargs': {'data_files': {'test': str(path)}},
    'test_split': 'test',
  }
  return [
    {
      **shared,
      'task': 'choice',
      'output_type': 'multiple_choice',
      'doc_to_text': '{{question}}',
      'doc_to_choice': '{{choices}}',
      'doc_to_target': '{{label}}',
      'metric_list': [{'metric': 'acc'}],
    },
    {
      **shared,
      'task': 'rolling',
      'output_type': 'loglikelihood_rolling',
      'doc_to_text': '',
      'doc_to_target': '{{text}}',
      'metric_list': [{'metric': 'word_perplexity'}],
    },
    {
      **shared,
      'task': 'until',
      'output_type': 'generate_until',
      'doc_to_text': '{{question}}',
      'doc_to_target': '{{choices[label]}}',
      'generation_kwargs': {'until': ['e'], 'max_gen_toks': 8},
      'metric_list': [{'metric': 'exact_match'}],
    },
  ]


def answers(results) -> dict[str, list]:
  """Returns what a model answered, by task, in the order of documents."""
  return {
    task: [
      sample['resps']
      for sample in sorted(samples, key=lambda sample: sample['doc_id'])
    ]
    for task, samples in results['samples'].items()
  }
