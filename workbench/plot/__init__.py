"""Plots as text: pure functions from values to rows of characters, for a terminal of any size.

`canvas` is a grid of cells with finer dots in them, `chart` draws lines, points and levels over one x axis, `series`
has the styles that distinguish runs, `window` is the part of a run that a timeline shows.
"""
