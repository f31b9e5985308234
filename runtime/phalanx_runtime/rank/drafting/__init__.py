"""Draft models and self-drafts."""
