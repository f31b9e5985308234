"""Draft tokens computed on the ranks: draft models and self-drafts."""
