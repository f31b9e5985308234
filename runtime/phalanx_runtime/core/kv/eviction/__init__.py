"""Which cached page goes first when the pool needs one: five policies behind one Protocol."""
