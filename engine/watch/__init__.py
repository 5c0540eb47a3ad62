"""Watch a trainer from outside its process. Loads without torch."""
