"""Placement policies, one function type: a problem in, a placement out."""
