"""The OpenAI door: schemas, chat templates, text, streaming, errors. Two programs mount it over their backends."""
