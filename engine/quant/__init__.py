"""Weights in blocks: byte layouts, dequantisation and quantisation. Reads no file and knows no
model."""
