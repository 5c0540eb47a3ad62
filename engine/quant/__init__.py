"""Block-quantised weights: byte layouts, dequantisation and quantisation. This package reads no
files and does not depend on any model.
"""
