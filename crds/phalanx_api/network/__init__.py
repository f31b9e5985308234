"""Networks, as programs see them."""
