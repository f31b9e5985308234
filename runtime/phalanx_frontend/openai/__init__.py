"""The OpenAI API: routes, schemas, prompts, sampling parameters and response formats."""
