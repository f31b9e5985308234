"""`make demo`: a real cluster, a real model, an answer that survives a deleted pod."""
