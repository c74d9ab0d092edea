"""Experiments that print tables: ``heterps bench paper`` repeats those of the HeterPS paper on this planner."""
