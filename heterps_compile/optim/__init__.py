"""Optimizer updates for embedding tables, applied inside the step of a stock optimizer."""
