"""Devices that exist only in software."""
