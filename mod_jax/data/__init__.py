"""Input pipelines: text for language models, labelled pictures."""
