"""Tokenizer, chat template, detokenizer, stop strings, parsers. No I/O."""
