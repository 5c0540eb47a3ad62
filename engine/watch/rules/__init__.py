"""What is wrong with a run, from its logs: rules, each a pure function of a RunView. No torch."""
