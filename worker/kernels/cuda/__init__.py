"""Triton kernels over paged KV, and their launchers. Imported only when `worker.device` is cuda, or by tests in
Triton's interpreter.

Page tables hold byte addresses, one table per layer, so each piece may lie anywhere and can be evicted alone. A row's
result depends only on its tokens and positions, and on the tile shapes in `attention.Tiles`.
"""
