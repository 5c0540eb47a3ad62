"""Plots as text: pure functions from values to rows of characters, for a terminal of any size.

`canvas` is a grid of cells with finer dots in them, `axis` says where a value is and which values to name,
`chart` draws lines, points and levels over one x axis, `forest` the pairs of a flip.
"""
