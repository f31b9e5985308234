"""How often a stored answer of a similar question is the right one: labelled pairs, embedded by the engine."""
