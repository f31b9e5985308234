"""GGUF files: the reader, and the conversion to a model folder."""
