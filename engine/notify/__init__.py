"""Messages about a run for people who do not look at it: who receives them, what they look like, how they are sent."""
