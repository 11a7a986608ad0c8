"""Decisions shared by HBM (worker) and DRAM (store): order of victims, bands of layers, size of slabs. Pure."""
