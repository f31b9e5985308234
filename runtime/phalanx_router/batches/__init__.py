"""OpenAI's Batch API: files of requests, which run at the lowest priority in what the groups leave free."""
