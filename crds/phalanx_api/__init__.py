"""Words that the operator, the router and the runtime share: API types, labels, wire records. No effects."""
