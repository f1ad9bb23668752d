"""A trained model, served over HTTP: who may ask, how much, in which batches, with which epoch."""
