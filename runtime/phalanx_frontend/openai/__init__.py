"""The OpenAI API: schemas, prompts, sampling parameters, response formats."""
