"""What is made of a finished model: weight files in other formats, and what a file holds."""
