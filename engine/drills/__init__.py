"""Known defects that are planted on purpose, for `engine drill` and for tests of what should detect them. No
other part of the engine imports this package."""
