"""Input pipelines: text, labelled images, detection, speech, conversations.

Batches for training and evaluation:

* `text`: rows of tokens for language models;
* `images`: labelled images;
* `detection`: pictures with objects;
* `audio`: recordings with transcripts;
* `conversations`: questions and answers about pictures;
* `batches`, `common`: parts that these share.

Sources of data, and what they need:

* `corpus`, `environment`: text files;
* `shards`, `prepared`, `prepare`: tokenised corpora;
* `tokenizers`, `bpe`, `characters`: vocabularies;
* `image_folder`, `label_table`, `image_cache`: folders of images;
* `digits`, `scenes`, `formants`: images and speech without a download;
* `coco`, `audio_files`, `tables`: files in other formats;
* `tfds_builder`, `tfds_images`, `tfds_text`: TensorFlow Datasets;
* `resize`: resizing, cropping and normalisation of images;
* `augment`: augmentation and mixing of images to train on;
* `corruptions`: corrupted images, to measure robustness;
* `fingerprint`: hashes of data, to notice changes.
"""
