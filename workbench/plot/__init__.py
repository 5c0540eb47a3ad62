"""Plots as text: pure functions from values to rows of characters, for a terminal of any size.

`canvas` is a grid of cells with finer dots in them, `axis` maps values to dots and chooses the ticks,
`chart` draws lines, points and levels over one x axis, `forest` draws the pairs of a flip.
"""
