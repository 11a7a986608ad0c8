"""Triton kernels over paged KV, and what launches them. Imported only where `worker.device` is cuda, or by tests in Triton's interpreter.

Page tables hold byte addresses, one table a layer, so that a layer of a chunk may lie anywhere and leave alone. What a kernel
computes for a row depends on that row's tokens and positions, on the tile shapes in `attention.Tiles`, and on nothing else.
"""
